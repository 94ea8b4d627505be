"""Plan made: the work of a run, the outlined model on a machine, its estimate, and the levers."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.batch import EncoderDecoderBatch
from toque.config import RunConfig
from toque.config.schema import OptimConfig
from toque.config.schema_methods import AdapterConfig
from toque.data.loader.batch_stream import usual_rows
from toque.data.loader.packing import RowShape
from toque.errors import ConfigError, argument
from toque.hardware.cards import card_named
from toque.hardware.memory import free_bytes
from toque.models.families import DTYPES, Family, family_of, max_positions
from toque.models.flops import flops_per_token, parameter_counts, products_of
from toque.models.forward.outline import OutlinedRows, Where
from toque.runs.estimate import Estimator, Machine, Memory, Work
from toque.runs.outlined_update import Peak, outlining, peak_of
from toque.training.arithmetic import count_flops
from toque.training.optim.factory import optimizer_of, state_bytes
from toque.training.runtime import Runtime
from toque.training.strategy import obstacle_to_dividing
from toque.units import Cursor
from toque.workflows.build import build_stream
from toque.workflows.plan.outlined_model import outlined_model, vocabulary_of
from toque.workflows.plan.plan_result import Lever, Plan
from toque.workflows.plan.several import memory_of_rank, shared_update, with_exchange

if TYPE_CHECKING:
    from toque.data.store.token_store import TokenStore

_BY_VALUES: Final = ("adamw8bit", "adafactor")
"""Optimizers whose step reads numbers, which an outline has not."""
_PROMPT, _TARGET = 256, 512
"""Tokens that documents are split at when nothing is set; see data.max_prompt_tokens."""
_HELD_OUT: Final = 512  # held-out examples where nothing is set
_RANK: Final = 16  # rank of the adapter that is offered
ModelOf = Callable[[RunConfig], PreTrainedModel]  # inside `outlining`


def ahead(
    config: RunConfig, hardware: str | None, gpus: int = 1, *, example: float | None = None
) -> tuple[Estimator, ModelOf, int]:
    """The run's estimator, its outlined model for any settings, and bytes of its prepared data.

    `example`: tokens of one on average, where nothing is prepared; None for the longest allowed.
    """
    from toque.data.store.token_store import TokenStore

    folder, store, held = Path(config.data.store), None, 0
    if (folder / "manifest.json").exists():
        store = TokenStore.open(folder)
        held = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    vocabulary = vocabulary_of(config, store)
    with outlining():
        # The family decides the precision, and the precision the layers: so twice.
        plain = outlined_model(config, vocabulary, where="cuda", precision="float32")
    work = _as_set(config, plain, example) if store is None else _from_store(config, plain, store)
    machine = _machine(config, hardware, family_of(plain.config), work.products, gpus)
    model_of = partial(
        outlined_model, known=vocabulary, where=machine.where, precision=machine.precision
    )
    return Estimator(config, work, machine, outlined_optimizer, gpus), model_of, held


def planned(config: RunConfig, hardware: str | None, utilisation: float | None, gpus: int) -> Plan:
    """Memory, time and disk of the run, and what would change them."""
    of_all, model_of, held = ahead(config, hardware, gpus)
    estimator, work = of_all.of_rank(), of_all.work
    share = estimator.work
    with outlining():
        model, memory, strategy = memory_of_rank(estimator, model_of)
    computing = of_all.time(model, memory, utilisation=utilisation)
    shared = shared_update(estimator, model, memory, strategy, computing)
    time = with_exchange(computing, work, shared)
    flops = memory.update.flops / memory.micro_batch_rows * share.update_rows
    levers = []
    fixed = _changed(
        config, "train", micro_batch_rows=memory.micro_batch_rows,
        gradient_checkpointing=memory.recompute, strategy=strategy,
    )  # fmt: skip
    with outlining():
        for settings, changes, other, row in _levers(fixed, share, estimator.machine.precision):
            rows = max(1, round(share.update_rows * share.row.target / row.target))
            changed = replace(
                estimator, config=other, work=replace(share, row=row, update_rows=rows)
            )
            _, found, _ = memory_of_rank(changed, model_of)
            # An update takes as much longer as its products are more.
            ratio = found.update.flops / found.micro_batch_rows * rows / flops
            seconds = time.update_seconds * ratio
            levers.append(Lever(settings, found.total, found.fits, seconds, changes))
    return Plan(
        parameters=parameter_counts(model),
        machine=estimator.machine,
        work=work,
        memory=memory,
        time=time,
        disk=estimator.disk(model, memory, held, update_seconds=time.update_seconds),
        levers=levers,
        shared=shared,
    )


class Outlook(NamedTuple):
    """Training of a model on this machine, before anything is allocated."""

    estimator: Estimator
    model: PreTrainedModel
    memory: Memory

    @property
    def parameters(self) -> int:
        """Parameters of the model, an adapter's included."""
        return parameter_counts(self.model).total

    def tokens_per_second(self) -> float:
        """Estimated rate, for which a CPU's operations are timed."""
        seconds = self.estimator.time(self.model, self.memory).update_seconds
        return self.estimator.work.tokens_per_update / seconds


def outlook_of(config: RunConfig, example: float | None = None) -> Outlook:
    """The model of a run, and the memory that training takes on this machine.

    `example`: tokens of one on average, where that is known; the memory is for the longest.
    """
    of_all, model_of, _ = ahead(config, None, example=example)
    with outlining():
        model, memory, _ = memory_of_rank(of_all.of_rank(), model_of)
    return Outlook(of_all, model, memory)


def outlined_optimizer(
    model: nn.Module, optim: OptimConfig
) -> tuple[torch.optim.Optimizer | None, int]:
    """Optimizer of an outlined model, None where its step reads numbers; bytes of its state."""
    optimizer, reads = optimizer_of(model, optim), optim.name in _BY_VALUES or ":" in optim.name
    return None if reads else optimizer, state_bytes(optimizer)


def _machine(
    config: RunConfig,
    hardware: str | None,
    family: Family,
    products: Mapping[tuple[int, int], float],
    gpus: int,
) -> Machine:
    """So many of the named card by its maker's rate, or this machine by its measured one."""
    if hardware is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        precision = Runtime.from_settings(config.train, family).precision
        name = f"this machine, {torch.get_num_threads()} threads of its CPU"
        where: Where = "cpu"
        if device.type == "cuda":
            name, where = torch.cuda.get_device_name(), "cuda"
        if gpus > 1 and where == "cpu":
            raise ConfigError(
                f"A plan for {gpus} GPUs was asked for, and this machine has none. Name a card: "
                f"{argument('hardware=rtx-4090')}."
            )
        peak = peak_of(device, DTYPES[precision], products).of_ranks(gpus)
        return Machine(_several(gpus, name), where, precision, free_bytes(device), None, peak)
    card = card_named(hardware)
    chosen: str = config.train.precision
    if chosen == "auto":
        has_bf16 = "bf16" in card.flops_per_second
        chosen = "bf16" if has_bf16 else "fp16" if family.fp16_is_safe else "float32"
    kind = "fp32" if chosen == "float32" else chosen
    rate = card.flops_per_second.get(kind)
    if rate is None:
        raise ConfigError(
            f"train.precision is {chosen}, and {card.name} has no unit for it. It has "
            f"{', '.join(card.flops_per_second)}."
        )
    peak = Peak(rate, f"stated: {card.source}, dense {kind}").of_ranks(gpus)
    return Machine(_several(gpus, card.name), "cuda", chosen, card.memory_bytes, card, peak)


def _several(gpus: int, name: str) -> str:
    return name if gpus == 1 else f"{gpus} x {name}"


def _from_store(config: RunConfig, model: PreTrainedModel, store: TokenStore) -> Work:
    stream = build_stream(config, store, model)
    batch, shape = stream.at(Cursor()).batch, stream.layout.shape
    longest = int(stream.plan.source_lengths.max()), int(stream.plan.target_lengths.max())
    if not stream.layout.packed:
        shape = RowShape(longest[0] if shape.source else 0, longest[1])
    examples = sum(len(ids) for ids in batch.example_ids) / max(1, batch.n_rows)
    splits, whole = store.manifest.splits, store.manifest.tokens
    held_out = min(splits.validation, config.evaluation.max_examples or splits.validation)
    each = (whole.prompt + whole.target) / max(1, store.manifest.examples)
    worst = -(-shape.target // max(1, longest[1]))
    if shape.source:
        worst = max(worst, -(-shape.source // max(1, longest[0])))
    if isinstance(batch, EncoderDecoderBatch):
        real = (batch.source_segments > 0).sum() + (batch.target_segments > 0).sum()
    else:
        real = (batch.segments > 0).sum()
    row = OutlinedRows(1, shape.source, shape.target, max(1, round(examples)))
    arithmetic = count_flops(model, stream)
    return Work(
        row=row,
        worst_examples=worst,
        update_rows=batch.n_rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=float(real),
        flops_per_token=arithmetic.flops_per_token,
        products=arithmetic.products,
        totals=stream.totals(config.train.stop_after),
        seconds=config.train.stop_after.seconds,
        held_out_tokens=held_out * each,
        how=f"the {splits.train:,} training examples of {config.data.store}, "
        f"{each:,.0f} tokens each on average",
    )


def _as_set(config: RunConfig, model: PreTrainedModel, example: float | None) -> Work:
    """Work with every example as long as the settings allow, or as `example` tokens on average."""
    data, train = config.data, config.train
    encoder = family_of(model.config).is_encoder_decoder
    prompt = _PROMPT if data.max_prompt_tokens == "auto" else data.max_prompt_tokens
    target = _TARGET if data.max_target_tokens == "auto" else data.max_target_tokens
    length = target if encoder else prompt + target
    if isinstance(train.row_tokens, int):
        length = max(length, train.row_tokens) if encoder else train.row_tokens
    limit = max_positions(model.config)
    length = length if limit is None else min(length, limit)
    row = OutlinedRows(1, prompt if encoder else 0, length)
    if example is not None:  # attention costs what examples are long, not what rows are
        most = min(row.source or row.target, row.target)  # each has a token of either side
        row = replace(row, examples=max(1, min(most, round(row.tokens / example))))
    in_tokens = train.batch.unit == "tokens"
    rows = int(train.batch.amount // row.tokens) if in_tokens else int(train.batch.amount)
    if rows < 1:
        raise ConfigError(
            f'train.batch is "{train.batch}", and one row as long as allowed takes {row.tokens} '
            f'tokens. Use at least train.batch="{row.tokens} tokens".'
        )
    shares: dict[str, Any] = {"source_share": row.source / row.tokens} if row.source else {}
    read = row.source / row.examples
    across = {"source_context": read, "cross_context": read}
    tokens = float(rows * row.tokens)
    held_out = 0.0 if data.validation else data.validation_fraction
    examples = data.max_examples and data.max_examples * (1.0 - held_out)
    steps_of_a_unit = {
        "steps": 1.0,
        "examples": 1.0 / rows,
        "tokens": 1.0 / tokens,
        "epochs": examples / rows if examples else None,
    }
    totals, steps_each = {}, steps_of_a_unit.get(train.stop_after.unit)
    if steps_each is not None:
        steps = train.stop_after.amount * steps_each
        totals = {"steps": steps, "examples": steps * rows, "tokens": steps * tokens}
    return Work(
        row=row,
        worst_examples=1,
        update_rows=rows,
        usual_rows=usual_rows(row.tokens),
        tokens_per_update=tokens,
        flops_per_token=flops_per_token(
            model, context=row.target / row.examples / 2, **shares, **across
        ),
        products=products_of(model, **shares),
        totals=totals,
        seconds=train.stop_after.seconds,
        held_out_tokens=float((config.evaluation.max_examples or _HELD_OUT) * row.tokens),
        how="the settings alone, every example as long as they allow, because "
        f"{data.store} is not prepared: real texts are shorter, so memory is an upper bound",
    )


def _changed(config: RunConfig, section: str, **values: Any) -> RunConfig:
    """The configuration with other values in one section."""
    other = getattr(config, section).model_copy(update=values)
    return config.model_copy(update={section: other})


def _levers(
    config: RunConfig, work: Work, precision: str
) -> Iterator[tuple[str, str, RunConfig, OutlinedRows]]:
    """Levers one by one, then those together that cost no quality.

    Each is its settings as written, what else changes, the configuration, and a row of an update.
    """
    train, adapter, row = config.train, config.adapter, work.row
    free, words = config, []
    divided = train.strategy == "fsdp"
    if train.strategy == "ddp" and not obstacle_to_dividing(
        train, adapter, config.optim.name, fp16=precision == "fp16"
    ):
        yield (
            "train.strategy=fsdp",
            "the same updates",
            _changed(config, "train", strategy="fsdp"),
            row,
        )
    if train.micro_batch_rows != 1:
        words.append("train.micro_batch_rows=1")
        free = _changed(free, "train", micro_batch_rows=1)
        yield words[-1], "the same result", free, row
    if not train.gradient_checkpointing:
        words.append("train.gradient_checkpointing=true")
        again = {"gradient_checkpointing": True}
        free = _changed(free, "train", **again)
        yield words[-1], "the same bits, a second forward", _changed(config, "train", **again), row
    if (
        not divided
        and config.optim.name in ("adamw", "muon")
        and importlib.util.find_spec("bitsandbytes")
    ):
        lighter = "optim.name=adamw8bit"
        eight = _changed(config, "optim", name="adamw8bit")
        yield lighter, "Adam's averages in 8 bits", eight, row
        if words:
            all_of_these = _changed(free, "optim", name="adamw8bit")
            yield " ".join([*words, lighter]), "all of these", all_of_these, row
    if adapter is None and config.model.start_from != "scratch":
        offered = config.model_copy(update={"adapter": AdapterConfig(r=_RANK)})
        yield f"adapter='{{kind: lora, r: {_RANK}}}'", "only an adapter is trained", offered, row
    quantisable = adapter is not None and adapter.quantize_base is None and adapter.kind != "dora"
    if quantisable and not divided:
        for form, bits in (("int8", 8), ("nf4", 4)):
            fewer = _changed(config, "adapter", quantize_base=form)
            yield f"adapter.quantize_base={form}", f"the frozen matrices in {bits} bits", fewer, row
    most = config.data.max_target_tokens
    if train.micro_batch_rows == 1 and isinstance(most, int) and row.target > most // 2:
        half = most // 2
        target = row.target - half if not row.source else max(half, row.target // 2)
        shorter = replace(row, target=target)
        yield f"data.max_target_tokens={half}", "long texts are cut", config, shorter
