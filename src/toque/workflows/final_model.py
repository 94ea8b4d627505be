"""Final model of a run: the best weights, scored, as a Hugging Face folder or an adapter's.

Model card: README.md of a finished model, from what was measured and recorded alone.

What was not measured is called so. Nothing here is a claim about the world: the data is described
by its counts, the model by its scores on held-out data, the cost by the run's own clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.recipe_scores import POOR
from toque.data.prepare.store_plan import named
from toque.data.store.store_manifest import SourceEntry, StoreManifest
from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.errors import CheckpointError, in_shell
from toque.evaluation.bootstrap import Estimate
from toque.evaluation.evaluator import sample_on_all_ranks
from toque.evaluation.text_samples import append_samples
from toque.models.families import family_of
from toque.models.loading.card_usage import adapter_usage, with_usage
from toque.models.loading.model_export import save_adapter, save_model
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import WEIGHTS
from toque.models.lora.layers import ADAPTER, is_adapted
from toque.reporter import Reporter, clock_text, counting
from toque.runs.history import METRICS, RunHistory, history_of
from toque.storage.atomic import atomic_write, disk_faults
from toque.training.callbacks import Goal
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.units import Progress
from toque.version import __version__
from toque.workflows.asking import example_prompt, form_in_words, model_files, provenance_of_run
from toque.workflows.build import Run
from toque.workflows.run_folder import load_weights
from toque.workflows.score import evaluation_of

END: Final = "end.json"
"""File of a run's folder that says which end its model and its scores are of; written last."""

NO_TEMPLATE: Final = (
    "The chat template of its base is not beside it: it was trained on prompts as they are, and on "
    "no conversations that the template wrote. The special tokens are all there."
)


def is_finished(folder: Path, step: int) -> bool:
    """True if the model and the scores in a run's folder are those of its end at `step`.

    A run that was stopped early and then continued has those of the earlier end until its own are
    written.
    """
    try:
        ended = json.loads((folder / END).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    there = all((folder / name).exists() for name in ("model", "evaluation.json"))
    return there and isinstance(ended, dict) and ended.get("step") == step


def finish(run: Run, reporter: Reporter) -> None:
    """Score the best model on held-out data and write it, in the folder of the run.

    Raises:
        DataError: the store was replaced since training began.
    """
    trainer, step = run.trainer, run.trainer.progress.step
    refuse_replaced(run.store)
    kept = trainer.checkpoints
    best = broadcast_checkpoint(kept.best, trainer.runtime.ranks)
    if best is not None:
        load_weights(trainer.model, best)
        step = best.step
    elif trainer.average is not None:
        trainer.average.apply(trainer.model)
    losses = run.evaluator.losses()
    with run.evaluator.sharing.whole() as whole:
        model = cast("PreTrainedModel", whole)
        _score_and_keep(run, model, losses, step=step, reporter=reporter)


def _score_and_keep(
    run: Run,
    model: PreTrainedModel,
    losses: Mapping[str, float],
    *,
    step: int,
    reporter: Reporter,
) -> None:
    """Write texts on all ranks; on rank 0 score them and write the model."""
    config, store, trainer, evaluator = run.config, run.store, run.trainer, run.evaluator
    folder, ranks = Path(config.run_dir), evaluator.ranks
    with counting(reporter, "writing", "texts") as count, evaluator.context():
        samples = sample_on_all_ranks(run.scored, model, ranks, count)
    if not ranks.is_main:
        return
    heldout = evaluator.heldout
    result = evaluation_of(
        config, store, model, heldout, losses, samples, step=step, reporter=reporter
    )
    refuse_replaced(store)
    result.write(folder)
    refused = append_samples(folder / "samples.jsonl", samples, step=step)
    if refused is not None:
        reporter.notice(f"warning: {refused}")
    record, base = provenance_of_run(config, store.manifest), trainer.base_sha256
    ended = Finished(
        step,
        trainer.goal,
        trainer.progress,
        result.heldout,
        {scores.task: scores.record() for scores in result.tasks},
        result.texts.overall,
        result.texts.n_texts,
        history_of(folder / METRICS) if (folder / METRICS).exists() else RunHistory(),
    )
    untaught = [NO_TEMPLATE] if "chat_template" in store.codec().settings else []
    told = model_card(as_used(config, model), record, store.manifest, ended)
    card = "\n".join([told, *untaught])
    with reporter.working("writing the finished model"):
        kept = keep_model(model, store, folder / "model", card=card, record=record, base_hash=base)
    at = {"step": trainer.progress.step, "model_step": step}
    with disk_faults(folder, "writing the end", setting="run_dir", error=CheckpointError):
        atomic_write(folder / END, (json.dumps(at) + "\n").encode())
    reporter.notice(str(result))
    for said in (f"{kept} (step {step}, {trainer.goal}).", *untaught):
        reporter.notice(said)


def keep_model(
    model: PreTrainedModel,
    store: TokenStore,
    folder: Path,
    *,
    card: str,
    record: Provenance,
    base_hash: str | None,
) -> str:
    """Write the finished model, or the adapter alone, and say where it is and how large."""
    # The tokenizer trained with, from memory: the store's folder is not ours.
    codec, most = store.codec(), record.max_new_tokens
    encoder = bool(model.config.is_encoder_decoder)
    files, portable = model_files(codec, record, encoder=encoder)
    if not is_adapted(model):
        prompt = example_prompt(record)
        card = with_usage(
            card, prompt=prompt, encoder=encoder, max_new_tokens=most, portable=portable
        )
        save_model(model, None, folder, card=card, files=files, max_new_tokens=most)
        return f"The model is in {folder}"
    save_adapter(
        model, None, folder, card=adapter_usage(card), base_hash=base_hash or "", files=files
    )
    size = (folder / WEIGHTS).stat().st_size / 1e6
    run = in_shell(folder.parent)
    return (
        f"The adapter, {size:,.1f} MB, is in {folder}; `toque export {run} --to merged` merges it "
        "into its base"
    )


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
