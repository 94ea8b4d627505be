"""Length of a run by the clock: what comes after training is measured before it, and told."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from toque.config import RunConfig
from toque.errors import ConfigError
from toque.evaluation.heldout_loss import HeldOut
from toque.reporter import Reporter, clock_text
from toque.training.time_limit import CommandClock, TimeLimit
from toque.units import Duration
from toque.workflows.asking.provenance import target_limit
from toque.workflows.assembly.evaluation import build_sampler, held_out_prompts
from toque.workflows.assembly.sample_writer import writing_in
from toque.workflows.assembly.setup import Setup

_BATCHES: Final = 2
"""Of the held-out examples, to time an evaluation by."""
_TOKENS: Final = 8
"""Of each text, to time the writing by."""
_COPIES: Final = 5
"""Of the weights that are written at the end: a checkpoint with AdamW's state is three, the best
model one, the finished model one."""
_PROBE_BYTES: Final = 8 << 20


@dataclass(frozen=True)
class AfterTraining:
    """Seconds that the end of a run is expected to take."""

    evaluating: float
    """One evaluation."""
    ending: float
    """Writing texts, the last checkpoint and the finished model."""

    @property
    def seconds(self) -> float:
        """All of it: the end is evaluated, and then the best weights."""
        return 2 * self.evaluating + self.ending


@dataclass(frozen=True)
class Length:
    """How long a run trains, and who sees to it."""

    stop_after: Duration
    limit: TimeLimit | None = None
    """Where the setting means the whole command; on the first rank alone."""
    line: str = ""
    """What is expected, for people; empty where the setting means training alone."""


def length_of(setup: Setup, heldout: HeldOut, clock: CommandClock, reporter: Reporter) -> Length:
    """The length that train.stop_after asks for; every rank is given the same.

    Raises:
        ConfigError: nothing would be left for training.
    """
    asked, ranks = setup.config.train.stop_after, setup.runtime.ranks
    whole = asked.seconds
    if whole is None or not asked.total:
        return Length(asked)
    with reporter.working("finding out how long evaluating and writing take"):
        after = measure_end(setup, heldout)
    spent, after = ranks.broadcast((clock.seconds(), after))
    clock = replace(clock, began=clock.now() - spent)
    limit = TimeLimit(whole, clock, after.evaluating, after.ending)
    stop_after = ranks.broadcast(limit.stop_after)
    told = (
        f"{clock_text(spent)} of it went into reading and measuring, and evaluating and writing "
        f"will take about {clock_text(after.seconds)}"
    )
    if stop_after.amount <= 0:
        raise ConfigError(
            f'train.stop_after is "{asked}": {told}. Nothing is left for training; give more, or '
            "evaluate less (evaluation.max_examples, evaluation.generate)."
        )
    limit.stop_after = stop_after
    return Length(
        stop_after,
        limit if ranks.is_main else None,
        f": {told}; about {clock_text(60 * stop_after.amount)} of training",
    )


def with_length(config: RunConfig, length: Length) -> RunConfig:
    """The configuration that the rate and averages go by; what is written down stays as asked."""
    train = config.train.model_copy(update={"stop_after": length.stop_after})
    return config.model_copy(update={"train": train})


def measure_end(setup: Setup, heldout: HeldOut) -> AfterTraining:
    """Time a little of everything that comes after training; no number of the run changes."""
    config, store, model = setup.config, setup.store, setup.model
    few = _BATCHES * heldout.rows_per_batch * heldout.share[1]
    part = replace(
        heldout,
        rows=heldout.rows[:few],
        weights=None if heldout.weights is None else heldout.weights[:few],
    )
    began = time.perf_counter()
    part(model)
    evaluating = (time.perf_counter() - began) * len(heldout.rows) / max(1, len(part.rows))
    tasks = 1 if config.data.tasks == ("write",) else 2  # each task's share is evaluated once more
    prompts = held_out_prompts(store, config.evaluation.generate)
    writing = 0.0
    if prompts:
        longest = target_limit(config, store.manifest)
        most = min(_TOKENS, longest)
        sampler = build_sampler(config, store, prompts, max_new_tokens=most)
        began = time.perf_counter()
        with writing_in(model, setup.runtime)():
            sampler(model)
        writing = (time.perf_counter() - began) * longest / most
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    saving = _COPIES * n_bytes * _seconds_a_byte(Path(config.run_dir))
    return AfterTraining(evaluating, (tasks - 1) * evaluating + writing + saving)


def _seconds_a_byte(run: Path) -> float:
    """Of writing durably to the disk of the run; 0 where it takes nothing, which saves will say."""
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=run) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return 0.0
    return (time.perf_counter() - began) / _PROBE_BYTES
