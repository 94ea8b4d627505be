"""Levers of a plan: the settings that change what memory and time a run takes, each worked out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema_methods import AdapterConfig
from toque.models.forward.outline import OutlinedRows
from toque.runs.estimate import Estimator, Memory, Time

_RANK = 16
"""Rank of the adapter that is offered."""


@dataclass(frozen=True)
class Lever:
    """A change of settings, and what a run then takes."""

    settings: str
    """Settings as they are written on the command line."""
    total: int
    fits: bool
    update_seconds: float
    changes: str
    """Other differences, in a few words."""


def levers_of(
    estimator: Estimator,
    memory: Memory,
    time: Time,
    model_of: Callable[[RunConfig], PreTrainedModel],
) -> Iterator[Lever]:
    """Each lever by itself, then those together that cost no quality; inside `outlining`.

    Args:
        estimator: of the run as it is.
        memory: of the run as it is.
        time: of the run as it is.
        model_of: the outlined model of a configuration.
    """
    config, work, optim = estimator.config, estimator.work, estimator.config.optim.name

    def seconds(changed: Estimator, found: Memory) -> float:
        """Seconds of an update: as much longer as its products are more."""
        flops = [m.update.flops * e.work.update_rows / m.micro_batch_rows
                 for e, m in ((changed, found), (estimator, memory))]  # fmt: skip
        return time.update_seconds * flops[0] / flops[1]

    def lever(settings: str, changes: str, changed: Estimator = estimator, **how: Any) -> Lever:
        found = changed.memory(
            model_of(changed.config),
            **{"rows": memory.micro_batch_rows, "recompute": memory.recompute} | how,
        )
        return Lever(settings, found.total, found.fits, seconds(changed, found), changes)

    free: dict[str, Any] = {}
    words: list[str] = []
    if memory.micro_batch_rows > 1:
        free["rows"] = 1
        words.append("train.micro_batch_rows=1")
        yield lever(words[-1], "the same result", rows=1)
    if not memory.recompute:
        free["recompute"] = True
        words.append("train.gradient_checkpointing=true")
        yield lever(words[-1], "the same bits, a second forward", recompute=True)
    if optim in ("adamw", "muon"):
        lighter = "optim.name=adamw8bit"
        yield lever(lighter, "Adam's averages in 8 bits", optimizer="adamw8bit")
        if free:
            together = " ".join([*words, lighter])
            yield lever(together, "all of these", **free, optimizer="adamw8bit")
    for settings, adapter, changes in _adapters(config):
        changed = replace(estimator, config=config.model_copy(update={"adapter": adapter}))
        yield lever(settings, changes, changed)
    most = config.data.max_target_tokens
    if memory.micro_batch_rows == 1 and isinstance(most, int):
        half, row = most // 2, work.row
        target = row.target - half if not row.source else max(half, row.target // 2)
        rows = max(1, round(work.update_rows * row.target / target))
        shorter = OutlinedRows(1, row.source, target, row.examples)
        changed = replace(estimator, work=replace(work, row=shorter, update_rows=rows))
        yield lever(f"data.max_target_tokens={half}", "long texts are cut", changed, rows=1)


def _adapters(config: RunConfig) -> Iterator[tuple[str, AdapterConfig, str]]:
    """Adapters that the run could have, as a setting, a section and words."""
    adapter = config.adapter
    if adapter is None and config.model.start_from != "scratch":
        settings = f"adapter='{{kind: lora, r: {_RANK}}}'"
        yield settings, AdapterConfig(r=_RANK), "only an adapter is trained"
    if adapter is not None and adapter.quantize_base is None and adapter.kind != "dora":
        for form, bits in (("int8", 8), ("nf4", 4)):
            quantised = adapter.model_copy(update={"quantize_base": form})
            yield f"adapter.quantize_base={form}", quantised, f"the frozen matrices in {bits} bits"
