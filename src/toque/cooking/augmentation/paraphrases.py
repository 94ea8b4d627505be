"""Paraphrase tables for augmentation."""

from __future__ import annotations

from typing import Final

CONNECTIONS: Final[tuple[str, ...]] = (
    "with",
    "using:",
    "with these ingredients:",
    "made from",
    "I have",
    "that uses",
)
"""Replacements for "using ingredients:" between a dish and its ingredients."""

VERBS: Final[dict[str, tuple[str, ...]]] = {
    "Add": ("Put in",),
    "Arrange": ("Lay out",),
    "Beat": ("Whisk",),
    "Blend": ("Mix",),
    "Chill": ("Refrigerate",),
    "Combine": ("Mix", "Mix together"),
    "Drain": ("Strain",),
    "Garnish": ("Decorate",),
    "Heat": ("Warm",),
    "Mix": ("Combine", "Stir together"),
    "Place": ("Put", "Set"),
    "Put": ("Place",),
    "Refrigerate": ("Chill",),
    "Sauté": ("Fry gently",),
    "Simmer": ("Boil gently",),
    "Sprinkle": ("Scatter",),
    "Stir": ("Mix",),
    "Toss": ("Mix",),
    "Transfer": ("Move",),
    "Whisk": ("Beat",),
}
"""Verbs that begin a sentence of a recipe, with their replacements."""

TIPS: Final[tuple[str, ...]] = (
    "Read the whole recipe before you begin.",
    "Measure everything out before you start.",
    "Ovens and stoves differ, so look before the time is up.",
    "Leftovers keep best in a closed container in the refrigerator.",
    "A sharp knife makes the work quicker and safer.",
    "Clean up as you go, and there is little left to do at the end.",
)
"""True of any dish."""
