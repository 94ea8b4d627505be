"""The machine that a plan is for: this one, measured, or a card by its maker's table."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from toque.config import RunConfig
from toque.errors import ConfigError
from toque.hardware.cards import Card, card_named
from toque.hardware.memory import free_bytes
from toque.models.families import Family
from toque.models.forward.outline import Where
from toque.training.peak_flops import Peak, Products, peak_of
from toque.training.runtime import DTYPES, Runtime


@dataclass(frozen=True)
class Machine:
    """Where the run is to be.

    Attributes:
        name: for people.
        where: the kind of device.
        precision: of the products.
        room: bytes that a process may have.
        card: of the table; None for a CPU.
        here: whether it is the machine the plan is made on.
    """

    name: str
    where: Where
    precision: str
    room: int
    card: Card | None
    here: bool

    def peak(self, products: Products) -> Peak:
        """FLOP/s of the model's products: stated for a card, measured here.

        Raises:
            ConfigError: the card has no unit for the precision.
        """
        if self.here:
            return peak_of(_device(), DTYPES[self.precision], products)
        assert self.card is not None
        kind = "fp32" if self.precision == "float32" else self.precision
        rate = self.card.flops_per_second.get(kind)
        if rate is None:
            raise ConfigError(
                f"train.precision is {self.precision}, and {self.card.name} has no unit for it. It "
                f"has {', '.join(self.card.flops_per_second)}."
            )
        return Peak(rate, f"stated: {self.card.source}, dense {kind}")


def machine_of(config: RunConfig, hardware: str | None, family: Family) -> Machine:
    """The named card, or this machine.

    Raises:
        ConfigError: no such card; or a precision that it, or this machine, cannot compute.
    """
    if hardware is None:
        device = _device()
        precision = Runtime.from_settings(config.train, family).precision
        name = torch.cuda.get_device_name() if device.type == "cuda" else _cpu_name()
        where: Where = "cuda" if device.type == "cuda" else "cpu"
        return Machine(name, where, precision, free_bytes(device), None, here=True)
    card = card_named(hardware)
    chosen: str = config.train.precision
    if chosen == "auto":
        has_bf16 = "bf16" in card.flops_per_second
        chosen = "bf16" if has_bf16 else "fp16" if family.fp16_is_safe else "float32"
    return Machine(card.name, "cuda", chosen, card.memory_bytes, card, here=False)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _cpu_name() -> str:
    return f"this machine, {torch.get_num_threads()} threads of its CPU"
