"""Evaluation of a run or a model on held-out data, and of texts from anywhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from toque.config import RunConfig, load_config
from toque.cooking.prompts import ASKS_FOR
from toque.cooking.recipe_scores import hint
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
)
from toque.reporter import SILENT, Reporter, counting
from toque.runs.run_files import refuse_users_folder
from toque.runs.run_record import EVALUATION
from toque.storage.atomic import atomic_write, disk_faults
from toque.storage.no_follow import refuse_links
from toque.workflows.configure import Configured, configure
from toque.workflows.results import Model, existing_folder
from toque.workflows.saved_steps import config_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from toque.data.store.token_store import TokenStore
    from toque.evaluation.heldout_loss import HeldOut
    from toque.evaluation.memorisation import Memorisation
    from toque.evaluation.task_scores import TaskScores
    from toque.evaluation.text_samples import Sample
    from toque.evaluation.text_scores import Scores

_DIGITS: Final = 6  # digits after the point in evaluation.json
_LISTS: Final = "Give lists of one length, of a text or more."
_SHOWN_SLICES: Final = ("recipe_score", "rougeL", "bleu")
"""Scores of the printed table of slices; evaluation.json holds all."""


@dataclass(frozen=True)
class Evaluation:
    """The content of evaluation.json."""

    step: int | None
    heldout: Mapping[str, float]
    texts: Scores
    tasks: Sequence[TaskScores] = ()
    examples: TextTable = field(default_factory=lambda: TextTable((), {}))
    """The loss of each held-out example."""
    memorisation: Memorisation | None = None
    """Runs that the texts share with training examples."""
    texts_left_out: int = 0  # texts that the run's time limit had no time for

    @property
    def of_examples(self) -> dict[str, float]:
        """The scores of the held-out examples by name, those of tasks included."""
        of_tasks = {
            f"{scores.task}_{name}": value
            for scores in self.tasks
            for name, value in scores.measured().items()
        }
        return {**self.heldout, **of_tasks}

    @property
    def metrics(self) -> dict[str, float]:
        """Every score by its name, without intervals."""
        return {**self.of_examples, **self.texts.metrics}

    def to_json(self) -> str:
        """The content of evaluation.json; null for what is no finite number, as in all JSON."""
        overall = self.texts.overall
        record = {
            "step": self.step,
            "heldout": dict(self.heldout),
            "tasks": {scores.task: scores.record() for scores in self.tasks},
            "generated": {
                "texts": self.texts.n_texts,
                **({"texts_left_out": self.texts_left_out} if self.texts_left_out else {}),
                **{name: round(e.value, _DIGITS) for name, e in overall.items()},
            },
            "intervals": {name: _interval(e) for name, e in overall.items() if e.low is not None},
            "applies_to": {name: e.n for name, e in overall.items()},
            "slices": {
                slicing: {
                    label: {"texts": self.texts.sizes[slicing][label]}
                    | {name: [round(e.value, _DIGITS), *_interval(e)] for name, e in found.items()}
                    for label, found in labels.items()
                }
                for slicing, labels in self.texts.slices.items()
            },
            "memorisation": None if self.memorisation is None else self.memorisation.record(),
            "failed": dict(self.texts.failed),
            "method": {
                "intervals": f"95 %, percentile bootstrap over texts, {RESAMPLES} resamples",
                "seed": SEED,
                "bleu": "nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp",
                "rouge": "F1 of each text, as rouge-score computes it, without stemming",
            },
        }
        return msgspec.json.format(msgspec.json.encode(record), indent=1).decode()

    def __str__(self) -> str:
        """The table for people."""
        tokens = self.heldout["target_tokens"]
        loss, perplexity = self.heldout["loss"], self.heldout["perplexity"]
        lines = [f"held-out loss {loss:.4f} nats a token, perplexity {perplexity:.2f}"]
        if "bits_per_byte" in self.heldout:
            lines[0] += f", {self.heldout['bits_per_byte']:.3f} bits a byte"
        else:
            lines[0] += " (bits a byte are unknown: the targets are pieces of texts)"
        lines.append(f"  over {tokens:,.0f} target tokens")
        for scores in self.tasks:
            lines += scores.lines()
        if self.texts.n_texts:
            lines.append(str(self.texts))
        if self.memorisation is not None and (said := str(self.memorisation)):
            lines.append(said)
        if (score := self.texts.overall.get("recipe_score")) and (advice := hint(score.value)):
            lines.append(advice)
        shown = [name for name in _SHOWN_SLICES if name in self.texts.overall]
        for slicing, labels in self.texts.slices.items():
            if len(labels) < 2 or not shown:
                continue
            lines.append(f"{'by ' + slicing:26}{'texts':>6}" + "".join(f"{n:>14}" for n in shown))
            for label, found in labels.items():
                cells = [f"{found[n].value:14.3f}" if n in found else f"{'-':>14}" for n in shown]
                lines.append(f"  {label:24}{self.texts.sizes[slicing][label]:6}" + "".join(cells))
        lines += [f"{name} failed: {error}" for name, error in self.texts.failed.items()]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Write the sums of each text, then evaluation.json, or raise a CheckpointError."""
        texts = TextTable(self.texts.keys, self.texts.each)
        each = to_json(examples=self.examples, texts=texts, step=self.step)
        with disk_faults(folder, "writing the scores", setting="run_dir", error=CheckpointError):
            atomic_write(folder / FILE, each.encode())
            atomic_write(folder / EVALUATION, self.to_json().encode())


def _interval(e: Estimate) -> list[float | None]:
    return [None if bound is None else round(bound, _DIGITS) for bound in (e.low, e.high)]


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
        run_or_model: what is scored.
        config: whose data to evaluate on; a run's own when None.
        trust_code: import the metrics that the run's own configuration names, as its maker wished.
        reporter: hears of progress.

    Returns:
        Its `metrics` are every score by name; as a text it is a table.

    Raises:
        ConfigError: no run folder and no configuration, or code that nobody vouches for.
        DataError: no prepared store, or one of another tokenizer.
    """
    folder = existing_folder(run_or_model)
    config_file = config_of(folder)
    if config_file.exists():
        refuse_links(config_file.parent, CheckpointError)
        refuse_users_folder(config_file.parent, writes=(FILE, EVALUATION))
    if config is None and not config_file.exists():
        raise ConfigError(
            f"{folder} is not a run folder, so it does not say what to evaluate on. Name a "
            "configuration after it: toque evaluate MODEL my.yaml, or evaluate(model, config)."
        )
    settings = configure(
        load_config(config_file, trust_code=False).config if config is None else config
    )
    if trust_code:
        settings = settings.with_foreign_code({})
    result = _score_model(folder, settings, reporter)
    if config_file.exists() and folder.is_dir():
        result.write(folder)
    elif config_file.exists():
        reporter.notice(f"note: the run has removed {folder}, so the scores are not written there")
    return result


def _score_model(folder: Path, config: RunConfig, reporter: Reporter) -> Evaluation:
    """Score the model of a run or model folder on the data of `config`."""
    with reporter.working("loading torch"):
        from toque.evaluation.text_samples import held_out_prompts
        from toque.evaluation.text_scores import ScoresByTask
        from toque.models.families import family_of
        from toque.models.lora.frozen import PLAIN, computing, format_of
        from toque.training.runtime import Runtime, torch_as_before
        from toque.workflows.build import build_heldout, build_sampler, build_stream
        from toque.workflows.inference.open_model import open_model
        from toque.workflows.prepared_store import open_store

    # A metric that cannot be imported is refused now.
    ScoresByTask.from_settings(config.evaluation, config.data, config.foreign_code)
    with reporter.working(f"reading {folder} and {config.data.store}"):
        opened = open_model(folder, device="auto", reporter=reporter)
        # A run's own sources were compared when it began, and may have changed since.
        held = opened.config
        fields = ("sources", "validation")
        own = held is not None and all(
            getattr(held.data, name) == getattr(config.data, name) for name in fields
        )
        store = open_store(config, sources=not own)
    opened.check_tokenizer(store)
    model, precision = opened.model, config.train.precision
    fp16_is_safe = precision == "fp16" and family_of(model.config).fp16_is_safe
    with torch_as_before():
        runtime = Runtime.detect(precision=precision, fp16_is_safe=fp16_is_safe)
        layout = build_stream(config, store, model).layout
        heldout = build_heldout(config, store, layout, runtime, reporter=reporter)
        if format_of(model) != PLAIN:  # it computes in no other precision, whatever is configured
            heldout = replace(heldout, autocast=partial(computing, model))
        with counting(reporter, "evaluating", "held-out examples") as count:
            losses = heldout(model, count)
        prompts = held_out_prompts(store, config.evaluation.generate, config.data)
        with counting(reporter, "writing", "texts") as count:
            samples = build_sampler(config, store, prompts, reporter)(model, count)
        return evaluation_of(
            config, store, model, heldout, losses, samples, step=opened.step, reporter=reporter
        )


def evaluation_of(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    heldout: HeldOut,
    losses: Mapping[str, float],
    samples: Sequence[Sample],
    *,
    step: int | None,
    reporter: Reporter = SILENT,
) -> Evaluation:
    """Score the texts and the tasks, and put them beside the held-out losses of the same model."""
    from toque.evaluation.memorisation import measure_memorisation
    from toque.evaluation.task_scores import score_tasks
    from toque.evaluation.text_scores import ScoresByTask

    alone, held_out = heldout.alone(), dict(losses)  # whatever the ranks
    if heldout.n_bytes > 0:
        held_out["target_bytes"] = heldout.n_bytes
    scores = ScoresByTask.from_settings(config.evaluation, config.data, config.foreign_code)
    with reporter.working(f"scoring {len(samples):,} texts"):
        scores.add(samples)
        of_texts = scores.result()
    with counting(reporter, "comparing texts with", "training examples") as count:
        memorisation = measure_memorisation(samples, store, count)
    examples = _each_example(store, model, alone, reporter)
    at_most = config.evaluation.max_examples
    of_tasks = score_tasks(model, alone, store, config.data, at_most=at_most, reporter=reporter)
    return Evaluation(step, held_out, of_texts, of_tasks, examples, memorisation)


def _each_example(
    store: TokenStore, model: PreTrainedModel, heldout: HeldOut, reporter: Reporter
) -> TextTable:
    """The loss of each held-out example, for comparison with those of another run."""
    with counting(reporter, "evaluating", "examples one by one") as count:
        rows, nats, weights = zip(*heldout.by_example(model, count), strict=True)
    codec = store.codec()
    targets = [codec.decode(store.learnt_ids(row)) for row in rows]
    prompts = [codec.decode(store.prompt(row)) for row in rows]
    keys = [key_of_text(*both) for both in zip(prompts, targets, strict=True)]
    n_bytes = [len(target.encode("utf-8", "replace")) for target in targets]
    tokens = store.learnt_lengths[[*rows]].astype(float)
    size = np.array(n_bytes, float) if heldout.n_bytes > 0 else np.zeros(len(rows))
    return losses_table(keys, np.array(nats), tokens, size, np.array(weights))


def score(
    texts: Iterable[str],
    references: Iterable[str | None] | None = None,
    *,
    prompts: Iterable[str] | None = None,
) -> Scores:
    """Score texts, whoever wrote them, as `evaluate` scores those of a model.

    Args:
        texts: what was written.
        references: for each text the one it should be like, None where there is none; ROUGE and
            BLEU need it.
        prompts: for each text what it answers; recipes are scored where one was asked for. Without
            them every text is taken for a recipe, of ingredients that nobody named.

    Returns:
        Its `metrics` are every score by its name in evaluation.json; as a text it is a table.

    Raises:
        ConfigError: no text, or not one reference and one prompt for each.
    """
    given = {"texts": texts, "references": references, "prompts": prompts}
    columns = {
        name: _texts_in(name, column)
        for name, column in given.items()
        if column is not None or name == "texts"
    }
    n = len(columns["texts"])
    for name, column in columns.items():
        if not 0 < len(column) == n:
            found = f"a list of {len(column):,}"
            raise ConfigError(f"{argument(name)} is {found}. {_LISTS}")
    from toque.evaluation.text_samples import Prompt, scored
    from toque.evaluation.text_scores import TextScores

    scores = TextScores()
    held, asked = columns.get("references", [None] * n), columns.get("prompts", [ASKS_FOR] * n)
    each = zip(columns["texts"], asked, held, strict=True)
    scores.add(scored(Prompt((), p, reference), text) for text, p, reference in each)
    return scores.result()


def _texts_in(name: str, column: object) -> list[Any]:
    """The texts of an iterable; among references may be None."""
    if isinstance(column, str) or not isinstance(column, Iterable):
        found = "one text" if isinstance(column, str) else f"a {type(column).__name__}"
        raise ConfigError(f"{argument(name)} is {found}. {_LISTS}")
    texts = list(column)
    for number, text in enumerate(texts, start=1):
        if not isinstance(text, str) and (text is not None or name != "references"):
            raise ConfigError(
                f"{argument(name)}, number {number:,}, is {str(text)[:60]!r}, a "
                f"{type(text).__name__} and no text. {_LISTS}"
            )
    return texts
