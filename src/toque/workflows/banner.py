"""Banner of a training session: the model, the data, the length and the machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.curriculum import StagedPlan
from toque.data.loader.epoch_plan import EpochPlan
from toque.data.store.token_store import TokenStore
from toque.errors import join_first
from toque.models.flops import parameter_counts
from toque.models.lora.adapter_files import saved_modules
from toque.models.lora.frozen import is_added
from toque.models.lora.layers import ADAPTER
from toque.reporter import millions
from toque.training.autotune import Fitted
from toque.training.bottlenecks import few_updates
from toque.training.optimisations import choose_attention
from toque.training.runtime import Runtime
from toque.training.strategy import PlacedModel
from toque.units import Cursor
from toque.version import __version__
from toque.workflows.run_length import Length

_Line = tuple[str, str]
"""Label and text of a line."""


class Banner(NamedTuple):
    """First lines of a session."""

    short: str
    """Lines for the console."""
    full: str
    """Lines for the log."""


def build_banner(
    config: RunConfig,
    store: TokenStore,
    placed: PlacedModel,
    stream: BatchStream,
    runtime: Runtime,
    fitted: Fitted,
    length: Length,
) -> Banner:
    """Build the first lines of a session."""
    n_rows = stream.at(Cursor()).batch.n_rows
    model_text = _describe_model(config, placed.model)
    examples = _describe_examples(store)
    dropped = _describe_dropped(store)
    row = _describe_row(stream)
    batch = _describe_batch(config, stream, row)
    n_micro_batches = math.ceil(n_rows / fitted.resources.micro_batch_rows)
    accumulation = f"{_count(n_micro_batches, 'micro-batch', 'es')} in the first update"
    compiled = "compiled" if fitted.resources.compile else "not compiled"
    uploads = config.checkpoint.upload or "none"
    length_lines = _describe_length(config, stream, length)
    ranks_lines = _describe_ranks(runtime, placed.sharing.strategy, n_rows)

    attention = choose_attention(placed.model, runtime)
    attention_parts = filter(None, (attention.name, attention.blocks))
    for_log = [
        ("model", model_text),
        ("data", f"{examples}; rows of {row} tokens"),
        ("dropped", dropped),
        *(("", line) for line in _describe_order(config, store, stream)),
        *length_lines,
        *ranks_lines,
        ("batch", f"{batch}, over all micro-batches and ranks"),
        ("accumulation", f"{accumulation}; {fitted.line}"),
        ("precision", f"{runtime.precision} on {runtime.device}"),
        ("attention", ", ".join(attention_parts)),
        ("compile", compiled),
        ("uploads", uploads),
        ("run folder", config.run_dir),
    ]

    paths = [source.path for source in config.data.sources]
    sources = join_first(paths) if paths else config.data.store
    device = f"{runtime.device} ({_describe_device(runtime)})"
    for_console = [
        ("data", f"{sources}: {examples}; {dropped}"),
        *length_lines,
        *ranks_lines,
        ("batch", f"{batch}, {accumulation}, {runtime.precision}, {compiled}"),
        ("run folder", f"{config.run_dir}, on {device}; uploads: {uploads}"),
    ]
    title = f"toque {__version__}"
    short = _join(f"{title}: {model_text}", for_console)
    return Banner(short, _join(title, for_log))


def _join(title: str, lines: Sequence[_Line]) -> str:
    """Join the lines below their title, with the labels in one column."""
    return "\n".join([title, *(f"  {label:14}{text}" for label, text in lines)])


def _count(n: int, noun: str, plural: str = "s") -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}{plural}"


def _describe_examples(store: TokenStore) -> str:
    tokens = store.manifest.tokens
    n_train = len(store.wanted_rows("train"))
    n_held_out = len(store.wanted_rows("validation"))
    noun = "pairs" if store.has_pairs else "examples"
    return (
        f"{n_train:,} {noun} to train on, {n_held_out:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens"
    )


def _describe_row(stream: BatchStream) -> str:
    """Return the length of a row in tokens, for an encoder-decoder as "source + target"."""
    shape = stream.layout.shape
    return f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"


def _describe_batch(config: RunConfig, stream: BatchStream, row: str) -> str:
    """Describe the batch size. A batch in tokens has only complete rows, so it may be smaller."""
    text = f"{config.train.batch} per update"
    update_rows = _stages(stream)[0].update_rows
    if update_rows is None:
        return text
    return f"{text}: {_count(update_rows, 'row')} of {row}"


def _describe_ranks(runtime: Runtime, strategy: str, n_rows: int) -> list[_Line]:
    """Describe the ranks, each with `n_rows` rows of the first update; [] for one rank."""
    if not runtime.ranks.is_distributed:
        return []
    library = "nccl" if runtime.device.type == "cuda" else "gloo"
    text = (
        f"{runtime.ranks.world_size} ranks over {library} share each update by {strategy}, about "
        f"{n_rows} of its rows each"
    )
    return [("ranks", text)]


def _describe_device(runtime: Runtime) -> str:
    if runtime.device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads"


def _describe_model(config: RunConfig, model: PreTrainedModel) -> str:
    """Describe the model's size, and the size of its adapter."""
    counts = parameter_counts(model)
    text = (
        f"{config.model.family} from {config.model.start_from}, {millions(counts.total)} "
        f"parameters ({millions(counts.non_embedding)} without embeddings)"
    )
    if config.adapter is None:
        return text
    n_added = sum(p.numel() for name, p in model.named_parameters() if is_added(name))
    share = counts.trainable / (counts.total - n_added)
    megabytes = counts.trainable * 4 / 1e6  # in float32
    modules = saved_modules(cast("Any", model).peft_config[ADAPTER])
    parts = ", ".join((f"{config.adapter.kind} adapter", *modules))
    return (
        f"{text}, {parts} of {counts.trainable:,} parameters "
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
        lines.append(rewriting.describe_effect(rows, seed=config.seed))
    return lines


def _describe_length(
    config: RunConfig, stream: BatchStream, length: Length
) -> list[_Line]:
    """Describe the length of training, and warn about very few updates."""
    stop = config.train.stop_after
    text = f"until {stop.in_words()}"
    n_steps = stream.totals(stop).get("steps")
    if not n_steps or stop.unit == "steps":
        return [("length", text + length.line)]
    lines = [("length", f"{text}, about {n_steps:,.0f} steps{length.line}")]
    if warning := few_updates(n_steps):
        lines.append(("warning", warning))
    return lines
