"""Several GPUs of a plan: memory of one, what they exchange, and the batch that they share."""

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
from toque.runs.estimate import Estimator, Memory, Time, Work
from toque.training.distributed.exchange import Exchange, GatheredGroup, exchange_of, groups_of
from toque.training.optim.factory import held_bytes
from toque.training.placement import obstacle_to_dividing
from toque.workflows.plan.outlined_model import remake

_OF_A_MACHINE: Final = 8  # GPUs; of networks between machines no rate is known here
_LINK_SHARE: Final = 0.8
"""Share of a link's stated rate that collectives reach. A guess: nothing of it was measured."""
_LITTLE: Final = 10_000  # bytes of numbers beside weights and gradients
_RATE_RULE: Final = (
    "optim.peak_lr stays, as train.batch is of all GPUs; with k times the batch, sqrt(k) times the "
    "rate (Adam; Malladi et al. 2022)"
)
_Strategy = Literal["single", "ddp", "fsdp"]


@dataclass(frozen=True)
class SharedUpdate:
    """Rows and exchange of an update that GPUs share; None for a link that is not known."""

    exchange: Exchange
    rows: int  # of the GPU with most
    link: str | None = None
    seconds: float | None = None  # of the exchange, alone
    shown: float = 0.0  # of these, what products do not hide

    def record(self) -> dict[str, Any]:
        """The same as JSON: bytes and seconds."""
        return asdict(self) | {"sent": self.exchange.sent, "rate": _RATE_RULE}

    def lines(self, update_rows: int, at_once: int) -> list[tuple[str, str]]:
        """Rows of a table for people."""
        e, over = self.exchange, "a network whose rate is not known here"
        if self.seconds is not None:
            over = (
                f"{self.link} as stated, {_LINK_SHARE:.0%} of it assumed: {1e3 * self.seconds:,.0f}"
            )
            over += f" ms, of which products hide all but {1e3 * self.shown:,.0f}"
        moved = (e.gathered, "gathered"), (e.scattered, "scattered"), (e.reduced, "summed")
        sizes = ", ".join(f"{size_text(n)} {how}" for n, how in moved if n > _LITTLE)
        return [
            (
                "the batch",
                f"{update_rows:,} rows together, {self.rows:,} each, {at_once:,} at once",
            ),
            ("exchanged", f"{sizes}; each sends {size_text(e.sent)}"),
            ("over", over),
            ("the rate", _RATE_RULE),
        ]


def memory_of_rank(
    estimator: Estimator, model_of: Callable[[RunConfig], PreTrainedModel]
) -> tuple[PreTrainedModel, Memory, _Strategy]:
    """The model, memory of a GPU, and the strategy that a training would take; in `outlining`."""
    config, ranks = estimator.config, estimator.ranks
    model = model_of(config)
    strategy: _Strategy = "single" if ranks == 1 else _strategy(estimator, model)
    if strategy != "fsdp":
        return model, estimator.memory(model), strategy
    asked, dtype = config.train.micro_batch_rows, DTYPES[estimator.machine.precision]
    # No rank can measure alone, so auto is the usual, as in `training.fitting`.
    changes = {
        "micro_batch_rows": usual_rows(estimator.work.row.tokens) if asked == "auto" else asked,
        "gradient_checkpointing": config.train.gradient_checkpointing is True,
    }
    fixed = config.model_copy(update={"train": config.train.model_copy(update=changes)})
    rounded = model_of(config)
    for block in blocks(rounded):  # as they are gathered
        remake(block, dtype=dtype)
    found = replace(estimator, config=fixed).memory(rounded)
    # A save is in float32, whatever the blocks were rounded to.
    held = held_bytes(model, config.optim)
    saved = replace(found.update, gradients=held["gradients"], optimizer=held["optimizer"])
    groups = groups_of(model, ranks, dtype)
    return model, _in_parts(replace(found, update=saved), groups, ranks), strategy


def _in_parts(found: Memory, groups: Sequence[GatheredGroup], ranks: int) -> Memory:
    """Memory of a rank that holds parts; `found` is of all weights, in the formats of products."""
    *inner, root = groups
    trained, block = sum(g.gradients for g in groups), max(inner, key=lambda g: g.gathered)
    logits, computing = (found.parts[n] for n in ("logits", "activations and their gradients"))
    # When the loss has gone, a block's backward has its gradients as computed and as they are sent,
    # and the next block's weights.
    backward = found.update.kept + 2 * block.gathered + block.gradients
    # When the activations and the root's weights have gone: its gradients as computed, as they
    # are sent, and its part of them.
    last = 2 * root.gradients + root.gradients // ranks - root.gathered
    parts = {
        "its part of the weights": sum(g.stored for g in groups) // ranks,
        "weights gathered at once": root.gathered + block.gathered,
        "its part of the gradients": trained // ranks,
        "its part of the optimizer states": 2 * trained // ranks,  # AdamW's; no other is divided
        "logits": logits,
        "activations and their gradients": computing,
        "whole gradients": max(0, max(backward, last) - logits - computing),
    }
    more = sum(parts.values()) / found.tensors
    beside = {name: round(more * n_bytes) for name, n_bytes in found.beside.items()}
    return replace(found, parts=parts, beside=beside)


def _strategy(estimator: Estimator, model: PreTrainedModel) -> Literal["ddp", "fsdp"]:
    config, machine = estimator.config, estimator.machine
    asked, name = config.train.strategy, config.optim.name
    if asked == "single":
        raise ConfigError(
            f"train.strategy is single, and a plan was asked for {estimator.ranks} GPUs. Set "
            "train.strategy=auto, or plan for one."
        )
    fp16 = machine.precision == "fp16"
    obstacle = obstacle_to_dividing(config.train, config.adapter, name, fp16=fp16)
    if asked != "auto":
        return asked
    needed = sum(p.nbytes for p in model.parameters())
    needed += sum(held_bytes(model, config.optim).values())
    return "ddp" if needed <= HEADROOM * machine.memory_bytes or obstacle else "fsdp"


def shared_update(
    estimator: Estimator, model: PreTrainedModel, memory: Memory, strategy: _Strategy, time: Time
) -> SharedUpdate | None:
    """The GPUs' exchange of an update, and its seconds that products do not hide."""
    if strategy == "single":
        return None
    ranks, rows, machine = estimator.ranks, estimator.work.update_rows, estimator.machine
    micro_batches = -(-rows // memory.micro_batch_rows)
    dtype = DTYPES[machine.precision]
    exchange = exchange_of(model, strategy, ranks, dtype=dtype, micro_batches=micro_batches)
    card = machine.card or card_of_device(machine.name)
    if card is None or card.link is None or ranks > _OF_A_MACHINE:
        return SharedUpdate(exchange, rows)
    name, rate = card.link
    seconds = exchange.sent / (_LINK_SHARE * rate)
    shown = exchange.exposed_seconds(seconds, time.update_seconds)
    return SharedUpdate(exchange, rows, f"{name}, {rate / 1e9:,.0f} GB/s", seconds, shown)


def with_exchange(time: Time, work: Work, shared: SharedUpdate | None) -> Time:
    """`time`, of GPUs that only compute, with what they exchange; `work` is of all of them."""
    if shared is None or time.measured:
        return time
    # The others wait for the one that has most rows.
    uneven = shared.rows * shared.exchange.ranks / work.update_rows
    whole, steps = time.run_seconds, work.totals.get("steps")
    if whole is not None and steps is not None and work.seconds is None:
        whole = whole * uneven + steps * shared.shown
    seconds = time.update_seconds * uneven + shared.shown
    return replace(time, update_seconds=seconds, run_seconds=whole)
