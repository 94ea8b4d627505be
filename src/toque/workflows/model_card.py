"""Model card of a run: README.md of the finished model, with front matter that the hub reads.

The card contains only measured or recorded values. It marks all other facts as not measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml
from huggingface_hub import EvalResult, ModelCardData
from huggingface_hub.repocard import metadata_load
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema import FilesConfig
from toque.cooking.recipe_scores import POOR
from toque.data.store.store_manifest import SourceEntry, StoreManifest
from toque.errors import ConfigError, join_first
from toque.evaluation.bootstrap import Estimate
from toque.models.families import CAUSAL, family_of
from toque.models.loading.hub import hub_name, resolve_folder
from toque.models.loading.provenance import Provenance
from toque.models.lora.layers import ADAPTER
from toque.reporter import clock_text
from toque.runs.history import RunHistory
from toque.runs.run_record import COUNTS
from toque.sources.hub_datasets import HubDataset, recorded_dataset
from toque.training.callbacks import Goal
from toque.units import Progress
from toque.version import __version__
from toque.workflows.evaluate import Evaluation
from toque.workflows.trained_model.prompt_format import describe_prompts

UNMEASURED = "not measured"
_UNMEASURED_RISKS = (
    "other prompts and languages than the data's; whether the data contains personal or harmful "
    "content"
)
_UNMEASURED_COPIES = (
    "Whether the model repeats texts of the data word for word is not measured."
)
_LICENCE_KEYS = ("license", "license_name", "license_link")
_MAX_CARD_BYTES = 1 << 20
"""Maximum size in bytes of a base model's card."""
_MAX_VALUE_LENGTH = 200
"""Maximum length of a value on a base model's card, in characters."""
_JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class FinishedRun:
    """Facts about a run at its end, for the model card."""

    evaluation: Evaluation
    """Scores of the model, with the step of its weights."""
    goal: Goal | None
    """Metric that selected the weights; None for the last weights of the run."""
    progress: Progress
    """Progress of the entire run."""
    history: RunHistory = field(default_factory=RunHistory)

    @property
    def chosen(self) -> str:
        """Reason why these weights are the final ones."""
        return "last of the run" if self.goal is None else str(self.goal)


def resolve_auto_values(config: RunConfig, model: PreTrainedModel) -> RunConfig:
    """Replace `auto` values in a configuration with the model's values."""
    family = family_of(model.config)
    name = "auto" if family == CAUSAL else family.name
    changes: dict[str, Any] = {
        "model": config.model.model_copy(update={"family": name})
    }
    if config.adapter is not None:
        rank = cast("Any", model).peft_config[ADAPTER].r
        changes["adapter"] = config.adapter.model_copy(update={"r": rank})
    return config.model_copy(update=changes)


def model_card(
    config: RunConfig, record: Provenance, manifest: StoreManifest, run: FinishedRun
) -> str:
    """Write README.md of the finished model without its usage section."""
    paths = [source.path for source in config.data.sources]
    if not paths:
        held_out_from = manifest.settings.get("held_out_from", math.inf)
        paths = [
            entry.path for entry in manifest.sources if entry.source < held_out_from
        ]
    sources = join_first(paths) or config.data.store
    card = f"""\
{_write_front_matter(config, manifest, run.evaluation, sources=sources)}
# {Path(config.run_dir).name}

Trained with Toque {__version__} from {config.model.start_from} on {sources}. These are the \
weights of step {run.evaluation.step}, the {run.chosen}. `config.yaml` of the run repeats it.

{describe_prompts(record)}
"""
    sections = {
        "Data": _describe_data(config, manifest),
        "Scores": _describe_scores(run.evaluation, record),
        "Intended use and limits": _describe_limits(
            config, record, manifest, run.evaluation
        ),
        "Training": _training_table(config, run),
        "Cost": _cost_table(run),
    }
    return card + "".join(f"\n## {name}\n\n{text}" for name, text in sections.items())


def _write_front_matter(
    config: RunConfig, manifest: StoreManifest, evaluation: Evaluation, *, sources: str
) -> str:
    """Write the front matter between its lines of dashes. `sources` is the name of the data."""
    facts = _licence_and_languages(config)
    base = hub_name(config.model.start_from)
    is_adapter = config.adapter is not None
    if base is not None:
        facts["base_model_relation"] = "adapter" if is_adapter else "finetune"

    is_encoder_decoder = manifest.family_kind == "encoder-decoder"
    task = "text2text-generation" if is_encoder_decoder else "text-generation"
    tags = ["toque"]
    if config.model.family != "auto":
        tags.append(config.model.family)

    datasets = _list_datasets(manifest)
    names = dict.fromkeys(dataset.name for dataset, _ in datasets)
    data = ModelCardData(
        model_name=" ".join(Path(config.run_dir).name.split()) or "model",
        **facts,
        base_model=base,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag=task,
        datasets=list(names) or None,  # the card leaves None out, but not an empty list
        tags=tags,
    )
    data.eval_results = _list_results(
        evaluation,
        task=task,
        data_name=f"held out of {' '.join(sources.split())}",
        dataset=datasets[0] if len(datasets) == 1 else None,
        fingerprint=manifest.fingerprint[:16],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _list_datasets(manifest: StoreManifest) -> list[tuple[HubDataset, str]]:
    """List the hub's datasets among the sources of a store, each with its commit."""
    recorded = [recorded_dataset(entry.path) for entry in manifest.sources]
    return list(dict.fromkeys(pair for pair in recorded if pair is not None))


def _list_results(
    evaluation: Evaluation,
    *,
    task: str,
    data_name: str,
    dataset: tuple[HubDataset, str] | None,
    fingerprint: str,
) -> list[EvalResult]:
    """Return the finite scores in the hub's format. `dataset` is the only dataset of the data."""
    # The hub requires a type, so data without a dataset on the hub has a general one.
    dataset_facts: dict[str, Any] = {"dataset_type": "held-out"}
    if dataset is not None:
        hub_dataset, commit = dataset
        dataset_facts = {
            "dataset_type": hub_dataset.name,
            "dataset_config": hub_dataset.config,
            "dataset_split": hub_dataset.split,
            "dataset_revision": commit,
        }
    text_scores = {
        name: estimate.value for name, estimate in evaluation.texts.overall.items()
    }
    scores = {**evaluation.example_metrics, **text_scores}
    return [
        EvalResult(
            task_type=task,
            dataset_name=data_name,
            dataset_args={"fingerprint": fingerprint},
            **dataset_facts,
            metric_type=name,
            metric_value=float(f"{value:.6g}"),
        )
        for name, value in scores.items()
        if math.isfinite(value) and name not in COUNTS
    ]


def _licence_and_languages(config: RunConfig) -> dict[str, Any]:
    """Return the licence and languages under the hub's keys, from `model.licence` or the base."""
    base_card = _read_base_card(config.model.start_from)
    if config.model.licence is not None:
        facts: dict[str, Any] = {"license": config.model.licence}
    else:
        keys = [key for key in _LICENCE_KEYS if _is_short_text(base_card.get(key))]
        facts = {key: base_card[key] for key in keys}
    languages = base_card.get("language")
    listed = languages if isinstance(languages, list) else [languages]
    if all(map(_is_short_text, listed)):
        facts["language"] = languages
    return facts


def _read_base_card(start_from: str) -> dict[str, Any]:
    """Read the front matter of a base model's card, or return {} without a readable card."""
    if start_from == "scratch":
        return {}
    # The card is untrusted, and an error in it must never cost a trained model.
    with suppress(ConfigError, OSError, ValueError, RecursionError, yaml.YAMLError):
        card = resolve_folder(start_from) / "README.md"
        if card.is_file() and card.stat().st_size <= _MAX_CARD_BYTES:
            return metadata_load(card) or {}
    return {}


def _is_short_text(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _MAX_VALUE_LENGTH


def _describe_data(config: RunConfig, manifest: StoreManifest) -> str:
    """Return the table of the sources, with the counts of examples and tokens."""
    files_by_source: dict[int, list[SourceEntry]] = {}
    for entry in manifest.sources:
        files_by_source.setdefault(entry.source, []).append(entry)

    configured: dict[int, FilesConfig] = {}
    settings = (*config.data.sources, *config.data.validation)
    # If the numbers differ, the store was prepared from other sources.
    if len(settings) == len(files_by_source):
        configured = dict(enumerate(settings))
    held_out_from = manifest.settings.get("held_out_from", math.inf)
    rows = [
        _describe_source(
            files, configured.get(number), is_held_out=number >= held_out_from
        )
        for number, files in sorted(files_by_source.items())
    ]

    table = _markdown_table(("source", "licence", "files", "records", "examples"), rows)
    dropped = ", ".join(
        f"{reason} {n:,}" for reason, n in manifest.dropped.items() if n
    )
    return table + (
        f"\n{manifest.splits.train:,} examples to train on, {manifest.splits.validation:,} held "
        f"out. Prompts have {manifest.tokens.prompt:,} tokens, targets "
        f"{manifest.tokens.target:,}. Dropped records by reason: {dropped or 'none'}. Fingerprint "
        f"of the prepared data: `{manifest.fingerprint[:16]}`.\n"
    )


def _describe_source(
    files: Sequence[SourceEntry], settings: FilesConfig | None, *, is_held_out: bool
) -> tuple[str, ...]:
    """Return a source's row of the table: its path, licence and counts."""
    path = files[0].path if settings is None else settings.path
    licence = None if settings is None else settings.licence
    if (recorded := recorded_dataset(files[0].path)) is not None:
        dataset, commit = recorded
        path = f"{dataset.address()}, commit {commit}"
    if is_held_out:
        path += " (held out)"
    n_read = sum(file.read for file in files)
    n_examples = sum(file.kept for file in files)
    counts = (f"{n:,}" for n in (len(files), n_read, n_examples))
    return (path, licence or "not recorded", *counts)


def _describe_scores(evaluation: Evaluation, record: Provenance) -> str:
    """Return the table of the scores, with the method of their measurement."""
    texts = evaluation.texts
    rows = [
        (name, f"{value:.4g}", "", "")
        for name, value in evaluation.example_metrics.items()
    ]
    for name, estimate in texts.overall.items():
        interval = _format_interval(estimate)
        rows.append((name, f"{estimate.value:.4g}", interval, f"{estimate.n:,}"))
    headings = ("held-out metric", "value", "95 % interval", "texts")
    table = _markdown_table(headings, rows)
    if not texts.overall:
        return table + "\nNo texts were generated, so their quality is not measured.\n"

    size = record.no_repeat_ngram_size
    rule = f", without repeating a sequence of {size} tokens" if size else ""
    copies = evaluation.memorisation or _UNMEASURED_COPIES
    return table + (
        f"\nThe model generated {texts.n_texts:,} texts for held-out prompts, always with the most "
        f"likely token{rule}. Intervals are percentiles of 1,000 bootstrap resamples of the texts. "
        f"The losses have no intervals.\n\n{copies}\n"
    )


def _format_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return UNMEASURED
    return f"{estimate.low:.4g} to {estimate.high:.4g}"


def _describe_limits(
    config: RunConfig,
    record: Provenance,
    manifest: StoreManifest,
    evaluation: Evaluation,
) -> str:
    """Return the list of the intended use, the licence and the limits."""
    intended = {
        "gaps": "A start for further training. It does not generate texts.",
        "documents": "Continuing texts of the kind it was trained on.",
        "conversations": "Conversations of the kind it was trained on.",
        "pairs": "Answering prompts of the kind it was trained on.",
    }.get(record.form, "Answering the prompts above. Other prompts were not measured.")
    lines = [f"Intended use: {intended}", _describe_licence(config)]

    lengths = []
    for side in ("prompt", "target"):
        limit = manifest.settings.get(f"max_{side}_tokens")
        if isinstance(limit, int):
            lengths.append(f"{side}s of up to {limit:,} tokens")
    if lengths:
        trained_lengths = " and ".join(lengths)
        lines.append(f"Trained on {trained_lengths}. Longer ones were {UNMEASURED}.")

    score = evaluation.texts.overall.get("recipe_score")
    if score is not None and score.value < POOR:
        lines.append(
            f"The texts are still poor: their recipe score is {score.value:.2f} of 1."
        )
    truth = "whether its texts are true or harmless"
    if record.knows_recipes:
        truth = "whether a recipe is correct, safe to cook or to eat, or free of an allergen"
    lines.append(f"Not measured: {truth}; {_UNMEASURED_RISKS}.")
    return "".join(f"- {line}\n" for line in lines)


def _describe_licence(config: RunConfig) -> str:
    """Describe the licence, from `model.licence` or the card of the base."""
    facts = _licence_and_languages(config)
    name = facts.get("license_name", facts.get("license"))
    if name is None:
        return "Licence: unknown. Neither `model.licence` nor the card of its base names one."
    if config.model.licence:
        return f"Licence: {name}."
    return f"Licence: {name}, from the card of its base."


def _training_table(config: RunConfig, run: FinishedRun) -> str:
    """Return the table of the settings that determine the training."""
    start = run.history.start
    optim, adapter = config.optim, config.adapter
    parameters = start.get("parameters") or {}
    learning_rate = f"{optim.peak_lr:g}, {optim.schedule}, warmup {optim.warmup}"
    rows = [
        ("starting point", config.model.start_from),
        ("parameters", _format_known(parameters.get("total"), ",.0f")),
        ("trained parameters", _format_known(parameters.get("trainable"), ",.0f")),
        ("adapter", "none" if adapter is None else f"{adapter.kind}, r {adapter.r}"),
        ("optimizer", f"{optim.name}, weight decay {optim.weight_decay:g}"),
        ("learning rate", learning_rate),
        ("batch", str(config.train.batch)),
        ("length", f"{run.progress.step:,} steps, {run.progress.epoch:.2f} epochs"),
        ("label smoothing", f"{optim.label_smoothing:g}"),
        ("precision", _format_known(start.get("precision"))),
        ("processes", _format_known(start.get("ranks"))),
        ("seed", str(config.seed)),
    ]
    return _markdown_table(("setting", "value"), rows)


def _cost_table(run: FinishedRun) -> str:
    """Return the table of the run's time, FLOPs and energy."""
    history = run.history
    tokens = run.progress.tokens
    flops_per_token = history.start.get("flops_per_token")
    flops = None if flops_per_token is None else flops_per_token * tokens
    joules = history.gpu_joules
    energy = UNMEASURED if joules is None else f"{joules / _JOULES_PER_KWH:.3g} kWh"
    hardware = history.start.get("hardware") or {}
    session_seconds = sum(session.seconds for session in history.sessions)
    evaluation_time = _format_measured_time(history.evaluation_seconds)
    rows = [
        ("time of the updates", clock_text(run.progress.seconds)),
        ("time of the evaluations between them", evaluation_time),
        ("time of the completed sessions", _format_measured_time(session_seconds)),
        ("device", _format_known(hardware.get("device"))),
        ("tokens", f"{tokens:,}"),
        ("FLOPs, by the model's shape", _format_known(flops, ".3g")),
        ("energy of the GPUs", energy),
        ("energy of the rest of the machine", UNMEASURED),
    ]
    return _markdown_table(("cost", "measured"), rows)


def _format_measured_time(seconds: float) -> str:
    """Format a time. The log of a run without the measurement adds up to 0 seconds."""
    return clock_text(seconds) if seconds else UNMEASURED


def _format_known(value: Any, form: str = "") -> str:
    return UNMEASURED if value is None else f"{value:{form}}"


def _markdown_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---" for _ in headings], *rows]
    # The name of a file may contain line breaks or |, which would end a cell.
    cells = [
        [" ".join(text.split()).replace("|", "\\|") for text in line] for line in lines
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
