"""Estimate of a run's bytes and seconds, before its model and data are loaded.

Bytes follow from shapes (`outlined_update`) and are accurate to 15 %. Seconds are accurate to
25 %. They come from the metrics of the run if it has ten updates. Otherwise a CPU times each of the
run's operations once, and a GPU is assumed to reach a share of the peak stated by its maker.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, cast

import psutil
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema import OptimConfig
from toque.hardware.cards import Card
from toque.models.families import family_of, vocabulary_rows
from toque.models.flops import parameter_counts
from toque.models.forward.loss import logits_bytes
from toque.models.forward.outline import OutlinedRows, Where
from toque.models.generation.kv_cache import cache_shape
from toque.models.lora.frozen import frozen_matrices
from toque.models.lora.layers import is_adapted
from toque.models.lora.quantised import quantised_layers
from toque.runs.history import METRICS, history_of
from toque.runs.outlined_update import OutlinedUpdate, outline_update, outlining
from toque.runs.peak import Peak
from toque.runs.time_left import times_in

_TENSOR_SHARE: Final = {"cpu": 0.65, "cuda": 0.9}
"""Tensors as a share of the memory that their allocator takes (CPU: lab/notes.md). glibc's heap
retains freed blocks for later tensors of the same size."""
_LIBRARY_BYTES: Final = 320 << 20
"""Bytes that libraries allocate when they compute, e.g. oneDNN's compiled matmuls. A rough estimate
from the demo, which has almost no tensors."""
_ASSUMED_UTILISATION: Final = {True: 0.30, False: 0.40}
"""Assumed share of a GPU's peak, by whether the model is an encoder-decoder. Published T5
training runs reach 12 to 38 %, decoders 33 to 57 %."""
_RECOMPUTE_FACTOR: Final = 4 / 3
"""Relative time of an update with two forward passes: a backward pass costs as much as two."""
_MIN_UPDATES: Final = 10

Optimizers = Callable[
    [nn.Module, OptimConfig], tuple[torch.optim.Optimizer | None, int]
]
"""Function that returns a model's optimizer and the bytes of its state. The optimizer is None if
its step reads tensor values."""


@dataclass(frozen=True)
class Work:
    """The work of a run: its rows, updates and tokens."""

    row: OutlinedRows  # one row with the average number of examples
    worst_examples: (
        int  # examples in a row of the longest examples: attention peaks there
    )
    update_rows: int
    usual_rows: int  # rows of a CPU's micro-batch by default
    tokens_per_update: float  # both sides, without padding
    flops_per_token: float
    products: Mapping[tuple[int, int], float]
    """FLOPs per token in matmuls with weights, by the weight's (in, out) size."""
    totals: Mapping[str, float]
    """Steps, epochs, examples and tokens of the entire run. Unknown totals are missing."""
    seconds: float | None  # length of a run that a time limit ends
    held_out_tokens: float
    how: str  # origin of the lengths

    @property
    def useful_share(self) -> float:
        """Tokens without padding as a share of the tokens in full rows."""
        return min(1.0, self.tokens_per_update / (self.update_rows * self.row.tokens))


@dataclass(frozen=True)
class Machine:
    """Machine that a run is estimated for: this machine or a GPU of the table."""

    name: str
    where: Where
    precision: str
    memory_bytes: int  # memory available to a process
    card: Card | None  # None for this machine
    peak: Peak  # peak of the model's matmuls


@dataclass(frozen=True)
class Memory:
    """Peak memory of training, in bytes."""

    parts: Mapping[str, int]  # bytes of tensors
    beside: Mapping[str, int]
    """Bytes in addition to the tensors: gaps and free blocks of the allocator, and on a CPU the
    libraries."""
    room: int
    micro_batch_rows: int
    recompute: bool
    update: OutlinedUpdate  # bytes and work of one micro-batch
    host: int | None = None
    """Bytes of host memory while the model of a GPU is loaded. None on a CPU."""

    @property
    def total(self) -> int:
        """Bytes of tensors, allocator and libraries."""
        return self.tensors + sum(self.beside.values())

    @property
    def tensors(self) -> int:
        """Bytes of all tensors."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the machine has enough memory."""
        return self.total <= self.room


@dataclass(frozen=True)
class Time:
    """Seconds of an update and of the run, with their origin."""

    update_seconds: float
    flops_per_update: float  # without padding and recomputation
    peak: Peak
    how: str
    evaluation_seconds: float  # time of one held-out loss
    run_seconds: float | None
    """Seconds of all updates and held-out losses. None if their number is unknown."""
    # True if the run's own updates, with their exchange, were measured.
    measured: bool = False

    @property
    def utilisation(self) -> float | None:
        """Useful FLOPs as a share of the peak, in [0, 1]. None if they exceed the peak."""
        share = self.flops_per_update / (
            self.update_seconds * self.peak.flops_per_second
        )
        return min(1.0, share) if share < 1.0 + 1e-9 else None


@dataclass(frozen=True)
class Disk:
    """Bytes of a run on the disk, and bytes sent to a bucket."""

    checkpoint: int
    kept: int
    """Bytes of the retained checkpoints, plus one of each kind while a save is in progress."""
    model: int  # the finished model
    store: int  # the prepared data; 0 before it exists
    saves: int
    uploaded: int

    @property
    def total(self) -> int:
        """Most bytes on the disk at a time."""
        return self.kept + self.model + self.store


@dataclass(frozen=True)
class Estimator:
    """Estimator of a run's memory, time and disk space on a machine."""

    config: RunConfig
    work: Work
    machine: Machine
    optimizers: Optimizers
    ranks: int = 1  # processes that share an update

    def of_rank(self) -> Estimator:
        """Return the estimator for the rank with the most rows."""
        rows = -(-self.work.update_rows // self.ranks)
        return replace(self, work=replace(self.work, update_rows=rows))

    def memory(self, model: PreTrainedModel) -> Memory:
        """Estimate the memory of an outlined model. Call this inside `outlining`."""
        setting = self.config.train.gradient_checkpointing
        memory = self._estimate_memory(model, recompute=setting is True)
        if setting == "auto" and not memory.fits and memory.micro_batch_rows == 1:
            memory = self._estimate_memory(model, recompute=True)
        return memory

    def _estimate_memory(self, model: PreTrainedModel, *, recompute: bool) -> Memory:
        """Estimate the memory at the configured micro-batch, or at the choice of `auto`."""
        setting = self.config.train.micro_batch_rows
        work = self.work
        if isinstance(setting, int):
            rows = min(setting, work.update_rows)
        elif self.machine.where == "cpu":
            rows = evenly(work.update_rows, work.usual_rows)
        else:
            free = self.machine.memory_bytes

            def bytes_if_fitting(n: int) -> int | None:
                total = self._estimate_rows(model, n, recompute=recompute).total
                return total if total <= free else None

            rows = largest_rows(
                bytes_if_fitting, update_rows=work.update_rows, room=lambda: free
            )
        return self._estimate_rows(model, rows, recompute=recompute)

    def _estimate_rows(
        self, model: PreTrainedModel, rows: int, *, recompute: bool
    ) -> Memory:
        update = self._outline(
            model, rows, self.work.worst_examples, recompute=recompute
        )
        parts = self._split_tensors(model, update, rows, recompute=recompute)
        return Memory(
            parts=parts,
            beside=_overhead(sum(parts.values()), self.machine.where),
            room=self.machine.memory_bytes,
            micro_batch_rows=rows,
            recompute=recompute,
            update=update,
            host=_host_bytes(self.config, model)
            if self.machine.where == "cuda"
            else None,
        )

    def _outline(
        self,
        model: PreTrainedModel,
        rows: int,
        examples: int,
        *,
        recompute: bool,
        operations: bool = False,
    ) -> OutlinedUpdate:
        optimizer, state = self.optimizers(model, self.config.optim)
        return outline_update(
            model,
            replace(self.work.row, rows=rows, examples=examples),
            where=self.machine.where,
            precision=self.machine.precision,
            optimizer=optimizer,
            state_bytes=state,
            # Gradient buckets of several ranks stay allocated between updates.
            accumulates=self.ranks > 1 or rows < self.work.update_rows,
            recompute=recompute,
            smoothing=self.config.optim.label_smoothing,
            masked=self.config.train.optimisations.attention == "dense",
            operations=operations,
        )

    def _split_tensors(
        self,
        model: PreTrainedModel,
        update: OutlinedUpdate,
        rows: int,
        *,
        recompute: bool,
    ) -> dict[str, int]:
        """Return the bytes of tensors at the peak, by purpose."""
        config = self.config
        where = self.machine.where

        chunk = logits_bytes(
            vocabulary_rows(model), where, positions=rows * self.work.row.target
        )
        logits = min(chunk, update.computing)
        computing = update.computing - logits
        if config.train.activation_offload and recompute:
            computing = max(
                0, computing - _block_input_bytes(model, self.work.row, rows)
            )

        parts = _weights_by_part(model, update.weights) | {
            "16-bit copies of weights": update.copies,
            "gradients": update.gradients,
            "optimizer states": update.optimizer,
            "logits": logits,
            "activations and their gradients": computing,
        }

        # Activations are free while the optimizer steps, texts are generated or a save begins.
        parts["the optimizer's step"] = max(0, update.step - update.computing)
        if where == "cpu":
            peak = max(update.step, update.computing)
            texts = _text_bytes(config, model, self.work.row)
            parts["evaluation: keys and values"] = max(0, texts - peak)

            saved = update.gradients + update.optimizer
            if config.train.keep_best:
                saved += update.gradients
            parts["a save's copies"] = max(0, saved - max(peak, texts))
        return parts

    def time(
        self,
        model: PreTrainedModel,
        memory: Memory,
        *,
        utilisation: float | None = None,
    ) -> Time:
        """Estimate the time of an update and of the run.

        The call may measure operations, so make it outside `outlining`.

        Args:
            model: Outlined model.
            memory: Its estimated memory.
            utilisation: Share of the peak to assume instead of a measurement.
        """
        work = self.work
        peak = self.machine.peak
        flops = work.flops_per_token * work.tokens_per_update
        is_this_machine = self.machine.card is None
        metrics = Path(self.config.run_dir) / METRICS
        measured = False

        if utilisation is not None:
            seconds = flops / (utilisation * peak.flops_per_second)
            how = f"{utilisation:.0%} of the peak, as requested"
        elif (
            is_this_machine
            and (rate := _measured_rate(metrics, model, self.ranks)) is not None
        ):
            seconds = work.tokens_per_update / rate
            measured = True
            how = f"measured in {metrics}: {rate:,.0f} tokens per second"
        elif self.machine.where == "cpu" and memory.fits:
            seconds = self._time_operations(model, memory)
            how = "this model's operations, each timed just now"
        else:
            share = _ASSUMED_UTILISATION[family_of(model.config).is_encoder_decoder]
            factor = _RECOMPUTE_FACTOR if memory.recompute else 1.0
            seconds = (
                flops * factor / (work.useful_share * share * peak.flops_per_second)
            )
            how = f"{share:.0%} of the peak while it computes: a guess until a run has measured"

        # A held-out loss needs only the forward pass, a third of an update.
        held_out = work.held_out_tokens / work.tokens_per_update * seconds / 3
        run_seconds = work.seconds
        steps = work.totals.get("steps")
        if run_seconds is None and steps is not None:
            train = self.config.train
            evaluations = times_in(
                train.stop_after, self._totals(seconds), train.evaluate_every
            )
            run_seconds = steps * seconds + evaluations * held_out
        return Time(seconds, flops, peak, how, held_out, run_seconds, measured)

    def _time_operations(self, model: PreTrainedModel, memory: Memory) -> float:
        """Measure the seconds of an update's micro-batches and optimizer step."""
        rows = memory.micro_batch_rows
        examples = self.work.row.examples
        with outlining():
            update = self._outline(
                model, rows, examples, recompute=memory.recompute, operations=True
            )
        # A CPU computes the examples of a row one by one, without padding.
        pieces = self.work.update_rows / rows * self.work.useful_share
        return pieces * update.micro_batch.seconds() + update.update.seconds()

    def _totals(self, update_seconds: float) -> dict[str, float]:
        """Return the run's totals by unit, with minutes, if an update takes `update_seconds`."""
        seconds = self.work.seconds
        totals = dict(self.work.totals)
        if seconds is None and "steps" in totals:
            seconds = totals["steps"] * update_seconds
        if seconds is None:
            return totals
        return {"steps": seconds / update_seconds, "minutes": seconds / 60} | totals

    def disk(
        self,
        model: PreTrainedModel,
        memory: Memory,
        store: int,
        *,
        update_seconds: float,
    ) -> Disk:
        """Estimate the disk space of an outlined model's run with `store` bytes of data."""
        config = self.config
        train = config.train
        # Trained weights have as many bytes as their gradients: both are float32.
        trained = memory.update.gradients
        saved = trained + memory.update.optimizer
        # A new checkpoint is complete before the oldest of its kind is removed.
        best = trained * (train.keep_best + 1) if train.keep_best else 0
        finished = (
            trained if config.adapter is not None else 4 * parameter_counts(model).total
        )
        saves = times_in(
            train.stop_after, self._totals(update_seconds), train.save_every
        )
        remote = config.checkpoint.upload is not None or "://" in config.run_dir
        return Disk(
            checkpoint=saved,
            kept=saved * (train.keep_last + 1) + best,
            model=finished,
            store=store,
            saves=saves,
            uploaded=saves * saved + finished if remote else 0,
        )


def _overhead(tensors: int, where: Where) -> dict[str, int]:
    """Return the bytes of allocator and libraries in addition to the tensors."""
    overhead = {
        "the allocator's share": round(tensors / _TENSOR_SHARE[where]) - tensors
    }
    if where == "cpu":
        resident = int(psutil.Process().memory_info().rss)
        overhead["Python and its libraries"] = resident + _LIBRARY_BYTES
    return overhead


def _measured_rate(path: Path, model: PreTrainedModel, ranks: int) -> float | None:
    """Return the useful tokens per second of a run with this model and number of ranks.

    The result is None before the run has enough updates.
    """
    if not path.is_file():
        return None
    history = history_of(path)
    rates = history.curves["tokens_per_second"].values()
    total = (history.start.get("parameters") or {}).get("total")
    is_same_model = total == parameter_counts(model).total
    is_same = is_same_model and history.start.get("ranks", 1) == ranks
    if not is_same or not rates or history.progress.step < _MIN_UPDATES:
        return None
    # Skip the first updates, which load kernels. A median ignores pauses.
    return statistics.median(rates[len(rates) // 5 :])


def evenly(update_rows: int, at_most: int) -> int:
    """Divide an update into the most even micro-batches of at most `at_most` rows.

    >>> evenly(30, 16), evenly(30, 40)
    (15, 30)
    """
    at_most = max(1, min(at_most, update_rows))
    pieces = -(-update_rows // at_most)
    return -(-update_rows // pieces)


def largest_rows(
    fits: Callable[[int], int | None], *, update_rows: int, room: Callable[[], float]
) -> int:
    """Find the largest micro-batch that fits, from the bytes of one and of two rows.

    Args:
        fits: Returns the bytes of a number of rows, or None if they do not fit.
        update_rows: Rows per update.
        room: Returns the available bytes. It is called after `fits` for two rows.

    Returns:
        A number of rows. It is at least 1, even if one row does not fit.
    """
    one = fits(1)
    two = fits(2) if update_rows > 1 else None
    if one is None or two is None:
        return 1
    rows = evenly(update_rows, max(2, 1 + int((room() - one) // max(1, two - one))))
    while rows > 2 and fits(rows) is None:
        rows = evenly(update_rows, max(2, int(0.85 * rows)))
    return rows


def _text_bytes(config: RunConfig, model: PreTrainedModel, row: OutlinedRows) -> int:
    """Return the float32 bytes of keys and values for the final evaluation's batch of texts."""
    layers, heads, size = cache_shape(model)
    # An encoder-decoder has cross-attention to the prompt. A decoder caches the prompt itself.
    tokens = row.source + row.target
    return 2 * 4 * layers * heads * size * tokens * config.evaluation.generate


def _weights_by_part(model: PreTrainedModel, total: int) -> dict[str, int]:
    """Split the bytes of the weights into quantised matrices, their constants, adapter and rest."""
    quantised = [layer.stored_bytes() for _, layer in quantised_layers(model)]
    parts = {
        "quantised matrices": sum(sizes["codes"] for sizes in quantised),
        "constants of their blocks": sum(sizes["constants"] for sizes in quantised),
    }
    if is_adapted(model):
        trained = (p for p in model.parameters() if p.requires_grad)
        parts["adapter"] = sum(p.numel() * p.element_size() for p in trained)
    return {"weights": total - sum(parts.values())} | parts


def _host_bytes(config: RunConfig, model: PreTrainedModel) -> int:
    """Return the bytes of host memory while the model is loaded, in float32."""
    if config.adapter is None or config.adapter.kind == "dora":
        return 4 * parameter_counts(model).total
    # With an adapter, frozen matrices are loaded one by one, so only the largest one adds memory.
    matrices = [
        cast("Tensor", layer.weight) for layer in frozen_matrices(model).values()
    ]
    sizes = [m.numel() for m in matrices] + [
        q.shape.numel() for _, q in quantised_layers(model)
    ]
    frozen_ids = {id(m) for m in matrices}
    remaining = sum(p.numel() for p in model.parameters() if id(p) not in frozen_ids)
    return 4 * (remaining + max(sizes))


def _block_input_bytes(model: PreTrainedModel, row: OutlinedRows, rows: int) -> int:
    """Return the bytes of the float32 inputs of all blocks but one."""
    shape = model.config
    if family_of(shape).is_encoder_decoder:
        sides = shape.num_layers * row.source + shape.num_decoder_layers * row.target
        return (
            4 * int(shape.d_model) * rows * (int(sides) - max(row.source, row.target))
        )
    return (
        4
        * int(shape.hidden_size)
        * rows
        * (int(shape.num_hidden_layers) - 1)
        * row.target
    )
