"""A plan made: the outlined model on a machine, its estimate, and the levers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from toque.config import RunConfig
from toque.errors import ConfigError
from toque.hardware.cards import card_named
from toque.hardware.memory import free_bytes
from toque.models.families import Family, family_of
from toque.models.flops import parameter_counts
from toque.models.forward.outline import Where
from toque.runs.estimate import Estimator, Machine
from toque.runs.outlined_update import outlining
from toque.runs.peak_flops import Peak, peak_of
from toque.training.optim.factory import build_optimizer, state_bytes
from toque.training.runtime import DTYPES, Runtime
from toque.workflows.plan.levers import levers_of
from toque.workflows.plan.outlined_model import outlined_model, vocabulary_of
from toque.workflows.plan.plan_result import Plan
from toque.workflows.plan.work_ahead import work_ahead

if TYPE_CHECKING:
    from toque.data.store.token_store import TokenStore

_BY_VALUES = ("adamw8bit", "adafactor")
"""Optimizers whose step reads numbers, which an outline has not."""


def planned(config: RunConfig, hardware: str | None, utilisation: float | None) -> Plan:
    """Memory, time and disk of the run, and what would change them."""
    store = store_of(config)
    vocabulary = vocabulary_of(config, store)
    with outlining():
        # The family decides the precision, and the precision the layers: so twice.
        plain = outlined_model(config, vocabulary, where="cuda", precision="float32")
    work = work_ahead(config, plain, store)
    machine = machine_of(config, hardware, family_of(plain.config), work.products)
    estimator = Estimator(config, work, machine, optimizer_of)
    model_of = partial(
        outlined_model, known=vocabulary, where=machine.where, precision=machine.precision
    )
    with outlining():
        model = model_of(config)
        memory = estimator.memory(model)
    time = estimator.time(model, memory, utilisation=utilisation)
    with outlining():
        levers = list(levers_of(estimator, memory, time, model_of))
    folder = Path(config.data.store)
    held = 0 if store is None else sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    return Plan(
        parameters=parameter_counts(model),
        machine=machine,
        work=work,
        memory=memory,
        time=time,
        disk=estimator.disk(model, memory, held, time.run_seconds),
        levers=levers,
    )


def store_of(config: RunConfig) -> TokenStore | None:
    """The prepared store, if there is one."""
    from toque.data.store.token_store import TokenStore

    folder = Path(config.data.store)
    return TokenStore.open(folder) if (folder / "manifest.json").exists() else None


def optimizer_of(model: nn.Module, name: str) -> tuple[torch.optim.Optimizer | None, int]:
    """Optimizer of an outlined model, None where its step reads numbers; bytes of its state."""
    optimizer = build_optimizer(model, name=name)
    return None if name in _BY_VALUES else optimizer, state_bytes(optimizer)


def machine_of(
    config: RunConfig,
    hardware: str | None,
    family: Family,
    products: Mapping[tuple[int, int], float],
) -> Machine:
    """The named card, or this machine; its rate is stated for a card, and measured here.

    Raises:
        ConfigError: no such card; or a precision that it, or this machine, cannot compute.
    """
    if hardware is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        precision = Runtime.from_settings(config.train, family).precision
        name = f"this machine, {torch.get_num_threads()} threads of its CPU"
        where: Where = "cpu"
        if device.type == "cuda":
            name, where = torch.cuda.get_device_name(), "cuda"
        peak = peak_of(device, DTYPES[precision], products)
        return Machine(name, where, precision, free_bytes(device), None, peak)
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
    peak = Peak(rate, f"stated: {card.source}, dense {kind}")
    return Machine(card.name, "cuda", chosen, card.memory_bytes, card, peak)
