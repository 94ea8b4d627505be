"""Texts that a run wrote while it trained, gathered by their prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from toque.reports.parts import Passage, Shown
from toque.reports.score_tables import written

Event = Mapping[str, Any]
_MOST_TEXTS: Final = 4


def by_prompt(samples: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """What was written for each prompt over the run; the prompt seen last stands last."""
    found: dict[str, list[Event]] = {}
    for sample in samples:
        prompt = str(sample.get("prompt", ""))
        found[prompt] = [*found.pop(prompt, []), sample]
    return list(found.items())


def shown_texts(prompt: str, own: Sequence[Event]) -> Shown:
    """A prompt's texts, the newest first; of many, some spread evenly over the run."""
    gap = max(1, -(-len(own) // _MOST_TEXTS))
    texts: list[Passage] = []
    for sample in own[::-1][::gap]:
        metrics = sample.get("metrics")
        metrics = metrics if isinstance(metrics, dict) else {}
        told = ", ".join(f"{name} {written(value)}" for name, value in metrics.items())
        texts.append(Passage(str(sample.get("text", "")), f"step {sample.get('step')}", told))
    if own[-1].get("reference"):
        texts.append(Passage(str(own[-1]["reference"]), "reference"))
    tag = f"{len(own)} texts" if len(own) > 1 else f"step {own[-1].get('step')}"
    return Shown(" ".join(prompt.split()), texts, [tag])
