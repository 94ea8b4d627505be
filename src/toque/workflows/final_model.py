"""Final model of a run: the best weights, scored, as a Hugging Face folder or an adapter's.

Its card, README.md, holds what was measured and recorded alone; the rest is called not measured.
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
from toque.evaluation.sample_writer import excerpt, main_score
from toque.evaluation.text_samples import append_samples
from toque.models.families import CAUSAL, family_of
from toque.models.loading.card_usage import adapter_usage, with_usage
from toque.models.loading.model_export import save_adapter, save_model
from toque.models.loading.provenance import WRITTEN, Provenance, provenance_of
from toque.models.lora.adapter_files import WEIGHTS
from toque.models.lora.layers import ADAPTER, is_adapted
from toque.reporter import Reporter, clock_text, counting
from toque.runs.history import METRICS, RunHistory, history_of
from toque.runs.run_record import BITS, END
from toque.sources.hub_datasets import recorded_dataset
from toque.storage.atomic import atomic_write, disk_faults, move_into
from toque.training.callbacks import Goal
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.training.observers.metrics_log import write_after
from toque.units import Progress
from toque.version import __version__
from toque.workflows.asking import example_prompt, form_in_words, model_files, provenance_of_run
from toque.workflows.build import Run
from toque.workflows.card_head import card_head, licence_in_words
from toque.workflows.evaluate import Evaluation, evaluation_of
from toque.workflows.run_folder import load_weights, set_aside_now

NO_TEMPLATE: Final = (
    "The chat template of its base is not beside it: it was trained on prompts as they are, and on "
    "no conversations that the template wrote. The special tokens are all there."
)


def _is_finished(folder: Path, step: int) -> bool:
    """True if the model and scores in a folder are of its end at `step`, not of an earlier one."""
    try:
        ended = json.loads((folder / END).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    there = all((folder / name).exists() for name in ("model", "evaluation.json"))
    return there and isinstance(ended, dict) and ended.get("step") == step


def finish(run: Run, reporter: Reporter) -> str:
    """Score the best model on held-out data and write it, unless that was done for this end.

    Returns a sentence about the model if it is poor and something can be done; else "".
    """
    trainer, step = run.trainer, run.trainer.progress.step
    folder, ranks = Path(run.config.run_dir), run.evaluator.ranks
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
    with run.evaluator.sharing.full_model() as whole:
        model = cast("PreTrainedModel", whole)
        judged = _score_and_keep(run, model, losses, step=step, goal=goal, reporter=reporter)
    if ranks.is_main:
        write_after(folder, {"finishing": time.perf_counter() - began})
    return judged


def _score_and_keep(
    run: Run,
    model: PreTrainedModel,
    losses: Mapping[str, float],
    *,
    step: int,
    goal: Goal | None,
    reporter: Reporter,
) -> str:
    """Write texts on all ranks; on rank 0 score them, write the model, and judge it."""
    config, store, trainer, evaluator = run.config, run.store, run.trainer, run.evaluator
    folder, ranks = Path(config.run_dir), evaluator.ranks
    with counting(reporter, "writing", "texts") as count:
        written = evaluator.written(run.scored, model, count, final=True)
    if not ranks.is_main:
        return ""
    samples = [*written.values()]
    left_out = len(run.scored.prompts) - len(samples)
    result = evaluation_of(
        config, store, model, evaluator.heldout, losses, samples, step=step, reporter=reporter
    )
    result = replace(result, texts_left_out=left_out)
    refuse_replaced(store)
    result.write(folder)
    if left_out and evaluator.limit is not None:
        reporter.notice(f"note: {evaluator.limit.left_out(left_out, len(run.scored.prompts))}")
    refused = append_samples(folder / "samples.jsonl", samples, step=step)
    if refused is not None:
        reporter.notice(f"warning: {refused}")
    history = history_of(folder / METRICS) if (folder / METRICS).exists() else RunHistory()
    ended = Finished(result, goal, trainer.progress, history)
    record, base = provenance_of_run(config, store.manifest), trainer.base_sha256
    talks = record.form == "conversations"
    untaught = [NO_TEMPLATE] if "chat_template" in store.codec().settings and not talks else []
    card = "\n".join([model_card(as_used(config, model), record, store.manifest, ended), *untaught])
    if (aside := set_users_model_aside(folder)) is not None:
        reporter.notice(f"note: {folder / 'model'} held another model, which is now in {aside}")
    with reporter.working("writing the finished model"):
        codec = store.codec()
        kept = keep_model(model, codec, folder / "model", card=card, record=record, base_hash=base)
    at = {"step": trainer.progress.step, "model_step": step}
    with disk_faults(folder, "writing the end", setting="run_dir", error=CheckpointError):
        atomic_write(folder / END, (json.dumps(at) + "\n").encode())
    reporter.detail(str(result))
    reporter.notice(
        f"{_in_short(result, evaluator.watched)}. {kept} (step {step}, {ended.chosen})."
    )
    for said in untaught:
        reporter.notice(said)
    if samples:
        reporter.notice(excerpt(samples[0], columns=reporter.columns))
    score = result.texts.overall.get("recipe_score")
    return history.overfitting_note or ("" if score is None else hint(score.value))


def _in_short(result: Evaluation, watched: Sequence[str]) -> str:
    """The held-out loss and the main score of the texts."""
    short = f"held-out loss {result.heldout['loss']:.4f}"
    if BITS in result.heldout:
        short += f" ({result.heldout[BITS]:.3f} bits per byte)"
    if name := main_score(result.texts.overall, watched):
        score = result.texts.overall[name]
        short += f", {name.replace('_', ' ')} {score.value:.2f} ({score.n:,} texts)"
    return short


def set_users_model_aside(folder: Path) -> Path | None:
    """Move a model that no run wrote out of the way; its new place, or None without one."""
    model, place = folder / "model", set_aside_now(folder)
    is_runs = (folder / END).exists() or provenance_of(model) is not None
    if is_runs or not any((model / name).exists() for name in WRITTEN):
        return None
    move_into(model, place, model.name)
    return place / model.name


def keep_model(
    model: PreTrainedModel,
    codec: Codec,
    folder: Path,
    *,
    card: str,
    record: Provenance,
    base_hash: str | None,
) -> str:
    """Write the finished model, or the adapter alone, and say where it is and how large."""
    # The tokenizer comes from memory, because the store's folder is not ours.
    most = record.max_new_tokens
    encoder = bool(model.config.is_encoder_decoder)
    files, portable = model_files(codec, record, encoder=encoder)
    if not is_adapted(model):
        prompt = example_prompt(record)
        card = with_usage(
            card, prompt=prompt, encoder=encoder, max_new_tokens=most, portable=portable
        )
        ends = codec.ordered_ends
        save_model(model, None, folder, card=card, files=files, record=record, end_ids=ends)
        return f"The model is in {folder}"
    card = adapter_usage(card)
    save_adapter(model, folder, card=card, base_hash=base_hash or "", files=files)
    size = (folder / WEIGHTS).stat().st_size / 1e6
    run = in_shell(folder.parent)
    return (
        f"The adapter, {size:,.1f} MB, is in {folder}; `toque export {run} --to merged` merges it "
        "into its base"
    )


UNKNOWN: Final = "not measured"
_OF_TEXTS: Final = (
    "other prompts and languages than those of the data; whether the data holds personal or "
    "harmful content"
)


_COPIES: Final = "Whether texts of the data are repeated word for word is not measured."


@dataclass(frozen=True)
class Finished:
    """Facts of a run at its end that its model card needs."""

    evaluation: Evaluation  # scores of the model, with the step of its weights
    goal: Goal | None  # what its weights are the best by; None: they are the run's last
    progress: Progress  # progress of the whole run
    history: RunHistory = field(default_factory=RunHistory)

    @property
    def chosen(self) -> str:
        """Why the weights are those of their step, in words."""
        return "last of the run" if self.goal is None else str(self.goal)


def as_used(config: RunConfig, model: PreTrainedModel) -> RunConfig:
    """The settings, with what `auto` came to in the model."""
    family = family_of(model.config)
    name = "auto" if family == CAUSAL else family.name  # of which none is made from scratch
    found: dict[str, Any] = {"model": config.model.model_copy(update={"family": name})}
    if config.adapter is not None:
        rank = cast("Any", model).peft_config[ADAPTER].r
        found["adapter"] = config.adapter.model_copy(update={"r": rank})
    return config.model_copy(update=found)


def model_card(
    config: RunConfig, record: Provenance, manifest: StoreManifest, run: Finished
) -> str:
    """README.md of the finished model, its usage section aside."""
    own = [source.path for source in config.data.sources]  # compared with the store's
    begins = manifest.settings.get("held_out_from", math.inf)
    there = [entry.path for entry in manifest.sources if entry.source < begins]
    sources = named(own or there) or config.data.store
    card = f"""\
{card_head(config, manifest, run.evaluation, sources=sources)}
# {Path(config.run_dir).name}

Trained with Toque {__version__} from {config.model.start_from} on {sources}; weights of step \
{run.evaluation.step}, the {run.chosen}. `config.yaml` of the run repeats it.

{form_in_words(record)}
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
    asked = (*config.data.sources, *config.data.validation)
    by_source: dict[int, list[SourceEntry]] = {}
    for entry in manifest.sources:
        by_source.setdefault(entry.source, []).append(entry)
    rows = []
    for number, files in sorted(by_source.items()):
        known = asked[number] if len(asked) == len(by_source) and number < len(asked) else None
        path = files[0].path if known is None else known.path
        if (dataset := recorded_dataset(files[0].path)) is not None:
            path = f"{dataset[0].address()}, commit {dataset[1]}"
        licence = (known.licence if known is not None else None) or "not recorded"
        read, kept = (sum(getattr(f, name) for f in files) for name in ("read", "kept"))
        held_out = number >= manifest.settings.get("held_out_from", math.inf)
        path += " (held out)" if held_out else ""
        rows.append((path, licence, f"{len(files):,}", f"{read:,}", f"{kept:,}"))
    dropped = ", ".join(f"{reason} {n:,}" for reason, n in manifest.dropped.items() if n)
    return (
        _table(("source", "licence", "files", "records", "read as examples"), rows)
        + f"\n{manifest.splits.train:,} examples to train on, {manifest.splits.validation:,} held "
        f"out; {manifest.tokens.prompt:,} tokens of prompts and {manifest.tokens.target:,} of "
        f"targets. Left out, by reason: {dropped or 'nothing'}. Fingerprint of the prepared data: "
        f"`{manifest.fingerprint[:16]}`.\n"
    )


def _scores(evaluation: Evaluation, record: Provenance) -> str:
    texts = evaluation.texts
    rows = [(name, f"{value:.4g}", "", "") for name, value in evaluation.of_examples.items()]
    for name, e in texts.overall.items():
        interval = UNKNOWN if e.low is None or e.high is None else f"{e.low:.4g} to {e.high:.4g}"
        rows.append((name, f"{e.value:.4g}", interval, f"{e.n:,}"))
    table = _table(("held-out metric", "value", "95 % interval", "texts"), rows)
    if not texts.overall:
        return table + "\nNo text was written and scored: quality of texts is not measured.\n"
    size = record.no_repeat_ngram_size
    rule = f" that writes no run of {size} tokens twice" if size else ""
    return table + (
        f"\n{texts.n_texts:,} texts were written for held-out prompts, the likeliest token each "
        f"time{rule}. Intervals are percentiles of 1,000 bootstrap resamples of the texts. Of the "
        f"losses no interval was measured.\n\n{evaluation.memorisation or _COPIES}\n"
    )


def _limits(
    config: RunConfig, record: Provenance, manifest: StoreManifest, evaluation: Evaluation
) -> str:
    intended = {
        "gaps": "A start for further training; it writes no texts of its own.",
        "documents": "Continuing texts of the kind it was trained on.",
        "conversations": "Conversations of the kind it was trained on.",
        "pairs": "Answering prompts of the kind it was trained on.",
    }.get(record.form, "Answering the prompts above, and no others: those were not measured.")
    lines = [f"Intended use: {intended}", licence_in_words(config)]
    lengths = [
        f"{side}s of up to {limit:,} tokens"
        for side in ("prompt", "target")
        if isinstance(limit := manifest.settings.get(f"max_{side}_tokens"), int)
    ]
    if lengths:
        lines.append(f"Trained on {' and '.join(lengths)}; longer ones are {UNKNOWN}.")
    score = evaluation.texts.overall.get("recipe_score")
    if score is not None and score.value < POOR:
        lines.append(f"The texts are still poor: their recipe score is {score.value:.2f} of 1.")
    truth = "whether what it writes is true or harmless"
    if record.knows_recipes:
        truth = "whether a recipe is true, safe to cook or to eat, or free of an allergen"
    lines.append(f"Not measured: {truth}; {_OF_TEXTS}.")
    return "".join(f"- {line}\n" for line in lines)


def _training(config: RunConfig, run: Finished) -> str:
    start, optim, adapter = run.history.start, config.optim, config.adapter
    parameters = start.get("parameters") or {}
    rows = [
        ("begun from", config.model.start_from),
        ("parameters", _known(parameters.get("total"), ",.0f")),
        ("of these trained", _known(parameters.get("trainable"), ",.0f")),
        ("adapter", "none" if adapter is None else f"{adapter.kind}, r {adapter.r}"),
        ("optimizer", f"{optim.name}, weight decay {optim.weight_decay:g}"),
        ("learning rate", f"{optim.peak_lr:g}, {optim.schedule}, warmup {optim.warmup}"),
        ("batch", str(config.train.batch)),
        ("length", f"{run.progress.step:,} steps, {run.progress.epoch:.2f} epochs"),
        ("label smoothing", f"{optim.label_smoothing:g}"),
        ("precision", _known(start.get("precision"))),
        ("processes", _known(start.get("ranks"))),
        ("seed", str(config.seed)),
    ]
    return _table(("setting", "value"), rows)


def _cost(run: Finished) -> str:
    history, tokens = run.history, run.progress.tokens
    flops, joules = history.start.get("flops_per_token"), history.gpu_joules
    ended = sum(session.seconds for session in history.sessions)
    evaluated = history.evaluation_seconds
    rows = [
        ("time of the updates", clock_text(run.progress.seconds)),
        ("time of the evaluations between them", clock_text(evaluated) if evaluated else UNKNOWN),
        ("time of the sessions that ended", clock_text(ended) if ended else UNKNOWN),
        ("device", _known((history.start.get("hardware") or {}).get("device"))),
        ("tokens", f"{tokens:,}"),
        ("FLOPs, by the model's shape", _known(flops and flops * tokens, ".3g")),
        ("energy of the GPUs", UNKNOWN if joules is None else f"{joules / 3.6e6:.3g} kWh"),
        ("energy of the rest of the machine", UNKNOWN),
    ]
    return _table(("cost", "measured"), rows)


def _known(value: Any, form: str = "") -> str:
    return UNKNOWN if value is None else f"{value:{form}}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    # A file's name may hold what ends a cell.
    cells = [[" ".join(text.split()).replace("|", "\\|") for text in line] for line in lines]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)
