"""Cards: GPUs by name, with their memory and the speeds that their makers state."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument, nearest_hint

_TABLE: Final = Path(__file__).with_name("cards.tsv")
_MAKERS: Final = frozenset({"NVIDIA", "Tesla", "GeForce"})


@dataclass(frozen=True)
class Card:
    """Specification of a GPU, from its maker's document."""

    name: str
    devices: tuple[str, ...]
    """Names of the GPU in torch, without the maker."""
    memory_bytes: int
    """Memory that torch reports."""
    flops_per_second: Mapping[str, float]
    """Speed of dense matrix products with float32 sums, by supported number format."""
    link: tuple[str, float] | None
    """Connection between GPUs of a machine: its kind, and bytes per second in one direction."""
    source: str
    """Document of the maker."""


@cache
def cards() -> dict[str, Card]:
    """Read all cards, by name."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader(
        (line for line in lines if not line.startswith("#")), delimiter="\t"
    )
    by_name = {}
    for row in rows:
        rates = {kind: row[kind] for kind in ("bf16", "fp16", "tf32", "fp32")}
        kind, _, rate = row["link"].partition(" ")
        by_name[row["name"]] = Card(
            name=row["name"],
            devices=tuple(row["device"].split("|")),
            memory_bytes=int(row["memory"]) << 20,
            flops_per_second={k: float(r) * 1e12 for k, r in rates.items() if r != "-"},
            link=(kind, float(rate) * 1e9) if rate else None,
            source=row["source"],
        )
    return by_name


def card_named(name: str) -> Card:
    """Find a card by name, ignoring case. Spaces and hyphens are equal.

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
    """Find the card with a name of torch, e.g. "NVIDIA H100 PCIe". None if it is not known.

    The entire name must match. "RTX 4090 Laptop GPU" is a different card, and a longer name may
    also be a part of a card (MIG).
    """
    name = " ".join(word for word in device.split() if word not in _MAKERS)
    return next((card for card in cards().values() if name in card.devices), None)
