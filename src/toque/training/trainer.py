"""The loop. What changes the numbers stands in `step`, what happens in order stands in `fit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from toque.batch import Batch
from toque.data.loader.batch_stream import Step
from toque.data.loader.prefetch import Batches, Prefetch
from toque.errors import CheckpointError, DataError, NonFiniteError
from toque.training.autotune.oom_fallback import OomFallback
from toque.training.callbacks import Callbacks
from toque.training.checkpoint.resume import (
    broadcast_checkpoint,
    environment_fingerprint,
    load_tensors,
    notes_on,
)
from toque.training.checkpoint.saver import Saves
from toque.training.checkpoint.state_tensors import has_frozen, model_tensors
from toque.training.checkpoint.store import Checkpoint, CheckpointStore
from toque.training.distributed.collectives import Ranks
from toque.training.events import Best, Requests, RunEnd, RunStart, State, StepInfo
from toque.training.guards.nan_tracer import NonFiniteOrigin, find_nonfinite_origin
from toque.training.guards.nonfinite import NonFiniteGuard
from toque.training.guards.skip_step import Outliers
from toque.training.guards.update_guard import UpdateGuard
from toque.training.optim.factory import optimizer_tensors
from toque.training.optim.gradient_noise import GradientNoise
from toque.training.optim.weight_average import WeightAverage
from toque.training.runtime import Runtime
from toque.training.signals import INTERRUPTED
from toque.units import Cursor, Duration, Progress

LossFn = Callable[[nn.Module, Batch], Tensor]
"""(model, micro-batch) -> [] nats summed over its targets; never a mean."""


@dataclass(frozen=True)
class Schedule:
    """When things happen. "%" is a share of `stop_after`; None is never, save at the end."""

    stop_after: Duration
    evaluate_every: Duration | None = None
    save_every: Duration | None = None
    check_every: Duration = Duration(10, "steps")
    """How often CUDA is waited for to see whether losses are finite; on a CPU it is every step."""


@dataclass
class Trainer:
    """Updates a model until `schedule.stop_after`. Everything it holds arrives built.

    `Progress.seconds` is time in updates, waiting for data included, evaluating and saving not: a
    run "for 30 minutes" trains for 30 minutes.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    loss_fn: LossFn
    lr_at: Callable[[Progress], float]
    evaluator: Callable[[], dict[str, float]]
    checkpoints: CheckpointStore
    callbacks: Callbacks
    runtime: Runtime
    schedule: Schedule
    micro_batch_rows: int
    max_grad_norm: float | None
    seed: int
    noise: GradientNoise | None = None
    average: WeightAverage | None = None
    """When there is one, it is what is evaluated and kept as a best model."""
    outliers: Outliers | None = None
    """When there is one, it leaves out updates far from those before, NaN too, and goes on."""
    check_reached: Callable[[nn.Module], None] | None = None
    """Called with the gradients of a session's first update; raises when parts got none."""
    base_sha256: str | None = None
    """Hash of frozen weights that checkpoints leave out; a checkpoint of others is refused."""
    smaller_from: dict[int, int] = field(default_factory=dict)
    """Step -> rows at once from there on, where memory ran out in an earlier session."""
    remember_smaller: Callable[[dict[int, int]], None] | None = None
    background_saves: bool = False
    """Write checkpoints while training goes on; the last of a session is always waited for."""
    run_folder: Path | None = None
    """Where `non_finite.json` goes; None for nowhere."""
    progress: Progress = Progress()
    cursor: Cursor = Cursor()
    best: Best | None = None
    stop_reason: str | None = None
    """Why a callback asked to end before `stop_after`."""
    owes_evaluation: bool = False
    """An interruption came before an evaluation that was due; continuing begins with it."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        guard = NonFiniteGuard(
            self.run_folder,
            norm_may_be_infinite=self.runtime.scaler is not None,
            locate=self._locate,
            gather=self._ranks.all_gather,
        )
        self._judge = UpdateGuard(guard, self.outliers, self.runtime, self.callbacks)
        self._saves = Saves(self.checkpoints, self.callbacks, background=self.background_saves)
        self._rows = OomFallback(self.micro_batch_rows, self.smaller_from, self.remember_smaller)
        self._session_began = time.perf_counter()

    def fit(self) -> RunEnd:
        """Train until the end, or until a callback asks to stop; the end is evaluated and saved.

        Raises:
            NonFiniteError: a loss or gradient is not a number; nothing of it was applied.
            CheckpointError: another process holds the run folder, or the final save failed.
        """
        self._session_began = time.perf_counter()
        self.stop_reason = None
        self._ranks.assert_in_sync("at the begin", self.model, self.progress, self.cursor)
        with (
            self._claimed() as leftovers,
            self.callbacks.around(self._start(leftovers), self._end) as wants,
            self._saves.session(lambda: self.progress),
        ):
            self._apply_requests(self._ranks.any_rank(wants))
            self._run_deferred_evaluation()
            if not self.finished:
                self._train()
        return self._end(None)

    def _train(self) -> None:
        pin = self.runtime.device.type == "cuda"
        with Prefetch(self.batches, self.cursor, pin=pin) as ahead:
            while not self.finished:
                started = time.perf_counter()
                self.callbacks.on_before_step(self.progress)
                planned, batch, waited = ahead.next()
                info = self.step(planned, batch, started=started, data_wait_seconds=waited)
                self.progress, self.cursor = info.progress, planned.cursor
                self._check_finite(info)
                if self.average is not None:
                    self.average.update(self.model, info.before, info.progress)
                # Observers may ask; only the loop acts, and on all ranks alike.
                wants = self._ranks.any_rank(self.callbacks.on_step(info))
                self._apply_requests(wants)
                self._evaluate_and_save(info.before, wants)
                self._saves.tell(self.progress)

    def _evaluate_and_save(self, before: Progress, wants: Requests) -> None:
        scheduled = self._due(self.schedule.evaluate_every, before) or self._reached
        if self.stop_reason == INTERRUPTED:
            # The machine may be taken away within seconds: save now, evaluate on the way back.
            self.owes_evaluation = scheduled
        elif scheduled or wants.evaluate or self.finished:
            wants |= self._evaluate()
        if wants.save or self.finished or self._due(self.schedule.save_every, before):
            self._save(final=self.finished)

    def _claimed(self) -> AbstractContextManager[list[str]]:
        return self.checkpoints.claimed() if self._ranks.is_main else nullcontext([])

    @property
    def _ranks(self) -> Ranks:
        return self.runtime.ranks

    @property
    def finished(self) -> bool:
        """Whether there is nothing more to do in this session."""
        return self.stop_reason is not None or self._reached

    @property
    def _reached(self) -> bool:
        return self.schedule.stop_after.reached(self.progress)

    def _due(self, every: Duration | None, before: Progress) -> bool:
        return every is not None and every.crossed(before, self.progress, self.schedule.stop_after)

    def step(
        self,
        planned: Step,
        batch: Batch | None = None,
        *,
        started: float | None = None,
        data_wait_seconds: float = 0.0,
    ) -> StepInfo:
        """One update; the same update for every `micro_batch_rows`, dropout aside.

        Args:
            planned: what the update sees.
            batch: `planned.batch`, perhaps in other memory.
            started: `perf_counter` when the update began, before waiting for its data.
            data_wait_seconds: of that, the seconds waited.

        Raises:
            DataError: no token of the batch has loss, so there is nothing to learn from.
        """
        started = time.perf_counter() if started is None else started
        self._refuse_no_targets(planned)
        loss_sum = self._rows.computed(
            self.progress.step,
            lambda rows: self._gradients(batch or planned.batch, rows, planned.n_targets),
            say=lambda text: self.callbacks.on_warning(self.progress, text),
        )
        loss_sum = self.runtime.sum_over_ranks(loss_sum, self.optimizer)
        if self.check_reached is not None:
            self.check_reached(self.model)
            self.check_reached = None
        mean_loss = loss_sum / planned.n_targets
        lr = self.lr_at(self.progress)  # no scheduler object to restore
        grad_norm = self.runtime.update(
            self.optimizer,
            lr=lr,
            max_grad_norm=self.max_grad_norm,
            loss=mean_loss,
            after_clipping=self._add_noise,
            accepts=self._judge.accepts(self.progress.step, mean_loss, planned.batch),
        )
        self._judge.add(self.progress.step, lr, mean_loss, grad_norm, planned.batch)
        # Rates and lengths may be in minutes, which are rank 0's, or ranks would part ways.
        own = (time.perf_counter() - started) if self._ranks.is_main else 0.0
        seconds, n_computed = self._ranks.all_reduce_sum([own, planned.n_computed])
        return StepInfo(
            before=self.progress,
            progress=planned.after(self.progress, seconds),
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            n_targets=planned.n_targets,
            n_tokens=planned.n_tokens,
            n_examples=planned.n_examples,
            n_computed=int(n_computed),
            seconds=seconds,
            data_wait_seconds=data_wait_seconds,
            stage=planned.stage,
        )

    def _refuse_no_targets(self, planned: Step) -> None:
        if planned.n_targets < 1:
            raise DataError(
                f"Step {self.progress.step} has no target token: leave such examples out."
            )

    def _gradients(self, batch: Batch, rows_at_once: int, n_targets: int) -> Tensor:
        """Add the whole update's gradients; [] its loss in nats, summed."""
        self.optimizer.zero_grad(set_to_none=True)  # a try that ran out of memory left some
        self.runtime.seed(self.seed, self.progress.step)  # dropout depends on the step alone
        self.model.train()
        loss_sum = torch.zeros((), device=self.runtime.device)
        for rows in batch.split(rows_at_once):
            with self.runtime.autocast():
                loss = self.loss_fn(self.model, rows.to(self.runtime.device))  # [] nats, summed
            self.runtime.backward(loss / n_targets)
            loss_sum += loss.detach()
        return loss_sum

    def _check_finite(self, info: StepInfo) -> None:
        on_cpu = self.runtime.device.type == "cpu"
        if on_cpu or self.finished or self._due(self.schedule.check_every, info.before):
            self._judge.check(self.progress)
            if self.outliers is not None and self.outliers.exhausted:
                self._roll_back(self.outliers)

    def _roll_back(self, outliers: Outliers) -> None:
        self._saves.settle(self.progress)
        found = broadcast_checkpoint(self.checkpoints.newest_valid, self._ranks)
        sentence = outliers.going_back(self.progress.step, found.step if found else None)
        assert found is not None
        load_tensors(found, self.model, self.optimizer, self.average)
        self.runtime.load_state_dict(found.state()["runtime"])
        self.callbacks.on_warning(self.progress, sentence)
        self._save(final=False)  # a killed run would otherwise come by the same examples again

    def _locate(self, step: int, batch: Batch) -> NonFiniteOrigin | None:
        self.model.train()
        return find_nonfinite_origin(
            self.model,
            self.loss_fn,
            batch,
            micro_batch_rows=self._rows.at(step),
            runtime=self.runtime,
            seed=lambda: self.runtime.seed(self.seed, step),
        )

    def _apply_requests(self, wants: Requests) -> None:
        if wants.stop and self.stop_reason is None:
            self.stop_reason = wants.reason or "stopped"

    def _evaluate(self) -> Requests:
        self._judge.check(self.progress)
        self.callbacks.on_before_evaluate(self.progress)
        with self._averaged():
            metrics = self.evaluator()
            loss = metrics.get("loss")
            if loss is not None and (self.best is None or loss < self.best.loss):
                self.best = Best(self.progress.step, loss)
            self._save_best(metrics)
            wants = self._ranks.any_rank(self.callbacks.on_evaluate(self.progress, metrics))
        self._apply_requests(wants)
        return wants

    def _averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else self.average.in_place(self.model)

    def _add_noise(self) -> None:
        if self.noise is not None:
            self.noise.add(self.model, self.progress.step)

    def _run_deferred_evaluation(self) -> None:
        if not self.owes_evaluation:
            return
        self.owes_evaluation = False
        self._evaluate()
        if self.finished:
            self._save(final=True)

    def _save_best(self, metrics: dict[str, float]) -> None:
        if self._ranks.is_main:
            self._saves.save_best(
                self.progress, self._model_tensors, progress=asdict(self.progress), metrics=metrics
            )

    def _save(self, *, final: bool) -> None:
        self._judge.check(self.progress)
        self._ranks.assert_in_sync("before a save", self.model, self.progress, self.cursor)
        if not self._ranks.is_main:
            return
        self.callbacks.on_before_save(self.progress)
        tensors = {
            "model": self._model_tensors(),
            "optimizer": optimizer_tensors(self.optimizer, self.model),
        }
        if self.average is not None:
            tensors["average"] = self.average.tensors()
        self._saves.save(self.progress, tensors, self.state_dict(), final=final)

    def _model_tensors(self) -> dict[str, Tensor]:
        return model_tensors(self.model, trainable_only=has_frozen(self.model))

    def state_dict(self) -> State:
        """What a step reads and a restart cannot recompute, tensors aside: no rate, no order."""
        return {
            "progress": asdict(self.progress),
            "cursor": asdict(self.cursor),
            "callbacks": self.callbacks.state_dict(),
            "runtime": self.runtime.state_dict(),
            "best": asdict(self.best) if self.best else None,
            "owes_evaluation": self.owes_evaluation,
            "base_sha256": self.base_sha256,
            "outliers": self.outliers.state_dict() if self.outliers is not None else None,
            **environment_fingerprint(self._ranks),
        }

    def load(self, checkpoint: Checkpoint) -> None:
        """Continue from `checkpoint`; whether it belongs to this run is for the caller to judge.

        Raises:
            CheckpointError: it does not fit the model or the optimizer, or its state is no state.
        """
        where = str(checkpoint.path)
        state = checkpoint.state()
        if state.get("base_sha256") != self.base_sha256:
            raise CheckpointError(
                f"{where} holds an adapter that was trained beside other frozen weights (then "
                f"{state.get('base_sha256')}, now {self.base_sha256}): the model in "
                "model.start_from changed. Put it back to continue, or start a new run folder."
            )
        load_tensors(checkpoint, self.model, self.optimizer, self.average)
        try:
            self.progress, self.cursor = Progress(**state["progress"]), Cursor(**state["cursor"])
            self.best = Best(**state["best"]) if state["best"] else None
            self.owes_evaluation = bool(state["owes_evaluation"])
            self.runtime.load_state_dict(state["runtime"])
            self.callbacks.load_state_dict(state["callbacks"])
            if self.outliers is not None and state.get("outliers"):
                self.outliers.load_state_dict(state["outliers"])
            versions = self.checkpoints.identity.versions
            self.notes += notes_on(checkpoint, versions, state, self._ranks)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{where} has a state this Toque cannot read: {error}."
            ) from error

    def _start(self, leftovers: list[str]) -> RunStart:
        removed = [f"removed what a killed save left: {', '.join(leftovers)}"] if leftovers else []
        notes = (*self.runtime.warnings, *self.notes, *removed)
        return RunStart(self.progress, self.schedule.stop_after, notes)

    def _end(self, error: BaseException | None) -> RunEnd:
        reason = self.stop_reason or "finished"
        if error is not None:
            reason = "non_finite" if isinstance(error, NonFiniteError) else type(error).__name__
        return RunEnd(
            reason=reason,
            progress=self.progress,
            seconds=time.perf_counter() - self._session_began,
            best=self.best,
            error=str(error) if error is not None else None,
            saves=self._saves.counts,
            skipped_updates=self.outliers.skipped if self.outliers is not None else 0,
        )
