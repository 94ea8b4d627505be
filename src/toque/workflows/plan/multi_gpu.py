"""Plan for several GPUs: memory per GPU, traffic, and the shared batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.loader.batch_stream import usual_rows
from toque.errors import ConfigError
from toque.hardware.cards import card_of_device
from toque.hardware.memory import HEADROOM
from toque.models.families import DTYPES
from toque.models.forward.blocks import blocks
from toque.reporter import size_text
from toque.runs.estimate import Estimator
from toque.runs.estimate_parts import Memory, Time, Work
from toque.training.distributed.exchange import (
    Exchange,
    GatheredGroup,
    exchange_of,
    groups_of,
)
from toque.training.optim.factory import gradient_and_state_bytes
from toque.training.strategy import find_fsdp_obstacle
from toque.workflows.plan.outlined_model import replace_parameters

_GPUS_PER_MACHINE: Final = 8
"""Maximum number of GPUs with a known link. The network between machines is unknown."""
_LINK_SHARE: Final = 0.8
"""Assumed fraction of a link's stated rate that collectives reach."""
_SMALL_BYTES: Final = 10_000
"""Traffic in bytes up to which the table does not list it, such as sums of losses."""
_RATE_RULE: Final = (
    "unchanged, because train.batch is that of all GPUs; with k times the batch, use sqrt(k) times "
    "optim.peak_lr (Adam; Malladi et al. 2022)"
)
_Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True)
class SharedUpdate:
    """Rows and traffic of an update that several GPUs share."""

    exchange: Exchange
    rows: int
    """Largest number of rows on one GPU."""
    link: str | None = None
    """Link between the GPUs; None if it is unknown."""
    seconds: float | None = None
    """Seconds of the traffic alone; None if the link is unknown."""
    shown: float = 0.0
    """Seconds of the traffic that do not overlap with computation."""

    def record(self) -> dict[str, Any]:
        """Return the fields as JSON values, in bytes and seconds."""
        return asdict(self) | {"sent": self.exchange.sent, "rate": _RATE_RULE}

    def lines(self, update_rows: int, micro_batch_rows: int) -> list[tuple[str, str]]:
        """Return the names and values of a table's rows."""
        exchange = self.exchange
        link = "a network with unknown rate"
        if self.seconds is not None:
            link = (
                f"{self.link} stated, {_LINK_SHARE:.0%} assumed: {1e3 * self.seconds:,.0f} ms, all "
                f"but {1e3 * self.shown:,.0f} ms during computing"
            )
        collectives = (
            (exchange.gathered, "gathered"),
            (exchange.scattered, "scattered"),
            (exchange.reduced, "summed"),
        )
        sizes = [
            f"{size_text(n)} {name}" for n, name in collectives if n > _SMALL_BYTES
        ]
        rows = f"{update_rows:,} rows, {self.rows:,} per GPU, {micro_batch_rows:,} per micro-batch"
        return [
            ("batch", rows),
            (
                "traffic",
                f"{', '.join(sizes)}; each GPU sends {size_text(exchange.sent)}",
            ),
            ("link", link),
            ("learning rate", _RATE_RULE),
        ]


def estimate_rank_memory(
    estimator: Estimator, build_model: Callable[[RunConfig], PreTrainedModel]
) -> tuple[PreTrainedModel, Memory, _Strategy]:
    """Return the outlined model, the memory per GPU and the strategy.

    Call this inside `outlining`.
    """
    model = build_model(estimator.config)
    strategy: _Strategy = "single"
    if estimator.ranks > 1:
        strategy = _choose_strategy(estimator, model)
    if strategy == "fsdp":
        gathered = build_model(estimator.config)
        return model, _estimate_fsdp_memory(estimator, model, gathered), strategy
    return model, estimator.memory(model), strategy


def _estimate_fsdp_memory(
    estimator: Estimator, model: PreTrainedModel, gathered: PreTrainedModel
) -> Memory:
    """Estimate the memory of a rank that shards `model`. `gathered` is a copy to change."""
    config = estimator.config
    dtype = DTYPES[estimator.machine.precision]
    micro_batch_rows = config.train.micro_batch_rows
    if micro_batch_rows == "auto":
        # FSDP ranks cannot measure how many rows fit, so training also uses the default.
        micro_batch_rows = usual_rows(estimator.work.row.tokens)
    changes = {
        "micro_batch_rows": micro_batch_rows,
        "gradient_checkpointing": config.train.gradient_checkpointing is True,
    }
    fixed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
    for block in blocks(gathered):  # blocks are gathered in the matmuls' precision
        replace_parameters(block, dtype=dtype)
    memory = replace(estimator, config=fixed).memory(gathered)
    # Unlike the gathered blocks, checkpoints are in float32.
    saved = gradient_and_state_bytes(model, config.optim)
    update = replace(
        memory.update, gradients=saved["gradients"], optimizer=saved["optimizer"]
    )
    groups = groups_of(model, estimator.ranks, dtype)
    # Only AdamW shards its states: two averages per weight, and perhaps one of the weight itself.
    averages = 2 if config.optim.ema_decay is None else 3
    memory = replace(memory, update=update)
    return _shard_memory(memory, groups, estimator.ranks, averages=averages)


def _shard_memory(
    memory: Memory, groups: Sequence[GatheredGroup], ranks: int, *, averages: int
) -> Memory:
    """Convert the memory for all weights to the memory of one FSDP rank.

    The optimizer keeps as many `averages` per weight, in float32.
    """
    *inner, root = groups
    largest = max(inner, key=lambda group: group.gathered)
    gradients = sum(group.gradients for group in groups)
    logits = memory.parts["logits"]
    activations = memory.parts["activations and their gradients"]
    # During the backward pass of a block: the block's gradients as computed and as sent, and the
    # weights of the next block.
    backward = memory.update.kept + 2 * largest.gathered + largest.gradients
    # At the end of the backward pass, without activations and the root's weights: the root's
    # gradients as computed and as sent, and the rank's part of them.
    end = 2 * root.gradients + root.gradients // ranks - root.gathered
    parts = {
        "its part of the weights": sum(group.stored for group in groups) // ranks,
        "weights gathered at once": root.gathered + largest.gathered,
        "its part of the gradients": gradients // ranks,
        "its part of the optimizer states": averages * gradients // ranks,
        "logits": logits,
        "activations and their gradients": activations,
        "whole gradients": max(0, max(backward, end) - logits - activations),
    }
    if memory.generation is not None:
        # Generation gathers all weights and has no activations.
        temporary = parts["weights gathered at once"] + parts["whole gradients"]
        temporary += logits + activations
        all_weights = sum(group.stored for group in groups)
        generating = all_weights + memory.generation.total - temporary
        parts["generating texts"] = max(0, generating)
    # The allocator's overhead is proportional to the tensors.
    ratio = sum(parts.values()) / memory.tensors
    beside = {name: round(ratio * n_bytes) for name, n_bytes in memory.beside.items()}
    return replace(memory, parts=parts, beside=beside)


def _choose_strategy(
    estimator: Estimator, model: PreTrainedModel
) -> Literal["ddp", "fsdp"]:
    """Return the strategy that training would choose.

    Raises:
        ConfigError: The configured strategy does not allow several GPUs.
    """
    config, machine = estimator.config, estimator.machine
    setting = config.train.strategy
    if setting == "single":
        raise ConfigError(
            f"train.strategy is single, but the plan is for {estimator.ranks} GPUs. Set "
            "train.strategy=auto, or plan for one GPU."
        )
    is_fp16 = machine.precision == "fp16"
    # This raises an error for fsdp with an obstacle.
    obstacle = find_fsdp_obstacle(
        config.train, config.adapter, config.optim.name, fp16=is_fp16
    )
    if setting != "auto":
        return setting
    if obstacle is not None or config.objective.kl:
        return "ddp"
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    n_bytes += sum(gradient_and_state_bytes(model, config.optim).values())
    return "ddp" if n_bytes <= HEADROOM * machine.memory_bytes else "fsdp"


def estimate_exchange(
    estimator: Estimator,
    model: PreTrainedModel,
    memory: Memory,
    strategy: _Strategy,
    time: Time,
) -> SharedUpdate | None:
    """Estimate an update's traffic, and its seconds that do not overlap with computation."""
    if strategy == "single":
        return None
    ranks, machine = estimator.ranks, estimator.machine
    rows = estimator.work.update_rows
    micro_batches = -(-rows // memory.micro_batch_rows)
    dtype = DTYPES[machine.precision]
    exchange = exchange_of(
        model, strategy, ranks, dtype=dtype, micro_batches=micro_batches
    )
    card = machine.card or card_of_device(machine.name)
    if card is None or card.link is None or ranks > _GPUS_PER_MACHINE:
        return SharedUpdate(exchange, rows)
    name, rate = card.link
    seconds = exchange.sent / (_LINK_SHARE * rate)
    shown = exchange.exposed_seconds(seconds, time.update_seconds)
    return SharedUpdate(
        exchange, rows, f"{name}, {rate / 1e9:,.0f} GB/s", seconds, shown
    )


def add_exchange(time: Time, work: Work, shared: SharedUpdate | None) -> Time:
    """Add the time of the traffic to the time of the computation. `work` includes all GPUs."""
    if shared is None or time.measured:
        return time
    # All GPUs wait for the GPU with the most rows.
    imbalance = shared.rows * shared.exchange.ranks / work.update_rows
    run_seconds = time.run_seconds
    steps = work.totals.get("steps")
    if run_seconds is not None and steps is not None and work.seconds is None:
        run_seconds = run_seconds * imbalance + steps * shared.shown
    update_seconds = time.update_seconds * imbalance + shared.shown
    return replace(time, update_seconds=update_seconds, run_seconds=run_seconds)
