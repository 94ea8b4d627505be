"""Training loop: `Trainer.step` makes one update. `Trainer.fit` also evaluates and saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.data.loader.batch_stream import BatchStream, Feed, Prefetch, Step
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
from toque.training.checkpoint.saver import CheckpointLayout, CheckpointSaver
from toque.training.checkpoint.store import MOVED, CheckpointStore
from toque.training.checkpoint.tensor_files import bytes_of
from toque.training.distributed.data_parallel import DataParallel, LossFn
from toque.training.micro_batch import OomFallback
from toque.training.nan_tracer import NonFiniteOrigin, find_nonfinite_origin
from toque.training.objectives.measurements import Measurements
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.phases import Part, PartClock
from toque.training.runtime import Runtime
from toque.training.stopping import INTERRUPTED, TAKEN_OVER
from toque.training.update_guard import PendingUpdate, UpdateGuard
from toque.units import Cursor, Duration, Progress


@dataclass(frozen=True)
class Schedule:
    """Length of a run, and the durations between evaluations, saves and checks.

    A duration in "%" is relative to `stop_after`. None means never, but the end of a run is always
    saved.
    """

    stop_after: Duration
    evaluate_every: Duration | None = None
    save_every: Duration | None = None
    check_every: Duration = Duration(10, "steps")
    """Duration between checks for losses that are not finite. Each check waits for CUDA. On a CPU
    every update is checked."""

    def due(self, every: Duration | None, before: Progress, after: Progress) -> bool:
        """True if a multiple of `every` is in the interval (`before`, `after`]."""
        return every is not None and every.crossed(before, after, self.stop_after)


@dataclass
class Trainer:
    """Trainer that updates a model until `schedule.stop_after`."""

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
    # Additional measurements of the loss function.
    measurements: Measurements = field(default_factory=Measurements)
    # How the ranks share the model and an update; None for a single process.
    sharing: DataParallel | None = None
    noise: GradientNoise | None = None
    # Called once with the model, after its first backward pass.
    check_reached: Callable[[nn.Module], None] | None = None
    # SHA-256 of the frozen weights, which checkpoints leave out.
    base_sha256: str | None = None
    # SHA-256 of the manifest of the checkpoint that the run started from.
    begun_from: str | None = None
    # Updates of earlier runs, if this run continues their optimizer. Random numbers count them.
    earlier_updates: int = 0
    prefetch: Callable[[BatchStream, Cursor], Feed] = Prefetch
    feed_part: Part = "data_wait"  # part of the time until a batch
    background_saves: bool = False  # `fit` still waits for the last save
    layout: CheckpointLayout = "whole"
    progress: Progress = Progress()
    cursor: Cursor = Cursor()
    goal: Goal = LOSS
    best: Best | None = None
    # A callback's reason for stopping before `stop_after`.
    stop_reason: str | None = None
    # True if an evaluation was due but has no results. The next session starts with it.
    owes_evaluation: bool = False
    notes: list[str] = field(default_factory=list)
    # Converts an update's wall seconds into the seconds that `Progress` counts.
    count_seconds: Callable[[float], float] = float
    clock: PartClock = field(default_factory=PartClock)

    def __post_init__(self) -> None:
        self._ranks = self.runtime.ranks
        assert self.sharing is not None or not self._ranks.is_distributed
        self._sharing = self.sharing or DataParallel(self.model)
        self._draws_checked = False
        self._stateful: dict[str, resume.Stateful] = {
            "callbacks": self.callbacks,
            "runtime": self.runtime,
            "outliers": self.guard,
        }
        self._saves = CheckpointSaver(
            self.checkpoints,
            self.callbacks,
            self._ranks,
            self.layout,
            self.background_saves,
        )

    def fit(self) -> RunEnd:
        """Train until the end or until a callback asks to stop, then evaluate and save.

        Raises:
            NonFiniteError: A loss or gradient is NaN or infinite. The update was not applied.
            CheckpointError: Another process uses the run folder, or the final save failed.
        """
        self._session_began = time.perf_counter()
        self.stop_reason = None
        self.clock.restart()
        self._ranks.assert_in_sync(
            "at the start", self._sharing, self.progress, self.cursor
        )
        with self._session() as requests:
            self._apply_requests(requests)
            self.clock.lap("starting")
            self._evaluate_and_save_first(requests)
            if not self.finished:
                self._train()
        return self._build_run_end(None)

    @contextmanager
    def _session(self) -> Iterator[Requests]:
        """Call the callbacks at the start and end of a session, and finish its saves.

        Yields the requests that the callbacks of all ranks make at the start.
        """
        with ExitStack() as stack:
            leftovers: list[str] = []
            if self._ranks.is_main:
                leftovers = stack.enter_context(self.checkpoints.sweeping())
            start = self._build_run_start(leftovers)
            around = self.callbacks.around(start, self._build_run_end)
            requests = stack.enter_context(around)
            # Entered last and so left first: the callbacks still see the session's last saves.
            stack.enter_context(self._saves.session(lambda: self.progress))
            yield self._ranks.combine_requests(requests)

    def _evaluate_and_save_first(self, requests: Requests) -> None:
        """Evaluate and save before the first update, if an earlier session or a callback asks."""
        owed_evaluation = self.owes_evaluation
        if owed_evaluation or requests.evaluate:
            self.owes_evaluation = False
            requests |= self._evaluate()
        if requests.save or (owed_evaluation and self.finished):
            self._save(final=self.finished)

    def _train(self) -> None:
        """Make updates until the session is finished. After each, evaluate and save if due."""
        with self.prefetch(self.batches, self.cursor) as prefetch:
            while not self.finished:
                started = time.perf_counter()
                self.callbacks.tell(Callback.on_before_step, self.progress)
                self.clock.lap("observers", slowed=self.callbacks.are_slow)
                planned, batch = prefetch.next()
                self.clock.lap(self.feed_part)

                info = self.step(planned, batch, started=started)
                self.progress = info.progress
                self.cursor = planned.cursor
                if self._is_check_due(info.before):
                    self._check_updates()
                    if self.guard.should_roll_back:
                        self._roll_back()

                # Callbacks only make requests. The loop acts on them, equally on all ranks.
                requests = self.callbacks.on_step(info) | self.checkpoints.requests()
                requests = self._ranks.combine_requests(requests)
                self._apply_requests(requests)
                self._evaluate_and_save(info.before, requests)
                self._saves.finish_written(self.progress)
        # Leaving the prefetch waits for a batch that is no longer needed.
        self.clock.lap("data_wait")

    def _is_check_due(self, before: Progress) -> bool:
        """Check whether to read the results of updates now, which waits only for a GPU."""
        if self.runtime.device.type != "cuda" or self.finished:
            return True
        schedule = self.schedule
        return schedule.due(schedule.check_every, before, self.progress)

    def step(
        self, planned: Step, batch: Batch | None = None, *, started: float | None = None
    ) -> StepInfo:
        """Run one update. Its result does not depend on the micro-batch size or the world size.

        Args:
            planned: Data of the update, with its position.
            batch: Batch of `planned`, if a copy is already on the device.
            started: The time by `perf_counter` before the update waited for its data.
        """
        if started is None:
            started = time.perf_counter()
        loss = self._compute_gradients(batch or planned.batch, planned.loss_count)
        means = self.measurements.means(self._ranks, count=planned.loss_count)
        measured = means | {n: torch.tensor(v) for n, v in planned.measured.items()}
        lr = self.lr_at(self.progress)  # a function of progress has no state to restore
        grad_norm = self._update_weights(loss, lr, planned.batch)

        # Rates and lengths may be in minutes. All ranks use the clock of rank 0 to stay in step.
        rank_seconds = (time.perf_counter() - started) if self._ranks.is_main else 0.0
        sums = [rank_seconds, self.count_seconds(rank_seconds), planned.n_computed]
        seconds, counted_seconds, n_computed = self._ranks.all_reduce_sum(sums)
        return StepInfo(
            before=self.progress,
            progress=planned.progress_after(self.progress, counted_seconds),
            loss=loss,
            grad_norm=grad_norm,
            lr=lr,
            seconds=seconds,
            parts=self.clock.take_parts(),
            n_targets=planned.n_targets,
            n_tokens=planned.n_tokens,
            n_examples=planned.n_examples,
            n_computed=int(n_computed),
            loss_count=planned.loss_count,
            measured=measured,
            texts=planned.texts,
            stage=planned.stage,
            slowed=self.callbacks.are_slow,
        )

    def _compute_gradients(self, batch: Batch, loss_count: int) -> Tensor:
        """Compute the gradients of an update, and return its mean loss, []."""
        with self._ranks.diagnosing_failures():
            loss_sum = self.oom_fallback.retry_with_fewer_rows(
                self.progress, self.forward_backward, self._sharing, batch, loss_count
            )
        self.clock.lap("forward_backward")
        loss_sum = self._ranks.total(loss_sum)
        self.clock.lap("ranks")
        if self.check_reached is not None:
            self.check_reached(self.model)
            self.check_reached = None
        return loss_sum / loss_count

    def _update_weights(self, loss: Tensor, lr: float, batch: Batch) -> Tensor:
        """Clip the gradients, apply the update if it is good, and return the gradient norm, []."""
        step = self.progress.step
        all_updates = self.earlier_updates + step
        grad_norm = self.runtime.clip_gradients(self.optimizer, self.max_grad_norm)
        if self.noise is not None:
            self.noise.add(self.model, all_updates)
        is_good = self.guard.should_apply(step, lr, loss, grad_norm, batch)
        self.clock.lap("clip")
        self.runtime.optimizer_step(
            self.optimizer, lr=lr, only_if=is_good, step=all_updates
        )
        self.clock.lap("optimizer")
        return grad_norm

    def forward_backward(
        self, micro_batches: Sequence[Batch], loss_count: int
    ) -> Tensor:
        """Accumulate the gradients of an update, and return its summed loss, [].

        `loss_count` counts the target tokens, or the pairs, of all ranks. The last backward pass
        sums the gradients of all ranks, so the gradient is of the mean loss over these.

        Raises:
            DataError: No token has a loss.
        """
        step = self.progress.step
        if loss_count < 1:
            raise DataError(
                f"Step {step} has no target tokens. Remove examples without targets."
            )
        # A previous attempt that ran out of memory may have left gradients.
        self.optimizer.zero_grad(set_to_none=True)
        self.measurements.clear(self.runtime.device)
        self.runtime.seed(self.seed, self.earlier_updates + step)
        self.model.train()
        loss_sum = torch.zeros((), device=self.runtime.device)
        n_micro_batches = len(micro_batches)
        for done, rows in enumerate(micro_batches, start=1):
            micro_batch = rows.to(self.runtime.device)
            loss = self._forward(micro_batch, last=done == n_micro_batches)
            self.runtime.backward(loss / loss_count)
            loss_sum += loss.detach()
            self.callbacks.tell(
                Callback.on_micro_batch, self.progress, done, n_micro_batches
            )
        return loss_sum

    def _forward(self, micro_batch: Batch, *, last: bool) -> Tensor:
        """Compute the summed loss of a micro-batch, [].

        The first forward pass also checks that the model draws no unkeyed random numbers.
        """
        draw_check: AbstractContextManager[None] = nullcontext()
        if not self._draws_checked:
            draw_check = refuse_unkeyed_draws(self.model, micro_batch.labels.device)
        with self.runtime.autocast(), draw_check:
            loss = self._sharing.loss(self.loss_fn, micro_batch, last=last)
        self._draws_checked = True
        return loss

    def _check_updates(self) -> None:
        """Raise an error if an update since the last check must end the run.

        This waits for the device.
        """
        bad_update = self.guard.check(self.progress)
        if bad_update is not None:
            origin, traced = self._trace_origin(bad_update)
            raise self.guard.record_error(bad_update, origin, traced=traced)

    def _trace_origin(self, bad: PendingUpdate) -> tuple[NonFiniteOrigin | None, bool]:
        """Recompute an update to find its first value that is not finite.

        Returns:
            The origin if there is one, and whether memory was large enough to look for it.
        """
        if not self._fits_full_model():
            return None, False

        with self._sharing.full_model() as model:
            # Try the rows of the update first, then one row at a time: this model is not compiled
            # and so needs more memory.
            for rows in sorted({self.oom_fallback.rows_at(bad.step), 1}, reverse=True):
                self.runtime.seed(self.seed, self.earlier_updates + bad.step)
                micro_batches = bad.batch.split(rows)
                try:
                    origin = find_nonfinite_origin(
                        model, self.loss_fn, micro_batches, self.runtime
                    )
                except RuntimeError as error:  # torch.OutOfMemoryError is one
                    if not is_out_of_memory(error):
                        raise
                else:
                    return origin, True
                model.zero_grad(set_to_none=True)
                release_memory()
        return None, False

    def _fits_full_model(self) -> bool:
        """Check whether every rank has free memory for all weights, in addition to its own part.

        If a rank ran out of memory while all ranks gather the weights, the remaining ranks would
        wait for it.
        """
        needed_bytes = 0
        if self._sharing.is_sharded:
            needed_bytes = bytes_of(dict(self.model.named_parameters()))
        fits = needed_bytes <= free_bytes(self.runtime.device)
        return all(self._ranks.all_gather(fits))

    def _find_rollback_checkpoint(self) -> Checkpoint | None:
        """Find the newest checkpoint from before the skipped updates, else the newest of all."""
        first_skipped = self.progress.step - self.guard.in_a_row
        store = self.checkpoints
        return store.newest_valid(before=first_skipped) or store.newest_valid()

    def _roll_back(self) -> None:
        """Load the weights of a checkpoint, but keep the progress, so that the data is skipped.

        Raises:
            NonFiniteError: The run does not have a checkpoint, or it has rolled back recently.
        """
        # An unfinished save may be the newest checkpoint.
        self._saves.finish_all(self.progress)
        checkpoint = resume.broadcast_checkpoint(
            self._find_rollback_checkpoint, self._ranks
        )
        to_step = checkpoint.step if checkpoint else None
        message = self.guard.record_rollback(self.progress.step, to_step)
        assert checkpoint is not None  # without one, `record_rollback` raises
        resume.load_tensors(checkpoint, self.model, self.optimizer)
        self.runtime.load_state_dict(checkpoint.state()["runtime"])
        self.callbacks.on_warning(self.progress, message)
        # Without a save, a killed run would meet the same examples again.
        self._save(final=False)

    @property
    def finished(self) -> bool:
        """True if this session makes no more updates."""
        if self.stop_reason is not None:
            return True
        return self.schedule.stop_after.reached(self.progress)

    @property
    def is_over(self) -> bool:
        """True if a later session would have no update to make and no evaluation to finish."""
        ended = self.schedule.stop_after.reached(self.progress)
        ended = ended or any(callback.is_over for callback in self.callbacks)
        return ended and not self.owes_evaluation

    def _apply_requests(self, requests: Requests) -> None:
        """End the session if a callback asks to stop. The first reason is kept."""
        if requests.stop and self.stop_reason is None:
            self.stop_reason = requests.reason or "stopped"

    def _evaluate_and_save(self, before: Progress, requests: Requests) -> None:
        """Evaluate and save after an update, as scheduled or requested, and at the end."""
        schedule = self.schedule
        at = self.progress
        is_scheduled = schedule.due(schedule.evaluate_every, before, at)
        # Always evaluate the end.
        is_scheduled = is_scheduled or schedule.stop_after.reached(at)

        if self.stop_reason in (INTERRUPTED, MOVED, TAKEN_OVER):
            # Save now, because the machine may stop soon or another process has the run.
            self.owes_evaluation = is_scheduled
        elif is_scheduled or requests.evaluate or self.finished:
            requests |= self._evaluate()

        is_save_due = schedule.due(schedule.save_every, before, at)
        if requests.save or self.finished or is_save_due:
            self._save(final=self.finished)

    def _evaluate(self) -> Requests:
        """Evaluate, save the model if it is among the best, and return the callbacks' requests."""
        self._check_updates()
        self.callbacks.tell(Callback.on_before_evaluate, self.progress)
        self.clock.lap("observers")
        try:
            metrics = self.evaluator()
        except Interrupted:
            # The results are lost, so the next session evaluates first.
            self.stop_reason = INTERRUPTED
            self.owes_evaluation = True
            return Requests(stop=True, save=True)
        self.clock.lap("evaluation")

        self.best = self.goal.best(self.best, self.progress.step, metrics)
        self._saves.save_best(self.progress, self.model, metrics)
        self.clock.lap("saving")

        requests = self.callbacks.on_evaluate(self.progress, metrics)
        requests = self._ranks.combine_requests(requests)
        self.clock.lap("texts")
        self._apply_requests(requests)
        return requests

    def _save(self, *, final: bool) -> None:
        """Save the trainer's state. The save before the end of a session is `final`."""
        # A checkpoint must not contain weights after a bad update.
        self._check_updates()
        self.clock.lap("observers")
        self._ranks.assert_in_sync(
            "before a save", self._sharing, self.progress, self.cursor
        )
        resources = self.oom_fallback.checkpoint_record(self._ranks)
        self.callbacks.tell(Callback.on_before_save, self.progress)
        tensors = resume.trainer_tensors(self.model, self.optimizer)
        state = self.state_dict() | resources
        self._saves.save(self.progress, tensors, state, final=final)
        self.clock.lap("saving")

    def state_dict(self) -> State:
        """Return the JSON state of a checkpoint."""
        trainer_state = resume.TrainerState(
            self.progress, self.cursor, self.best, self.owes_evaluation
        )
        state = trainer_state.to_json(
            self._stateful, self._ranks, base=self.base_sha256
        )
        return state | {
            "begun_from": self.begun_from,
            "earlier_updates": self.earlier_updates,
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint of this run.

        Raises:
            CheckpointError: The checkpoint does not fit the model, the data or the settings.
        """
        versions = self.checkpoints.identity.versions
        saved, notes = resume.TrainerState.load(
            checkpoint,
            self._stateful,
            self._ranks,
            versions=versions,
            base=self.base_sha256,
        )
        saved.refuse_other_data(self.batches, where=str(checkpoint.path))
        resume.load_tensors(checkpoint, self.model, self.optimizer)

        self.progress = saved.progress
        self.cursor = saved.cursor
        self.best = saved.best
        self.owes_evaluation = saved.owes_evaluation
        self.notes = self.notes + notes
        if not self.checkpoints.is_comparable(checkpoint.manifest):
            self.best = None
            self.notes.append(
                f"the settings of evaluation changed at step {self.progress.step}, so the search "
                f"for the {self.goal} starts again"
            )
        self.begun_from = checkpoint.state().get("begun_from")
        self.earlier_updates = resume.count_earlier_updates(checkpoint)

    def continue_optimizer(self, checkpoint: Checkpoint) -> None:
        """Begin with the optimizer of another run. The model already has the weights of that run.

        Raises:
            CheckpointError: The checkpoint does not fit the model or the optimizer.
        """
        resume.load_optimizer(checkpoint, self.model, self.optimizer)
        self.runtime.load_state_dict(checkpoint.state()["runtime"])
        earlier = resume.count_earlier_updates(checkpoint)
        self.earlier_updates = earlier + checkpoint.step

    def _build_run_start(self, leftovers: list[str]) -> RunStart:
        """Describe the start of a session, with notes about it and the removed `leftovers`."""
        notes = [*self.runtime.warnings, *self.checkpoints.notes, *self.notes]
        if leftovers:
            notes.append(
                f"removed the leftovers of a killed save: {', '.join(leftovers)}"
            )
        return RunStart(
            self.progress, self.schedule.stop_after, tuple(notes), self.best
        )

    def _build_run_end(self, error: BaseException | None) -> RunEnd:
        """Describe the end of a session, and take the clock's last parts."""
        self.clock.lap("saving")  # includes the wait for background saves
        reason = self.stop_reason or FINISHED
        if error is not None:
            is_non_finite = isinstance(error, NonFiniteError)
            reason = "non_finite" if is_non_finite else type(error).__name__
        return RunEnd(
            reason=reason,
            progress=self.progress,
            seconds=time.perf_counter() - self._session_began,
            best=self.best,
            skipped_updates=self.guard.n_skipped,
            parts=self.clock.take_parts(),
            saves=self._saves.counts,
            error=str(error) if error is not None else None,
        )
