"""Length of a run in time, what its end takes and what is left of it; and the banner that tells."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.prepare.store_plan import named
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.evaluator import Evaluator
from toque.evaluation.text_samples import Sampler
from toque.models.flops import parameter_counts
from toque.reporter import Reporter, clock_text, millions
from toque.runs.time_left import TimeLeft
from toque.training.autotune import Fitted
from toque.training.bottlenecks import few_updates
from toque.training.micro_batch import least_of
from toque.training.optimisations import choose_attention
from toque.training.runtime import Runtime
from toque.training.stopping import CommandClock, TimeLimit
from toque.units import Cursor, Duration
from toque.version import __version__
from toque.workflows.asking import target_limit

_FEW_TOKENS, _MORE_TOKENS = 2, 10
_SHORT_SECONDS: Final = 2.0
_BATCHES: Final = 2  # batches of held-out examples that an evaluation is timed by
_COPIES: Final = 5
"""Copies of the weights that are written at the end: a checkpoint with AdamW's state is three, the
best model one, the finished model one."""
_PROBE_BYTES: Final = 8 << 20
_PROBING: Final = 0.01
"""Share of a limited time that may go into repeating one measurement; a guess."""
_MOST_TEXTS: Final = 0.25
"""Share of a limited time that is kept for the texts at the end; a guess."""


@dataclass(frozen=True)
class AfterTraining:
    """Seconds that the end of a run is expected to take."""

    evaluating: float  # seconds of one held-out loss
    ending: float
    """Seconds of the final scores, the last checkpoint and the finished model."""
    texts: float = 0.0  # seconds of the texts of one evaluation
    final_texts: float = 0.0  # seconds of the texts at the end
    each_text: float = 0.0  # seconds of one text

    @property
    def seconds(self) -> float:
        """Seconds from the last update until the command ends."""
        return 2 * self.evaluating + self.texts + self.final_texts + self.ending

    def within(self, seconds: float) -> AfterTraining:
        """The same with fewer texts, if they would take longer than this."""
        share = min(1.0, max(0.0, seconds) / max(self.texts + self.final_texts, 1e-9))
        return replace(self, texts=share * self.texts, final_texts=share * self.final_texts)


@dataclass(frozen=True)
class Length:
    """Length of a run's training, and the limit that ends it."""

    stop_after: Duration
    after: AfterTraining | None = None  # seconds after training; None where nobody asked for them
    limit: TimeLimit | None = None
    """Ends training where the setting means the whole command; on the first rank alone."""
    line: str = ""  # expectation in words; empty where the setting means training alone


def length_of(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    scored: Sampler,
    clock: CommandClock,
    reporter: Reporter,
    *,
    over: bool,
) -> Length:
    """The length that train.stop_after asks for, the same on every rank; `scored` writes texts.

    The end is measured where `reporter` is heard or time is limited, unless the run is `over`. A
    ConfigError where nothing would be left for training.
    """
    asked, ranks = config.train.stop_after, evaluator.ranks
    whole = config.train.command_seconds
    if whole is None and (over or not ranks.broadcast(reporter.heard)):
        return Length(asked)
    # As often on every rank: they add up what each computes.
    most = math.inf if ranks.is_distributed else probing_seconds(config, clock)
    after = AfterTraining(0.0, 0.0)
    if not over:
        with reporter.working("finding out how long evaluating and writing take"):
            after = _measured_end(config, store, evaluator, scored, most_seconds=most)
    spent, after = ranks.broadcast((clock.seconds(), after))
    if whole is None:
        return Length(asked, after)
    after = after.within(_MOST_TEXTS * (whole - spent))
    clock = replace(clock, began=clock.now() - spent)
    limit = TimeLimit(
        whole,
        clock,
        after.evaluating,
        after.ending,
        after.texts,
        after.final_texts,
        after.each_text,
        from_scratch=config.model.start_from == "scratch",
        length=None if asked.total else asked,
    )
    left = ranks.broadcast(limit.stop_after)
    told = (
        f"{clock_text(spent)} of it went into reading and measuring, and the last scores and texts "
        f"will take about {clock_text(after.seconds)}"
    )
    if left.amount <= 0 and not over:
        limits = {"train.stop_after": asked, "train.time_limit": config.train.time_limit}
        named = [name for name, limit in limits.items() if limit and limit.seconds == whole]
        advice = "Give more time"
        if spent < whole:
            advice += ", or evaluate less (evaluation.max_examples, evaluation.generate)"
        raise ConfigError(
            f'{named[-1]} is "{limits[named[-1]]}": {told}. Nothing is left for training. {advice}.'
        )
    limit.stop_after = left
    at_most = "" if asked.total else f", or {clock_text(whole)} of the whole command"
    return Length(
        left if asked.total else asked,
        after,
        limit if ranks.is_main else None,
        f"{at_most}: {told}; about {clock_text(60 * left.amount)} are left to train and evaluate",
    )


def probing_seconds(config: RunConfig, clock: CommandClock) -> float:
    """Seconds after which a measurement is not repeated; infinity without a limit on the time."""
    whole = config.train.command_seconds
    left = math.inf if whole is None else whole - clock.seconds()
    return _PROBING * max(0.0, left)


def time_left_of(
    stream: BatchStream,
    length: Length,
    evaluate_every: Duration,
    update_seconds: float | None,
    *,
    n_texts: int,
) -> TimeLeft | None:
    """The run's time as it can be foreseen, `n_texts` at its end; None where nothing was timed."""
    if length.after is None or update_seconds is None:
        return None
    stop = length.stop_after
    totals = stream.totals(stop)
    training = totals.get("steps", 0.0) * update_seconds
    if stop.seconds is not None:
        training = stop.seconds
        totals = {"steps": training / update_seconds} | totals
    totals = {"minutes": training / 60} | totals
    after = length.after
    return TimeLeft(
        stop,
        evaluate_every,
        expected=totals,
        training_seconds=training,
        evaluation_seconds=after.evaluating + after.texts,
        final_seconds=after.evaluating + after.final_texts + after.ending,
        n_texts=n_texts,
        counts_evaluations=length.limit is not None and length.limit.length is None,
    )


def _measured_end(
    config: RunConfig,
    store: TokenStore,
    evaluator: Evaluator,
    scored: Sampler,
    *,
    most_seconds: float,
) -> AfterTraining:
    """Time a little of everything that comes after training; no number of the run changes.

    A measurement that took `most_seconds` is not repeated.
    """
    heldout, model = evaluator.heldout, evaluator.model
    rows = heldout.at_once.rows if heldout.at_once else heldout.rows_per_batch
    few = _BATCHES * rows * heldout.share[1]
    weights = None if heldout.weights is None else heldout.weights[:few]
    part = replace(heldout, rows=heldout.rows[:few], weights=weights)

    def timed() -> float:
        began = time.perf_counter()
        part(model)
        return time.perf_counter() - began

    seconds = least_of(timed, budget_seconds=0.0, most_seconds=most_seconds)
    evaluating = seconds * len(heldout.rows) / max(1, len(part.rows))
    tasks = 1 if config.data.tasks == ("write",) else 2  # each task's share is evaluated once more
    limit = target_limit(config, store.manifest)
    writing, looking = (
        texts_seconds(evaluator, sampler, limit, most_seconds=most_seconds)
        for sampler in (scored, evaluator.sampler)
    )
    n_bytes = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    try:
        began = time.perf_counter()
        with tempfile.TemporaryFile(dir=config.run_dir) as file:
            file.write(bytes(_PROBE_BYTES))
            file.flush()
            os.fsync(file.fileno())
        saving = _COPIES * n_bytes * (time.perf_counter() - began) / _PROBE_BYTES
    except OSError:  # the disk refuses
        saving = 0.0
    n_texts = len(scored.prompts) + len(evaluator.sampler.prompts)
    return AfterTraining(
        evaluating,
        tasks * evaluating + saving,  # the loss of each example by itself is one, too
        texts=looking,
        final_texts=writing,
        each_text=(writing + looking) / max(1, n_texts),
    )


def texts_seconds(
    evaluator: Evaluator, sampler: Sampler, limit: int, *, most_seconds: float = math.inf
) -> float:
    """Estimate the seconds until every text of a sampler has `limit` tokens.

    A measurement that took `most_seconds` is not repeated.
    """
    if not sampler.prompts:
        return 0.0
    ranks = evaluator.ranks
    ids = [prompt.ids for prompt in sampler.prompts[ranks.rank :: ranks.world_size]]
    with evaluator.sharing.whole() as model:  # together, also where a rank has no text

        def timed(tokens: int) -> float:
            started = time.perf_counter()
            sampler.written(model, ids, tokens)
            return time.perf_counter() - started

        return seconds_of_texts(timed, limit, most_seconds=most_seconds) if ids else 0.0


def seconds_of_texts(
    timed: Callable[[int], float], most: int, *, most_seconds: float = math.inf
) -> float:
    """Seconds of texts of `most` tokens: two short lengths tell reading prompts from writing.

    A measurement that took `most_seconds` is not repeated.
    """
    short = min(_SHORT_SECONDS, most_seconds)
    few = least_of(lambda: timed(_FEW_TOKENS), budget_seconds=short, most_seconds=most_seconds)
    if few / _FEW_TOKENS * most < _SHORT_SECONDS or most <= _MORE_TOKENS:
        return few / _FEW_TOKENS * most
    more = least_of(lambda: timed(_MORE_TOKENS), at_least=1, budget_seconds=short)
    # Disturbed, more tokens may seem to take less than few: then one takes as much as can be.
    each = (more - few) / (_MORE_TOKENS - _FEW_TOKENS) if more > few else more / _MORE_TOKENS
    return few + each * (most - _FEW_TOKENS)


class Banner(NamedTuple):
    """Lines that a session begins with."""

    short: str  # for the screen: what is trained, on what, how long and where
    full: str  # for the log


def banner(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    strategy: str,
    fitted: Fitted,
    length: Length,
) -> Banner:
    """The lines that a session begins with."""
    counts, shape = parameter_counts(model), stream.layout.shape
    splits, tokens = store.manifest.splits, store.manifest.tokens
    rows = f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"
    n_rows, ranks, resources = stream.at(Cursor()).batch.n_rows, runtime.ranks, fitted.resources
    attention = choose_attention(model, runtime)
    sharing = ""
    if ranks.is_distributed:
        library = "nccl" if runtime.device.type == "cuda" else "gloo"
        words = f"{ranks.world_size} ranks over {library} share each update by {strategy}, about "
        sharing = f"{words}{n_rows} of its rows each"
    of_model = (
        f"{config.model.family} from {config.model.start_from}, {millions(counts.total)} "
        f"parameters ({millions(counts.non_embedding)} without embeddings)"
    )
    if config.adapter is not None:
        share = counts.trainable / (counts.total - counts.trainable)
        of_model += (
            f", {config.adapter.kind} adapter of {counts.trainable:,} parameters ({share:.2%}, "
            f"{counts.trainable * 4 / 1e6:,.1f} MB)"
        )
    examples = (
        f"{splits.train:,} examples to train on, {splits.validation:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens"
    )
    dropped = _dropped(store)
    # A batch in tokens is as many whole rows as it holds, which may be far fewer tokens.
    asked = _stages(stream)[0].update_rows
    whole = "" if asked is None else f": {asked:,} row{'s' * (asked > 1)} of {rows}"
    n = math.ceil(n_rows / resources.micro_batch_rows)
    at_once = f"{n} micro-batch{'es' * (n > 1)} in the first update"
    words, *warning = _length(config, stream, length).splitlines()
    compiled = "compiled" if resources.compile else "not compiled"
    cuda = runtime.device.type == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"{torch.get_num_threads()} threads"
    uploads = config.checkpoint.upload or "none"
    pairs = [
        ("model", of_model),
        ("data", f"{examples}; rows of {rows} tokens"),
        ("dropped", dropped),
        *(("", line) for line in _drawn(config, store, stream)),
        ("length", words),
        *(("warning", line) for line in warning),
        *([("ranks", sharing)] if sharing else []),
        ("batch", f"{config.train.batch} an update{whole}, over all micro-batches and ranks"),
        ("accumulation", f"{at_once}; {fitted.line}"),
        ("precision", f"{runtime.precision} on {runtime.device}"),
        ("attention", ", ".join(filter(None, (attention.name, attention.blocks)))),
        ("compile", compiled),
        ("uploads", uploads),
        ("run folder", config.run_dir),
    ]
    of_batch = [f"{config.train.batch} per update{whole}", f"{at_once}", runtime.precision]
    on_screen = [
        ("data", f"{_sources(config)}: {examples}; {dropped}"),
        ("length", words),
        *(("warning", line) for line in warning),
        *([("ranks", sharing)] if sharing else []),
        ("batch", ", ".join([*of_batch, compiled])),
        ("run folder", f"{config.run_dir}, on {runtime.device} ({device}); uploads: {uploads}"),
    ]
    title = f"toque {__version__}"
    return Banner(_as_lines(f"{title}: {of_model}", on_screen), _as_lines(title, pairs))


def _as_lines(title: str, pairs: Sequence[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:14}{text}" for name, text in pairs)])


def _sources(config: RunConfig) -> str:
    """The sources that are trained on; of a store without any, its folder."""
    paths = [source.path for source in config.data.sources]
    return named(paths) if paths else config.data.store


def _dropped(store: TokenStore) -> str:
    """Number of records that preparing dropped, with the most frequent reason."""
    dropped, read = store.manifest.dropped, store.manifest.records.read
    n = sum(dropped.values())
    if not n:
        return "no record dropped"
    reason = max(dropped, key=lambda each: dropped[each])
    why = f"{reason}: {dropped[reason]:,}"
    return (
        f"{n:,} of {read:,} records dropped ({'' if dropped[reason] == n else 'most often '}{why})"
    )


def _stages(stream: BatchStream) -> Sequence[EpochPlan]:
    """Plans that follow each other; of a run without a curriculum, one."""
    return stream.plan.stages if isinstance(stream.plan, StagedPlan) else [stream.plan]


def _drawn(config: RunConfig, store: TokenStore, stream: BatchStream) -> list[str]:
    """Lines on the mixture, the stages and the augmentation of the examples."""
    plan, rows, mixture = stream.plan, store.rows("train"), _stages(stream)[0].mixture
    lines = [mixture.in_words(config.data)] if mixture is not None else []
    if config.curriculum is not None and isinstance(plan, StagedPlan):
        lines += plan.in_words(config.curriculum)
    encoder = stream.layout.shape.source > 0
    if config.augmentation is not None:
        rewriting = Rewriting(config.augmentation, store, rows, encoder=encoder)
        lines.append(rewriting.in_words(rows, seed=config.seed))
    return lines


def _length(config: RunConfig, stream: BatchStream, length: Length) -> str:
    steps = stream.totals(config.train.stop_after).get("steps")
    stop = config.train.stop_after
    words = f"until {stop.in_words()}"
    if not steps or stop.unit == "steps":
        return words + length.line
    few = few_updates(steps)
    return f"{words}, about {steps:,.0f} steps{length.line}" + (f"\n{few}" if few else "")
