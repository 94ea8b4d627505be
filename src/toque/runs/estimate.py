"""Estimate of a run's memory, time and disk space, before its model and data are loaded.

The memory follows from tensor shapes (`outlined_update`) and is accurate to 15 %. The time is
accurate to 25 %. It comes from the run's metrics if the run has at least ten updates. Otherwise, on
a CPU, each of the run's operations is timed. A GPU is assumed to reach a part of the peak that its
manufacturer states.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema import OptimConfig
from toque.models.families import family_of, vocabulary_rows
from toque.models.flops import parameter_counts
from toque.models.forward.loss import logits_bytes
from toque.runs.estimate_parts import Disk, Machine, Memory, Time, Work
from toque.runs.generated_texts import (
    GeneratedTexts,
    GenerationMemory,
    estimate_generation,
)
from toque.runs.history import METRICS, read_history
from toque.runs.memory_parts import (
    block_input_bytes,
    host_bytes,
    overhead_bytes,
    split_weights,
    text_bytes,
)
from toque.runs.outlined_update import (
    OutlinedUpdate,
    UpdateOutliner,
    outline_forward,
    outlining,
)
from toque.runs.time_left import count_events

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


class _UpdateTime(NamedTuple):
    """Seconds for an update, and their origin."""

    seconds: float
    how: str
    """Origin of the seconds, as text."""
    is_measured: bool = False
    """True if the run's own updates were measured."""


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
        work = self.work
        rows = -(-work.update_rows // self.ranks)
        texts = None if work.texts is None else work.texts.of_rank(self.ranks)
        return replace(self, work=replace(work, update_rows=rows, texts=texts))

    def memory(self, model: PreTrainedModel) -> Memory:
        """Estimate the memory of an outlined model. Call this inside `outlining`."""
        texts = self.work.texts
        if texts is not None and texts.prompt_bytes is None:
            return self._with_prompt_bytes(model, texts).memory(model)
        setting = self.config.train.gradient_checkpointing
        recompute = setting is True
        rows = self._choose_rows(model, recompute=recompute)
        memory = self._estimate_rows(model, rows, recompute=recompute)
        if setting == "auto" and not memory.fits and rows == 1:
            rows = self._choose_rows(model, recompute=True)
            memory = self._estimate_rows(model, rows, recompute=True)
        return memory

    def _with_prompt_bytes(
        self, model: PreTrainedModel, texts: GeneratedTexts
    ) -> Estimator:
        """Return the estimator with the memory to read the prompts of generated texts."""
        # On a GPU, only the matmuls of generation are in 16 bits.
        is_on_gpu = self.machine.where == "cuda"
        precision = "float32" if is_on_gpu else self.machine.precision
        rows = texts.prompt_rows(encoder=family_of(model.config).is_encoder_decoder)
        n_bytes = outline_forward(
            model, rows, where=self.machine.where, precision=precision
        )
        texts = replace(texts, prompt_bytes=n_bytes)
        return replace(self, work=replace(self.work, texts=texts))

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
            update_rows=min(
                work.update_rows, work.largest_micro_batch or work.update_rows
            ),
            available_bytes=lambda: available,
        )

    def _estimate_rows(
        self, model: PreTrainedModel, rows: int, *, recompute: bool
    ) -> Memory:
        """Estimate the memory with micro-batches of `rows` rows of the longest examples."""
        update = self._outline(
            model, rows, self.work.worst_examples, recompute=recompute
        )
        generation = self._estimate_generation(model, update)
        parts = self._split_tensors(
            model, update, rows, generation, recompute=recompute
        )
        is_on_gpu = self.machine.where == "cuda"
        return Memory(
            parts=parts,
            beside=overhead_bytes(sum(parts.values()), self.machine.where),
            room=self.machine.memory_bytes,
            micro_batch_rows=rows,
            recompute=recompute,
            update=update,
            host=host_bytes(self.config, model) if is_on_gpu else None,
            generation=generation,
        )

    def _estimate_generation(
        self, model: PreTrainedModel, update: OutlinedUpdate
    ) -> GenerationMemory | None:
        """Estimate the memory to generate the texts of an update."""
        if self.work.texts is None:
            return None
        retained = update.weights + update.copies + update.gradients + update.optimizer
        return estimate_generation(
            model,
            self.work.texts,
            where=self.machine.where,
            precision=self.machine.precision,
            free=self.machine.memory_bytes - retained - self._reference_bytes(update),
        )

    def _reference_bytes(self, update: OutlinedUpdate) -> int:
        """Return the bytes of the copy of the start model for `objective.kl`."""
        return update.weights + update.copies if self.config.objective.kl else 0

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
        objective = self.config.objective
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
            needs_nats=objective.kind == "dpo" or objective.kl > 0,
            has_reference=objective.kl > 0,
        )
        row = self.work.row
        return outliner.outline(model, replace(row, rows=rows, examples=examples))

    def _split_tensors(
        self,
        model: PreTrainedModel,
        update: OutlinedUpdate,
        rows: int,
        generation: GenerationMemory | None,
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
            offloaded = block_input_bytes(model, row, rows)
            computing = max(0, computing - offloaded)

        parts = split_weights(model, update.weights) | {
            "16-bit copies of weights": update.copies,
            "copy of the start model": self._reference_bytes(update),
            "gradients": update.gradients,
            "optimizer states": update.optimizer,
            "logits": logits,
            "activations and their gradients": computing,
        }

        # Other phases have no activations. Each adds only the bytes that exceed the peak so far.
        phases = self._later_phases(model, update)
        if generation is not None:
            phases = {"generating texts": generation.total} | phases
        peak = update.computing
        for name, n_bytes in phases.items():
            parts[name] = max(0, n_bytes - peak)
            peak = max(peak, n_bytes)
        return parts

    def _later_phases(
        self, model: PreTrainedModel, update: OutlinedUpdate
    ) -> dict[str, int]:
        """Return the temporary bytes of each phase after the backward pass, in their order."""
        phases = {"the optimizer's step": update.step}
        if self.machine.where == "cpu":
            texts = text_bytes(self.config, model, self.work.row)
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
        """Estimate the time of an update and of the run, without the generation of texts.

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
        forward_seconds = seconds / work.tokens_per_update / 3  # per token
        held_out = work.held_out_tokens * forward_seconds
        reference = None
        if work.reference_tokens is not None:
            reference = work.reference_tokens * forward_seconds
        run_seconds = work.seconds
        steps = work.totals.get("steps")
        if run_seconds is None and steps is not None:
            train = self.config.train
            totals = self._totals(seconds)
            evaluations = count_events(train.stop_after, totals, train.evaluate_every)
            run_seconds = steps * seconds + evaluations * held_out + (reference or 0.0)
        return Time(
            update_seconds=seconds,
            flops_per_update=flops,
            peak=self.machine.peak,
            how=update.how,
            evaluation_seconds=held_out,
            run_seconds=run_seconds,
            measured=update.is_measured,
            reference_seconds=reference,
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
        outlined = memory.update
        factor *= outlined.flops / (outlined.flops - outlined.extra_flops)
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
            reference=4 * self.work.reference_rows,
        )


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
