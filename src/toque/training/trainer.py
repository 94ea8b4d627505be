"""Training loop: `step` is one update, with gradient accumulation; `fit` is the order around it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.data.loader.batch_stream import BatchStream, Prefetch, Step
from toque.errors import DataError, Interrupted, NonFiniteError
from toque.hardware.memory import free_bytes, is_out_of_memory, release_memory
from toque.models.forward.random_draws import refuse_unkeyed_draws
from toque.runs.history import FINISHED
from toque.training.callbacks import (
    LOSS,
    Best,
    Callback,
    Callbacks,
    Goal,
    Requests,
    RunEnd,
    RunStart,
    State,
    StepInfo,
)
from toque.training.checkpoint import resume
from toque.training.checkpoint.saved import Checkpoint
from toque.training.checkpoint.saver import CheckpointLayout, Saves
from toque.training.checkpoint.store import MOVED, CheckpointStore
from toque.training.checkpoint.tensor_files import bytes_of
from toque.training.distributed.sharing import LossFn, Sharing
from toque.training.micro_batch import OomFallback
from toque.training.nan_tracer import NonFiniteOrigin, find_nonfinite_origin
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.phases import PartClock
from toque.training.runtime import Runtime
from toque.training.stopping import INTERRUPTED, TAKEN_OVER
from toque.training.update_guard import PendingUpdate, UpdateGuard
from toque.units import Cursor, Duration, Progress


@dataclass(frozen=True)
class Schedule:
    """Durations; "%" is a share of `stop_after`; None means never, except for a save at the end."""

    stop_after: Duration
    evaluate_every: Duration | None = None
    save_every: Duration | None = None
    check_every: Duration = Duration(10, "steps")
    """Time between waits for CUDA to see whether losses are finite; on a CPU it is every step."""

    def due(self, every: Duration | None, before: Progress, after: Progress) -> bool:
        """True if a multiple of `every`, one of these, lies after `before` and up to `after`."""
        return every is not None and every.crossed(before, after, self.stop_after)


@dataclass
class Trainer:
    """Updates a model until `schedule.stop_after`. Everything it holds arrives built."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: BatchStream
    loss_fn: LossFn
    lr_at: Callable[[Progress], float]
    evaluator: Callable[[], dict[str, float]]
    checkpoints: CheckpointStore
    callbacks: Callbacks
    runtime: Runtime
    schedule: Schedule
    oom_fallback: OomFallback
    guard: UpdateGuard
    max_grad_norm: float | None
    seed: int
    sharing: Sharing | None = None  # how the ranks hold the model; None in one process
    noise: GradientNoise | None = None
    check_reached: Callable[[nn.Module], None] | None = None  # raises at the first gradients
    base_sha256: str | None = None  # of frozen weights, which checkpoints leave out
    begun_from: str | None = None  # hash of the checkpoint's manifest whose weights it began with
    prefetch: Callable[[BatchStream, Cursor], Prefetch] = Prefetch  # ahead of the loop
    background_saves: bool = False  # the last of a session is waited for all the same
    layout: CheckpointLayout = "whole"  # of checkpoints
    progress: Progress = Progress()
    cursor: Cursor = Cursor()
    goal: Goal = LOSS
    best: Best | None = None
    stop_reason: str | None = None  # why a callback asked to end before `stop_after`
    owes_evaluation: bool = False  # one that was due or begun; continuing begins with it
    notes: list[str] = field(default_factory=list)
    count_seconds: Callable[[float], float] = float  # what `Progress` counts of an update's
    clock: PartClock = field(default_factory=PartClock)

    def __post_init__(self) -> None:
        self._ranks = self.runtime.ranks
        assert self.sharing is not None or not self._ranks.is_distributed
        self._sharing = self.sharing or Sharing(self.model)
        self._draws_checked = False
        self._stateful: dict[str, resume.Stateful] = {
            "callbacks": self.callbacks, "runtime": self.runtime, "outliers": self.guard
        }  # fmt: skip
        self._saves = Saves(
            self.checkpoints, self.callbacks, self._ranks, self.layout, self.background_saves
        )

    def fit(self) -> RunEnd:
        """Train until the end, or until a callback asks to stop; the end is evaluated and saved.

        Raises:
            NonFiniteError: a loss or gradient is NaN or infinite; nothing of it was applied.
            CheckpointError: another process holds the run folder, or the final save failed.
        """
        self._session_began, self.stop_reason = time.perf_counter(), None
        self.clock.restart()
        self._ranks.assert_in_sync("at the begin", self._sharing, self.progress, self.cursor)
        with ExitStack() as stack:
            left = stack.enter_context(self.checkpoints.claimed()) if self._ranks.is_main else []
            wants = stack.enter_context(self.callbacks.around(self._start(left), self._end))
            stack.enter_context(self._saves.session(lambda: self.progress))
            wants, owed = self._ranks.any_rank(wants), self.owes_evaluation
            self._apply_requests(wants)
            self.clock.lap("starting")
            if owed or wants.evaluate:
                self.owes_evaluation = False
                wants |= self._evaluate()
            if wants.save or (owed and self.finished):
                self._save(final=self.finished)
            if not self.finished:
                self._train()
        return self._end(None)

    def _train(self) -> None:
        cuda, schedule = self.runtime.device.type == "cuda", self.schedule
        with self.prefetch(self.batches, self.cursor) as prefetch:
            while not self.finished:
                started = time.perf_counter()
                self.callbacks.tell(Callback.on_before_step, self.progress)
                self.clock.lap("observers", slowed=self.callbacks.slow)
                planned, batch = prefetch.next()
                self.clock.lap("data_wait")
                info = self.step(planned, batch, started=started)
                self.progress, self.cursor = info.progress, planned.cursor
                looked = schedule.due(schedule.check_every, info.before, self.progress)
                if not cuda or self.finished or looked:
                    self._check_updates()
                    if self.guard.should_roll_back:
                        self._roll_back()
                # Observers may ask; only the loop acts, and on all ranks alike.
                wants = self._ranks.any_rank(self.callbacks.on_step(info) | self.checkpoints.asks())
                self._apply_requests(wants)
                self._evaluate_and_save(info.before, wants)
                self._saves.tell(self.progress)
        self.clock.lap("data_wait")  # for the batch that is being made and nobody needs

    def step(
        self, planned: Step, batch: Batch | None = None, *, started: float | None = None
    ) -> StepInfo:
        """One update; the same update for every micro-batch size and world size.

        `batch` is that of `planned`, perhaps on the device already; `started` is `perf_counter`
        when the update began, before waiting for its data.
        """
        started = time.perf_counter() if started is None else started
        n_targets, own = planned.n_targets, batch or planned.batch
        with self._ranks.computing():
            loss_sum = self.oom_fallback.run(
                self.progress, self.forward_backward, self._sharing, own, n_targets
            )
        self.clock.lap("forward_backward")
        loss_sum = self._ranks.total(loss_sum)
        self.clock.lap("ranks")
        if self.check_reached is not None:
            self.check_reached(self.model)
            self.check_reached = None
        loss = loss_sum / n_targets
        lr = self.lr_at(self.progress)  # no scheduler object to restore
        grad_norm = self.runtime.clip_gradients(self.optimizer, self.max_grad_norm)
        if self.noise is not None:
            self.noise.add(self.model, self.progress.step)
        apply = self.guard.should_apply(self.progress.step, lr, loss, grad_norm, planned.batch)
        self.clock.lap("clip")
        self.runtime.optimizer_step(self.optimizer, lr=lr, only_if=apply)
        self.clock.lap("optimizer")
        # Rates and lengths may be in minutes, which are rank 0's, or ranks would part ways.
        spent = (time.perf_counter() - started) if self._ranks.is_main else 0.0
        sums = [spent, self.count_seconds(spent), planned.n_computed]
        seconds, counted, n_computed = self._ranks.all_reduce_sum(sums)
        return StepInfo(
            before=self.progress, progress=planned.after(self.progress, counted),
            loss=loss, grad_norm=grad_norm, lr=lr, seconds=seconds, parts=self.clock.taken(),
            n_targets=n_targets, n_tokens=planned.n_tokens, n_examples=planned.n_examples,
            n_computed=int(n_computed), stage=planned.stage, slowed=self.callbacks.slow,
        )  # fmt: skip

    def forward_backward(self, micro_batches: Sequence[Batch], n_targets: int) -> Tensor:
        """Gradient accumulation: add up the gradients of an update; [] its loss in nats, summed.

        `n_targets` are of all ranks, whose gradients the last backward sums: their mean at once. A
        DataError where no token has loss.
        """
        step = self.progress.step
        if n_targets < 1:
            raise DataError(f"Step {step} has no target token: leave such examples out.")
        self.optimizer.zero_grad(set_to_none=True)  # an attempt that ran out of memory left some
        self.runtime.seed(self.seed, step)
        self.model.train()
        loss_sum = torch.zeros((), device=self.runtime.device)
        for done, rows in enumerate(micro_batches, start=1):
            here, last = rows.to(self.runtime.device), done == len(micro_batches)
            draws: AbstractContextManager[None] = nullcontext()
            if not self._draws_checked:
                draws = refuse_unkeyed_draws(self.model, here.labels.device)
            with self.runtime.autocast(), draws:
                loss = self._sharing.loss(self.loss_fn, here, last=last)  # [] nats, summed
            self._draws_checked = True
            self.runtime.backward(loss / n_targets)
            loss_sum += loss.detach()
            self.callbacks.tell(Callback.on_micro_batch, self.progress, done, len(micro_batches))
        return loss_sum

    def _check_updates(self) -> None:
        """Judge the updates since the last check; waits for the device."""
        bad = self.guard.check(self.progress)
        if bad is not None:
            origin, traced = self._traced(bad)
            raise self.guard.error(bad, origin, traced=traced)

    def _traced(self, bad: PendingUpdate) -> tuple[NonFiniteOrigin | None, bool]:
        """Where an update stopped being finite, and whether memory had room to find out."""
        needed = bytes_of(dict(self.model.named_parameters())) if self._sharing.is_sharded else 0
        # A rank that ran out while all gather would leave the others waiting.
        if not all(self._ranks.all_gather(needed <= free_bytes(self.runtime.device))):
            return None, False
        with self._sharing.whole() as model:
            # As it was computed, or row by row: it is not compiled, which takes more memory.
            for rows in sorted({self.oom_fallback.rows_at(bad.step), 1}, reverse=True):
                self.runtime.seed(self.seed, bad.step)
                micro_batches = bad.batch.split(rows)
                try:
                    origin = find_nonfinite_origin(model, self.loss_fn, micro_batches, self.runtime)
                except RuntimeError as error:  # torch.OutOfMemoryError is one
                    if not is_out_of_memory(error):
                        raise
                else:
                    return origin, True
                model.zero_grad(set_to_none=True)
                release_memory()
        return None, False

    def _sound(self) -> Checkpoint | None:
        """The checkpoint to go back to: the newest whose weights are not those of now."""
        store, since = self.checkpoints, self.progress.step - self.guard.in_a_row
        return store.newest_valid(before=since) or store.newest_valid()

    def _roll_back(self) -> None:
        self._saves.settle(self.progress)
        found = resume.broadcast_checkpoint(self._sound, self._ranks)
        message = self.guard.roll_back(self.progress.step, found.step if found else None)
        assert found is not None
        resume.load_tensors(found, self.model, self.optimizer)
        self.runtime.load_state_dict(found.state()["runtime"])
        self.callbacks.on_warning(self.progress, message)
        self._save(final=False)  # a killed run would otherwise come by the same examples again

    @property
    def finished(self) -> bool:
        """True if there is nothing more to do in this session."""
        return self.stop_reason is not None or self.schedule.stop_after.reached(self.progress)

    @property
    def is_over(self) -> bool:
        """True if no session of this run has anything left to train or evaluate."""
        ended = self.schedule.stop_after.reached(self.progress)
        ended = ended or any(callback.is_over for callback in self.callbacks)
        return ended and not self.owes_evaluation

    def _apply_requests(self, wants: Requests) -> None:
        if wants.stop and self.stop_reason is None:
            self.stop_reason = wants.reason or "stopped"

    def _evaluate_and_save(self, before: Progress, wants: Requests) -> None:
        schedule, at = self.schedule, self.progress
        scheduled = schedule.due(schedule.evaluate_every, before, at)
        scheduled = scheduled or schedule.stop_after.reached(at)  # the end always is evaluated
        if self.stop_reason in (INTERRUPTED, MOVED, TAKEN_OVER):
            # The machine may be taken away: save now. Or another evaluates what was taken over.
            self.owes_evaluation = scheduled
        elif scheduled or wants.evaluate or self.finished:
            wants |= self._evaluate()
        if wants.save or self.finished or schedule.due(schedule.save_every, before, at):
            self._save(final=self.finished)

    def _evaluate(self) -> Requests:
        self._check_updates()
        self.callbacks.tell(Callback.on_before_evaluate, self.progress)
        self.clock.lap("observers")
        try:
            metrics = self.evaluator()
        except Interrupted:  # nothing of it is kept, and continuing begins with it
            self.stop_reason, self.owes_evaluation = INTERRUPTED, True
            return Requests(stop=True, save=True)
        self.clock.lap("evaluation")
        self.best = self.goal.best(self.best, self.progress.step, metrics)
        self._saves.save_best(self.progress, self.model, metrics)
        self.clock.lap("saving")
        wants = self._ranks.any_rank(self.callbacks.on_evaluate(self.progress, metrics))
        self.clock.lap("texts")
        self._apply_requests(wants)
        return wants

    def _save(self, *, final: bool) -> None:
        self._check_updates()
        self.clock.lap("observers")
        self._ranks.assert_in_sync("before a save", self._sharing, self.progress, self.cursor)
        layout = self.oom_fallback.for_checkpoint(self._ranks)
        self.callbacks.tell(Callback.on_before_save, self.progress)
        tensors = resume.trainer_tensors(self.model, self.optimizer)
        self._saves.save(self.progress, tensors, self.state_dict() | layout, final=final)
        self.clock.lap("saving")

    def state_dict(self) -> State:
        """The JSON of a checkpoint."""
        at = resume.TrainerState(self.progress, self.cursor, self.best, self.owes_evaluation)
        state = at.to_json(self._stateful, self._ranks, base=self.base_sha256)
        return state | {"begun_from": self.begun_from}

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint` of this run; a CheckpointError where it does not fit."""
        versions = self.checkpoints.identity.versions
        at, notes = resume.TrainerState.load(
            checkpoint, self._stateful, self._ranks, versions=versions, base=self.base_sha256
        )
        at.refuse_other_data(self.batches, where=str(checkpoint.path))
        resume.load_tensors(checkpoint, self.model, self.optimizer)
        self.progress, self.cursor, self.best = at.progress, at.cursor, at.best
        self.owes_evaluation, self.notes = at.owes_evaluation, self.notes + notes
        if not self.checkpoints.measures_as(checkpoint.manifest):
            self.best = None
            self.notes.append(
                f"the settings of evaluation were others until step {self.progress.step}, so the "
                f"{self.goal} is looked for anew from here"
            )
        self.begun_from = checkpoint.state().get("begun_from")

    def _start(self, leftovers: list[str]) -> RunStart:
        removed = [f"removed what a killed save left: {', '.join(leftovers)}"] if leftovers else []
        notes = (*self.runtime.warnings, *self.checkpoints.notes, *self.notes, *removed)
        return RunStart(self.progress, self.schedule.stop_after, notes, self.best)

    def _end(self, error: BaseException | None) -> RunEnd:
        self.clock.lap("saving")  # those in the background were waited for
        reason = self.stop_reason or FINISHED
        if error is not None:
            overflowed = isinstance(error, NonFiniteError)
            reason = "non_finite" if overflowed else type(error).__name__
        return RunEnd(
            reason=reason,
            progress=self.progress, seconds=time.perf_counter() - self._session_began,
            best=self.best, skipped_updates=self.guard.n_skipped, parts=self.clock.taken(),
            saves=self._saves.counts, error=str(error) if error is not None else None,
        )  # fmt: skip
