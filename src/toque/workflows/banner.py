"""Banner of a training session: the model, the data, the length and the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.prepare.store_plan import join_first
from toque.data.store.token_store import TokenStore
from toque.models.flops import parameter_counts
from toque.reporter import millions
from toque.training.autotune import Fitted
from toque.training.bottlenecks import few_updates
from toque.training.optimisations import choose_attention
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.version import __version__
from toque.workflows.run_length import Length


class Banner(NamedTuple):
    """First lines of a session."""

    short: str
    """Lines for the console."""
    full: str
    """Lines for the log."""


def build_banner(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    strategy: str,
    fitted: Fitted,
    length: Length,
) -> Banner:
    """Build the first lines of a session."""
    ranks = runtime.ranks
    n_rows = stream.at(Cursor()).batch.n_rows
    sharing = []
    if ranks.is_distributed:
        library = "nccl" if runtime.device.type == "cuda" else "gloo"
        text = (
            f"{ranks.world_size} ranks over {library} share each update by {strategy}, about "
            f"{n_rows} of its rows each"
        )
        sharing = [("ranks", text)]

    splits, tokens = store.manifest.splits, store.manifest.tokens
    examples = (
        f"{splits.train:,} examples to train on, {splits.validation:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens"
    )
    shape = stream.layout.shape
    row = f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"
    batch = f"{config.train.batch} per update"
    # A batch in tokens has only complete rows, which may contain far fewer tokens.
    update_rows = _stages(stream)[0].update_rows
    if update_rows is not None:
        batch += f": {_count(update_rows, 'row')} of {row}"
    n_micro_batches = math.ceil(n_rows / fitted.resources.micro_batch_rows)
    plural = "es" if n_micro_batches > 1 else ""
    accumulation = f"{n_micro_batches} micro-batch{plural} in the first update"

    length_text, *warnings = _describe_length(config, stream, length)
    lines_of_length = [
        ("length", length_text),
        *(("warning", line) for line in warnings),
    ]
    model_text = _describe_model(config, model)
    dropped = _describe_dropped(store)
    compiled = "compiled" if fitted.resources.compile else "not compiled"
    uploads = config.checkpoint.upload or "none"
    attention = choose_attention(model, runtime)
    is_gpu = runtime.device.type == "cuda"
    device = (
        torch.cuda.get_device_name() if is_gpu else f"{torch.get_num_threads()} threads"
    )
    for_log = [
        ("model", model_text),
        ("data", f"{examples}; rows of {row} tokens"),
        ("dropped", dropped),
        *(("", line) for line in _describe_order(config, store, stream)),
        *lines_of_length,
        *sharing,
        ("batch", f"{batch}, over all micro-batches and ranks"),
        ("accumulation", f"{accumulation}; {fitted.line}"),
        ("precision", f"{runtime.precision} on {runtime.device}"),
        ("attention", ", ".join(filter(None, (attention.name, attention.blocks)))),
        ("compile", compiled),
        ("uploads", uploads),
        ("run folder", config.run_dir),
    ]
    paths = [source.path for source in config.data.sources]
    sources = join_first(paths) if paths else config.data.store
    for_console = [
        ("data", f"{sources}: {examples}; {dropped}"),
        *lines_of_length,
        *sharing,
        ("batch", f"{batch}, {accumulation}, {runtime.precision}, {compiled}"),
        (
            "run folder",
            f"{config.run_dir}, on {runtime.device} ({device}); uploads: {uploads}",
        ),
    ]
    title = f"toque {__version__}"
    return Banner(_join(f"{title}: {model_text}", for_console), _join(title, for_log))


def _join(title: str, lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join([title, *(f"  {name:14}{text}" for name, text in lines)])


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def _describe_model(config: RunConfig, model: PreTrainedModel) -> str:
    counts = parameter_counts(model)
    text = (
        f"{config.model.family} from {config.model.start_from}, {millions(counts.total)} "
        f"parameters ({millions(counts.non_embedding)} without embeddings)"
    )
    if config.adapter is None:
        return text
    share = counts.trainable / (counts.total - counts.trainable)
    megabytes = counts.trainable * 4 / 1e6
    return (
        f"{text}, {config.adapter.kind} adapter of {counts.trainable:,} parameters "
        f"({share:.2%}, {megabytes:,.1f} MB)"
    )


def _describe_dropped(store: TokenStore) -> str:
    """Describe the number of dropped records and the most frequent reason."""
    dropped = store.manifest.dropped
    n_dropped = sum(dropped.values())
    if not n_dropped:
        return "no record dropped"
    reason = max(dropped, key=lambda name: dropped[name])
    n_reason = dropped[reason]
    frequency = "" if n_reason == n_dropped else "most often "
    return (
        f"{n_dropped:,} of {store.manifest.records.read:,} records dropped "
        f"({frequency}{reason}: {n_reason:,})"
    )


def _stages(stream: BatchStream) -> Sequence[EpochPlan]:
    """Return the plans of a curriculum, or the only plan of a run without one."""
    return stream.plan.stages if isinstance(stream.plan, StagedPlan) else [stream.plan]


def _describe_order(
    config: RunConfig, store: TokenStore, stream: BatchStream
) -> list[str]:
    """Describe the mixture, the stages and the augmentation of the examples."""
    mixture = _stages(stream)[0].mixture
    lines = [mixture.describe(config.data)] if mixture is not None else []
    if config.curriculum is not None and isinstance(stream.plan, StagedPlan):
        lines += stream.plan.describe(config.curriculum)
    if config.augmentation is not None:
        rows = store.rows("train")
        has_encoder = stream.layout.shape.source > 0
        rewriting = Rewriting(config.augmentation, store, rows, encoder=has_encoder)
        lines.append(rewriting.in_words(rows, seed=config.seed))
    return lines


def _describe_length(
    config: RunConfig, stream: BatchStream, length: Length
) -> list[str]:
    """Describe the length of training, and warn about very few updates."""
    stop = config.train.stop_after
    text = f"until {stop.in_words()}"
    steps = stream.totals(stop).get("steps")
    if not steps or stop.unit == "steps":
        return [text + length.line]
    lines = [f"{text}, about {steps:,.0f} steps{length.line}"]
    if warning := few_updates(steps):
        lines.append(warning)
    return lines
