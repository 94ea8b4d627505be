"""Final model of a run: the best weights, scored, as a Hugging Face folder or an adapter's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final, cast

from transformers import PreTrainedModel

from toque.data.store.token_store import TokenStore, refuse_replaced
from toque.errors import CheckpointError, in_shell
from toque.evaluation.evaluator import sample_on_all_ranks
from toque.evaluation.text_samples import append_samples
from toque.models.loading.card_usage import adapter_usage, with_usage
from toque.models.loading.model_export import save_adapter, save_model
from toque.models.loading.provenance import Provenance
from toque.models.lora.adapter_files import WEIGHTS
from toque.models.lora.layers import is_adapted
from toque.reporter import Reporter, counting
from toque.runs.history import METRICS, RunHistory, history_of
from toque.storage.atomic import atomic_write, disk_faults
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.workflows.asking import (
    example_prompt,
    model_files,
    provenance_of_run,
)
from toque.workflows.build import Run
from toque.workflows.model_card import Finished, as_used, model_card
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
