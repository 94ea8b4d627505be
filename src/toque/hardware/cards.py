"""Cards: GPUs by name, with their memory and the speeds from the manufacturers' data sheets."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument, nearest_hint

_TABLE: Final = Path(__file__).with_name("cards.tsv")
_FORMATS: Final = ("bf16", "fp16", "tf32", "fp32")
_BRANDS: Final = frozenset({"NVIDIA", "Tesla", "GeForce"})


@dataclass(frozen=True)
class Card:
    """Specification of a GPU, from a document of its manufacturer."""

    name: str
    devices: tuple[str, ...]
    """Names of the GPU in torch, without the brand."""
    memory_bytes: int
    """Bytes of GPU memory, as reported by torch."""
    flops_per_second: Mapping[str, float]
    """FLOP/s of dense matmuls with float32 accumulation, by supported number format."""
    link: tuple[str, float] | None
    """Connection between a machine's GPUs: its kind, and bytes per second in one direction."""
    source: str
    """Manufacturer's document with these numbers."""


@cache
def cards() -> dict[str, Card]:
    """Read all cards, by name."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if not line.startswith("#")]
    rows = csv.DictReader(table, delimiter="\t")
    return {row["name"]: _card_in(row) for row in rows}


def _card_in(row: Mapping[str, str]) -> Card:
    """Convert a row of the table: MiB, TFLOP/s and GB/s. "-" means not supported or unknown."""
    teraflops = {name: row[name] for name in _FORMATS if row[name] != "-"}
    link_kind, _, gigabytes = row["link"].partition(" ")
    return Card(
        name=row["name"],
        devices=tuple(row["device"].split("|")),
        memory_bytes=int(row["memory"]) << 20,
        flops_per_second={name: float(t) * 1e12 for name, t in teraflops.items()},
        link=(link_kind, float(gigabytes) * 1e9) if gigabytes else None,
        source=row["source"],
    )


def card_named(name: str) -> Card:
    """Return the card with a name. Case is ignored, and spaces equal hyphens.

    Raises:
        ConfigError: The name is unknown. The message suggests the most similar name.

    >>> card_named("RTX 4090").memory_bytes // 2**20
    24081
    """
    by_name = cards()
    key = "-".join(name.lower().removeprefix("nvidia ").split())
    if key in by_name:
        return by_name[key]
    raise ConfigError(
        f"{name!r} is not a known card.{nearest_hint(key, by_name, cutoff=0.0)} Known: "
        f"{', '.join(by_name)}. For this machine, leave {argument('hardware')} out."
    )


def card_of_device(device: str) -> Card | None:
    """Return the card with a name in torch, e.g. "NVIDIA H100 PCIe"; None for an unknown card.

    The entire name must match. "RTX 4090 Laptop GPU" is a different card, and a longer name may
    also be a part of a card (MIG).
    """
    name = " ".join(word for word in device.split() if word not in _BRANDS)
    return next((card for card in cards().values() if name in card.devices), None)
