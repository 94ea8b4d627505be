"""Model card: README.md of a finished model, from what was measured and recorded alone.

What was not measured is called so. Nothing here is a claim about the world: the data is described
by its counts, the model by its scores on held-out data, the cost by the run's own clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.recipe_scores import POOR
from toque.data.prepare.store_plan import named
from toque.data.store.store_manifest import SourceEntry, StoreManifest
from toque.evaluation.bootstrap import Estimate
from toque.models.families import family_of
from toque.models.loading.provenance import Provenance
from toque.models.lora.layers import ADAPTER
from toque.reporter import clock_text
from toque.runs.history import RunHistory
from toque.training.callbacks import Goal
from toque.units import Progress
from toque.version import __version__
from toque.workflows.asking import form_in_words

UNKNOWN: Final = "not measured"
_NOT_MEASURED: Final = {
    "recipes": (
        "whether a recipe is true, safe to cook or to eat, or free of an allergen; other prompts "
        "and languages than those of the data; whether texts of the data are repeated word by "
        "word; whether the data holds personal or harmful content"
    ),
    "": (
        "whether what it writes is true or harmless; other prompts and languages than those of the "
        "data; whether texts of the data are repeated word by word; whether the data holds "
        "personal or harmful content"
    ),
}


@dataclass(frozen=True)
class Finished:
    """Facts of a run at its end that its model card needs."""

    step: int
    """Step of the model's weights."""
    goal: Goal
    progress: Progress
    """Progress of the whole run."""
    heldout: Mapping[str, float]
    tasks: Mapping[str, Mapping[str, Any]]
    """Scores of each task."""
    texts: Mapping[str, Estimate]
    n_texts: int
    history: RunHistory = field(default_factory=RunHistory)


def as_used(config: RunConfig, model: PreTrainedModel) -> RunConfig:
    """The settings, with what `auto` came to in the model."""
    found: dict[str, Any] = {
        "model": config.model.model_copy(update={"family": family_of(model.config).name})
    }
    if config.adapter is not None:
        rank = cast("Any", model).peft_config[ADAPTER].r
        found["adapter"] = config.adapter.model_copy(update={"r": rank})
    return config.model_copy(update=found)


def model_card(
    config: RunConfig, record: Provenance, manifest: StoreManifest, run: Finished
) -> str:
    """README.md of the finished model, its usage section aside.

    Args:
        config: of the run.
        record: what the model is asked with.
        manifest: of the store it was trained on.
        run: its end.
    """
    own = [source.path for source in config.data.sources]  # compared with the store's
    sources = named(own or [entry.path for entry in manifest.sources]) or config.data.store
    made = (
        f"Trained with Toque {__version__} from {config.model.start_from} on {sources}; weights of "
        f"step {run.step}, the {run.goal}. `config.yaml` of the run repeats it.\n"
    )
    parts = (
        f"---\nlibrary_name: transformers\ntags: [toque, {config.model.family}]\n---\n",
        f"# {Path(config.run_dir).name}\n",
        made,
        f"{form_in_words(record)}\n",
        f"## Data\n\n{_data(config, manifest)}\n",
        f"## Scores\n\n{_scores(run)}\n",
        f"## Intended use and limits\n\n{_limits(record, manifest, run)}\n",
        f"## Training\n\n{_training(config, run)}\n",
        f"## Cost\n\n{_cost(run)}\n",
    )
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _data(config: RunConfig, manifest: StoreManifest) -> str:
    asked = config.data.sources
    by_source: dict[int, list[SourceEntry]] = {}
    for entry in manifest.sources:
        by_source.setdefault(entry.source, []).append(entry)
    rows = []
    for number, files in sorted(by_source.items()):
        known = asked[number] if len(asked) == len(by_source) and number < len(asked) else None
        path = files[0].path if known is None else known.path
        licence = (known.licence if known is not None else None) or "not recorded"
        read, kept = (sum(getattr(f, name) for f in files) for name in ("read", "kept"))
        rows.append((path, licence, f"{len(files):,}", f"{read:,}", f"{kept:,}"))
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in manifest.dropped.items() if n)
    return (
        _table(("source", "licence", "files", "records", "read as examples"), rows)
        + f"\n{manifest.splits.train:,} examples to train on, {manifest.splits.validation:,} held "
        f"out; {manifest.tokens.prompt:,} tokens of prompts and {manifest.tokens.target:,} of "
        f"targets. Left out, by reason: {dropped or 'nothing'}. Fingerprint of the prepared data: "
        f"`{manifest.fingerprint[:16]}`.\n"
    )


def _scores(run: Finished) -> str:
    rows = [(name, f"{value:.4g}", "", "") for name, value in run.heldout.items()]
    for task, scores in run.tasks.items():
        rows += [
            (f"{task}_{name}", f"{value:.4g}", "", "")
            for name, value in scores.items()
            if name in ("loss", "accuracy", "macro_f1", "ece")
        ]
    for name, e in run.texts.items():
        interval = UNKNOWN if e.low is None or e.high is None else f"{e.low:.4g} to {e.high:.4g}"
        rows.append((name, f"{e.value:.4g}", interval, f"{e.n:,}"))
    table = _table(("held-out metric", "value", "95 % interval", "texts"), rows)
    if not run.texts:
        return table + "\nNo text was written and scored: quality of texts is not measured.\n"
    return table + (
        f"\n{run.n_texts:,} texts were written for held-out prompts, the likeliest token each "
        "time. Intervals are percentiles of 1,000 bootstrap resamples of the texts. Of the losses "
        "no interval was measured.\n"
    )


def _limits(record: Provenance, manifest: StoreManifest, run: Finished) -> str:
    intended = {
        "gaps": "A start for further training; it writes no texts of its own.",
        "documents": "Continuing texts of the kind it was trained on.",
        "pairs": "Answering prompts of the kind it was trained on.",
    }.get(record.form, "Answering the prompts above, and no others: those were not measured.")
    lines = [f"Intended use: {intended}"]
    lengths = [
        f"{side}s of up to {limit:,} tokens"
        for side in ("prompt", "target")
        if isinstance(limit := manifest.settings.get(f"max_{side}_tokens"), int)
    ]
    if lengths:
        lines.append(f"Trained on {' and '.join(lengths)}; longer ones are {UNKNOWN}.")
    score = run.texts.get("recipe_score")
    if score is not None and score.value < POOR:
        lines.append(f"The texts are still poor: their recipe score is {score.value:.2f} of 1.")
    lines.append(f"Not measured: {_NOT_MEASURED.get(record.form, _NOT_MEASURED[''])}.")
    return "".join(f"- {line}\n" for line in lines)


def _training(config: RunConfig, run: Finished) -> str:
    start = run.history.start
    parameters = start.get("parameters") or {}
    optim, adapter = config.optim, config.adapter
    total, trainable = parameters.get("total"), parameters.get("trainable")
    rows = [
        ("begun from", config.model.start_from),
        ("parameters", UNKNOWN if total is None else f"{total:,.0f}"),
        ("of these trained", UNKNOWN if trainable is None else f"{trainable:,.0f}"),
        ("adapter", "none" if adapter is None else f"{adapter.kind}, r {adapter.r}"),
        ("optimizer", f"{optim.name}, weight decay {optim.weight_decay:g}"),
        ("learning rate", f"{optim.peak_lr:g}, {optim.schedule}, warmup {optim.warmup}"),
        ("batch", str(config.train.batch)),
        ("length", f"{run.progress.step:,} steps, {run.progress.epoch:.2f} epochs"),
        ("label smoothing", f"{optim.label_smoothing:g}"),
        ("precision", str(start.get("precision", UNKNOWN))),
        ("processes", str(start.get("ranks", UNKNOWN))),
        ("seed", str(config.seed)),
    ]
    return _table(("setting", "value"), rows)


def _cost(run: Finished) -> str:
    start = run.history.start
    hardware = start.get("hardware") or {}
    flops, tokens = start.get("flops_per_token"), run.progress.tokens
    ended = sum(session.seconds for session in run.history.sessions)
    evaluated, joules = run.history.evaluation_seconds, run.history.gpu_joules
    rows = [
        ("time of the updates", clock_text(run.progress.seconds)),
        ("time of the evaluations between them", clock_text(evaluated) if evaluated else UNKNOWN),
        ("time of the sessions that ended", clock_text(ended) if ended else UNKNOWN),
        ("device", str(hardware.get("device", UNKNOWN))),
        ("tokens", f"{tokens:,}"),
        (
            "FLOPs, by the model's shape",
            f"{flops * tokens:.3g}" if isinstance(flops, int | float) else UNKNOWN,
        ),
        ("energy of the GPUs", f"{joules / 3.6e6:.3g} kWh" if joules is not None else UNKNOWN),
        ("energy of the rest of the machine", UNKNOWN),
    ]
    return _table(("cost", "measured"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(map(_cell, line))} |\n" for line in lines)


def _cell(text: str) -> str:
    """A text in a table: a file's name may hold what ends a cell."""
    return " ".join(text.split()).replace("|", "\\|")
