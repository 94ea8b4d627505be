"""Levers of a plan: the settings that change what memory and time a run takes, each worked out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.outline import OutlinedRows
from toque.workflows.plan.ahead import Ahead
from toque.workflows.plan.duration import Time
from toque.workflows.plan.machine import Machine
from toque.workflows.plan.memory import Memory, memory_of
from toque.workflows.plan.outlined_model import Vocabulary, outlined_model

_RANK = 16


@dataclass(frozen=True)
class Lever:
    """A change of settings, and what a run then takes."""

    settings: str
    """As they are written on the command line."""
    total: int
    fits: bool
    update_seconds: float
    changes: str
    """What else is different, in a few words."""


@dataclass(frozen=True)
class Case:
    """What a plan is about."""

    config: RunConfig
    vocabulary: Vocabulary | None
    ahead: Ahead
    machine: Machine
    memory: Memory
    time: Time

    def seconds(self, ahead: Ahead, memory: Memory) -> float:
        """Of an update with another memory: as much longer as its operations are more."""
        pace = self.time.pace
        ratio = pace.seconds(ahead, memory) / pace.seconds(self.ahead, self.memory)
        return self.time.update_seconds * ratio


def levers_of(case: Case) -> Iterator[Lever]:
    """Each lever by itself, then those together that cost no quality; inside `outlining`."""
    memory, optim = case.memory, case.config.optim.name
    one = 1 if memory.micro_batch_rows > 1 else None
    if one is not None:
        yield _tried(case, "train.micro_batch_rows=1", "the same result", rows=1)
    if not memory.recompute:
        same = "the same bits, a second forward"
        yield _tried(case, "train.gradient_checkpointing=true", same, recompute=True)
    lighter = "adamw8bit" if optim in ("adamw", "muon") else None
    if lighter is not None:
        yield _tried(case, f"optim.name={lighter}", "Adam's averages in 8 bits", optimizer=lighter)
        if one is not None or not memory.recompute:
            together = ["train.micro_batch_rows=1"] * (one is not None)
            together += ["train.gradient_checkpointing=true"] * (not memory.recompute)
            yield _tried(
                case,
                " ".join([*together, f"optim.name={lighter}"]),
                "all of these",
                rows=one,
                recompute=True,
                optimizer=lighter,
            )
    adapter = case.config.adapter
    if adapter is None and case.config.model.start_from != "scratch":
        settings = f"adapter='{{kind: lora, r: {_RANK}}}'"
        yield _adapted(case, AdapterConfig(r=_RANK), settings, "only an adapter is trained")
    if adapter is not None and adapter.quantize_base is None and adapter.kind != "dora":
        for form, bits in (("int8", 8), ("nf4", 4)):
            quantised = adapter.model_copy(update={"quantize_base": form})
            settings = f"adapter.quantize_base={form}"
            yield _adapted(case, quantised, settings, f"the frozen matrices in {bits} bits")
    yield from _shorter(case)


def _tried(
    case: Case,
    settings: str,
    changes: str,
    *,
    rows: int | None = None,
    recompute: bool | None = None,
    optimizer: str | None = None,
) -> Lever:
    model = _model(case, case.config)
    memory = memory_of(
        case.config,
        model,
        case.ahead,
        case.machine,
        rows=rows or case.memory.micro_batch_rows,
        recompute=case.memory.recompute if recompute is None else recompute,
        optimizer=optimizer,
    )
    return Lever(settings, memory.total, memory.fits, case.seconds(case.ahead, memory), changes)


def _adapted(case: Case, adapter: AdapterConfig, settings: str, changes: str) -> Lever:
    """With this adapter beside the checkpoint's frozen weights."""
    config = case.config.model_copy(update={"adapter": adapter})
    model = _model(case, config)
    memory = memory_of(config, model, case.ahead, case.machine, rows=case.memory.micro_batch_rows)
    return Lever(
        settings,
        memory.total,
        memory.fits,
        case.seconds(case.ahead, memory),
        changes,
    )


def _shorter(case: Case) -> Iterator[Lever]:
    """With targets, or rows, half as long."""
    row, data = case.ahead.row, case.config.data
    if case.memory.micro_batch_rows > 1 or not isinstance(data.max_target_tokens, int):
        return
    half = data.max_target_tokens // 2
    target = row.target - half if not row.source else max(half, row.target // 2)
    shorter = replace(case.ahead, row=OutlinedRows(1, row.source, target, row.examples))
    ahead = replace(
        shorter, update_rows=max(1, round(case.ahead.update_rows * row.target / target))
    )
    model = _model(case, case.config)
    memory = memory_of(case.config, model, ahead, case.machine, rows=1)
    yield Lever(
        f"data.max_target_tokens={half}",
        memory.total,
        memory.fits,
        case.seconds(ahead, memory),
        "long texts are cut",
    )


def _model(case: Case, config: RunConfig) -> PreTrainedModel:
    return outlined_model(
        config, case.vocabulary, where=case.machine.where, precision=case.machine.precision
    )
