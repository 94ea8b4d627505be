"""Plan of an ablation: the runs that show what an improvement is worth, and their differences.

Each improvement is taken away from a run that has all of them, and added to a run that has none,
with the same seeds: the difference of two runs of one seed is free of what the seed alone does to
both. A new improvement is one line in `IMPROVEMENTS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, NamedTuple

from toque.config import config_sha256, load_config
from toque.errors import ConfigError, argument


class Improvement(NamedTuple):
    """Something that can be switched on and off by settings alone."""

    name: str
    setting: str
    """Setting that decides: a configuration that has a value there has its own."""
    on: tuple[str, ...]
    """Overrides that switch it on in a configuration that does not have it."""
    off: tuple[str, ...]
    """Overrides that switch it off in one that does."""
    only: str = ""
    """If set, the one value of the setting that is on."""


_STAGES: Final = 'curriculum={stages: [{from: "0 %"}, {from: "33 %"}, {from: "67 %"}]}'
"""Stages of an ablation whose configuration has none; several improvements bound them."""
IMPROVEMENTS: Final = (
    Improvement("adapter", "adapter", ("adapter={kind: lora}",), ("adapter=null",)),
    Improvement(
        "label smoothing",
        "optim.label_smoothing",
        ("optim.label_smoothing=0.1",),
        ("optim.label_smoothing=0.0",),
    ),
    Improvement(
        "warm restarts",
        "optim.schedule",
        # Three whole cycles, each twice as long as the one before: 1 + 2 + 4 sevenths.
        ("optim.schedule=cosine_restarts", 'optim.cycles={first: "14.2 %"}'),
        ("optim.schedule=cosine", "optim.cycles=null"),
        only="cosine_restarts",
    ),
    Improvement(
        "gradient noise",
        "optim.gradient_noise",
        ("optim.gradient_noise={}",),
        ("optim.gradient_noise=null",),
    ),
    Improvement(
        "weight averaging",
        "optim.averaging",
        # Of the last fifth, however short the run; an ema of 0.999 spans 1,000 updates.
        ('optim.averaging={kind: last, last: 5, every: "4 %"}',),
        ("optim.averaging=null",),
    ),
    Improvement(
        "curriculum",
        "curriculum",
        (
            _STAGES,
            "curriculum.stages.0.max_difficulty=easy",
            "curriculum.stages.1.max_difficulty=medium",
        ),
        ("curriculum=null",),
    ),
    Improvement(
        "rising quality",
        "curriculum",
        (_STAGES, *(f"curriculum.stages.{i}.min_quality=0.{5 + i}" for i in range(3))),
        ("curriculum=null",),
    ),
    Improvement(
        "prompt formats",
        "augmentation",
        ("augmentation.prompt_formats=true",),
        ("augmentation=null",),
    ),
    Improvement(
        "other wordings",
        "augmentation",
        tuple(f"augmentation.{part}=0.3" for part in ("instructions", "paraphrase", "tips")),
        ("augmentation=null",),
    ),
)
"""Packing is not listed: it does not change the arithmetic. Neither are the held-out loss and the
recipe scores: they are the yardstick."""

QUIET: Final = ("observe.webhook=null", "observe.trackers=[]", "checkpoint.upload=null")
"""Overrides for what the runs of an ablation do without."""


@dataclass(frozen=True)
class Variant:
    """One configuration of the ablation, for one seed."""

    name: str
    seed: int
    overrides: tuple[str, ...]
    key: str
    """Hash of all its settings but the run folder: equal variants are one run."""


@dataclass(frozen=True)
class AblationPlan:
    """Runs to be compared."""

    improvements: tuple[str, ...]
    left_out: Mapping[str, str]
    """Improvement -> why this configuration cannot have it."""
    variants: tuple[Variant, ...]

    @property
    def runs(self) -> dict[str, Variant]:
        """Every run once, by its key."""
        return {variant.key: variant for variant in self.variants}

    def keys(self, name: str) -> list[str]:
        """Keys of the variant `name`, one a seed."""
        return [variant.key for variant in self.variants if variant.name == name]


def plan_ablation(config: str, overrides: Sequence[str], *, seeds: int) -> AblationPlan:
    """The runs for `config`, each seed the configuration's and those after it.

    Args:
        config: a file or a preset.
        overrides: settings that hold in all runs.
        seeds: how many.

    Raises:
        ConfigError: the configuration cannot be used, no improvement fits it, or seeds is below 2.
    """
    if seeds < 2:
        raise ConfigError(
            f"{argument('seeds')} is {seeds}, and a single pair of runs says nothing of how sure a "
            "difference is. Give at least 2; 5 is a good number."
        )
    common = [*overrides, *QUIET]
    able, left_out = _able(config, common)
    if not able:
        raise ConfigError(
            f"None of the improvements fits {config}: "
            + "; ".join(f"{name}: {why}" for name, why in left_out.items())
        )
    first = load_config(config, common).config.seed
    variants = []
    for seed in range(first, first + seeds):
        for base, change in (("on", "off"), ("off", "on")):
            for changed in ("", *able):
                # A setting that several share is written once, before what each adds to it.
                words = dict.fromkeys(
                    word
                    for name, (on, off) in able.items()
                    for word in (on if (base == "on") != (name == changed) else off)
                )
                given = (*common, f"seed={seed}", *words)
                name = f"all {base}, {changed} {change}" if changed else f"all {base}"
                key = config_sha256(load_config(config, [*given, "run_dir=run"]).config)[:16]
                variants.append(Variant(name, seed, given, key))
    return AblationPlan(tuple(able), left_out, tuple(variants))


def _able(
    config: str, overrides: Sequence[str]
) -> tuple[dict[str, tuple[tuple[str, ...], tuple[str, ...]]], dict[str, str]]:
    """Improvements that fit, each with overrides for on and off; and why the others do not."""
    base = load_config(config, overrides).config
    able: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    left_out: dict[str, str] = {}
    its_own: dict[str, str] = {}
    for name, setting, on, off, only in IMPROVEMENTS:
        value = attrgetter(setting)(base)
        if value == only if only else value not in (None, 0.0):
            # Its value is what is switched; a value has one switch.
            first = its_own.setdefault(setting, name)
            if first == name:
                able[name] = (), off
            else:
                left_out[name] = (
                    f"the configuration has its own `{setting}`, which is switched as a whole: see "
                    f"{first}."
                )
            continue
        try:
            load_config(config, [*overrides, *on])
        except ConfigError as error:
            left_out[name] = str(error)
        else:
            able[name] = on, ()
    return able, left_out
