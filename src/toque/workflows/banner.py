"""Banner of a run: its model, data, length, batch, precision and folder, for people."""

from __future__ import annotations

import math

from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.cooking.augmentation import Rewriting
from toque.data.loader.batch_stream import BatchStream
from toque.data.loader.curriculum import StagedPlan
from toque.data.store.token_store import TokenStore
from toque.models.flops import ParameterCounts, parameter_counts
from toque.training.autotune.fitting import Fitted
from toque.training.bottlenecks import few_updates
from toque.training.distributed.collectives import Ranks
from toque.training.placement import attention_in
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.version import __version__
from toque.workflows.run_length import Length


def banner(
    config: RunConfig,
    store: TokenStore,
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    strategy: str,
    fitted: Fitted,
    length: Length,
) -> str:
    """The lines that a session begins with."""
    counts, shape = parameter_counts(model), stream.layout.shape
    splits, tokens = store.manifest.splits, store.manifest.tokens
    rows = f"{shape.source} + {shape.target}" if shape.source else f"{shape.target}"
    batch = stream.at(Cursor()).batch
    ranks = _ranks_in_words(runtime.ranks, str(runtime.device), batch.n_rows, strategy)
    resources = fitted.resources
    of_model = (
        f"{config.model.family} from {config.model.start_from}, {counts.total / 1e6:,.1f} M "
        f"parameters ({counts.non_embedding / 1e6:,.1f} M without embeddings)"
    )
    data = (
        f"{splits.train:,} examples to train on, {splits.validation:,} held out; "
        f"{tokens.prompt + tokens.target:,} tokens; rows of {rows} tokens"
    )
    at_once = _micro_batches(batch.n_rows, resources.micro_batch_rows)
    pairs = [
        ("model", of_model + _adapter_in_words(config, counts)),
        ("data", data),
        *(("", line) for line in _drawn(config, store, stream)),
        *zip(("length", "warning"), _length(config, stream, length).splitlines(), strict=False),
        *(("ranks", line) for line in ranks.splitlines()),
        ("batch", f"{config.train.batch} an update, over all micro-batches and ranks"),
        ("accumulation", f"{at_once}; {fitted.line}"),
        ("precision", f"{runtime.precision} on {runtime.device}"),
        ("attention", attention_in(model, runtime).name),
        ("compile", "compiled" if resources.compile else "not compiled"),
        ("uploads", config.checkpoint.upload or "none"),
        ("run folder", config.run_dir),
    ]
    lines = [f"  {name:14}{text}" for name, text in pairs]
    return "\n".join([f"toque {__version__}", *lines])


def _drawn(config: RunConfig, store: TokenStore, stream: BatchStream) -> list[str]:
    """Lines on the mixture, the stages and the augmentation of the examples."""
    plan, rows = stream.plan, store.rows("train")
    mixture = plan.stages[0].mixture if isinstance(plan, StagedPlan) else plan.mixture
    lines = [mixture.in_words(config.data)] if mixture is not None else []
    if config.curriculum is not None and isinstance(plan, StagedPlan):
        lines += plan.in_words(config.curriculum)
    encoder = stream.layout.shape.source > 0
    if config.augmentation is not None:
        rewriting = Rewriting(config.augmentation, store, rows, encoder=encoder)
        lines.append(rewriting.in_words(rows, seed=config.seed))
    return lines


def _length(config: RunConfig, stream: BatchStream, length: Length) -> str:
    steps = stream.totals(config.train.stop_after).get("steps")
    stop = config.train.stop_after
    words = f"until {str(stop).removesuffix('s') if stop.amount == 1 else stop}"
    if not steps or stop.unit == "steps":
        return words + length.line
    few = few_updates(steps)
    return f"{words}, about {steps:,.0f} steps{length.line}" + (f"\n{few}" if few else "")


def _micro_batches(rows: int, at_once: int) -> str:
    """Micro-batches of the first update, on this rank."""
    n = math.ceil(rows / at_once)
    return f"{n} micro-batch{'es' * (n > 1)} in the first update"


def _adapter_in_words(config: RunConfig, counts: ParameterCounts) -> str:
    """The trained share; nothing when all is trained."""
    if config.adapter is None:
        return ""
    base = counts.total - counts.trainable
    return (
        f", {config.adapter.kind} adapter of {counts.trainable:,} parameters "
        f"({counts.trainable / base:.2%}, {counts.trainable * 4 / 1e6:,.1f} MB)"
    )


def _ranks_in_words(ranks: Ranks, device: str, rows: int, strategy: str) -> str:
    """A line on the ranks and the `rows` of each in an update; "" for one process."""
    if not ranks.is_distributed:
        return ""
    library = "nccl" if device.startswith("cuda") else "gloo"
    return (
        f"{ranks.world_size} ranks over {library} share each update by {strategy}, about {rows} of "
        "its rows each\n"
    )
