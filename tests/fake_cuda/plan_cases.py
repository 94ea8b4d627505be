"""The presets, cards and ways for which a plan's memory is held against the fake card's.

Imports no torch, so that a process can be started with the hooks afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from toque.config import load_config, presets
from toque.config.resolve import names_card
from toque.config.schema import RunConfig
from toque.config.schema_methods import AdapterConfig, ObjectiveConfig
from toque.units import Duration

CARDS = {
    "rtx-4090": ("NVIDIA GeForce RTX 4090", (8, 9)),
    "l40s": ("NVIDIA L40S", (8, 9)),
    "h100": ("NVIDIA H100 80GB HBM3", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
}  # 24, 48, 80 and 141 GB: what torch calls them, and their capability
WAYS = ("whole", "lora", "nf4")
IMITATION = ObjectiveConfig()
PROMPTS = 8  # of an update that learns from rewards
OBJECTIVES = {
    "dpo": ObjectiveConfig(kind="dpo"),
    "grpo": ObjectiveConfig(kind="grpo", rewards={"recipe_score": 1.0}, samples=8),
    "grpo with a penalty": ObjectiveConfig(
        kind="grpo", rewards={"recipe_score": 1.0}, samples=16, kl=0.1
    ),
}
"""Objectives with another memory than imitation. The last one generates many texts at a time."""
LIMIT = 0.03  # largest distance of a plan's tensors from the fake run's peak
# The first has no model of its own, the second is the shape of neox-1.2b.
PRESETS = [
    name for name in presets() if name not in ("finetune-folder", "neox-1.2b-test")
]


@dataclass(frozen=True)
class Case:
    """One preset on a card."""

    preset: str
    way: str
    card: str
    recompute: bool
    objective: ObjectiveConfig = IMITATION

    @property
    def config(self) -> RunConfig:
        """The preset's configuration for the card, its weights trained that way."""
        overlay = self.card if names_card(self.preset, self.card) else None
        found = load_config(self.preset, hardware=overlay).config
        adapter = None
        if self.way != "whole":
            own = found.adapter or AdapterConfig(r=16)
            form = "nf4" if self.way == "nf4" else None
            adapter = own.model_copy(update={"quantize_base": form})
        train = found.train.model_copy(
            update={"gradient_checkpointing": self.recompute}
        )
        if self.objective.learns_from_rewards:
            prompts = Duration(PROMPTS, "examples")
            train = train.model_copy(update={"batch": prompts})
        update = {"adapter": adapter, "train": train, "objective": self.objective}
        return found.model_copy(update=update)


def ways_of(preset: str) -> tuple[str, ...]:
    """An adapter stands beside a checkpoint only."""
    return (
        WAYS if load_config(preset).config.model.start_from != "scratch" else WAYS[:1]
    )


def cases(preset: str, way: str, cards: Sequence[str] = tuple(CARDS)) -> Iterator[Case]:
    """With and without recomputing, on each card."""
    for recompute in (False, True):
        for card in cards:
            yield Case(preset, way, card, recompute)


@dataclass(frozen=True)
class Compared:
    """Bytes of a plan beside those of the run's own code."""

    case: Case
    rows: int
    optimizer: str
    fits: bool
    planned: int  # tensors, without the allocator's share
    phases: dict[str, int]  # the most that tensors took in each phase of an update
    generation: tuple[int, int] | None = (
        None  # planned and real bytes of generated texts
    )

    @property
    def peak(self) -> int:
        """The most that they took at all."""
        return max(self.phases.values())

    @property
    def error(self) -> float:
        """Share by which the plan is above the run."""
        return self.planned / self.peak - 1.0

    def __str__(self) -> str:
        """A row of a Markdown table, in GiB."""
        case, gib = self.case, 2.0**30
        phases = ", ".join(f"{size / gib:.2f}" for size in self.phases.values())
        return (
            f"| {case.preset} | {case.way} | {case.card} | {'yes' if case.recompute else 'no'} "
            f"| {self.rows}{'' if self.fits else ', does not fit'} | {self.planned / gib:.2f} "
            f"| {self.peak / gib:.2f} | {self.error:+.2%} | {phases} |"
        )


HEAD = (
    "| preset | trained | card | recomputed | rows | plan, GiB | run, GiB | error "
    "| run's forward, backward, clip, step |\n|---|---|---|---|---|---:|---:|---:|---|"
)
