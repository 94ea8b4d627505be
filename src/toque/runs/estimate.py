"""Estimate of a run: bytes and seconds, before anything of it is loaded.

Bytes follow from shapes (`outlined_update`) and hold within 15 %. Seconds are those of the run's
own updates once it has ten; before, on this machine's CPU, the sum of its operations, each timed
once, and on a card a share of the peak that its maker states: within 25 %.
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
from toque.runs.outlined_update import OutlinedUpdate, Peak, outline_update, outlining
from toque.runs.time_left import times_in

_OF_TENSORS: Final = {"cpu": 0.65, "cuda": 0.9}
"""Share that tensors have of the memory which their allocator takes. glibc's heap keeps what is
freed for sizes that come again (`models.glibc_malloc`); in-use over taken was 0.59 to 0.75 in three
trainings (lab/notes.md), and one round share for all is what 15 % allow."""
_LIBRARIES: Final = 320 << 20
"""Bytes that libraries take once they compute: oneDNN's compiled products, export. A round guess
by the demo's shape, whose tensors weigh next to nothing."""
_ASSUMED: Final = {True: 0.30, False: 0.40}
"""Share of a card's peak, by whether the model is an encoder-decoder. Guesses, until a run of the
model has measured its own: published T5 trainings reach 12 to 38 %, decoders 33 to 57 %."""
_RECOMPUTED: Final = 4 / 3
"""Time of an update that computes forward twice: backward costs two forwards."""
_ENOUGH_UPDATES: Final = 10

Optimizers = Callable[[nn.Module, OptimConfig], tuple[torch.optim.Optimizer | None, int]]
"""Optimizer of a model by its name, None where its step reads numbers; and its state's bytes."""


@dataclass(frozen=True)
class Work:
    """The work of a run: its rows, updates and tokens."""

    row: OutlinedRows  # one row, filled with as many examples as rows have on average
    worst_examples: int  # examples in a row of the longest, whose attention takes most memory
    update_rows: int
    usual_rows: int  # that a CPU computes at once where nothing is set
    tokens_per_update: float  # no padding, both sides
    flops_per_token: float
    products: Mapping[tuple[int, int], float]
    """FLOPs of a token in products with weights, by their (in, out)."""
    totals: Mapping[str, float]
    """Steps, epochs, examples, tokens of the whole run; without those that are not known."""
    seconds: float | None  # where it ends by the clock
    held_out_tokens: float
    how: str  # origin of the lengths

    @property
    def useful_share(self) -> float:
        """Tokens that are no padding, of those computed where rows are computed whole."""
        return min(1.0, self.tokens_per_update / (self.update_rows * self.row.tokens))


@dataclass(frozen=True)
class Machine:
    """Machine that a run is estimated for: a card of the table, or the one this runs on."""

    name: str
    where: Where
    precision: str
    memory_bytes: int  # that a process may have
    card: Card | None  # None for this machine
    peak: Peak  # of the model's products


@dataclass(frozen=True)
class Memory:
    """Bytes at the fullest moment of training; parts and what is beside them add up to `total`."""

    parts: Mapping[str, int]  # of tensors
    beside: Mapping[str, int]
    """Bytes that an allocator holds on top of the tensors (gaps, blocks kept for sizes that come
    again), a share of them; on a CPU also those of libraries."""
    room: int
    micro_batch_rows: int
    recompute: bool
    update: OutlinedUpdate  # bytes and work of one micro-batch of so many rows
    host: int | None = None
    """Bytes of the machine's own memory while a card's model is read; None on a CPU."""

    @property
    def total(self) -> int:
        """All together."""
        return self.tensors + sum(self.beside.values())

    @property
    def tensors(self) -> int:
        """All parts together: the bytes that the program itself asks for."""
        return sum(self.parts.values())

    @property
    def fits(self) -> bool:
        """True if the machine has so much."""
        return self.total <= self.room


@dataclass(frozen=True)
class Time:
    """Seconds of an update and of the run, and what they were computed from."""

    update_seconds: float
    flops_per_update: float  # FLOPs that the model needs, padding and recomputing not counted
    peak: Peak
    how: str
    evaluation_seconds: float  # of one held-out loss
    run_seconds: float | None
    """Seconds of all updates and held-out losses; None where their number is not known."""
    measured: bool = False  # by updates of the run itself, their exchange among them

    @property
    def utilisation(self) -> float | None:
        """Useful FLOPs as a share of the peak, in [0, 1]; None where the peak is too low for it."""
        share = self.flops_per_update / (self.update_seconds * self.peak.flops_per_second)
        return min(1.0, share) if share < 1.0 + 1e-9 else None


@dataclass(frozen=True)
class Disk:
    """Bytes on the disk, and those that go to a bucket over the whole run."""

    checkpoint: int
    kept: int
    """Bytes of the checkpoints kept, and of one of each kind that is being written besides."""
    model: int  # the finished one
    store: int  # the prepared data, where it exists
    saves: int
    uploaded: int

    @property
    def total(self) -> int:
        """All that lies on the disk at once."""
        return self.kept + self.model + self.store


@dataclass(frozen=True)
class Estimator:
    """Bytes and seconds of a run's model and data on a machine."""

    config: RunConfig
    work: Work
    machine: Machine
    optimizers: Optimizers
    ranks: int = 1  # that share an update

    def of_rank(self) -> Estimator:
        """The same for the rows of the rank that has most of them."""
        rows = -(-self.work.update_rows // self.ranks)
        return replace(self, work=replace(self.work, update_rows=rows))

    def memory(self, model: PreTrainedModel) -> Memory:
        """Memory by part of an outlined model; inside `outlining`."""
        asked = self.config.train.gradient_checkpointing
        found = self._at_usual_rows(model, recompute=asked is True)
        if asked == "auto" and not found.fits and found.micro_batch_rows == 1:
            found = self._at_usual_rows(model, recompute=True)
        return found

    def _at_usual_rows(self, model: PreTrainedModel, *, recompute: bool) -> Memory:
        """Memory at the micro-batch that is set or, for auto, that a training would choose."""
        wanted, work = self.config.train.micro_batch_rows, self.work
        if isinstance(wanted, int):
            rows = min(wanted, work.update_rows)
        elif self.machine.where == "cpu":
            rows = evenly(work.update_rows, work.usual_rows)
        else:
            free = self.machine.memory_bytes

            def fits(n: int) -> int | None:
                total = self._memory_at(model, n, recompute=recompute).total
                return total if total <= free else None

            rows = largest_rows(fits, update_rows=work.update_rows, room=lambda: free)
        return self._memory_at(model, rows, recompute=recompute)

    def _memory_at(self, model: PreTrainedModel, rows: int, *, recompute: bool) -> Memory:
        update = self._outlined(model, rows, self.work.worst_examples, recompute=recompute)
        parts = self._parts(model, update, rows, recompute=recompute)
        return Memory(
            parts=parts,
            beside=_beside(sum(parts.values()), self.machine.where),
            room=self.machine.memory_bytes,
            micro_batch_rows=rows,
            recompute=recompute,
            update=update,
            host=_host_bytes(self.config, model) if self.machine.where == "cuda" else None,
        )

    def _outlined(
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
            # Sums over ranks are kept from update to update.
            accumulates=self.ranks > 1 or rows < self.work.update_rows,
            recompute=recompute,
            smoothing=self.config.optim.label_smoothing,
            masked=self.config.train.optimisations.attention == "dense",
            operations=operations,
        )

    def _parts(
        self, model: PreTrainedModel, update: OutlinedUpdate, rows: int, *, recompute: bool
    ) -> dict[str, int]:
        config, where = self.config, self.machine.where
        chunk = logits_bytes(vocabulary_rows(model), where, positions=rows * self.work.row.target)
        logits = min(chunk, update.computing)
        computing = update.computing - logits
        if config.train.activation_offload and recompute:
            computing = max(0, computing - _inputs_of_blocks(model, self.work.row, rows))
        parts = _weights_by_part(model, update.weights) | {
            "16-bit copies of weights": update.copies,
            "gradients": update.gradients,
            "optimizer states": update.optimizer,
            "logits": logits,
            "activations and their gradients": computing,
        }
        # Activations are not there while the optimizer steps, texts are written or a save begins.
        parts["the optimizer's step"] = max(0, update.step - update.computing)
        if where == "cpu":
            most = max(update.step, update.computing)
            texts = _texts_bytes(config, model, self.work.row)
            parts["evaluation: keys and values"] = max(0, texts - most)
            saved = update.gradients + update.optimizer
            saved += update.gradients if config.train.keep_best else 0
            parts["a save's copies"] = max(0, saved - max(most, texts))
        return parts

    def time(
        self, model: PreTrainedModel, memory: Memory, *, utilisation: float | None = None
    ) -> Time:
        """Seconds of an update and of the run, not inside `outlining`, for it may measure.

        `utilisation` is a share of the peak to assume, instead of what is known.
        """
        work, peak, measured = self.work, self.machine.peak, False
        flops = work.flops_per_token * work.tokens_per_update
        here, metrics = self.machine.card is None, Path(self.config.run_dir) / METRICS
        if utilisation is not None:
            seconds = flops / (utilisation * peak.flops_per_second)
            how = f"{utilisation:.0%} of the peak, as asked for"
        elif here and (rate := _measured_rate(metrics, model, self.ranks)) is not None:
            seconds, measured = work.tokens_per_update / rate, True
            how = f"as {metrics} has it: {rate:,.0f} tokens a second"
        elif self.machine.where == "cpu" and memory.fits:
            seconds = self._of_operations(model, memory)
            how = "this model's operations, each timed just now"
        else:
            assumed = _ASSUMED[family_of(model.config).is_encoder_decoder]
            more = _RECOMPUTED if memory.recompute else 1.0
            seconds = flops * more / (work.useful_share * assumed * peak.flops_per_second)
            how = f"{assumed:.0%} of the peak while it computes: a guess until a run has measured"
        held_out = work.held_out_tokens / work.tokens_per_update * seconds / 3  # forward alone
        train, steps, whole = self.config.train, work.totals.get("steps"), work.seconds
        if whole is None and steps is not None:
            evaluations = times_in(train.stop_after, self._expected(seconds), train.evaluate_every)
            whole = steps * seconds + evaluations * held_out
        return Time(seconds, flops, peak, how, held_out, whole, measured)

    def _of_operations(self, model: PreTrainedModel, memory: Memory) -> float:
        """Seconds of an update, its micro-batches and its optimizer's step."""
        rows, examples = memory.micro_batch_rows, self.work.row.examples
        with outlining():
            update = self._outlined(
                model, rows, examples, recompute=memory.recompute, operations=True
            )
        # Rows on a CPU have no padding: their examples are computed one after the other.
        pieces = self.work.update_rows / rows * self.work.useful_share
        return pieces * update.micro_batch.seconds() + update.update.seconds()

    def _expected(self, update_seconds: float) -> dict[str, float]:
        """The run's totals by unit, minutes included, where an update takes so long."""
        seconds, totals = self.work.seconds, dict(self.work.totals)
        if seconds is None and "steps" in totals:
            seconds = totals["steps"] * update_seconds
        if seconds is None:
            return totals
        return {"steps": seconds / update_seconds, "minutes": seconds / 60} | totals

    def disk(
        self, model: PreTrainedModel, memory: Memory, store: int, *, update_seconds: float
    ) -> Disk:
        """Bytes on the disk of an outlined model's run, whose prepared data has `store` bytes."""
        config, train, trained = self.config, self.config.train, memory.update.gradients
        # What is trained has as many bytes as its gradients, float32 both.
        saved = trained + memory.update.optimizer
        # Of each kind of checkpoint one is written before the oldest goes.
        best = trained * (train.keep_best + 1) if train.keep_best else 0
        finished = trained if config.adapter is not None else 4 * parameter_counts(model).total
        saves = times_in(train.stop_after, self._expected(update_seconds), train.save_every)
        remote = config.checkpoint.upload is not None or "://" in config.run_dir
        return Disk(
            checkpoint=saved,
            kept=saved * (train.keep_last + 1) + best,
            model=finished,
            store=store,
            saves=saves,
            uploaded=saves * saved + finished if remote else 0,
        )


def _beside(tensors: int, where: Where) -> dict[str, int]:
    """Bytes that are held on top of so many bytes of tensors."""
    found = {"the allocator's share": round(tensors / _OF_TENSORS[where]) - tensors}
    if where == "cpu":
        own = int(psutil.Process().memory_info().rss)
        found["Python and its libraries"] = own + _LIBRARIES
    return found


def _measured_rate(path: Path, model: PreTrainedModel, ranks: int) -> float | None:
    """Useful tokens a second that a run of this model by so many ranks measured in ten updates."""
    if not path.is_file():
        return None
    history = history_of(path)
    rates = history.curves["tokens_per_second"].values()
    total = (history.start.get("parameters") or {}).get("total")
    like = total == parameter_counts(model).total and history.start.get("ranks", 1) == ranks
    if not like or not rates or history.progress.step < _ENOUGH_UPDATES:
        return None
    # The first ones load and choose kernels. The median, so that a pause does not count.
    return statistics.median(rates[len(rates) // 5 :])


def evenly(update_rows: int, at_most: int) -> int:
    """Rows of a micro-batch, at most `at_most`, that divide an update most evenly.

    >>> evenly(30, 16), evenly(30, 40)
    (15, 30)
    """
    at_most = max(1, min(at_most, update_rows))
    pieces = -(-update_rows // at_most)
    return -(-update_rows // pieces)


def largest_rows(
    fits: Callable[[int], int | None], *, update_rows: int, room: Callable[[], float]
) -> int:
    """The largest micro-batch that fits, by what one row and two rows take; at least 1 row.

    `fits` tells the bytes that so many rows take, None if they do not fit; `room` those that may be
    taken, asked once two rows were tried.
    """
    one = fits(1)
    two = fits(2) if update_rows > 1 else None
    if one is None or two is None:
        return 1
    rows = evenly(update_rows, max(2, 1 + int((room() - one) // max(1, two - one))))
    while rows > 2 and fits(rows) is None:
        rows = evenly(update_rows, max(2, int(0.85 * rows)))
    return rows


def _texts_bytes(config: RunConfig, model: PreTrainedModel, row: OutlinedRows) -> int:
    """Keys and values of the texts that the final evaluation writes side by side, in float32."""
    layers, heads, size = cache_shape(model)
    tokens = row.source + row.target  # its own, and in an encoder-decoder the prompt's across
    return 2 * 4 * layers * heads * size * tokens * config.evaluation.generate


def _weights_by_part(model: PreTrainedModel, total: int) -> dict[str, int]:
    """Bytes of the weights: quantised matrices and their constants, the adapter, the rest."""
    held = [layer.held_bytes() for _, layer in quantised_layers(model)]
    parts = {
        "quantised matrices": sum(sizes["codes"] for sizes in held),
        "constants of their blocks": sum(sizes["constants"] for sizes in held),
    }
    if is_adapted(model):
        trained = (p for p in model.parameters() if p.requires_grad)
        parts["adapter"] = sum(p.numel() * p.element_size() for p in trained)
    return {"weights": total - sum(parts.values())} | parts


def _host_bytes(config: RunConfig, model: PreTrainedModel) -> int:
    """Bytes of the machine's own memory while the model is read: all of it in float32."""
    # Beside an adapter the matrices are read one by one, so it is what is none, and the largest.
    if config.adapter is None or config.adapter.kind == "dora":
        return 4 * parameter_counts(model).total
    matrices = [cast("Tensor", layer.weight) for layer in frozen_matrices(model).values()]
    sizes = [m.numel() for m in matrices] + [q.shape.numel() for _, q in quantised_layers(model)]
    read = {id(m) for m in matrices}
    kept = sum(p.numel() for p in model.parameters() if id(p) not in read)
    return 4 * (kept + max(sizes))


def _inputs_of_blocks(model: PreTrainedModel, row: OutlinedRows, rows: int) -> int:
    """Bytes of the float32 hidden states that all blocks but one start from."""
    shape = model.config
    if family_of(shape).is_encoder_decoder:
        sides = shape.num_layers * row.source + shape.num_decoder_layers * row.target
        return 4 * int(shape.d_model) * rows * (int(sides) - max(row.source, row.target))
    return 4 * int(shape.hidden_size) * rows * (int(shape.num_hidden_layers) - 1) * row.target
