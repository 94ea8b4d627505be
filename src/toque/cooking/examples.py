"""Training examples of a recipe: prompt and target of each task, keys, and label columns.

Columns of an example, all numbers:

* quality: `quality.quality_of`, in [0, 1]; filtered by `data.min_quality`.
* difficulty: 0 easy, 1 medium, 2 hard. difficulty_from: 0 by our rule, 1 the source's own label.
* nutrition: 0 Healthy, 1 Moderate, 2 Indulgent, 255 unknown. nutrition_from: 0 estimated from
  the ingredients, 1 from the nutrients the source gives, 2 the source's own label. Nothing is
  estimated of a recipe that is not in English.
  nutrition_coverage: how much of an estimate rests on measured, known foods; see `nutrition`.
* cuisine: the number of its class in `cuisines.CUISINES`, 255 unknown.
* n_ingredients, n_steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from xxhash import xxh3_64_intdigest

from toque.cooking.labels.cuisines import cuisine_of
from toque.cooking.labels.difficulty import difficulty_of
from toque.cooking.labels.language import language_of
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.quality import quality_of
from toque.cooking.labels.recipe_features import Reading, read
from toque.cooking.prompts import CLASSES, TASKS, Task
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES, Recipe
from toque.cooking.tasks import NEEDS, Labelled, ask
from toque.cooking.text_keys import normalised
from toque.sources.records import NO_LABEL, Example, examples_note, missing_note

UNKNOWN: Final = 255
"""Column value of an unknown label."""
BY_RULE, BY_FIGURES, BY_SOURCE = 0, 1, 2
"""Origin of a label; see above."""


def examples_of(
    recipe: Recipe, notes: Counter[str], tasks: Sequence[Task] = ("write",)
) -> list[Example] | str:
    """The examples of a recipe, one per task in ascending order; or the reason why it has none.

    Args:
        recipe: cleaned.
        notes: counts the labels' origins, and for each task the recipes with an example of it
            and those without what it needs.
        tasks: the requested tasks.
    """
    reading = read(recipe)
    columns = labels_of(reading, notes)
    body = normalised("\n".join((*recipe.ingredients, *recipe.steps)))
    title = normalised(recipe.title)
    keys = map(xxh3_64_intdigest, (body, title, b"%b\n%b" % (title, body)))
    key, title_key, record_key = keys
    codes = {task: int(columns[task]) for task in CLASSES if columns[task] != UNKNOWN}
    labelled = Labelled(reading, codes, record_key)
    examples: list[Example] = []
    for number, task in enumerate(TASKS):
        if task not in tasks:
            continue
        asked = ask(task, labelled)
        if asked is None:
            notes[missing_note(task, NEEDS[task])] += 1
            continue
        if tuple(tasks) != ("write",):  # which every recipe has
            notes[examples_note(task)] += 1
        prompt, target = asked
        examples.append(
            Example(prompt, target, key, title_key, record_key, task=number, columns=columns)
        )
    return examples or f"{NO_LABEL} for {', '.join(tasks)}"


def labels_of(reading: Reading, notes: Counter[str]) -> dict[str, int | float]:
    """The columns of a recipe; the source's own labels take precedence over ours."""
    recipe = reading.recipe
    quality = quality_of(reading)
    language = language_of(reading) if quality.parts["language"] < 1.0 else "English"
    is_english = language == "English"
    if not is_english:
        notes[f"recipes in {language} (labels know English only)"] += 1
    if recipe.difficulty is None:
        report = difficulty_of(reading)
        # Of a foreign text the counts of ingredients and steps alone can be trusted.
        difficulty = report.level if is_english else report.by_bounds
        difficulty_from = BY_RULE
    else:
        difficulty, difficulty_from = recipe.difficulty, 1
        notes["difficulty as the source says"] += 1
    nutrition, nutrition_from, coverage = recipe.nutrition_class, BY_SOURCE, 1.0
    if nutrition is None:
        found = nutrition_of(reading)
        nutrition, coverage = found.klass, found.coverage
        nutrition_from = BY_RULE if found.estimated else BY_FIGURES
        if found.estimated and not is_english:
            nutrition, coverage = None, 0.0
    notes[_ORIGINS[nutrition_from if nutrition else UNKNOWN]] += 1
    cuisine = cuisine_of(recipe.tags)
    return {
        "n_ingredients": len(recipe.ingredients),
        "n_steps": len(recipe.steps),
        "quality": quality.score,
        "difficulty": DIFFICULTIES.index(difficulty),
        "difficulty_from": difficulty_from,
        "nutrition": UNKNOWN if nutrition is None else NUTRITION_CLASSES.index(nutrition),
        "nutrition_from": nutrition_from if nutrition else UNKNOWN,
        "nutrition_coverage": coverage,
        "cuisine": UNKNOWN if cuisine is None else cuisine,
    }


_ORIGINS: Final = {
    BY_RULE: "nutrition class estimated from the ingredients",
    BY_FIGURES: "nutrition class from the source's figures",
    BY_SOURCE: "nutrition class as the source says",
    UNKNOWN: "nutrition class unknown",
}
