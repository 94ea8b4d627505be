"""Estimate of a run's memory, time and disk space, before its model and data are loaded.

The memory follows from tensor shapes (`outlined_update`) and is accurate to 15 %. The time is
accurate to 25 %. It comes from the run's metrics if the run has at least ten updates. Otherwise, on
a CPU, each of the run's operations is timed. A GPU is assumed to reach a part of the peak that its
manufacturer states.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple, cast

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
from toque.runs.history import METRICS, read_history
from toque.runs.outlined_update import OutlinedUpdate, UpdateOutliner, outlining
from toque.runs.peak import Peak
from toque.runs.time_left import count_events

_TENSOR_SHARE: Final = {"cpu": 0.65, "cuda": 0.9}
"""Fraction of the allocator's memory that live tensors use (CPU: lab/notes.md). The rest is gaps,
and freed blocks that glibc's heap retains for later tensors of the same size.
"""
_LIBRARY_BYTES: Final = 320 << 20
"""Bytes that libraries allocate during computation, e.g. for oneDNN's compiled matmuls. A rough
estimate from the demo, which has small tensors."""
_ASSUMED_UTILISATION: Final = {True: 0.30, False: 0.40}
"""Assumed model FLOPs utilisation of a GPU. The key is True for an encoder-decoder. Published
training runs reach 12 to 38 % for T5, and 33 to 57 % for decoders.
"""
_RECOMPUTE_FACTOR: Final = 4 / 3
"""Relative time of an update that runs the forward pass twice. The backward pass takes as long as
two forward passes."""
_MIN_UPDATES: Final = 10
"""Updates after which the run's own speed replaces the estimate."""

Optimizers = Callable[
    [nn.Module, OptimConfig], tuple[torch.optim.Optimizer | None, int]
]
"""Function that returns a model's optimizer and the bytes of its state. The optimizer is None if
its step reads tensor values."""


@dataclass(frozen=True)
class Work:
    """Work of a run: its rows, updates and tokens."""

    row: OutlinedRows
    """One row with the average number of examples."""
    worst_examples: int
    """Number of examples in a row packed with the longest examples: the worst case for attention
    memory."""
    update_rows: int
    usual_rows: int
    """Default number of rows in a CPU's micro-batch."""
    tokens_per_update: float
    """Source and target tokens per update, without padding."""
    flops_per_token: float
    products: Mapping[tuple[int, int], float]
    """FLOPs per token in matmuls with weights, by the weight's (in, out) size."""
    totals: Mapping[str, float]
    """Steps, epochs, examples and tokens of the entire run. Unknown totals are missing."""
    seconds: float | None
    """Length of the run in seconds, if a time limit ends it."""
    held_out_tokens: float
    how: str
    """Origin of the example lengths, as text."""

    @property
    def useful_share(self) -> float:
        """Fraction of the tokens in full rows that are not padding."""
        return min(1.0, self.tokens_per_update / (self.update_rows * self.row.tokens))


@dataclass(frozen=True)
class Machine:
    """Machine for which a run is estimated: this machine or a GPU in the table."""

    name: str
    where: Where
    precision: str
    memory_bytes: int
    """Bytes of memory available to a process."""
    card: Card | None
    """GPU in the table, or None for this machine."""
    peak: Peak
    """Peak speed of the model's matmuls."""


@dataclass(frozen=True)
class Memory:
    """Peak memory of training, in bytes."""

    parts: Mapping[str, int]
    """Bytes of the tensors, by purpose."""
    beside: Mapping[str, int]
    """Bytes in addition to the tensors: the allocator's gaps and free blocks, and on a CPU the
    libraries."""
    room: int
    """Bytes available to a process."""
    micro_batch_rows: int
    recompute: bool
    """True if the backward pass recomputes activations."""
    update: OutlinedUpdate
    """Memory and work of one micro-batch."""
    host: int | None = None
    """Bytes of host memory needed to load the model for a GPU. None on a CPU."""

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
    """Seconds for an update and for the run, with their origin."""

    update_seconds: float
    flops_per_update: float
    """FLOPs per update, without padding and recomputation."""
    peak: Peak
    how: str
    """Origin of `update_seconds`, as text."""
    evaluation_seconds: float
    """Seconds to compute the held-out loss once."""
    run_seconds: float | None
    """Seconds for all updates and held-out losses. None if their number is unknown."""
    measured: bool = False
    """True if the run's own updates, including the GPUs' traffic, were measured."""

    @property
    def utilisation(self) -> float | None:
        """Useful FLOPs as a fraction of the peak, in [0, 1]. None if they exceed the peak."""
        share = self.flops_per_update / (
            self.update_seconds * self.peak.flops_per_second
        )
        # A requested utilisation of 100 % may exceed 1 by a rounding error.
        return min(1.0, share) if share < 1.0 + 1e-9 else None


class _UpdateTime(NamedTuple):
    """Seconds for an update, and their origin."""

    seconds: float
    how: str
    """Origin of the seconds, as text."""
    is_measured: bool = False
    """True if the run's own updates were measured."""


@dataclass(frozen=True)
class Disk:
    """Disk space of a run in bytes, and bytes sent to a bucket."""

    checkpoint: int
    kept: int
    """Bytes of the retained checkpoints, plus one more of each kind during a save."""
    model: int
    """Bytes of the finished model."""
    store: int
    """Bytes of the prepared data, or 0 before it exists."""
    saves: int
    """Number of saved checkpoints."""
    uploaded: int
    """Bytes sent to the bucket."""

    @property
    def total(self) -> int:
        """Largest number of bytes on the disk at any time."""
        return self.kept + self.model + self.store


@dataclass(frozen=True)
class Estimator:
    """Estimator of a run's memory, time and disk space on a machine."""

    config: RunConfig
    work: Work
    machine: Machine
    optimizers: Optimizers
    ranks: int = 1
    """Number of processes that share an update."""

    def of_rank(self) -> Estimator:
        """Return the estimator for the rank with the most rows."""
        rows = -(-self.work.update_rows // self.ranks)
        return replace(self, work=replace(self.work, update_rows=rows))

    def memory(self, model: PreTrainedModel) -> Memory:
        """Estimate the memory of an outlined model. Call this inside `outlining`."""
        setting = self.config.train.gradient_checkpointing
        recompute = setting is True
        rows = self._choose_rows(model, recompute=recompute)
        memory = self._estimate_rows(model, rows, recompute=recompute)
        if setting == "auto" and not memory.fits and rows == 1:
            rows = self._choose_rows(model, recompute=True)
            memory = self._estimate_rows(model, rows, recompute=True)
        return memory

    def _choose_rows(self, model: PreTrainedModel, *, recompute: bool) -> int:
        """Return the configured rows per micro-batch, or the rows that `auto` would choose."""
        setting = self.config.train.micro_batch_rows
        work = self.work
        if isinstance(setting, int):
            return min(setting, work.update_rows)
        if self.machine.where == "cpu":
            return even_rows(work.update_rows, work.usual_rows)

        available = self.machine.memory_bytes

        def bytes_if_fitting(rows: int) -> int | None:
            total = self._estimate_rows(model, rows, recompute=recompute).total
            return total if total <= available else None

        return largest_rows(
            bytes_if_fitting,
            update_rows=work.update_rows,
            available_bytes=lambda: available,
        )

    def _estimate_rows(
        self, model: PreTrainedModel, rows: int, *, recompute: bool
    ) -> Memory:
        """Estimate the memory with micro-batches of `rows` rows of the longest examples."""
        update = self._outline(
            model, rows, self.work.worst_examples, recompute=recompute
        )
        parts = self._split_tensors(model, update, rows, recompute=recompute)
        is_on_gpu = self.machine.where == "cuda"
        return Memory(
            parts=parts,
            beside=_overhead(sum(parts.values()), self.machine.where),
            room=self.machine.memory_bytes,
            micro_batch_rows=rows,
            recompute=recompute,
            update=update,
            host=_host_bytes(self.config, model) if is_on_gpu else None,
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
        """Outline an update of rows with `examples` examples each."""
        optimizer, state = self.optimizers(model, self.config.optim)
        outliner = UpdateOutliner(
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
        row = self.work.row
        return outliner.outline(model, replace(row, rows=rows, examples=examples))

    def _split_tensors(
        self,
        model: PreTrainedModel,
        update: OutlinedUpdate,
        rows: int,
        *,
        recompute: bool,
    ) -> dict[str, int]:
        """Return the bytes of tensors at the peak, by purpose."""
        row = self.work.row
        positions = rows * row.target
        chunk = logits_bytes(
            vocabulary_rows(model), self.machine.where, positions=positions
        )
        logits = min(chunk, update.computing)
        computing = update.computing - logits
        if self.config.train.activation_offload and recompute:
            offloaded = _block_input_bytes(model, row, rows)
            computing = max(0, computing - offloaded)

        parts = _weights_by_part(model, update.weights) | {
            "16-bit copies of weights": update.copies,
            "gradients": update.gradients,
            "optimizer states": update.optimizer,
            "logits": logits,
            "activations and their gradients": computing,
        }

        # The later phases begin after activations are freed. Each adds only the bytes that exceed
        # the peak so far.
        peak = update.computing
        for name, n_bytes in self._later_phases(model, update).items():
            parts[name] = max(0, n_bytes - peak)
            peak = max(peak, n_bytes)
        return parts

    def _later_phases(
        self, model: PreTrainedModel, update: OutlinedUpdate
    ) -> dict[str, int]:
        """Return the temporary bytes of each phase after the backward pass, in their order."""
        phases = {"the optimizer's step": update.step}
        if self.machine.where == "cpu":
            texts = _text_bytes(self.config, model, self.work.row)
            phases["evaluation: keys and values"] = texts
            # Trained weights have as many bytes as their gradients.
            saved = update.gradients + update.optimizer
            if self.config.train.keep_best:
                saved += update.gradients
            phases["a save's copies"] = saved
        return phases

    def time(
        self,
        model: PreTrainedModel,
        memory: Memory,
        *,
        utilisation: float | None = None,
    ) -> Time:
        """Estimate the time of an update and of the run.

        The call may time operations, so make it outside `outlining`.

        Args:
            model: The outlined model.
            memory: The model's estimated memory.
            utilisation: Fraction of the peak to assume instead of a measurement.
        """
        work = self.work
        flops = work.flops_per_token * work.tokens_per_update
        update = self._update_time(model, memory, flops, utilisation)
        seconds = update.seconds

        # The held-out loss needs only the forward pass, a third of an update.
        held_out = work.held_out_tokens / work.tokens_per_update * seconds / 3
        run_seconds = work.seconds
        steps = work.totals.get("steps")
        if run_seconds is None and steps is not None:
            train = self.config.train
            totals = self._totals(seconds)
            evaluations = count_events(train.stop_after, totals, train.evaluate_every)
            run_seconds = steps * seconds + evaluations * held_out
        return Time(
            update_seconds=seconds,
            flops_per_update=flops,
            peak=self.machine.peak,
            how=update.how,
            evaluation_seconds=held_out,
            run_seconds=run_seconds,
            measured=update.is_measured,
        )

    def _update_time(
        self,
        model: PreTrainedModel,
        memory: Memory,
        flops: float,
        utilisation: float | None,
    ) -> _UpdateTime:
        """Compute the time of an update from `utilisation`. Without it, measure or guess."""
        work = self.work
        peak = self.machine.peak.flops_per_second
        if utilisation is not None:
            how = f"{utilisation:.0%} of the peak, as requested"
            return _UpdateTime(flops / (utilisation * peak), how)

        if self.machine.card is None:
            metrics = Path(self.config.run_dir) / METRICS
            rate = _measured_rate(metrics, model, self.ranks)
            if rate is not None:
                how = f"measured in {metrics}: {rate:,.0f} tokens per second"
                seconds = work.tokens_per_update / rate
                return _UpdateTime(seconds, how, is_measured=True)

        if self.machine.where == "cpu" and memory.fits:
            how = "this model's operations, each timed just now"
            return _UpdateTime(self._time_operations(model, memory), how)

        share = _ASSUMED_UTILISATION[family_of(model.config).is_encoder_decoder]
        factor = _RECOMPUTE_FACTOR if memory.recompute else 1.0
        seconds = flops * factor / (work.useful_share * share * peak)
        how = f"{share:.0%} of the peak during computation, a guess until a run is measured"
        return _UpdateTime(seconds, how)

    def _time_operations(self, model: PreTrainedModel, memory: Memory) -> float:
        """Time an update's micro-batches and its optimizer step, in seconds."""
        rows = memory.micro_batch_rows
        examples = self.work.row.examples
        with outlining():
            update = self._outline(
                model, rows, examples, recompute=memory.recompute, operations=True
            )
        # A CPU computes a row's examples one by one, without padding.
        micro_batches = self.work.update_rows / rows * self.work.useful_share
        return micro_batches * update.micro_batch.seconds() + update.update.seconds()

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
        """Estimate the disk space of a run. Its prepared data takes `store` bytes."""
        config = self.config
        train = config.train
        # Trained weights have as many bytes as their gradients: both are float32.
        trained = memory.update.gradients
        checkpoint = trained + memory.update.optimizer
        # A new checkpoint is complete before the oldest of its kind is removed.
        retained = checkpoint * (train.keep_last + 1)
        if train.keep_best:
            retained += trained * (train.keep_best + 1)
        # A finished adapter is saved without its base model.
        finished = trained
        if config.adapter is None:
            finished = 4 * parameter_counts(model).total
        totals = self._totals(update_seconds)
        saves = count_events(train.stop_after, totals, train.save_every)
        uploaded = 0
        if config.checkpoint.upload is not None or "://" in config.run_dir:
            uploaded = saves * checkpoint + finished
        return Disk(
            checkpoint=checkpoint,
            kept=retained,
            model=finished,
            store=store,
            saves=saves,
            uploaded=uploaded,
        )


def _overhead(tensors: int, where: Where) -> dict[str, int]:
    """Return the bytes that the allocator and libraries take in addition to the tensors."""
    allocated = round(tensors / _TENSOR_SHARE[where])
    overhead = {"the allocator's share": allocated - tensors}
    if where == "cpu":
        resident = int(psutil.Process().memory_info().rss)
        overhead["Python and its libraries"] = resident + _LIBRARY_BYTES
    return overhead


def _measured_rate(path: Path, model: PreTrainedModel, ranks: int) -> float | None:
    """Return the median tokens per second, without padding, in a run's metrics.

    Return None if the run has another model or number of ranks, or too few updates.
    """
    if not path.is_file():
        return None
    history = read_history(path)
    rates = history.curves["tokens_per_second"].values()
    if not rates or history.progress.step < _MIN_UPDATES:
        return None
    total = (history.start.get("parameters") or {}).get("total")
    is_same_model = total == parameter_counts(model).total
    if not is_same_model or history.start.get("ranks", 1) != ranks:
        return None
    # Skip the first updates, which load kernels. The median ignores pauses.
    return statistics.median(rates[len(rates) // 5 :])


def even_rows(update_rows: int, max_rows: int) -> int:
    """Return the rows per micro-batch that divide an update most evenly, at most `max_rows`.

    >>> even_rows(30, 16), even_rows(30, 40)
    (15, 30)
    """
    max_rows = max(1, min(max_rows, update_rows))
    micro_batches = -(-update_rows // max_rows)
    return -(-update_rows // micro_batches)


def largest_rows(
    bytes_if_fitting: Callable[[int], int | None],
    *,
    update_rows: int,
    available_bytes: Callable[[], float],
) -> int:
    """Find the largest micro-batch that fits, from the bytes of one and of two rows.

    Args:
        bytes_if_fitting: Returns the bytes of a number of rows, or None if they do not fit.
        update_rows: Number of rows per update.
        available_bytes: Returns the available bytes. It is called after two rows were measured.

    Returns:
        A number of rows. It is at least 1, even if one row does not fit.
    """
    one_row = bytes_if_fitting(1)
    two_rows = bytes_if_fitting(2) if update_rows > 1 else None
    if one_row is None or two_rows is None:
        return 1
    bytes_per_row = max(1, two_rows - one_row)
    more_rows = int((available_bytes() - one_row) // bytes_per_row)
    rows = even_rows(update_rows, max(2, 1 + more_rows))
    # Two rows fit. Reduce a larger estimate until it also fits.
    while rows > 2 and bytes_if_fitting(rows) is None:
        rows = even_rows(update_rows, max(2, int(0.85 * rows)))
    return rows


def _text_bytes(config: RunConfig, model: PreTrainedModel, row: OutlinedRows) -> int:
    """Return the bytes of the float32 KV cache for the final evaluation's batch of texts."""
    layers, heads, size = cache_shape(model)
    # An encoder-decoder has cross-attention to the prompt. A decoder caches the prompt itself.
    tokens = row.source + row.target
    bytes_per_token = 2 * 4 * layers * heads * size  # keys and values, each in float32
    return bytes_per_token * tokens * config.evaluation.generate


def _weights_by_part(model: PreTrainedModel, total: int) -> dict[str, int]:
    """Split the weights' bytes into quantised matrices, their constants, the adapter and the rest.

    `total` is the bytes of all weights.
    """
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
    """Return the bytes of host memory needed to load the model, in float32."""
    if config.adapter is None or config.adapter.kind == "dora":
        return 4 * parameter_counts(model).total

    # With an adapter, frozen matrices are loaded one by one, so only the largest one adds memory.
    layers = frozen_matrices(model).values()
    matrices = [cast("Tensor", layer.weight) for layer in layers]
    sizes = [matrix.numel() for matrix in matrices]
    sizes += [layer.shape.numel() for _, layer in quantised_layers(model)]
    frozen_ids = {id(matrix) for matrix in matrices}
    remaining = sum(p.numel() for p in model.parameters() if id(p) not in frozen_ids)
    return 4 * (remaining + max(sizes))


def _block_input_bytes(model: PreTrainedModel, row: OutlinedRows, rows: int) -> int:
    """Return the bytes of the float32 inputs of all blocks except the largest input."""
    shape = model.config
    if family_of(shape).is_encoder_decoder:
        hidden_size = shape.d_model
        positions = (
            shape.num_layers * row.source
            + shape.num_decoder_layers * row.target
            - max(row.source, row.target)
        )
    else:
        hidden_size = shape.hidden_size
        positions = (shape.num_hidden_layers - 1) * row.target
    return 4 * int(hidden_size) * rows * int(positions)
