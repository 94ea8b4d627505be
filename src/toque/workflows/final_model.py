"""Final model of a run: the best weights with their scores, as a model folder or an adapter."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from toque.data.store.token_store import refuse_replaced
from toque.data.tokenizer.codec import Codec
from toque.errors import CheckpointError, in_shell
from toque.evaluation.sample_writer import choose_main_score, format_excerpt
from toque.evaluation.source_losses import read_before
from toque.evaluation.text_samples import Sample, append_samples
from toque.models.loading.card_usage import adapter_usage, with_usage
from toque.models.loading.model_export import save_adapter, save_model
from toque.models.loading.provenance import WRITTEN, Provenance, provenance_of
from toque.models.lora.adapter_files import WEIGHTS
from toque.models.lora.layers import is_adapted
from toque.reporter import Reporter, counting
from toque.runs.history import METRICS, RunHistory, read_history
from toque.runs.run_record import BITS, END
from toque.storage.atomic import atomic_write, disk_faults, move_into
from toque.training.callbacks import Goal
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.training.observers.metrics_log import write_after_event
from toque.workflows.build import Run
from toque.workflows.evaluate import (
    Evaluation,
    describe_accuracy,
    evaluate_samples,
)
from toque.workflows.inference.open_model import TrainedModel
from toque.workflows.model_card import FinishedRun, model_card, resolve_auto_values
from toque.workflows.run_folder.set_aside import set_aside_folder
from toque.workflows.run_folder.weights import load_weights
from toque.workflows.trained_model.model_codec import model_files
from toque.workflows.trained_model.prompt_format import example_prompt
from toque.workflows.trained_model.training_record import build_record

NO_TEMPLATE = (
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
    last_step = trainer.progress.step
    folder = Path(run.config.run_dir)
    ranks = run.evaluator.ranks
    if ranks.broadcast(_is_finished(folder, last_step)):
        return ""

    began = time.perf_counter()
    refuse_replaced(run.store)
    goal = None
    model_step = last_step
    best = broadcast_checkpoint(trainer.checkpoints.best, ranks)
    if best is not None:
        load_weights(trainer.model, best)
        goal = trainer.goal
        model_step = best.step
    losses = run.evaluator.losses()
    with run.evaluator.sharing.full_model() as gathered:
        model = cast("PreTrainedModel", gathered)
        samples = _generate_samples(run, model, reporter)
        advice = ""
        if ranks.is_main:
            evaluation = _score(
                run, model, losses, samples, step=model_step, reporter=reporter
            )
            advice = _write(run, model, evaluation, samples, goal, reporter)
    if ranks.is_main:
        write_after_event(folder, {"finishing": time.perf_counter() - began})
    return advice


def _generate_samples(
    run: Run, model: PreTrainedModel, reporter: Reporter
) -> list[Sample]:
    """Generate the final texts on all ranks. A time limit may leave out some of them."""
    with counting(reporter, "generating", "texts") as count:
        samples = run.evaluator.generate_in_time(
            run.final_sampler, model, count, final=True
        )
    return [*samples.values()]


def _score(
    run: Run,
    model: PreTrainedModel,
    losses: Mapping[str, float],
    samples: Sequence[Sample],
    *,
    step: int,
    reporter: Reporter,
) -> Evaluation:
    """Score the model of `step`. Write its scores and texts to the run folder."""
    evaluator = run.evaluator
    n_prompts = len(run.final_sampler.prompts)
    n_left_out = n_prompts - len(samples)
    scores = evaluate_samples(
        run.config,
        run.store,
        model,
        evaluator.heldout,
        losses,
        samples,
        step=step,
        before=read_before(Path(run.config.run_dir)),
        reporter=reporter,
    )
    evaluation = replace(scores, texts_left_out=n_left_out)

    folder = Path(run.config.run_dir)
    refuse_replaced(run.store)
    evaluation.write(folder)
    if n_left_out and evaluator.limit is not None:
        reporter.notice(
            f"note: {evaluator.limit.describe_left_out(n_left_out, n_prompts)}"
        )
    write_error = append_samples(folder / "samples.jsonl", samples, step=step)
    if write_error is not None:
        reporter.notice(f"warning: {write_error}")
    return evaluation


def _write(
    run: Run,
    model: PreTrainedModel,
    evaluation: Evaluation,
    samples: Sequence[Sample],
    goal: Goal | None,
    reporter: Reporter,
) -> str:
    """Write the finished model and report it. Return advice if the model is poor, else "".

    `goal` selected the weights. None means the last weights of the run.
    """
    config, store = run.config, run.store
    trainer = run.trainer
    folder = Path(config.run_dir)
    metrics_file = folder / METRICS
    history = read_history(metrics_file) if metrics_file.exists() else RunHistory()
    finished = FinishedRun(evaluation, goal, trainer.progress, history)

    record = build_record(config, store.manifest)
    codec = store.codec()
    actual_config = resolve_auto_values(config, model)
    card = model_card(actual_config, record, store.manifest, finished)
    has_template = "chat_template" in codec.settings
    lacks_template = has_template and record.form != "conversations"
    if lacks_template:
        card += f"\n{NO_TEMPLATE}"

    aside = set_users_model_aside(folder)
    if aside is not None:
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
    # This file marks the run as finished, so it is the last one.
    _write_end(folder, step=trainer.progress.step, model_step=evaluation.step)

    reporter.detail(str(evaluation))
    summary = _summarise(evaluation, run.evaluator.watched)
    reporter.notice(
        f"{summary}. {location} (step {evaluation.step}, {finished.chosen})."
    )
    if lacks_template:
        reporter.notice(NO_TEMPLATE)
    if (decay := config.optim.ema_decay) is not None:
        reporter.notice(
            f"`toque average {in_shell(folder)}` measures the exponential average of the weights "
            f"(optim.ema_decay={decay:g}), and writes it as a model if it is better."
        )
    if samples:
        reporter.notice(format_excerpt(samples[0], columns=reporter.columns))
    return history.overfitting_note or evaluation.advice


def _write_end(folder: Path, *, step: int, model_step: int | None) -> None:
    """Write the file that marks a run as finished, with the steps of the run and of its model.

    Raises:
        CheckpointError: The disk is full or cannot be written.
    """
    end = {"step": step, "model_step": model_step}
    with disk_faults(
        folder, "writing the end", setting="run_dir", error=CheckpointError
    ):
        atomic_write(folder / END, (json.dumps(end) + "\n").encode())


def _summarise(evaluation: Evaluation, watched: Sequence[str]) -> str:
    """Return the held-out loss and the main score of the texts."""
    summary = f"held-out loss {evaluation.heldout['loss']:.4f}"
    if BITS in evaluation.heldout:
        summary += f" ({evaluation.heldout[BITS]:.3f} bits per byte)"
    if (accuracy := evaluation.accuracy) is not None:
        summary += f", {describe_accuracy(accuracy)}"
    if name := choose_main_score(evaluation.texts.overall, watched):
        score = evaluation.texts.overall[name]
        summary += f", {name.replace('_', ' ')} {score.value:.2f} ({score.n:,} texts)"
    for source in evaluation.sources:
        summary += f"; {source}"
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


def write_trained(trained: TrainedModel, folder: Path, *, card: str) -> None:
    """Write an open checkpoint in the format of a finished model. See `write_model`."""
    write_model(
        trained.model,
        trained.codec,
        folder,
        card=card,
        record=trained.record,
        base_hash=trained.base_hash,
    )


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
