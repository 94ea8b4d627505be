"""Tracker names: what the figures of metrics.jsonl are called in a tracker, as others call them.

train/loss and train/learning_rate for updates, val_loss and val_perplexity for held-out data,
eval/bleu and the like for written texts, recipe/... for scores of recipes among them,
curriculum/..., gradients/GROUP/... and system/....
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_TRAIN: Final = {"lr": "learning_rate"}
"""Fields of a step event that trackers know by another name."""
_DIFFICULTIES: Final = {"easy": 1.0, "medium": 2.0, "hard": 3.0}
_ANY_DIFFICULTY: Final = 3.0
_MIB: Final = 2**20
_GIB: Final = 2**30

Figures = dict[str, float]


@dataclass(frozen=True)
class TrackerNames:
    """Figures of a record under their names.

    Args:
        stages: of the curriculum, each with `min_quality` and `max_difficulty`.
        recipe_scores: names of scores that are of recipes.
    """

    stages: Sequence[Mapping[str, Any]] = ()
    recipe_scores: frozenset[str] = frozenset()

    def figures(self, record: Mapping[str, Any]) -> Figures:
        """The numbers of a record; none for an event that has no figures.

        >>> TrackerNames().figures({"event": "step", "step": 3, "lr": 0.1, "mfu": None})
        {'train/learning_rate': 0.1}
        >>> TrackerNames().figures({"event": "evaluation", "metrics": {"loss": 2.0}})
        {'val_loss': 2.0}
        """
        named: Mapping[str, Callable[[Mapping[str, Any]], Iterator[tuple[str, object]]]] = {
            "step": self._step,
            "evaluation": self._evaluation,
            "gradients": _gradients,
            "system": _system,
        }
        of_event = named.get(record["event"])
        pairs = of_event(record) if of_event is not None else ()
        return {name: float(value) for name, value in pairs if _is_number(value)}  # type: ignore[arg-type]

    def final(self, scores: Mapping[str, Any]) -> Figures:
        """The scores of the finished model, from evaluation.json."""
        flat = {**(scores.get("heldout") or {}), **(scores.get("generated") or {})}
        return {f"final/{name}": float(v) for name, v in flat.items() if _is_number(v)}

    def _step(self, record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
        for name, value in record.items():
            if name not in ("step", "stage"):
                yield f"train/{_TRAIN.get(name, name)}", value
        for part, seconds in (record.get("parts") or {}).items():
            yield f"train/seconds/{part}", seconds
        for phase, n_bytes in (record.get("peak_memory_bytes") or {}).items():
            yield f"system/gpu_peak_memory_gib/{phase}", n_bytes / _GIB
        stage = record.get("stage")
        if isinstance(stage, int) and 1 <= stage <= len(self.stages):
            bounds = self.stages[stage - 1]
            hardest = _DIFFICULTIES.get(str(bounds.get("max_difficulty")), _ANY_DIFFICULTY)
            yield "curriculum/stage", stage
            yield "curriculum/quality_threshold", bounds.get("min_quality", 0.0)
            yield "curriculum/difficulty_level", hardest

    def _evaluation(self, record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
        yield "val_epoch", record.get("epoch")
        yield "val_seconds", record.get("seconds")
        found = {
            "val_": record.get("metrics", {}),
            "eval/": record.get("texts") or {},  # scores of texts that were written
        }
        for of_kind, scores in found.items():
            for name, value in scores.items():
                yield f"recipe/{name}" if name in self.recipe_scores else f"{of_kind}{name}", value


def _gradients(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    for group, figures in record.get("groups", {}).items():
        for name, value in figures.items():
            yield f"gradients/{group}/{name}", value
    for place, rules in enumerate(record.get("optimizer_groups", ())):
        yield f"train/learning_rate/group_{place}", rules.get("learning_rate")


def _system(record: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    yield "system/cpu_percent", record.get("cpu_percent")
    yield "system/process_cpu_percent", record.get("process_cpu_percent")
    yield "system/memory_percent", _percent(record, "memory_used_bytes", "memory_total_bytes")
    yield "system/process_memory_gib", _over(record.get("process_resident_bytes"), _GIB)
    for name, value in record.items():
        if name.endswith("_bytes_per_second"):
            short = name.removesuffix("_bytes_per_second")
            yield f"system/{short}_mib_per_second", _over(value, _MIB)
    gpus = record.get("gpus") or []
    for gpu in gpus:
        for name, value in _gpu(gpu).items():
            yield f"system/gpu.{gpu['index']}/{name}", value
    # One figure for all, under the name that others look for.
    for name in _gpu(gpus[0]) if gpus else ():
        known = [value for gpu in gpus if _is_number(value := _gpu(gpu)[name])]
        yield f"system/gpu_{name}", sum(known) / len(known) if known else None


def _gpu(gpu: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "utilization": gpu.get("utilisation_percent"),
        "memory_percent": _percent(gpu, "memory_used_bytes", "memory_total_bytes"),
        "power_watts": gpu.get("power_watts"),
        "temperature_celsius": gpu.get("temperature_celsius"),
        "throttled": float(bool(gpu.get("throttled"))),
    }


def _percent(record: Mapping[str, Any], part: str, whole: str) -> float | None:
    some, all_of_it = record.get(part), record.get(whole)
    return 100.0 * some / all_of_it if some is not None and all_of_it else None


def _over(value: float | None, unit: int) -> float | None:
    return None if value is None else value / unit


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
