"""A small real run: a causal model with dropout and tied embeddings over rows of uneven length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.data.stream import Step
from toque.train.averaging import WeightAverage
from toque.train.callbacks import Callback, Callbacks
from toque.train.checkpoint import CheckpointStore, Saved
from toque.train.events import RunEnd, RunStart, StepInfo
from toque.train.noise import GradientNoise
from toque.train.optim import build_optimizer
from toque.train.runtime import Runtime, set_deterministic
from toque.train.schedules import Cycles, make_schedule
from toque.train.trainer import Schedule, Trainer
from toque.units import Cursor, Duration, Progress

VOCABULARY = 61
N_ROWS, ROWS_PER_UPDATE = 26, 4  # 7 updates an epoch, the last one of 2 rows


class TinyModel(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.norm = nn.LayerNorm(16)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.mix(self.dropout(self.embed(tokens)))
        return self.head(self.dropout(self.norm(hidden)) * self.scale)


def loss_sum(model: nn.Module, batch: Batch) -> Tensor:
    assert isinstance(batch, DecoderBatch)
    logits = model(batch.tokens).float()
    return F.cross_entropy(
        logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


@dataclass(frozen=True)
class RowStream:
    """Random token rows; the order is a function of (seed, epoch)."""

    seed: int = 5

    def at(self, cursor: Cursor) -> Step:
        order = np.random.default_rng([self.seed, cursor.epoch]).permutation(N_ROWS)
        ids = order[cursor.row : cursor.row + ROWS_PER_UPDATE]
        rows = [self._row(int(i)) for i in ids]
        longest = max(len(row) for row in rows) - 1
        tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORE)
        segments = torch.zeros_like(tokens, dtype=torch.int32)
        for r, row in enumerate(rows):
            n = len(row) - 1
            tokens[r, :n], labels[r, :n] = torch.from_numpy(row[:-1]), torch.from_numpy(row[1:])
            segments[r, :n] = 1
        positions = torch.arange(longest).expand_as(tokens).contiguous()
        examples = tuple((int(i),) for i in ids)
        batch = DecoderBatch(labels, examples, tokens, segments, positions)
        done = cursor.row + len(ids)
        after = Cursor(cursor.epoch + 1) if done == N_ROWS else replace(cursor, row=done)
        return Step(
            batch=batch,
            cursor=after,
            n_targets=batch.n_targets,
            n_tokens=batch.n_tokens,
            n_examples=len(ids),
            n_computed=batch.n_computed,
            epoch=cursor.epoch + done / N_ROWS,
        )

    def _row(self, index: int) -> np.ndarray:
        rng = np.random.default_rng([self.seed, 99, index])
        length = int(rng.integers(4, 17))
        return np.cumsum(rng.integers(1, 4, size=length)) % VOCABULARY


class Recorder(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps: list[StepInfo] = []
        self.events: list[str] = []
        self.warnings: list[str] = []
        self.evaluations: list[tuple[int, float]] = []
        self.ends: list[RunEnd] = []

    def on_fit_start(self, start: RunStart) -> None:
        self.events.append("start")

    def on_step(self, info: StepInfo) -> None:
        self.losses.append(float(info.loss))
        self.steps.append(info)
        self.events.append(f"step {info.progress.step}")

    def on_evaluate(self, at: Progress, metrics: Any) -> None:
        self.evaluations.append((at.step, metrics["loss"]))
        self.events.append(f"evaluate {at.step}")

    def on_save(self, at: Progress, saved: Saved) -> None:
        self.events.append(f"save {saved.step}")

    def on_warning(self, at: Progress, message: str) -> None:
        self.warnings.append(message)

    def on_fit_end(self, end: RunEnd) -> None:
        self.ends.append(end)
        self.events.append(f"end {end.reason}")


@dataclass
class Run:
    """Everything of one run that a test may look at."""

    trainer: Trainer
    recorder: Recorder

    @property
    def losses(self) -> list[float]:
        return self.recorder.losses

    def weights(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.trainer.model.named_parameters()}


@dataclass
class RunMaker:
    """`make(...)` builds a run in `folder`, continuing from its newest checkpoint if any."""

    folder: Path
    made: list[Run] = field(default_factory=list)

    def __call__(
        self,
        *,
        folder: Path | None = None,
        steps: int = 18,
        save_every: str | None = "1 steps",
        evaluate_every: str | None = None,
        dropout: float = 0.1,
        micro_batch_rows: int = 4,
        keep_last: int = 1000,
        keep_best: int = 1,
        callbacks: tuple[Callback, ...] = (),
        evaluator: Callable[[TinyModel], dict[str, float]] | None = None,
        precision: Any = "float32",
        peak_lr: float = 1e-2,
        loss_fn: Callable[[nn.Module, Batch], Tensor] = loss_sum,
        store: CheckpointStore | None = None,
        freeze: tuple[str, ...] = (),
        stop_after: str | None = None,
        schedule: str = "cosine",
        noise: GradientNoise | None = None,
        average: WeightAverage | None = None,
        background_saves: bool = False,
    ) -> Run:
        torch.manual_seed(3)
        model = TinyModel(dropout)
        for name in freeze:
            model.get_parameter(name).requires_grad_(False)
        folder = folder or self.folder
        stop = Duration.parse(stop_after or f"{steps} steps")
        recorder = Recorder()
        trainer = Trainer(
            model=model,
            optimizer=build_optimizer(model),
            batches=RowStream(),
            loss_fn=loss_fn,
            lr_at=make_schedule(
                schedule,
                peak_lr=peak_lr,
                warmup=Duration(3, "steps"),
                stop_after=stop,
                cycles=Cycles(Duration(4, "steps")),
            ),
            evaluator=lambda: (evaluator or held_out_loss)(model),
            checkpoints=store
            or CheckpointStore(folder / "checkpoints", keep_last=keep_last, keep_best=keep_best),
            callbacks=Callbacks([*callbacks, recorder]),
            runtime=Runtime.detect(device="cpu", precision=precision),
            schedule=Schedule(
                stop,
                Duration.parse(evaluate_every) if evaluate_every else None,
                Duration.parse(save_every) if save_every else None,
            ),
            micro_batch_rows=micro_batch_rows,
            max_grad_norm=1.0,
            seed=17,
            noise=noise,
            average=replace(average) if average is not None else None,
            run_folder=folder,
            background_saves=background_saves,
        )
        newest = trainer.checkpoints.newest_valid()
        if newest is not None:
            trainer.load(newest)
        run = Run(trainer, recorder)
        self.made.append(run)
        return run


@torch.no_grad()
def held_out_loss(model: TinyModel) -> dict[str, float]:
    model.eval()
    step = RowStream(seed=6).at(Cursor())
    return {"loss": float(loss_sum(model, step.batch)) / step.n_targets}


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[RunMaker]:
    before = torch.are_deterministic_algorithms_enabled()
    yield RunMaker(tmp_path / "run")
    set_deterministic(before)


@pytest.fixture
def row_stream() -> RowStream:
    return RowStream()


@pytest.fixture
def tiny_model() -> TinyModel:
    torch.manual_seed(3)
    return TinyModel()
