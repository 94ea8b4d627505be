"""One of several ranks, whose others are torch's fake process group: bytes of its collectives.

FSDP2 runs on the fake card. DDP cannot: its reducer compares addresses of host tensors, and fake
ones have none. So it runs on real tensors of the CPU, whose gradients have as many bytes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from fake_cuda.card import BLOCK, FakeCard, fake_card, to_card
from fake_cuda.cases import small_model
from fixtures.trainers import small_trainer
from tiny import stream_of, uneven_examples
from toque.config.schema import RunConfig
from toque.models.families import vocabulary_rows
from toque.models.forward.blocks import recompute_blocks
from toque.models.forward.loss import loss_sum
from toque.models.lora.frozen import hold_frozen
from toque.runs.outlined_update import outlining
from toque.training.distributed import sharding
from toque.training.distributed.collectives import RankFailures, Ranks
from toque.training.distributed.data_parallel import DataParallel, Replicated
from toque.training.distributed.exchange import Exchange, exchange_of
from toque.training.micro_batch import WorstBatch
from toque.training.optim.factory import build_optimizer
from toque.training.runtime import PrecisionChoice, Runtime
from toque.training.trainer import Schedule
from toque.units import Cursor, Duration
from toque.workflows.plan.multi_gpu import estimate_rank_memory
from toque.workflows.plan.outlined_model import find_vocabulary, outline_model
from toque.workflows.plan.run_estimate import build_estimator

_C10D, _FUNCTIONAL = torch.ops.c10d, torch.ops._c10d_functional
_ALL_PARTS = {
    _C10D.allreduce_.default: ("all_reduce", 0),
    _FUNCTIONAL.all_reduce.default: ("all_reduce", 0),
    _C10D._allgather_base_.default: ("all_gather", 0),
    _C10D._reduce_scatter_base_.default: ("reduce_scatter", 1),
}
"""Collectives, and the argument that holds all ranks' parts: an output, or an input."""
_KNOWN = {*_ALL_PARTS, _FUNCTIONAL.wait_tensor.default}
_ALL_REDUCE = dist.all_reduce


class Collectives(TorchDispatchMode):
    """Counts bytes of collectives, by their kind; those on the host's numbers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented  # for a DTensor to do with its parts, which come here again
        if func.namespace in ("c10d", "_c10d_functional"):
            assert func in _KNOWN, func
        if func in _ALL_PARTS:
            name, at = _ALL_PARTS[func]
            for tensor in tree_leaves(args[at]):
                # The host sums a count of rows, and seconds with a count of tokens.
                of_host = tensor.dtype in (torch.int64, torch.float64)
                self.bytes["of the host" if of_host else name] += tensor.nbytes
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Counted:
    """Bytes of an update's collectives beside those of the formulas."""

    bytes: dict[str, int]
    formula: Exchange

    @property
    def expected(self) -> dict[str, int]:
        """The formulas' bytes by the same names."""
        found = {
            "all_gather": self.formula.gathered,
            "reduce_scatter": self.formula.scattered,
            "all_reduce": self.formula.reduced,
        }
        # Three float64, and under fsdp the most micro-batches of a rank.
        found["of the host"] = 24 + 8 * (self.formula.strategy == "fsdp")
        return {name: n for name, n in found.items() if n}


def counted_update(
    family: str,
    strategy: Literal["ddp", "fsdp"],
    ranks: int,
    *,
    adapter: bool = False,
    precision: PrecisionChoice = "bf16",
    micro_batches: int = 1,
) -> Counted:
    """Collectives of one whole update of the trainer, on the first of so many ranks."""
    model = small_model(family, adapter=adapter)
    rows = 2 * micro_batches * ranks
    stream = stream_of(uneven_examples(150), family, update_rows=rows, world_size=ranks)
    step = stream.at(Cursor())
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        held = stack.enter_context(fake_ranks(ranks))
        if strategy == "fsdp":
            stack.enter_context(fake_card())
            to_card(model)
        runtime = Runtime.detect(precision=precision, ranks=held)
        if adapter:
            hold_frozen(model, runtime.dtype, None)
        formula = exchange_of(
            model, strategy, ranks, dtype=runtime.dtype, micro_batches=micro_batches
        )
        trainer = small_trainer(
            model,
            stream,
            folder=Path(folder),
            runtime=runtime,
            schedule=Schedule(Duration(6, "steps"), None, None),
            sharing=_shared(model, strategy, runtime),
        )
        batch = step.batch.to(runtime.device)
        with Collectives() as counted:
            trainer.step(step, batch)
        return Counted(dict(counted.bytes), formula)


def peak_of_rank(config: RunConfig, ranks: int) -> tuple[int, int]:
    """Bytes of tensors that a plan has for one of so many ranks, and those that one takes."""
    estimator, model_of, _ = build_estimator(config, "h100", ranks)
    with outlining():
        _, memory, _ = estimate_rank_memory(estimator.of_rank(), model_of)
        known = find_vocabulary(config, None)
        model = outline_model(config, known, where="cuda", precision="float32")
    rows, row = memory.micro_batch_rows, estimator.work.row
    worst = WorstBatch(
        row.source, row.target, row.source, row.target, vocabulary_rows(model)
    )
    batch = worst(2 * rows).counted()
    with fake_ranks(ranks) as held, fake_card(memory=1 << 50) as card, _seen_by(card):
        runtime = Runtime.detect(precision="bf16", ranks=held)
        to_card(model)
        if memory.recompute:
            recompute_blocks(model)
        sharing, optimizer = _shared(model, "fsdp", runtime), build_optimizer(model)
        model.train()
        batch = batch.to(runtime.device)
        for _update in range(2):  # in the first the optimizer has no state yet
            card.peak = card.now
            for micro_batch in batch.split(rows):
                with runtime.autocast():
                    loss = sharing.loss(loss_sum, micro_batch, last=True)
                runtime.backward(loss / batch.n_targets)
                del loss
            norm = runtime.clip_gradients(optimizer, 1.0)
            runtime.optimizer_step(
                optimizer, lr=1e-4, only_if=torch.isfinite(norm), step=0
            )
        return memory.tensors, card.peak


@contextlib.contextmanager
def _seen_by(card: FakeCard) -> Iterator[None]:
    """Inside, the card counts the parts of a DTensor, and storages that FSDP2 empties and fills."""
    dispatch, resize = FakeCard.__torch_dispatch__, torch.UntypedStorage.resize_

    def of_parts(self: FakeCard, func: Any, types: Any, *args: Any) -> Any:
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        return dispatch(self, func, types, *args)

    def resized(storage: Any, size: int) -> Any:
        if (held := card._live.get(storage._cdata)) is not None:
            before, held.size = held.size, -(-size // BLOCK) * BLOCK
            card.now += held.size - before
            card.peak = max(card.peak, card.now)
        return resize(storage, size)

    with (
        patch.object(FakeCard, "__torch_dispatch__", of_parts),
        patch.object(torch.UntypedStorage, "resize_", resized),
    ):
        yield


def _shared(model: Any, strategy: str, runtime: Runtime) -> DataParallel:
    if strategy == "ddp":
        return Replicated(model)
    return sharding.Sharded(
        model, runtime.ranks, device=runtime.device, dtype=runtime.dtype
    )


@contextlib.contextmanager
def fake_ranks(n: int) -> Iterator[Ranks]:
    """The first of `n` ranks, whose others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=n)
    try:
        with (
            patch.object(sharding, "init_device_mesh", _mesh),
            patch.object(dist, "all_reduce", _all_reduce),
            # FSDP2 asks for it by this name, too, which knows devices that torch was built for.
            patch.object(torch.accelerator, "current_stream", _Current),
        ):
            yield Ranks(0, n, failures=RankFailures(dist.HashStore(), 0, n, 600.0))
    finally:
        faulthandler.cancel_dump_traceback_later()
        dist.destroy_process_group()


def _mesh(*args: Any, **kwargs: Any) -> Any:
    """A mesh of real tensors: it is asked who is in it."""
    with _disable_current_modes():
        return init_device_mesh(*args, **kwargs)


class _Current:
    """The stream in use, as torch asks for it by its kind of device."""

    def wait_event(self, _event: Any) -> None: ...
    def is_capturing(self) -> bool:
        return False


class _Done:
    """Work whose future has its tensors; that of the fake group has none."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self._future: Any = torch.futures.Future()
        self._future.set_result(tensors)

    def get_future(self) -> Any:
        return self._future


def _all_reduce(
    tensor: Tensor, *args: Any, async_op: bool = False, **kwargs: Any
) -> Any:
    _ALL_REDUCE(tensor, *args, async_op=async_op, **kwargs)
    return _Done([tensor]) if async_op else None
