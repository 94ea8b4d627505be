"""Estimate of a run: its work, its machine, and the settings that would change its cost."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from toque.config import RunConfig
from toque.config.schema import OptimConfig
from toque.config.schema_methods import AdapterConfig
from toque.errors import ConfigError, argument
from toque.hardware.cards import card_named
from toque.hardware.memory import free_bytes
from toque.models.families import DTYPES, Family, family_of
from toque.models.flops import parameter_counts
from toque.models.forward.outline import OutlinedRows, Where
from toque.runs.estimate import Estimator
from toque.runs.estimate_parts import Machine, Memory, Time, Work
from toque.runs.outlined_update import outlining
from toque.runs.peak import Peak, peak_of
from toque.training.optim.factory import optimizer_of, state_bytes
from toque.training.runtime import Runtime
from toque.training.strategy import find_fsdp_obstacle
from toque.workflows.plan.generation_speed import add_generation
from toque.workflows.plan.multi_gpu import (
    add_exchange,
    estimate_exchange,
    estimate_rank_memory,
)
from toque.workflows.plan.outlined_model import find_vocabulary, outline_model
from toque.workflows.plan.plan_report import Lever, Plan
from toque.workflows.plan.run_work import work_from_settings, work_from_store

_NEEDS_VALUES: Final = ("adamw8bit", "adafactor")
"""Optimizers that read tensor values, which an outlined model does not have."""
_RANK: Final = 16
"""Rank of the proposed adapter."""
ModelBuilder = Callable[[RunConfig], PreTrainedModel]
"""Function that builds an outlined model for a configuration, inside `outlining`."""


def build_estimator(
    config: RunConfig,
    hardware: str | None,
    gpus: int = 1,
    *,
    example: float | None = None,
) -> tuple[Estimator, ModelBuilder, int]:
    """Return the estimator of a run, the builder of its model, and the bytes of its store.

    Args:
        config: Configuration of the run.
        hardware: Name of a GPU, or None for this machine.
        gpus: Number of GPUs.
        example: Mean number of tokens per example, used without a store. None means the longest
            allowed example.
    """
    from toque.data.store.token_store import TokenStore

    folder = Path(config.data.store)
    store = None
    store_bytes = 0
    if (folder / "manifest.json").exists():
        store = TokenStore.open(folder)
        files = filter(Path.is_file, folder.rglob("*"))
        store_bytes = sum(file.stat().st_size for file in files)
    vocabulary = find_vocabulary(config, store)
    with outlining():
        # The work and the machine depend on the shapes of the model, but not on its layers, which
        # depend on the machine.
        plain = outline_model(config, vocabulary, where="cuda", precision="float32")
    if store is None:
        work = work_from_settings(config, plain, example)
    else:
        work = work_from_store(config, plain, store)

    family = family_of(plain.config)
    if hardware is None:
        machine = _this_machine(config, family, work.products, gpus)
    else:
        machine = _named_machine(config, family, hardware, gpus)
    build_model = partial(
        outline_model,
        vocabulary=vocabulary,
        where=machine.where,
        precision=machine.precision,
    )
    estimator = Estimator(config, work, machine, outline_optimizer, gpus)
    return estimator, build_model, store_bytes


def build_plan(
    config: RunConfig,
    hardware: str | None,
    utilisation: float | None,
    gpus: int,
    *,
    changes: bool,
) -> Plan:
    """Estimate a run, and the effect of other settings if there are to be `changes`."""
    all_gpus, build_model, store_bytes = build_estimator(config, hardware, gpus)
    rank = all_gpus.of_rank()
    with outlining():
        model, memory, strategy = estimate_rank_memory(rank, build_model)
    computing = all_gpus.time(model, memory, utilisation=utilisation)
    shared = estimate_exchange(rank, model, memory, strategy, computing)
    time = add_exchange(computing, all_gpus.work, shared)
    time = add_generation(time, all_gpus, model, memory)

    levers = []
    if changes:
        # Changes are compared with the settings that training would choose.
        chosen = {
            "micro_batch_rows": memory.micro_batch_rows,
            "gradient_checkpointing": memory.recompute,
            "strategy": strategy,
        }
        train = config.train.model_copy(update=chosen)
        chosen_config = config.model_copy(update={"train": train})
        flops = _update_flops(memory, rank.work)
        with outlining():
            levers = [
                _estimate_lever(rank, proposal, build_model, time, flops)
                for proposal in _propose_changes(chosen_config, rank)
            ]
    return Plan(
        parameters=parameter_counts(model),
        machine=rank.machine,
        work=all_gpus.work,
        memory=memory,
        time=time,
        disk=rank.disk(model, memory, store_bytes, update_seconds=time.update_seconds),
        levers=levers,
        shared=shared,
    )


def _estimate_lever(
    rank: Estimator,
    proposal: _Proposal,
    build_model: ModelBuilder,
    time: Time,
    flops: float,
) -> Lever:
    """Estimate a proposed change. An update now takes `time` and `flops`."""
    changed = _change_estimator(rank, proposal)
    _, memory, _ = estimate_rank_memory(changed, build_model)
    # The time of an update, without the generation of texts, is proportional to its FLOPs.
    ratio = _update_flops(memory, changed.work) / flops
    generating = time.generation_seconds
    seconds = generating + ratio * (time.update_seconds - generating)
    return Lever(proposal.settings, memory.total, memory.fits, seconds, proposal.effect)


def _update_flops(memory: Memory, work: Work) -> float:
    """Return the FLOPs of all micro-batches of an update."""
    return memory.update.flops / memory.micro_batch_rows * work.update_rows


def _change_estimator(rank: Estimator, proposal: _Proposal) -> Estimator:
    """Return the estimator of a run with other settings and about as many tokens per update."""
    row_ratio = rank.work.row.target / proposal.row.target
    n_rows = max(1, round(rank.work.update_rows * row_ratio))
    work = replace(rank.work, row=proposal.row, update_rows=n_rows)
    return replace(rank, config=proposal.config, work=work)


class Outlook(NamedTuple):
    """Prediction of training on this machine."""

    estimator: Estimator
    model: PreTrainedModel
    memory: Memory

    @property
    def parameters(self) -> int:
        """Number of parameters, including an adapter."""
        return parameter_counts(self.model).total

    def tokens_per_second(self) -> float:
        """Estimate the training speed. On a CPU, time the operations of an update."""
        seconds = self.estimator.time(self.model, self.memory).update_seconds
        return self.estimator.work.tokens_per_update / seconds


def predict_training(config: RunConfig, example: float | None = None) -> Outlook:
    """Predict the memory and speed of training on this machine.

    The memory assumes the longest examples. `example` is the mean number of tokens per example, if
    known.
    """
    estimator, build_model, _ = build_estimator(config, None, example=example)
    with outlining():
        model, memory, _ = estimate_rank_memory(estimator.of_rank(), build_model)
    return Outlook(estimator, model, memory)


def outline_optimizer(
    model: nn.Module, optim: OptimConfig
) -> tuple[torch.optim.Optimizer | None, int]:
    """Build the optimizer of an outlined model, and return the bytes of its state.

    The optimizer is None if its step reads tensor values.
    """
    optimizer = optimizer_of(model, optim)
    needs_values = optim.name in _NEEDS_VALUES or ":" in optim.name
    return None if needs_values else optimizer, state_bytes(optimizer)


def _this_machine(
    config: RunConfig,
    family: Family,
    products: Mapping[tuple[int, int], float],
    gpus: int,
) -> Machine:
    """Return this machine with its free memory and its stated or measured peak."""
    has_gpu = torch.cuda.is_available()
    if gpus > 1 and not has_gpu:
        raise ConfigError(
            f"{argument('gpus')} is {gpus}, but this machine does not have a GPU. Name one: "
            f"{argument('hardware=rtx-4090')}."
        )
    where: Where = "cuda" if has_gpu else "cpu"
    device = torch.device(where)
    name = f"this machine, {torch.get_num_threads()} threads of its CPU"
    if has_gpu:
        name = torch.cuda.get_device_name()

    precision = Runtime.from_settings(config.train, family).precision
    peak = peak_of(device, DTYPES[precision], products).of_ranks(gpus)
    memory = free_bytes(device)
    return Machine(_multiply(gpus, name), where, precision, memory, None, peak)


def _named_machine(
    config: RunConfig, family: Family, hardware: str, gpus: int
) -> Machine:
    """Return a machine with GPUs from the table, with their stated memory and peak."""
    card = card_named(hardware)
    precision = config.train.precision
    if precision == "auto":
        if "bf16" in card.flops_per_second:
            precision = "bf16"
        else:
            precision = "fp16" if family.fp16_is_safe else "float32"
    kind = "fp32" if precision == "float32" else precision

    rate = card.flops_per_second.get(kind)
    if rate is None:
        raise ConfigError(
            f"train.precision is {precision}, but {card.name} only supports "
            f"{', '.join(card.flops_per_second)}. Use one of these."
        )

    peak = Peak(rate, f"stated: {card.source}, dense {kind}").of_ranks(gpus)
    return Machine(
        _multiply(gpus, card.name), "cuda", precision, card.memory_bytes, card, peak
    )


def _multiply(gpus: int, name: str) -> str:
    return name if gpus == 1 else f"{gpus} x {name}"


class _Proposal(NamedTuple):
    """Other settings for a run."""

    settings: str
    """Settings as written on the command line."""
    effect: str
    config: RunConfig
    row: OutlinedRows
    """Row of an update with these settings."""


def _change(config: RunConfig, setting: str, value: object) -> RunConfig:
    """Return the configuration with another value of a setting, such as "optim.name"."""
    section, name = setting.split(".")
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})


def _propose_changes(config: RunConfig, rank: Estimator) -> Iterator[_Proposal]:
    """Propose single changes, and together all changes that do not cost quality."""
    train, row = config.train, rank.work.row
    is_fp16 = rank.machine.precision == "fp16"
    if train.strategy == "ddp" and not find_fsdp_obstacle(
        train, config.adapter, config.optim.name, fp16=is_fp16
    ):
        sharded = _change(config, "train.strategy", "fsdp")
        yield _Proposal("train.strategy=fsdp", "the same updates", sharded, row)
    yield from _propose_harmless(config, row)
    yield from _propose_adapters(config, row)

    longest = config.data.max_target_tokens
    half = longest // 2 if isinstance(longest, int) else row.target
    if train.micro_batch_rows == 1 and row.target > half:
        target = max(half, row.target // 2) if row.source else row.target - half
        shorter = replace(row, target=target)
        setting = f"data.max_target_tokens={half}"
        yield _Proposal(setting, "long texts are truncated", config, shorter)


def _propose_harmless(config: RunConfig, row: OutlinedRows) -> Iterator[_Proposal]:
    """Propose changes that do not cost quality, and all of them with an 8-bit optimizer."""
    changes: list[tuple[str, object, str]] = []
    if config.train.micro_batch_rows != 1:
        changes.append(("train.micro_batch_rows", 1, "the same result"))
    if not config.train.gradient_checkpointing:
        effect = "a bitwise identical result, with a second forward pass"
        changes.append(("train.gradient_checkpointing", True, effect))
    is_adam = config.optim.name in ("adamw", "muon") and not _is_sharded(config)
    has_8bit = is_adam and importlib.util.find_spec("bitsandbytes") is not None
    if has_8bit:
        changes.append(("optim.name", "adamw8bit", "Adam's averages in 8 bits"))

    combined = config
    settings = []
    for setting, value, effect in changes:
        settings.append(f"{setting}={str(value).lower()}")
        combined = _change(combined, setting, value)
        yield _Proposal(settings[-1], effect, _change(config, setting, value), row)
    if has_8bit and len(settings) > 1:
        yield _Proposal(" ".join(settings), "all of these", combined, row)


def _propose_adapters(config: RunConfig, row: OutlinedRows) -> Iterator[_Proposal]:
    """Propose an adapter for a pretrained model, or quantised matrices below an adapter."""
    adapter = config.adapter
    if adapter is None:
        if config.model.start_from != "scratch":
            adapted = config.model_copy(update={"adapter": AdapterConfig(r=_RANK)})
            setting = f"adapter='{{kind: lora, r: {_RANK}}}'"
            yield _Proposal(setting, "only an adapter is trained", adapted, row)
        return
    if adapter.quantize_base is not None or adapter.kind == "dora":
        return
    if _is_sharded(config):
        return
    for form, bits in (("int8", 8), ("nf4", 4)):
        quantised = _change(config, "adapter.quantize_base", form)
        effect = f"the frozen matrices in {bits} bits"
        yield _Proposal(f"adapter.quantize_base={form}", effect, quantised, row)


def _is_sharded(config: RunConfig) -> bool:
    return config.train.strategy == "fsdp"
