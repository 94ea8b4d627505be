"""Evaluation of a run or a model on held-out data, and scores of any texts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from toque.config import RunConfig, load_config
from toque.cooking.prompts import ASKS_FOR
from toque.cooking.recipe_scores import advice_on_score
from toque.errors import CheckpointError, ConfigError, argument
from toque.evaluation.bootstrap import (
    FILE,
    RESAMPLES,
    SEED,
    Estimate,
    TextTable,
    key_of_text,
    losses_table,
    to_json,
    wilson_interval,
)
from toque.reporter import SILENT, Reporter, counting
from toque.runs.run_files import refuse_users_folder
from toque.runs.run_record import ACCURACY, BITS, EVALUATION
from toque.sources.preference_pairs import PREFERRED
from toque.storage.atomic import atomic_write, disk_faults
from toque.storage.no_follow import refuse_links
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, resolve_model
from toque.workflows.saved_steps import config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.data.store.token_store import TokenStore
    from toque.evaluation.heldout_loss import HeldOut
    from toque.evaluation.memorisation import Memorisation
    from toque.evaluation.source_losses import SourceLoss
    from toque.evaluation.task_scores import TaskScores
    from toque.evaluation.text_samples import Sample
    from toque.evaluation.text_scores import Scores

_DIGITS = 6
"""Number of decimal places in evaluation.json."""
_LISTS = "Give lists of equal length with at least one text."
_SHOWN_SLICES = ("cookable", "recipe_score", "rougeL", "bleu")
"""Scores in the printed table of slices, which shows the first three that exist."""


@dataclass(frozen=True)
class Evaluation:
    """The content of evaluation.json."""

    step: int | None
    heldout: Mapping[str, float]
    texts: Scores
    tasks: Sequence[TaskScores] = ()
    examples: TextTable = field(default_factory=lambda: TextTable((), {}))
    """Losses of the held-out examples."""
    memorisation: Memorisation | None = None
    """Word sequences that occur both in the texts and in training examples."""
    sources: Sequence[SourceLoss] = ()
    """Losses per source before and after training. Empty for a single source."""
    texts_left_out: int = 0
    """Number of texts that were not generated because the run reached its time limit."""

    @property
    def example_metrics(self) -> dict[str, float]:
        """Scores of the held-out examples and tasks by name."""
        task_metrics = {
            f"{scores.task}_{name}": value
            for scores in self.tasks
            for name, value in scores.metrics().items()
        }
        return {**self.heldout, **task_metrics}

    @property
    def metrics(self) -> dict[str, float]:
        """All scores by name, without intervals."""
        return {**self.example_metrics, **self.texts.metrics}

    @property
    def accuracy(self) -> Estimate | None:
        """Share of held-out pairs with a preferred chosen answer, with its Wilson interval.

        None for a run without pairs.
        """
        share = self.heldout.get(ACCURACY)
        if share is None:
            return None
        n = int(self.heldout["pairs"])
        return Estimate(share, *wilson_interval(share, n), n)

    @property
    def advice(self) -> str:
        """Advice if the recipes among the texts are poor, otherwise ""."""
        score = self.texts.overall.get("recipe_score")
        return "" if score is None else advice_on_score(score.value)

    def to_json(self) -> str:
        """Return the content of evaluation.json. Numbers that are not finite become null."""
        overall = self.texts.overall
        memorisation = self.memorisation
        intervals = {
            name: _rounded_interval(estimate)
            for name, estimate in overall.items()
            if estimate.low is not None
        }
        applies_to = {name: estimate.n for name, estimate in overall.items()}
        if (accuracy := self.accuracy) is not None:
            intervals[ACCURACY] = _rounded_interval(accuracy)
            applies_to[ACCURACY] = accuracy.n
        record = {
            "step": self.step,
            "heldout": dict(self.heldout),
            "sources": {loss.source: loss.record() for loss in self.sources},
            "tasks": {scores.task: scores.record() for scores in self.tasks},
            "generated": self._generated_record(),
            "intervals": intervals,
            "applies_to": applies_to,
            "slices": self._slices_record(),
            "memorisation": None if memorisation is None else memorisation.record(),
            "failed": dict(self.texts.failed),
            "method": {
                "intervals": f"95 %, percentile bootstrap over texts, {RESAMPLES} resamples",
                ACCURACY: "95 %, Wilson score interval over held-out pairs",
                "seed": SEED,
                "bleu": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp",
                "rouge": "F1 of each text, as rouge-score computes it, without stemming",
            },
        }
        return msgspec.json.format(msgspec.json.encode(record), indent=1).decode()

    def _generated_record(self) -> dict[str, float]:
        """Return the number of generated texts and their scores."""
        record: dict[str, float] = {"texts": self.texts.n_texts}
        if self.texts_left_out:
            record["texts_left_out"] = self.texts_left_out
        for name, estimate in self.texts.overall.items():
            record[name] = round(estimate.value, _DIGITS)
        return record

    def _slices_record(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return the scores of each slice: [value, low, high] by slicing, label and name."""
        record: dict[str, dict[str, dict[str, Any]]] = {}
        for slicing, labels in self.texts.slices.items():
            record[slicing] = {}
            for label, estimates in labels.items():
                scores: dict[str, Any] = {"texts": self.texts.sizes[slicing][label]}
                for name, estimate in estimates.items():
                    value = round(estimate.value, _DIGITS)
                    scores[name] = [value, *_rounded_interval(estimate)]
                record[slicing][label] = scores
        return record

    def __str__(self) -> str:
        """Return a table of the scores."""
        lines = [
            self._loss_line(),
            f"  over {self.heldout['target_tokens']:,.0f} target tokens",
        ]
        lines += [f"  {loss}" for loss in self.sources]
        for scores in self.tasks:
            lines += scores.lines()
        if self.texts.n_texts:
            lines.append(str(self.texts))
        if self.memorisation is not None and (shared_text := str(self.memorisation)):
            lines.append(shared_text)
        if self.advice:
            lines.append(self.advice)
        lines += self._slice_lines()
        for name, error in self.texts.failed.items():
            lines.append(f"{name} failed: {error}")
        return "\n".join(lines)

    def _loss_line(self) -> str:
        loss = self.heldout["loss"]
        if (accuracy := self.accuracy) is not None:
            return (
                f"held-out loss {loss:.4f} per pair, {describe_accuracy(accuracy)}, "
                f"{self.heldout[BITS]:.3f} bits per byte of the chosen answers"
            )
        perplexity = self.heldout["perplexity"]
        line = f"held-out loss {loss:.4f} nats per token, perplexity {perplexity:.2f}"
        if BITS not in self.heldout:
            reason = "the targets are parts of texts"
            return f"{line} (bits per byte are unknown because {reason})"
        return f"{line}, {self.heldout[BITS]:.3f} bits per byte"

    def _slice_lines(self) -> Iterator[str]:
        """Yield the lines of the tables of slices."""
        names = [name for name in _SHOWN_SLICES if name in self.texts.overall][:3]
        for slicing, labels in self.texts.slices.items():
            if len(labels) < 2 or not names:
                continue
            headings = "".join(f"{name:>14}" for name in names)
            yield f"{'by ' + slicing:26}{'texts':>6}{headings}"
            for label, estimates in labels.items():
                values = [
                    f"{estimates[name].value:.3f}" if name in estimates else "-"
                    for name in names
                ]
                cells = "".join(f"{value:>14}" for value in values)
                yield f"  {label:24}{self.texts.sizes[slicing][label]:6}{cells}"

    def write(self, folder: Path) -> None:
        """Write the scores of each text, then evaluation.json.

        Raises:
            CheckpointError: The disk is full or fails.
        """
        texts = TextTable(self.texts.keys, self.texts.each)
        by_text = to_json(examples=self.examples, texts=texts, step=self.step)
        with disk_faults(
            folder, "writing the scores", setting="run_dir", error=CheckpointError
        ):
            atomic_write(folder / FILE, by_text.encode())
            atomic_write(folder / EVALUATION, self.to_json().encode())


def describe_accuracy(accuracy: Estimate) -> str:
    """Describe the share of held-out pairs with a preferred chosen answer."""
    return (
        f"the chosen answer preferred in {accuracy.value:.1%} of {accuracy.n:,} pairs (95 % "
        f"interval: {accuracy.low:.1%} to {accuracy.high:.1%})"
    )


def _rounded_interval(estimate: Estimate) -> list[float | None]:
    bounds = (estimate.low, estimate.high)
    return [None if bound is None else round(bound, _DIGITS) for bound in bounds]


def evaluate(
    run_or_model: Model,
    config: Configured | None = None,
    *,
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Score a run, a checkpoint or a model folder on held-out data.

    The scores of a run or a checkpoint are written to evaluation.json in its folder.

    Args:
        run_or_model: The run or model to score.
        config: The configuration of the data. None means the run's own configuration.
        trust_code: Import the metrics that the run's configuration names.
        reporter: Receives the progress.

    Returns:
        The evaluation. Its `metrics` are all scores by name, and its text is a table.

    Raises:
        ConfigError: A model folder needs a configuration, or the configuration names code that you
            did not trust.
        DataError: The store does not exist or has another tokenizer.
    """
    folder = resolve_model(run_or_model)
    config_file = config_of(folder)
    is_run = config_file.exists()
    if is_run:
        refuse_links(config_file.parent, CheckpointError)
        refuse_users_folder(config_file.parent, writes=(FILE, EVALUATION))
    elif config is None:
        raise ConfigError(
            f"{folder} is not a run folder, so it has no data configuration. Add one: toque "
            "evaluate MODEL my.yaml, or evaluate(model, config)."
        )
    if config is None:
        config = load_config(config_file, trust_code=False).config
    settings = configure(config)
    if trust_code:
        settings = settings.with_foreign_code({})

    result = _score_model(folder, settings, reporter)
    if is_run and folder.is_dir():
        result.write(folder)
    elif is_run:
        reporter.notice(
            f"note: the run removed {folder}, so its scores were not written"
        )
    return result


def _score_model(folder: Path, config: RunConfig, reporter: Reporter) -> Evaluation:
    """Score a model on the data of a configuration."""
    with reporter.working("loading torch"):
        from toque.evaluation.source_losses import read_before
        from toque.evaluation.text_samples import held_out_prompts
        from toque.evaluation.text_scores import ScoresByTask
        from toque.training.runtime import restoring_torch
        from toque.workflows.build import build_sampler
        from toque.workflows.inference.open_model import open_model
        from toque.workflows.prepared_store import open_store

    # Build the scores once now, so that a metric that cannot be imported fails immediately.
    ScoresByTask.from_settings(config.evaluation, config.data, config.foreign_code)
    with reporter.working(f"reading {folder} and {config.data.store}"):
        opened = open_model(folder, device="auto", reporter=reporter)
        # The run compared its sources when it began. They may have changed since then.
        is_runs_data = opened.config is not None and _has_same_sources(
            opened.config, config
        )
        store = open_store(config, sources=not is_runs_data)
    opened.check_tokenizer(store)

    model = opened.model
    with restoring_torch():
        heldout = heldout_of_model(config, store, model, reporter)
        with counting(reporter, "evaluating", "held-out examples") as count:
            losses = heldout(model, count)

        prompts = held_out_prompts(store, config.evaluation.generate, config.data)
        with counting(reporter, "generating", "texts") as count:
            sampler = build_sampler(config, store, prompts, reporter)
            samples = [*sampler.generate_samples(model, count).values()]
        return evaluate_samples(
            config,
            store,
            model,
            heldout,
            losses,
            samples,
            step=opened.step,
            before=read_before(config_of(folder).parent) if is_runs_data else {},
            reporter=reporter,
        )


def heldout_of_model(
    config: RunConfig, store: TokenStore, model: PreTrainedModel, reporter: Reporter
) -> HeldOut:
    """Build the held-out loss of a model, with the batches and the precision of its training.

    Call this within `restoring_torch`.
    """
    from toque.models.families import family_of
    from toque.models.lora.frozen import PLAIN, computing, format_of
    from toque.training.runtime import Runtime
    from toque.workflows.build import build_heldout, build_stream

    precision = config.train.precision
    fp16_is_safe = precision == "fp16" and family_of(model.config).fp16_is_safe
    runtime = Runtime.detect(precision=precision, fp16_is_safe=fp16_is_safe)
    layout = build_stream(config, store, model).layout
    heldout = build_heldout(config, store, layout, runtime, reporter=reporter)
    if format_of(model) == PLAIN:
        return heldout
    # A separate adapter needs the precision of its base.
    return replace(heldout, autocast=partial(computing, model))


def _has_same_sources(first: RunConfig, second: RunConfig) -> bool:
    return (first.data.sources, first.data.validation) == (
        second.data.sources,
        second.data.validation,
    )


def evaluate_samples(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    heldout: HeldOut,
    losses: Mapping[str, float],
    samples: Sequence[Sample],
    *,
    step: int | None,
    before: Mapping[str, float],
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Score texts and tasks, and combine the scores with the held-out losses of the model.

    `before` are the losses per source before training.
    """
    from toque.evaluation.memorisation import measure_memorisation
    from toque.evaluation.source_losses import compare_with_before
    from toque.evaluation.task_scores import score_tasks
    from toque.evaluation.text_scores import ScoresByTask

    metrics = dict(losses)
    if heldout.n_bytes > 0:
        metrics["target_bytes"] = heldout.n_bytes
    if ACCURACY in losses:
        metrics["pairs"] = heldout.n_examples // 2
    scores = ScoresByTask.from_settings(
        config.evaluation, config.data, config.foreign_code
    )
    with reporter.working(f"scoring {len(samples):,} texts"):
        scores.add(samples)
        text_scores = scores.result()
    with counting(reporter, "comparing texts with", "training examples") as count:
        memorisation = measure_memorisation(samples, store, count)

    local_heldout = heldout.alone()  # this rank scores the examples of all ranks
    measured = _measure_examples(store, model, local_heldout, reporter)
    task_scores = score_tasks(
        model,
        local_heldout,
        store,
        config.data,
        at_most=config.evaluation.max_examples,
        reporter=reporter,
    )
    encoder = bool(model.config.is_encoder_decoder)
    sources = compare_with_before(store, measured, before, encoder=encoder)
    examples = _tabulate_examples(store, measured, heldout)
    return Evaluation(
        step, metrics, text_scores, task_scores, examples, memorisation, sources
    )


def _measure_examples(
    store: TokenStore, model: PreTrainedModel, heldout: HeldOut, reporter: Reporter
) -> list[tuple[int, float, float]]:
    """Measure the store row, nats and weight of each held-out example.

    Of a preference pair, only the chosen answer is an example.
    """
    with counting(reporter, "evaluating", "examples one by one") as count:
        measured = heldout.by_example(model, count)
    if store.has_pairs:
        is_chosen = store.column(PREFERRED) == 1
        measured = [example for example in measured if is_chosen[example[0]]]
    return measured


def _tabulate_examples(
    store: TokenStore, measured: Sequence[tuple[int, float, float]], heldout: HeldOut
) -> TextTable:
    """Tabulate the losses of held-out examples for `toque compare`."""
    rows, nats, weights = zip(*measured, strict=True)
    codec = store.codec()
    targets = [codec.decode(store.learnt_ids(row)) for row in rows]
    prompts = [codec.decode(store.prompt(row)) for row in rows]
    keys = [key_of_text(*texts) for texts in zip(prompts, targets, strict=True)]
    tokens = store.learnt_lengths[[*rows]].astype(float)
    n_bytes = np.zeros(len(rows))
    if heldout.n_bytes > 0:
        # A model may generate half a surrogate pair, which is not valid UTF-8.
        encoded = [target.encode("utf-8", "replace") for target in targets]
        n_bytes = np.array([len(target) for target in encoded], float)
    return losses_table(keys, np.array(nats), tokens, n_bytes, np.array(weights))


def score(
    texts: Iterable[str],
    references: Iterable[str | None] | None = None,
    *,
    prompts: Iterable[str] | None = None,
) -> Scores:
    """Score texts of any origin with the scores of `evaluate`.

    Args:
        texts: Texts to score.
        references: A reference per text, or None, for ROUGE and BLEU.
        prompts: A prompt per text. A text is scored as a recipe if its prompt asks for one. Without
            prompts, every text is scored as a recipe without requested ingredients.

    Returns:
        The scores. Their `metrics` have the names of evaluation.json, and their text is a table.

    Raises:
        ConfigError: `texts` is empty, or the lists differ in length.
    """
    columns = {"texts": _check_texts("texts", texts)}
    if references is not None:
        columns["references"] = _check_texts("references", references)
    if prompts is not None:
        columns["prompts"] = _check_texts("prompts", prompts)
    n = len(columns["texts"])
    if n == 0:
        raise ConfigError(f"texts is empty. {_LISTS}")
    for name, column in columns.items():
        if len(column) != n:
            raise ConfigError(
                f"texts has length {n:,}, but {name} has length "
                f"{len(column):,}. {_LISTS}"
            )
    from toque.evaluation.text_samples import Prompt, score_text
    from toque.evaluation.text_scores import TextScores

    all_prompts = columns.get("prompts", itertools.repeat(ASKS_FOR, n))
    all_references = columns.get("references", itertools.repeat(None, n))
    rows = zip(columns["texts"], all_prompts, all_references, strict=True)
    scores = TextScores()
    scores.add(
        score_text(Prompt((), prompt, reference), text)
        for text, prompt, reference in rows
    )
    return scores.result()


def _check_texts(name: str, column: object) -> list[Any]:
    """Return the texts of an argument, or raise a ConfigError. A reference may be None."""
    if isinstance(column, str) or not isinstance(column, Iterable):
        kind = "one text" if isinstance(column, str) else f"a {type(column).__name__}"
        raise ConfigError(f"{argument(name)} is {kind}. {_LISTS}")
    texts = list(column)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) and (text is not None or name != "references"):
            raise ConfigError(
                f"{argument(name)}, number {number:,}, must be a text, not "
                f"{str(text)[:60]!r} ({type(text).__name__}). {_LISTS}"
            )
    return texts
