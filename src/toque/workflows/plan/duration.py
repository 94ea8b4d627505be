"""Time of a plan: from a measured run, from layers measured here, or from a card's peak."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.models.families import family_of
from toque.models.flops import parameter_counts
from toque.runs.history import METRICS, read_metrics
from toque.training.peak_flops import Peak
from toque.units import Duration
from toque.workflows.plan.ahead import Ahead
from toque.workflows.plan.machine import Machine
from toque.workflows.plan.measured_layers import measured_seconds
from toque.workflows.plan.memory import Memory
from toque.workflows.plan.outlined_model import Vocabulary

ASSUMED: Final = {True: 0.30, False: 0.40}
"""Share of a card's peak, by whether the model is an encoder-decoder. Guesses, until a run of the
model has measured its own: published T5 trainings reach 12 to 38 %, decoders 33 to 57 %."""
_RECOMPUTED: Final = 4 / 3
"""A second forward: backward costs two."""
_LEAST_UPDATES: Final = 5


@dataclass(frozen=True)
class Pace:
    """How fast the machine is taken to compute."""

    peak: Peak
    share: float
    """Of the peak, assumed while it computes."""

    def seconds(self, ahead: Ahead, memory: Memory) -> float:
        """Of an update, if it were products alone."""
        pieces = ahead.update_rows / memory.micro_batch_rows
        products = sum(memory.update.products.values()) * pieces
        return products / (self.share * self.peak.flops_per_second)


@dataclass(frozen=True)
class Time:
    """Seconds of an update and of the run, and what they were computed from."""

    update_seconds: float
    flops_per_update: float
    """That the model needs, padding and recomputing not counted."""
    pace: Pace
    how: str
    evaluation_seconds: float
    """Of one held-out loss."""
    run_seconds: float | None
    """Of all updates and held-out losses; None where their number is not known."""

    @property
    def peak(self) -> Peak:
        """What the utilisation is a share of."""
        return self.pace.peak

    @property
    def utilisation(self) -> float | None:
        """Useful FLOPs as a share of the peak, in [0, 1]; None where the peak is too low for it."""
        share = self.flops_per_update / (self.update_seconds * self.peak.flops_per_second)
        return min(1.0, share) if share < 1.0 + 1e-9 else None


def time_of(
    config: RunConfig,
    model: PreTrainedModel,
    known: Vocabulary | None,
    ahead: Ahead,
    machine: Machine,
    memory: Memory,
    *,
    utilisation: float | None = None,
) -> Time:
    """Seconds of an update and of the run; not inside `outlining`, for it may measure.

    Args:
        config: of the run.
        model: outlined.
        known: the tokenizer's vocabulary.
        ahead: its work.
        machine: that it is for.
        memory: for the micro-batch, whose work is known by its operations.
        utilisation: share of the peak to assume, instead of what is known.
    """
    peak = machine.peak(ahead.arithmetic.products)
    assumed = ASSUMED[family_of(model.config).is_encoder_decoder]
    flops = ahead.arithmetic.flops_per_token * ahead.tokens_per_update
    if utilisation is not None:
        seconds = flops / (utilisation * peak.flops_per_second)
        how = f"{utilisation:.0%} of the peak, as asked for"
    elif machine.here and (begun := _measured(config, model, ahead)) is not None:
        seconds, how = begun
    elif machine.where == "cpu" and memory.fits:
        seconds = measured_seconds(config, known, ahead, memory)
        how = "updates of this model with one layer and with two, measured just now"
    else:
        more = _RECOMPUTED if memory.recompute else 1.0
        seconds = flops * more / (ahead.useful_share * assumed * peak.flops_per_second)
        how = f"{assumed:.0%} of the peak while it computes: a guess until a run has measured it"
    held_out = ahead.held_out_tokens / ahead.tokens_per_update * seconds / 3  # forward alone
    pace = Pace(peak, assumed)
    return Time(seconds, flops, pace, how, held_out, _whole(config, ahead, seconds, held_out))


def _measured(config: RunConfig, model: PreTrainedModel, ahead: Ahead) -> tuple[float, str] | None:
    """Seconds of an update by the run's own metrics, if it has begun with this model."""
    path = Path(config.run_dir) / METRICS
    if not path.is_file():
        return None
    events = read_metrics(path)
    started = next((e for e in events if e["event"] == "start"), {})
    total = (started.get("parameters") or {}).get("total")
    steps = [e for e in events if e["event"] == "step" and e.get("tokens") and e.get("seconds")]
    if total != parameter_counts(model).total or len(steps) < _LEAST_UPDATES:
        return None
    late = steps[len(steps) // 5 :]  # the first ones load and choose kernels
    # The median, so that a pause or another program does not count.
    rate = statistics.median(e["tokens"] / e["seconds"] for e in late)
    return ahead.tokens_per_update / rate, f"as {path} has it: {rate:,.0f} tokens a second"


def _whole(config: RunConfig, ahead: Ahead, seconds: float, held_out: float) -> float | None:
    if ahead.seconds is not None:
        return ahead.seconds
    if ahead.steps is None:
        return None
    return ahead.steps * seconds + evaluations_of(config, ahead) * held_out


def evaluations_of(config: RunConfig, ahead: Ahead) -> float:
    """How often the held-out loss is taken; the end is always evaluated."""
    return times(config.train.evaluate_every, ahead, config)


def times(every: Duration, ahead: Ahead, config: RunConfig) -> float:
    """How often something happens that `every` is between, the end among it."""
    unit, amount = every.unit, every.amount
    if unit == "%":
        return 100.0 / amount
    whole = ahead.totals.get(unit)
    stop = config.train.stop_after
    whole = stop.amount if whole is None and stop.unit == unit else whole
    return 1.0 if whole is None else max(1.0, -(-whole // amount))
