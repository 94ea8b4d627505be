"""Improvements of an ablation, and the overrides that switch each of them on and off."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from toque.config import RunConfig, load_config
from toque.errors import ConfigError


class Improvement(NamedTuple):
    """An improvement that settings switch on and off."""

    name: str
    setting: str
    """Name of the setting that has a value if the improvement is on."""
    on: tuple[str, ...]
    """Overrides that switch it on."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off; () to set the setting to null."""
    only: str = ""
    """The only value of the setting that counts as on; "" for any value."""

    def is_on(self, config: RunConfig) -> bool:
        """Return whether a configuration has the improvement."""
        value = attrgetter(self.setting)(config)
        return value == self.only if self.only else value not in (None, 0.0)


_STAGES = 'curriculum={stages: [{from: "0 %"}, {from: "33 %"}, {from: "67 %"}]}'
"""Stages for a configuration without a curriculum. Several improvements set its limits."""
_DIFFICULTY = [
    f"curriculum.stages.{n}.max_difficulty={level}"
    for n, level in enumerate(("easy", "medium"))
]
_QUALITY = [f"curriculum.stages.{n}.min_quality=0.{5 + n}" for n in range(3)]
_WORDINGS = [
    f"augmentation.{part}=0.3" for part in ("instructions", "paraphrase", "tips")
]
_RESTARTS = (
    "optim.schedule=cosine_restarts",
    # Three complete cycles, each twice as long as the previous one: 1/7 + 2/7 + 4/7.
    'optim.cycles={first: "14.2 %"}',
)
_NO_RESTARTS = ("optim.schedule=cosine", "optim.cycles=null")
_SMOOTHING = "optim.label_smoothing"

IMPROVEMENTS = (
    Improvement("adapter", "adapter", ("adapter={kind: lora}",)),
    Improvement(
        "label smoothing", _SMOOTHING, (f"{_SMOOTHING}=0.1",), (f"{_SMOOTHING}=0.0",)
    ),
    Improvement(
        "warm restarts", "optim.schedule", _RESTARTS, _NO_RESTARTS, "cosine_restarts"
    ),
    Improvement("gradient noise", "optim.gradient_noise", ("optim.gradient_noise={}",)),
    Improvement("curriculum", "curriculum", (_STAGES, *_DIFFICULTY)),
    Improvement("rising quality", "curriculum", (_STAGES, *_QUALITY)),
    Improvement(
        "prompt formats", "augmentation", ("augmentation.prompt_formats=true",)
    ),
    Improvement("other wordings", "augmentation", (*_WORDINGS,)),
)
"""Improvements to ablate. Packing is not listed, because it does not change the results."""


class Switch(NamedTuple):
    """Overrides that switch an improvement on and off."""

    on: tuple[str, ...]
    off: tuple[str, ...]


def find_switches(
    config: str, overrides: Sequence[str]
) -> tuple[dict[str, Switch], dict[str, str]]:
    """Return the switches of improvements that fit, and the reasons against the rest."""
    base = load_config(config, overrides).config
    switches: dict[str, Switch] = {}
    left_out: dict[str, str] = {}
    switched_by: dict[str, str] = {}
    for improvement in IMPROVEMENTS:
        name, setting = improvement.name, improvement.setting
        if not improvement.is_on(base):
            try:
                load_config(config, [*overrides, *improvement.on])
            except ConfigError as error:
                left_out[name] = str(error)
            else:
                switches[name] = Switch(improvement.on, ())
        elif setting in switched_by:
            left_out[name] = (
                f"the configuration already sets `{setting}`, which {switched_by[setting]} "
                "switches on and off."
            )
        else:
            switched_by[setting] = name
            switches[name] = Switch((), improvement.off or (f"{setting}=null",))
    return switches, left_out


def switch_overrides(
    switches: Mapping[str, Switch], enabled: Collection[str]
) -> list[str]:
    """Return the overrides that switch on the `enabled` improvements, and switch off the rest."""
    # Improvements may share an override, such as the stages. A second one would replace the
    # settings that the overrides in between have changed.
    overrides: dict[str, None] = {}
    for name, switch in switches.items():
        overrides |= dict.fromkeys(switch.on if name in enabled else switch.off)
    return [*overrides]
