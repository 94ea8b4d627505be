"""Cards: accelerators by name, with the memory and the rates that their makers state."""

from __future__ import annotations

import csv
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from toque.errors import ConfigError, argument

_TABLE: Final = Path(__file__).with_name("cards.tsv")
_GIB: Final = 2**30
_SOLD_IN_GIB: Final = ("rtx-",)
"""Names of cards whose makers say GB and mean GiB: GeForce and workstation cards."""


@dataclass(frozen=True)
class Card:
    """One card, as its maker's document, the source, states it."""

    name: str
    device: str  # part of the name that torch has for the card
    memory_bytes: int
    bytes_per_second: float  # of its memory
    flops_per_second: Mapping[str, float]
    """Rate of dense products with float32 sums, by number format that has a unit."""
    source: str


@cache
def cards() -> dict[str, Card]:
    """Every card by its name, in the order in which torch's names are to be compared."""
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
    found = {}
    for row in rows:
        unit = _GIB if row["name"].startswith(_SOLD_IN_GIB) else 10**9
        rates = {kind: row[kind] for kind in ("bf16", "fp16", "tf32", "fp32")}
        found[row["name"]] = Card(
            name=row["name"],
            device=row["device"],
            memory_bytes=int(float(row["memory"]) * unit),
            bytes_per_second=float(row["bandwidth"]) * 1e9,
            flops_per_second={k: float(rate) * 1e12 for k, rate in rates.items() if rate != "-"},
            source=row["source"],
        )
    return found


def card_named(name: str) -> Card:
    """The card called `name`, in capitals or not, with spaces or hyphens.

    Raises:
        ConfigError: there is none; the nearest is named.

    >>> card_named("RTX 4090").memory_bytes // 2**30
    24
    """
    known, wanted = cards(), "-".join(name.lower().removeprefix("nvidia ").split())
    if wanted in known:
        return known[wanted]
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.0)
    raise ConfigError(
        f"{name!r} is not a card that is known here. Nearest: {close[0]}. Known: "
        f"{', '.join(known)}. For the machine you are on, leave {argument('hardware')} out."
    )


def card_of_device(device: str) -> Card | None:
    """The card that torch calls `device`, e.g. "NVIDIA H100 PCIe"; None where it is not known."""
    return next((card for card in cards().values() if card.device in device), None)
