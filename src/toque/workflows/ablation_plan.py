"""Plan of an ablation: the runs that show what an improvement is worth, and their differences.

Each improvement is taken away from a run that has all of them, and added to a run that has none,
with the same seeds: the difference of two runs of one seed is free of what the seed alone does to
both. A new improvement is one line in `IMPROVEMENTS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from toque.config import RunConfig, config_sha256, load_config
from toque.errors import ConfigError, argument


@dataclass(frozen=True)
class Improvement:
    """Something that can be switched on and off by settings alone."""

    name: str
    setting: str
    """Setting that decides: at another value than `off`, that value is on."""
    off: str
    on: tuple[str, ...] = ()
    """Overrides that switch it on in a configuration that does not have it."""
    off_besides: tuple[str, ...] = ()
    only: str = ""
    """If set, the one value that is on; a configuration's other value is what it is off with."""
    stages: tuple[str, ...] = ()
    """Bounds of each stage of a curriculum, which several improvements share."""
    part: str = ""
    """Words it adds to a section that several improvements share."""

    @property
    def without(self) -> tuple[str, ...]:
        """Overrides that switch it off."""
        return (f"{self.setting}={self.off}", *self.off_besides)


def switched(improvements: Sequence[tuple[Improvement, bool]]) -> list[str]:
    """Overrides that switch each improvement on or off.

    Those that share a setting are written into it together: a curriculum of easy dishes first and
    quality rising has stages that ask both.

    >>> curriculum, quality = IMPROVEMENTS[5:7]
    >>> switched([(curriculum, False), (quality, False)])
    ['curriculum=null']
    """
    words: dict[str, None] = {}
    shared: dict[str, list[Improvement]] = {}
    for improvement, on in improvements:
        if improvement.stages or improvement.part:
            shared.setdefault(improvement.setting, []).extend([improvement] if on else [])
        else:
            words |= dict.fromkeys(improvement.on if on else improvement.without)
    for setting, those in shared.items():
        words[f"{setting}={_together(those)}"] = None
    return list(words)


def _together(improvements: Sequence[Improvement]) -> str:
    if not improvements:
        return "null"
    if improvements[0].part:
        return f"{{{', '.join(each.part for each in improvements)}}}"
    stages = []
    for begins, *bounds in zip(_STAGES, *(each.stages for each in improvements), strict=True):
        stages.append(", ".join([f'from: "{begins}"', *(bound for bound in bounds if bound)]))
    return f"{{stages: [{', '.join(f'{{{stage}}}' for stage in stages)}]}}"


_STAGES: Final = ("0 %", "33 %", "67 %")
"""Begins of the stages of an ablation, when the configuration has none of its own."""

IMPROVEMENTS: Final = (
    Improvement("adapter", "adapter", "null", ("adapter={kind: lora}",)),
    Improvement("label smoothing", "optim.label_smoothing", "0.0", ("optim.label_smoothing=0.1",)),
    Improvement(
        "warm restarts",
        "optim.schedule",
        "cosine",
        # Three whole cycles, each twice as long as the one before: 1 + 2 + 4 sevenths.
        ("optim.schedule=cosine_restarts", 'optim.cycles={first: "14.2 %"}'),
        ("optim.cycles=null",),
        only="cosine_restarts",
    ),
    Improvement("gradient noise", "optim.gradient_noise", "null", ("optim.gradient_noise={}",)),
    Improvement(
        "weight averaging",
        "optim.averaging",
        "null",
        # Of the last fifth, however short the run; an ema of 0.999 spans 1,000 updates.
        ('optim.averaging={kind: last, last: 5, every: "4 %"}',),
    ),
    Improvement(
        "curriculum",
        "curriculum",
        "null",
        stages=("max_difficulty: easy", "max_difficulty: medium", ""),
    ),
    Improvement(
        "rising quality",
        "curriculum",
        "null",
        stages=("min_quality: 0.5", "min_quality: 0.6", "min_quality: 0.7"),
    ),
    Improvement("prompt formats", "augmentation", "null", part="prompt_formats: true"),
    Improvement(
        "other wordings",
        "augmentation",
        "null",
        part="instructions: 0.3, paraphrase: 0.3, tips: 0.3",
    ),
)
"""Packing is not listed: it does not change the arithmetic. Neither are the held-out loss and the
recipe scores: they are the yardstick."""

QUIET: Final = ("observe.webhook=null", "observe.trackers=[]", "checkpoint.upload=null")
"""Overrides for what the runs of an ablation do without."""

Switch = Literal["on", "off"]


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

    def key(self, name: str, seed: int) -> str:
        """Key of the variant `name` with `seed`."""
        return next(v.key for v in self.variants if (v.name, v.seed) == (name, seed))

    @property
    def seeds(self) -> list[int]:
        """Seeds in their order."""
        return list(dict.fromkeys(variant.seed for variant in self.variants))


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
    base = load_config(config, [*overrides, *QUIET]).config
    able, left_out = _able(config, [*overrides, *QUIET], base)
    if not able:
        raise ConfigError(
            f"None of the improvements fits {config}: "
            + "; ".join(f"{name}: {why}" for name, why in left_out.items())
        )
    variants = []
    for seed in range(base.seed, base.seed + seeds):
        for name, switches in _combinations([i.name for i in able]):
            switch = switched([(i, switches[i.name] == "on") for i in able])
            words = (*overrides, *QUIET, f"seed={seed}", *switch)
            variants.append(Variant(name, seed, words, _key(config, words)))
    return AblationPlan(tuple(i.name for i in able), left_out, tuple(variants))


def _able(
    config: str, overrides: Sequence[str], base: RunConfig
) -> tuple[list[Improvement], dict[str, str]]:
    """The improvements this configuration can have, and why it cannot have the others."""
    able: list[Improvement] = []
    left_out: dict[str, str] = {}
    its_own: dict[str, str] = {}
    for improvement in IMPROVEMENTS:
        if _has_its_own(improvement, base):
            # Its value is what is switched; a value has one switch.
            first = its_own.setdefault(improvement.setting, improvement.name)
            if first != improvement.name:
                left_out[improvement.name] = (
                    f"the configuration has its own `{improvement.setting}`, which is switched as "
                    f"a whole: see {first}."
                )
                continue
            improvement = replace(improvement, on=(), stages=(), part="")  # noqa: PLW2901
        elif improvement.only:
            off = str(_value(improvement, base))
            improvement = replace(improvement, off=off)  # noqa: PLW2901
        try:
            load_config(config, [*overrides, *switched([(improvement, True)])])
        except ConfigError as error:
            left_out[improvement.name] = str(error)
        else:
            able.append(improvement)
    return able, left_out


def _value(improvement: Improvement, base: RunConfig) -> Any:
    value: Any = base
    for part in improvement.setting.split("."):
        value = getattr(value, part)
    return value


def _has_its_own(improvement: Improvement, base: RunConfig) -> bool:
    value = _value(improvement, base)
    if improvement.only:
        return bool(value == improvement.only)
    off = {"null": None, "0.0": 0.0}.get(improvement.off, improvement.off)
    return bool(value != off)


def _combinations(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Switch]]]:
    for begin, other in (("on", "off"), ("off", "on")):
        base: dict[str, Any] = dict.fromkeys(names, begin)
        yield f"all {begin}", base
        for name in names:
            yield f"all {begin}, {name} {other}", base | {name: other}


def _key(config: str, overrides: Sequence[str]) -> str:
    resolved = load_config(config, [*overrides, "run_dir=run"]).config
    return config_sha256(resolved)[:16]
