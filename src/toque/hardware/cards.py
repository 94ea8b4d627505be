"""Cards: accelerators by name, with their memory and the rates that their makers state."""

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
    """One card, as its maker's document, the source, states it."""

    name: str
    devices: tuple[str, ...]  # the names that torch has for the card, without its maker's words
    memory_bytes: int  # that torch sees
    flops_per_second: Mapping[str, float]
    """Rate of dense products with float32 sums, by number format that has a unit."""
    link: tuple[str, float] | None  # between cards of a machine: its kind, bytes/s one way
    source: str


@cache
def cards() -> dict[str, Card]:
    """Every card by its name."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
    found = {}
    for row in rows:
        rates = {kind: row[kind] for kind in ("bf16", "fp16", "tf32", "fp32")}
        kind, _, rate = row["link"].partition(" ")
        found[row["name"]] = Card(
            name=row["name"],
            devices=tuple(row["device"].split("|")),
            memory_bytes=int(row["memory"]) << 20,
            flops_per_second={k: float(r) * 1e12 for k, r in rates.items() if r != "-"},
            link=(kind, float(rate) * 1e9) if rate else None,
            source=row["source"],
        )
    return found


def card_named(name: str) -> Card:
    """The card called `name`, in capitals or not, with spaces or hyphens.

    Raises:
        ConfigError: there is none; the nearest is named.

    >>> card_named("RTX 4090").memory_bytes // 2**20
    24081
    """
    known, wanted = cards(), "-".join(name.lower().removeprefix("nvidia ").split())
    if wanted in known:
        return known[wanted]
    raise ConfigError(
        f"{name!r} is not a card that is known here.{nearest_hint(wanted, known, cutoff=0.0)} "
        f"Known: {', '.join(known)}. For the machine you are on, leave {argument('hardware')} out."
    )


def card_of_device(device: str) -> Card | None:
    """The card that torch calls `device`, e.g. "NVIDIA H100 PCIe"; None where it is not known.

    A word more may be another card: "RTX 4090 Laptop GPU", or a part of one, by MIG.
    """
    name = " ".join(word for word in device.split() if word not in _MAKERS)
    return next((card for card in cards().values() if name in card.devices), None)
