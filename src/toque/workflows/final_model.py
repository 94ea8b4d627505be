"""Final model of a run: the best weights, scored, as a Hugging Face folder or an adapter's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.data.store.token_store import TokenStore
from toque.evaluation.text_samples import append_samples
from toque.models.loading.export import save_adapter, save_model
from toque.models.lora.files import WEIGHTS
from toque.models.lora.layers import is_adapted
from toque.reporter import Reporter, counting
from toque.storage.atomic import atomic_write
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.version import __version__
from toque.workflows.assembly.distributed_eval import sample_on_all_ranks
from toque.workflows.assembly.evaluation import build_sampler, held_out_prompts
from toque.workflows.assembly.run import Run
from toque.workflows.assembly.sample_writer import writing_in
from toque.workflows.run_folder import load_weights
from toque.workflows.score import evaluation_of


def finish(run: Run, reporter: Reporter) -> None:
    """Score the best model on held-out data and write it, in the folder of the run."""
    setup, trainer, step = run.setup, run.trainer, run.trainer.progress.step
    config, store, model, runtime = setup.config, setup.store, setup.model, setup.runtime
    folder = Path(config.run_dir)
    best = broadcast_checkpoint(trainer.checkpoints.best, runtime.ranks)
    if best is not None:
        load_weights(model, best)
        step = best.step
    elif trainer.average is not None:
        trainer.average.apply(model)
    losses = trainer.evaluator()
    prompts = held_out_prompts(store, config.evaluation.generate)
    scored = build_sampler(config, store, prompts) if prompts else run.sampler
    with counting(reporter, "writing", "texts") as count, writing_in(model, runtime)():
        samples = sample_on_all_ranks(scored, model, runtime.ranks, count)
    if not runtime.ranks.is_main:
        return
    result = evaluation_of(setup, losses, samples, step=step, reporter=reporter)
    atomic_write(folder / "evaluation.json", result.to_json().encode())
    append_samples(folder / "samples.jsonl", samples, step=step)
    card = model_card(config, step=step, metrics=result.metrics)
    with reporter.working("writing the finished model"):
        kept = keep_model(model, store, folder / "model", card=card, base_hash=trainer.base_sha256)
    reporter.notice(str(result))
    reporter.notice(f"{kept} (step {step}, lowest held-out loss).")


def keep_model(
    model: PreTrainedModel, store: TokenStore, folder: Path, *, card: str, base_hash: str | None
) -> str:
    """Write the finished model, or the adapter alone, and say where it is and how large."""
    tokenizer = store.path / "tokenizer"
    if not is_adapted(model):
        save_model(model, tokenizer, folder, card=card)
        return f"The model is in {folder}"
    save_adapter(model, tokenizer, folder, card=card, base_hash=base_hash or "")
    size = (folder / WEIGHTS).stat().st_size / 1e6
    return (
        f"The adapter, {size:,.1f} MB, is in {folder}; `toque export {folder.parent}` merges it "
        "into its base"
    )


def model_card(config: RunConfig, *, step: int, metrics: Mapping[str, float]) -> str:
    """README.md of the finished model: what it is, how it was made, how good it is."""
    scores = "\n".join(f"| {name} | {value:.4g} |" for name, value in metrics.items())
    sources = ", ".join(s.path for s in config.data.sources) or config.data.store
    return (
        f"---\nlibrary_name: transformers\ntags: [toque, {config.model.family}]\n---\n\n"
        f"# {Path(config.run_dir).name}\n\nTrained with Toque {__version__} from "
        f"{config.model.start_from} on {sources}; weights of step {step}, the lowest held-out "
        "loss. `config.yaml` of the run repeats it.\n\n"
        "The prompt it was trained on: `Generate recipe for: NAME using ingredients: a, b, c`.\n\n"
        f"| held-out metric | value |\n|---|---|\n{scores}\n"
    )
