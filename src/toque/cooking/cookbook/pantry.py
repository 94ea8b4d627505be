"""Pantry of the cookbook: foods with their names and rough figures, from `pantry.tsv`."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TABLE: Final = Path(__file__).with_name("pantry.tsv")
_CAN_OUNCES: Final = "15"
_SALT_PER_SODIUM: Final = 2.5


@dataclass(frozen=True)
class PantryFood:
    """One food of the pantry."""

    name: str
    """Name in a step, singular: "chickpea"."""
    plural: str
    """Name in a step, plural: "chickpeas"; a mass noun has `name` here too."""
    listed_as: str
    """Words before the name in an ingredient list: "boneless skinless" for chicken breasts."""
    title: str
    """Name in a title: "lemon" for lemon zest; empty where it is the name in a step."""
    per_100_g: Mapping[str, float]
    """energy_kcal, fat_g, sugar_g and salt_g of 100 g."""
    cup_g: float
    """Grams in a cup; 0 for a food never measured by volume."""
    piece_g: float
    """Grams of one piece, clove, slice, stalk or can; 0 for a food never counted."""
    origin: str
    """plant, dairy, egg, honey, meat or fish."""
    can: str
    """Ounces of one can: "14.5"."""
    halved: bool
    """True if a recipe may use half a piece."""


def _food(row: Mapping[str, str]) -> PantryFood:
    name, ending = row["food"], row["ending"]
    facts = {fact: float(row[fact]) for fact in ("energy_kcal", "fat_g", "sugar_g")}
    return PantryFood(
        name=name,
        plural=ending if len(ending) > 2 else name + ending,
        listed_as=row["listed_as"],
        title=row["title"],
        per_100_g={**facts, "salt_g": float(row["sodium_mg"]) * _SALT_PER_SODIUM / 1000.0},
        cup_g=float(row["cup_g"] or 0),
        piece_g=float(row["piece_g"] or 0),
        origin=row["origin"],
        can=row["can"] or _CAN_OUNCES,
        halved=row["halved"] == "yes",
    )


def _pantry() -> dict[str, PantryFood]:
    lines = _TABLE.read_text(encoding="utf-8").splitlines()
    rows = csv.DictReader((line for line in lines if not line.startswith("#")), delimiter="\t")
    foods = {row["food"]: _food(row) for row in rows}
    # A name wins over an equal plural: "rice" is the raw one, though cooked rice is so called too.
    return {food.plural: food for food in foods.values()} | foods


PANTRY: Final[Mapping[str, PantryFood]] = _pantry()
"""Every food by its singular and its plural name."""
