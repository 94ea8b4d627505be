"""Final model of a run: the best weights with their scores, as a model folder or an adapter.

The model card, README.md, contains only measured or recorded values. It marks the rest as not
measured.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, cast

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.recipe_scores import POOR, hint
from toque.data.prepare.store_plan import named
from toque.data.store.store_manifest import SourceEntry, StoreManifest
from toque.data.store.token_store import refuse_replaced
from toque.data.tokenizer.codec import Codec
from toque.errors import CheckpointError, in_shell
from toque.evaluation.sample_writer import choose_main_score, format_excerpt
from toque.evaluation.text_samples import append_samples
from toque.models.families import CAUSAL, family_of
from toque.models.loading.card_usage import adapter_usage, with_usage
from toque.models.loading.model_export import save_adapter, save_model
from toque.models.loading.provenance import WRITTEN, Provenance, provenance_of
from toque.models.lora.adapter_files import WEIGHTS
from toque.models.lora.layers import ADAPTER, is_adapted
from toque.reporter import Reporter, clock_text, counting
from toque.runs.history import METRICS, RunHistory, read_history
from toque.runs.run_record import BITS, END
from toque.sources.hub_datasets import recorded_dataset
from toque.storage.atomic import atomic_write, disk_faults, move_into
from toque.training.callbacks import Goal
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.training.observers.metrics_log import write_after
from toque.units import Progress
from toque.version import __version__
from toque.workflows.build import Run
from toque.workflows.card_head import card_head, describe_licence
from toque.workflows.evaluate import Evaluation, evaluate_samples
from toque.workflows.model_record import build_record, model_files
from toque.workflows.prompts import describe_prompts, example_prompt
from toque.workflows.run_folder import load_weights, set_aside_folder

NO_TEMPLATE: Final = (
    "The folder does not contain the chat template of the base, because the model was not trained "
    "on conversations in this template. It contains all special tokens."
)


def _is_finished(folder: Path, step: int) -> bool:
    """Return whether a folder has the model and the scores of a run that ended at `step`."""
    try:
        end = json.loads((folder / END).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    is_complete = all((folder / name).exists() for name in ("model", "evaluation.json"))
    return is_complete and isinstance(end, dict) and end.get("step") == step


def finish(run: Run, reporter: Reporter) -> str:
    """Score the best model on held-out data and write it, unless this is already done.

    Returns:
        Advice if the model is poor, otherwise "".
    """
    trainer = run.trainer
    step = trainer.progress.step
    folder = Path(run.config.run_dir)
    ranks = run.evaluator.ranks
    if ranks.broadcast(_is_finished(folder, step)):
        return ""
    began = time.perf_counter()
    refuse_replaced(run.store)
    best = broadcast_checkpoint(trainer.checkpoints.best, ranks)
    if best is not None:
        load_weights(trainer.model, best)
        step = best.step
    goal = None if best is None else trainer.goal
    losses = run.evaluator.losses()
    with run.evaluator.sharing.full_model() as gathered:
        model = cast("PreTrainedModel", gathered)
        advice = _score_and_write(
            run, model, losses, step=step, goal=goal, reporter=reporter
        )
    if ranks.is_main:
        write_after(folder, {"finishing": time.perf_counter() - began})
    return advice


def _score_and_write(
    run: Run,
    model: PreTrainedModel,
    losses: Mapping[str, float],
    *,
    step: int,
    goal: Goal | None,
    reporter: Reporter,
) -> str:
    """Generate texts on all ranks. On rank 0 score them, write the model, and return advice."""
    config, store = run.config, run.store
    trainer, evaluator = run.trainer, run.evaluator
    with counting(reporter, "writing", "texts") as count:
        written = evaluator.generate_in_time(run.scored, model, count, final=True)
    if not evaluator.ranks.is_main:
        return ""

    folder = Path(config.run_dir)
    samples = [*written.values()]
    n_prompts = len(run.scored.prompts)
    n_left_out = n_prompts - len(samples)
    result = evaluate_samples(
        config,
        store,
        model,
        evaluator.heldout,
        losses,
        samples,
        step=step,
        reporter=reporter,
    )
    result = replace(result, texts_left_out=n_left_out)
    refuse_replaced(store)
    result.write(folder)
    if n_left_out and evaluator.limit is not None:
        reporter.notice(f"note: {evaluator.limit.left_out(n_left_out, n_prompts)}")
    write_error = append_samples(folder / "samples.jsonl", samples, step=step)
    if write_error is not None:
        reporter.notice(f"warning: {write_error}")

    history = (
        read_history(folder / METRICS) if (folder / METRICS).exists() else RunHistory()
    )
    finished = FinishedRun(result, goal, trainer.progress, history)
    record = build_record(config, store.manifest)
    codec = store.codec()
    card = model_card(
        with_actual_values(config, model), record, store.manifest, finished
    )
    lacks_template = (
        "chat_template" in codec.settings and record.form != "conversations"
    )
    if lacks_template:
        card += f"\n{NO_TEMPLATE}"
    if (aside := set_users_model_aside(folder)) is not None:
        reporter.notice(
            f"note: {folder / 'model'} contained another model, which is now {aside}"
        )
    with reporter.working("writing the finished model"):
        location = write_model(
            model,
            codec,
            folder / "model",
            card=card,
            record=record,
            base_hash=trainer.base_sha256,
        )
    end = {"step": trainer.progress.step, "model_step": step}
    with disk_faults(
        folder, "writing the end", setting="run_dir", error=CheckpointError
    ):
        atomic_write(folder / END, (json.dumps(end) + "\n").encode())

    reporter.detail(str(result))
    summary = _summarise(result, evaluator.watched)
    reporter.notice(f"{summary}. {location} (step {step}, {finished.chosen}).")
    if lacks_template:
        reporter.notice(NO_TEMPLATE)
    if samples:
        reporter.notice(format_excerpt(samples[0], columns=reporter.columns))
    score = result.texts.overall.get("recipe_score")
    return history.overfitting_note or ("" if score is None else hint(score.value))


def _summarise(result: Evaluation, watched: Sequence[str]) -> str:
    """Return the held-out loss and the main score of the texts."""
    summary = f"held-out loss {result.heldout['loss']:.4f}"
    if BITS in result.heldout:
        summary += f" ({result.heldout[BITS]:.3f} bits per byte)"
    if name := choose_main_score(result.texts.overall, watched):
        score = result.texts.overall[name]
        summary += f", {name.replace('_', ' ')} {score.value:.2f} ({score.n:,} texts)"
    return summary


def set_users_model_aside(folder: Path) -> Path | None:
    """Move a model that no run wrote. Return its new folder, or None without such a model."""
    model = folder / "model"
    is_from_run = (folder / END).exists() or provenance_of(model) is not None
    if is_from_run or not any((model / name).exists() for name in WRITTEN):
        return None
    target = set_aside_folder(folder)
    move_into(model, target, model.name)
    return target / model.name


def write_model(
    model: PreTrainedModel,
    codec: Codec,
    folder: Path,
    *,
    card: str,
    record: Provenance,
    base_hash: str | None,
) -> str:
    """Write a finished model or adapter. Return a message with its folder and size."""
    encoder = bool(model.config.is_encoder_decoder)
    files, portable = model_files(codec, record, encoder=encoder)
    if not is_adapted(model):
        card = with_usage(
            card,
            prompt=example_prompt(record),
            encoder=encoder,
            max_new_tokens=record.max_new_tokens,
            portable=portable,
        )
        end_ids = codec.ordered_ends
        save_model(
            model, None, folder, card=card, files=files, record=record, end_ids=end_ids
        )
        return f"The model is in {folder}"
    card = adapter_usage(card)
    save_adapter(model, folder, card=card, base_hash=base_hash or "", files=files)
    megabytes = (folder / WEIGHTS).stat().st_size / 1e6
    run = in_shell(folder.parent)
    return (
        f"The adapter ({megabytes:,.1f} MB) is in {folder}. `toque export {run} --to merged` "
        "merges it into its base"
    )


UNKNOWN: Final = "not measured"
_UNMEASURED: Final = (
    "other prompts and languages than those of the data; whether the data contains personal or "
    "harmful content"
)
_COPIES: Final = (
    "Whether the model repeats texts of the data word for word is not measured."
)


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


def with_actual_values(config: RunConfig, model: PreTrainedModel) -> RunConfig:
    """Replace the values `auto` of a configuration by the values of the model."""
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
    sources = named(paths) or config.data.store
    card = f"""\
{card_head(config, manifest, run.evaluation, sources=sources)}
# {Path(config.run_dir).name}

Trained with Toque {__version__} from {config.model.start_from} on {sources}. These are the \
weights of step {run.evaluation.step}, the {run.chosen}. `config.yaml` of the run repeats it.

{describe_prompts(record)}
"""
    sections = {
        "Data": _data(config, manifest),
        "Scores": _scores(run.evaluation, record),
        "Intended use and limits": _limits(config, record, manifest, run.evaluation),
        "Training": _training(config, run),
        "Cost": _cost(run),
    }
    return card + "".join(f"\n## {name}\n\n{text}" for name, text in sections.items())


def _data(config: RunConfig, manifest: StoreManifest) -> str:
    configured = (*config.data.sources, *config.data.validation)
    files_by_source: dict[int, list[SourceEntry]] = {}
    for entry in manifest.sources:
        files_by_source.setdefault(entry.source, []).append(entry)

    has_settings = len(configured) == len(files_by_source)
    held_out_from = manifest.settings.get("held_out_from", math.inf)

    rows = []
    for number, files in sorted(files_by_source.items()):
        path = files[0].path
        licence = None
        if has_settings and number < len(configured):
            path = configured[number].path
            licence = configured[number].licence

        if (dataset := recorded_dataset(files[0].path)) is not None:
            path = f"{dataset[0].address()}, commit {dataset[1]}"
        if number >= held_out_from:
            path += " (held out)"

        n_read = sum(file.read for file in files)
        n_examples = sum(file.kept for file in files)
        counts = (f"{n:,}" for n in (len(files), n_read, n_examples))
        rows.append((path, licence or "not recorded", *counts))

    dropped = ", ".join(
        f"{reason} {n:,}" for reason, n in manifest.dropped.items() if n
    )
    return (
        _table(("source", "licence", "files", "records", "examples"), rows)
        + f"\n{manifest.splits.train:,} examples to train on, {manifest.splits.validation:,} held "
        f"out. Prompts have {manifest.tokens.prompt:,} tokens, targets "
        f"{manifest.tokens.target:,}. Dropped records by reason: {dropped or 'none'}. Fingerprint "
        f"of the prepared data: `{manifest.fingerprint[:16]}`.\n"
    )


def _scores(evaluation: Evaluation, record: Provenance) -> str:
    texts = evaluation.texts
    rows = [
        (name, f"{value:.4g}", "", "") for name, value in evaluation.of_examples.items()
    ]
    for name, e in texts.overall.items():
        interval = (
            UNKNOWN
            if e.low is None or e.high is None
            else f"{e.low:.4g} to {e.high:.4g}"
        )
        rows.append((name, f"{e.value:.4g}", interval, f"{e.n:,}"))
    table = _table(("held-out metric", "value", "95 % interval", "texts"), rows)
    if not texts.overall:
        return table + "\nNo texts were written, so their quality is not measured.\n"
    size = record.no_repeat_ngram_size
    rule = f", without repeating a sequence of {size} tokens" if size else ""
    return table + (
        f"\nThe model wrote {texts.n_texts:,} texts for held-out prompts, always with the most "
        f"likely token{rule}. Intervals are percentiles of 1,000 bootstrap resamples of the texts. "
        f"The losses have no intervals.\n\n{evaluation.memorisation or _COPIES}\n"
    )


def _limits(
    config: RunConfig,
    record: Provenance,
    manifest: StoreManifest,
    evaluation: Evaluation,
) -> str:
    intended = {
        "gaps": "A start for further training. It does not write texts.",
        "documents": "Continuing texts of the kind it was trained on.",
        "conversations": "Conversations of the kind it was trained on.",
        "pairs": "Answering prompts of the kind it was trained on.",
    }.get(record.form, "Answering the prompts above. Other prompts were not measured.")
    lines = [f"Intended use: {intended}", describe_licence(config)]
    lengths = [
        f"{side}s of up to {limit:,} tokens"
        for side in ("prompt", "target")
        if isinstance(limit := manifest.settings.get(f"max_{side}_tokens"), int)
    ]
    if lengths:
        lines.append(f"Trained on {' and '.join(lengths)}. Longer ones were {UNKNOWN}.")
    score = evaluation.texts.overall.get("recipe_score")
    if score is not None and score.value < POOR:
        lines.append(
            f"The texts are still poor: their recipe score is {score.value:.2f} of 1."
        )
    truth = "whether its texts are true or harmless"
    if record.knows_recipes:
        truth = "whether a recipe is correct, safe to cook or to eat, or free of an allergen"
    lines.append(f"Not measured: {truth}; {_UNMEASURED}.")
    return "".join(f"- {line}\n" for line in lines)


def _training(config: RunConfig, run: FinishedRun) -> str:
    start = run.history.start
    optim, adapter = config.optim, config.adapter
    parameters = start.get("parameters") or {}
    rows = [
        ("starting point", config.model.start_from),
        ("parameters", _known(parameters.get("total"), ",.0f")),
        ("trained parameters", _known(parameters.get("trainable"), ",.0f")),
        ("adapter", "none" if adapter is None else f"{adapter.kind}, r {adapter.r}"),
        ("optimizer", f"{optim.name}, weight decay {optim.weight_decay:g}"),
        (
            "learning rate",
            f"{optim.peak_lr:g}, {optim.schedule}, warmup {optim.warmup}",
        ),
        ("batch", str(config.train.batch)),
        ("length", f"{run.progress.step:,} steps, {run.progress.epoch:.2f} epochs"),
        ("label smoothing", f"{optim.label_smoothing:g}"),
        ("precision", _known(start.get("precision"))),
        ("processes", _known(start.get("ranks"))),
        ("seed", str(config.seed)),
    ]
    return _table(("setting", "value"), rows)


def _cost(run: FinishedRun) -> str:
    history = run.history
    tokens = run.progress.tokens
    flops_per_token = history.start.get("flops_per_token")
    flops = flops_per_token and flops_per_token * tokens
    joules = history.gpu_joules
    session_seconds = sum(session.seconds for session in history.sessions)
    rows = [
        ("time of the updates", clock_text(run.progress.seconds)),
        ("time of the evaluations between them", _clock(history.evaluation_seconds)),
        ("time of the completed sessions", _clock(session_seconds)),
        ("device", _known((history.start.get("hardware") or {}).get("device"))),
        ("tokens", f"{tokens:,}"),
        (
            "FLOPs, by the model's shape",
            _known(flops, ".3g"),
        ),
        (
            "energy of the GPUs",
            UNKNOWN if joules is None else f"{joules / 3.6e6:.3g} kWh",
        ),
        ("energy of the rest of the machine", UNKNOWN),
    ]
    return _table(("cost", "measured"), rows)


def _clock(seconds: float) -> str:
    return clock_text(seconds) if seconds else UNKNOWN


def _known(value: Any, form: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{form}}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # The name of a file may contain line breaks or |, which would end a cell.
    cells = [
        [" ".join(text.split()).replace("|", "\\|") for text in line] for line in lines
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
