"""`toque train` and `toque demo`: a run from its folder's state to its finished model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from toque import __version__
from toque.config import Difference, Resolved, RunConfig, differences, load_config, resolved_yaml
from toque.data.loader.batch_stream import BatchStream
from toque.data.store.token_store import TokenStore
from toque.errors import CheckpointError
from toque.evaluation.text_samples import Sampler, append_samples
from toque.models.families import family_of
from toque.models.flops import parameter_counts
from toque.models.forward.fast_dropout import use_fast_dropout
from toque.models.lora.files import base_sha256
from toque.models.lora.layers import hold_frozen, is_adapted
from toque.storage.atomic import atomic_write
from toque.training.callbacks import Callback, EarlyStopping
from toque.training.checkpoint.resume import broadcast_checkpoint
from toque.training.checkpoint.run_lock import run_lock
from toque.training.checkpoint.state_tensors import has_frozen, load_model_tensors
from toque.training.checkpoint.store import Checkpoint, CheckpointStore, verify_checkpoint
from toque.training.checkpoint.upload import UploadProgress, Uploads
from toque.training.distributed.collectives import Ranks
from toque.training.distributed.launch import joined
from toque.training.observers.console import ConsoleProgress
from toque.training.observers.metrics_log import MetricsLog
from toque.training.runtime import Runtime
from toque.training.signals import INTERRUPTED, Interrupt
from toque.training.trainer import Trainer
from toque.units import Cursor, Progress
from toque.workflows.assembly.augmentation import augmentation_in_words
from toque.workflows.assembly.autotune import Fitted, fit_to_machine
from toque.workflows.assembly.batches import build_language_model, build_stream, expected_totals
from toque.workflows.assembly.curriculum import stages_in_words
from toque.workflows.assembly.data import open_store
from toque.workflows.assembly.evaluation import (
    build_heldout,
    build_sampler,
    held_out_prompts,
    own_prompts,
)
from toque.workflows.assembly.metrics import build_text_scores
from toque.workflows.assembly.mixture import mixture_in_words
from toque.workflows.assembly.observers import Watchers, build_watchers
from toque.workflows.assembly.trainer import about_run, build_trainer, flops_of
from toque.workflows.bucket_run import on_this_machine, uploading
from toque.workflows.distributed_eval import peak_of_all, words_on, written_by_all
from toque.workflows.evaluate import evaluation_of
from toque.workflows.final_model import adapter_words, keep_model, writing_in
from toque.workflows.sample_writer import SampleWriter
from toque.workflows.task_scores import score_tasks

LOOKS = 2
"""Texts written at every evaluation for the eye; the scored ones come at the end."""


@dataclass(frozen=True)
class RunOutcome:
    """How `toque train` ended."""

    folder: Path
    step: int
    reason: str

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended the session before the run was done."""
        return self.reason == INTERRUPTED


def run_training(
    resolved: Resolved,
    *,
    start: str | None = None,
    own: Sequence[object] = (),
    upload: bool = True,
) -> RunOutcome:
    """Train from the beginning, or continue from the run folder's newest whole checkpoint.

    Args:
        resolved: the configuration and the origin of its values.
        start: a checkpoint folder whose weights a new run begins with.
        own: objects that watch the run, besides those of observe.callbacks.
        upload: fetch from `checkpoint.upload` and copy to it, if there is one.

    Raises:
        ConfigError: settings that do not fit each other, the model or the data.
        DataError: the store is missing, damaged, or prepared with other settings.
        CheckpointError: the run folder belongs to another run, or cannot be used.
        NonFiniteError: the loss is not a number.
        RankLost: another process of the same run is gone or does not answer.
    """
    build_text_scores(resolved.config)  # a metric that cannot be imported is refused now
    with joined(strategy=resolved.config.train.strategy) as ranks:
        return _shared(on_this_machine(resolved), ranks, start=start, own=own, upload=upload)


def _shared(
    resolved: Resolved, ranks: Ranks, *, start: str | None, own: Sequence[object], upload: bool
) -> RunOutcome:
    """The same in each of several ranks; rank 0 speaks and writes, the others compute."""
    config, console = resolved.config, Console(stderr=True, quiet=not ranks.is_main)
    watchers = build_watchers(config, own) if ranks.is_main else None
    store = open_store(config)

    def say(sentence: str) -> None:
        console.print(sentence, highlight=False, soft_wrap=True)

    with uploading(config, say=say, on=upload and ranks.is_main) as uploads:
        outcome = _train(resolved, store, ranks, watchers, console, start=start, uploads=uploads)
        if uploads is not None and not outcome.interrupted:
            uploads.finished()
    return outcome


def _train(
    resolved: Resolved,
    store: TokenStore,
    ranks: Ranks,
    watchers: Watchers | None,
    console: Console,
    *,
    start: str | None,
    uploads: Uploads | None,
) -> RunOutcome:
    config = resolved.config
    run = Path(config.run_dir)
    found = broadcast_checkpoint(lambda: _continued(config, store, run), ranks)
    if start is not None and found is not None:
        raise CheckpointError(
            f"{run} already holds a run at step {found.step}, and --from begins a new one. Choose "
            "another folder: run_dir=runs/another."
        )
    if ranks.is_main:
        _write_config(resolved, run)
    trainer, sampler = _assemble(config, store, ranks, console, watchers, uploads)
    if found is not None:
        trainer.load(found)
    elif start is not None:
        _start_from(trainer.model, Path(start))
    before = trainer.progress.step
    end = trainer.fit()
    unfinished = ranks.broadcast(end.progress.step > before or not (run / "model").exists())
    if end.reason != INTERRUPTED and unfinished:
        _finish(config, store, trainer, sampler, console)
    return RunOutcome(run, end.progress.step, end.reason)


def _assemble(
    config: RunConfig,
    store: TokenStore,
    ranks: Ranks,
    console: Console,
    watchers: Watchers | None,
    uploads: Uploads | None,
) -> tuple[Trainer, Sampler]:
    model = build_language_model(config, store)
    family = family_of(model.config)
    runtime = Runtime.detect(
        precision=config.train.precision,
        deterministic=config.train.deterministic,
        fp16_is_safe=family.name != "t5",
        ranks=ranks,
    )
    base_hash = base_sha256(model) if is_adapted(model) else None
    hold_frozen(model, runtime.dtype)
    model.to(runtime.device)  # type: ignore[arg-type]  # transformers annotates it away
    use_fast_dropout(model)
    stream = build_stream(config, store, model, rank=ranks.rank, ranks=ranks.world_size)
    with console.status("finding out how to compute on this machine"):
        fitted = fit_to_machine(config, model, stream, runtime)
    heldout = build_heldout(config, store, stream, runtime)
    looks = own_prompts(config, store, encoder=family.is_encoder_decoder) or held_out_prompts(
        store, LOOKS
    )
    sampler = build_sampler(config, store, looks if config.evaluation.generate else [])

    def warn(at: Progress, message: str) -> None:
        trainer.callbacks.on_warning(at, message)

    shared = {"silent": not ranks.is_main, "same_for_seconds": 5.0} if ranks.is_distributed else {}
    callbacks: list[Callback] = [Interrupt(**shared)]  # type: ignore[arg-type]  # by name
    if watchers is not None:  # there are none but on the first rank
        callbacks += [
            ConsoleProgress(log_every=config.observe.log_every, console=console),
            *_observers(config, model, stream, runtime, fitted, sampler, watchers, warn, console),
        ]
    if uploads is not None:
        callbacks.append(UploadProgress(uploads, Path(config.run_dir), warn))
    trainer = build_trainer(
        config,
        store=store,
        model=model,
        runtime=runtime,
        evaluator=lambda: heldout(model),
        stream=stream,
        callbacks=callbacks,
        fitted=fitted,
        base_hash=base_hash,
    )
    _banner(config, store, trainer, fitted, console)
    return trainer, sampler


def _observers(
    config: RunConfig,
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    fitted: Fitted,
    sampler: Sampler,
    watchers: Watchers,
    warn: Callable[[Progress, str], None],
    console: Console,
) -> list[Callback]:
    run, feeds = Path(config.run_dir), watchers.feeds(warn)
    callbacks: list[Callback] = [
        MetricsLog(
            run / "metrics.jsonl",
            log_every=config.observe.log_every,
            about=about_run(config, model, stream, runtime, fitted.resources),
            flops_per_token=flops_of(model, stream),
            peak=peak_of_all(runtime.peak, runtime.ranks),
            copies=[feed.take for feed in feeds],
        ),
        SampleWriter(
            sampler,
            model,
            run / "samples.jsonl",
            writing_in(model, runtime),
            console=console if config.evaluation.prompts else None,  # asked for by name
        ),
    ]
    if config.train.early_stopping is not None:
        stopping = config.train.early_stopping
        callbacks.append(EarlyStopping(patience=stopping.patience, min_delta=stopping.min_delta))
    return [*callbacks, *watchers.callbacks(warn), *feeds]


def _banner(
    config: RunConfig, store: TokenStore, trainer: Trainer, fitted: Fitted, console: Console
) -> None:
    counts, stream = parameter_counts(trainer.model), trainer.batches
    splits, tokens = store.manifest.splits, store.manifest.tokens
    shape, runtime = stream.layout.shape, trainer.runtime  # type: ignore[attr-defined]
    rows = f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"
    steps = expected_totals(config, stream).get("steps")  # type: ignore[arg-type]
    console.print(
        f"toque {__version__}: {counts.total / 1e6:,.1f} M parameters "
        f"({counts.non_embedding / 1e6:,.1f} M without embeddings), "
        f"{adapter_words(config, counts)}{runtime.precision} on {runtime.device}\n"
        f"{splits.train:,} examples to train on, {splits.validation:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens; rows of {rows} tokens\n"
        f"{words_on(runtime.ranks, str(runtime.device), stream.at(Cursor()).batch.n_rows)}"
        f"{fitted.line}\n"
        f"{mixture_in_words(config, stream.plan)}"  # type: ignore[attr-defined]
        f"{stages_in_words(config, stream.plan)}"  # type: ignore[attr-defined]
        f"{augmentation_in_words(config, store, encoder=shape.source > 0)}"
        f"until {config.train.stop_after}"
        + (
            f", about {steps:,.0f} steps"
            if steps and config.train.stop_after.unit != "steps"
            else ""
        )
        + f"; run folder {config.run_dir}",
        highlight=False,
        soft_wrap=True,
    )


def _continued(config: RunConfig, store: TokenStore, run: Path) -> Checkpoint | None:
    """The checkpoint to continue from, after asking whether this is the same run."""
    if not run.exists():
        return None
    # Held for a moment: a second run is refused before it has read or written anything.
    with run_lock(run / "checkpoints"):
        found = CheckpointStore(run / "checkpoints").newest_valid()
    if found is None:
        return None
    if found.manifest.data_fingerprint != store.fingerprint:
        raise CheckpointError(
            f"{run} was trained on another store (then {found.manifest.data_fingerprint[:12]}, now "
            f"{store.fingerprint[:12]}): the data or the tokenizer changed. Set data.store back, "
            "or begin a new run: run_dir=runs/another."
        )
    old = load_config(str(run / "config.yaml"), []).config
    # Where the data lies may change: the fingerprint above holds it to its content.
    unsafe = [d for d in differences(old, config) if not d.is_safe and not _only_moved(d)]
    if unsafe:
        listed = "; ".join(f"{d.path}: {d.old} -> {d.new}" for d in unsafe)
        raise CheckpointError(
            f"{run} holds a run at step {found.step} with other settings: {listed}. Continuing "
            "with these would be neither run. Set them back to continue, or begin a new run from "
            f"its weights: run_dir=runs/another --from {found.path}."
        )
    return found


def _only_moved(difference: Difference) -> bool:
    """Whether the data lies elsewhere and is drawn from as before."""
    if difference.path.endswith(".weight"):
        return (difference.old or 1.0) == (difference.new or 1.0)
    return difference.path.startswith(("data.store", "data.sources"))


def _write_config(resolved: Resolved, run: Path) -> None:
    try:
        run.mkdir(parents=True, exist_ok=True)
        atomic_write(run / "config.yaml", resolved_yaml(resolved).encode())
    except OSError as error:
        raise CheckpointError(
            f"The run folder {run} cannot be written: {error.strerror}. Choose another with "
            "run_dir=... or mend its permissions."
        ) from error


def _start_from(model: nn.Module, path: Path) -> None:
    folder = path
    if not (folder / "manifest.json").exists():
        newest = CheckpointStore(path / "checkpoints").newest_valid() if path.exists() else None
        if newest is None:
            raise CheckpointError(
                f"--from {path}: no checkpoint there. Name a folder such as "
                "runs/cookbook/checkpoints/step-00000200, or a run."
            )
        folder = newest.path
    checkpoint = verify_checkpoint(folder)
    load_model_tensors(
        model,
        checkpoint.tensors("model"),
        trainable_only=has_frozen(model),
        where=str(checkpoint.path),
    )


def _finish(
    config: RunConfig, store: TokenStore, trainer: Trainer, sampler: Sampler, console: Console
) -> None:
    """The best model as a Hugging Face folder, scored on held-out data."""
    run, model = Path(config.run_dir), trainer.model
    step = trainer.progress.step
    ranks = trainer.runtime.ranks
    best = broadcast_checkpoint(trainer.checkpoints.best, ranks)
    if best is not None:
        tensors = best.tensors("model")
        load_model_tensors(model, tensors, trainable_only=has_frozen(model), where=str(best.path))
        step = best.step
    elif trainer.average is not None:
        trainer.average.apply(model)
    losses = trainer.evaluator()
    prompts = held_out_prompts(store, config.evaluation.generate)
    scored = build_sampler(config, store, prompts) if prompts else sampler
    writing = f"writing {len(scored.prompts)} held-out recipes"
    with console.status(writing), writing_in(model, trainer.runtime)():
        samples = written_by_all(scored, model, ranks)
    if not ranks.is_main:
        return
    result = evaluation_of(
        store,
        build_heldout(config, store, trainer.batches, trainer.runtime),  # type: ignore[arg-type]
        losses,
        samples,
        build_text_scores(config),
        step=step,
        tasks=score_tasks(config, store, trainer.batches, trainer.runtime, model),  # type: ignore[arg-type]
    )
    atomic_write(run / "evaluation.json", result.to_json().encode())
    append_samples(run / "samples.jsonl", samples, step=step)
    card = model_card(config, step=step, metrics=result.metrics)
    said = keep_model(model, store, run / "model", card=card, base_hash=trainer.base_sha256)
    console.print(result.table(), highlight=False)
    console.print(f"{said} (step {step}, lowest held-out loss).", highlight=False)


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
