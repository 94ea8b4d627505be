"""Training examples of a recipe: prompt and target of each task, keys, and label columns.

| task       | asks                                     | answer                            |
|------------|------------------------------------------|-----------------------------------|
| write      | title and ingredient names               | the recipe                        |
| request    | a free request                           | the recipe                        |
| nutrition  | title and ingredient lines               | Healthy, Moderate or Indulgent    |
| difficulty | title, ingredient names, steps           | easy, medium or hard              |
| cuisine    | title and ingredient names               | one of `origins.CUISINES`         |
| next_step  | title, names, up to three steps          | the step that follows             |
| title      | ingredient names, steps                  | the title                         |

All answers are text, so every model family can learn every task.

Columns of an example, all numbers:

* quality: `quality.quality_of`, in [0, 1]; filtered by `data.min_quality`.
* difficulty: 0 easy, 1 medium, 2 hard. difficulty_from: 0 by our rule, 1 the source's own label.
* nutrition: 0 Healthy, 1 Moderate, 2 Indulgent, 255 unknown. nutrition_from: 0 estimated from
  the ingredients, 1 from the nutrients the source gives, 2 the source's own label. Nothing is
  estimated of a recipe that is not in English.
  nutrition_coverage: how much of an estimate rests on measured, known foods; see `nutrition`.
* cuisine: the number of its class in `origins.CUISINES`, 255 unknown.
* n_ingredients, n_steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from xxhash import xxh3_64_intdigest

from toque.cooking.labels.difficulty import difficulty_of
from toque.cooking.labels.features import Reading, read
from toque.cooking.labels.nutrition import nutrition_of
from toque.cooking.labels.origins import cuisine_of, language_of
from toque.cooking.labels.quality import quality_of
from toque.cooking.prompts import (
    CLASSES,
    QUESTIONS,
    REQUESTS,
    TASKS,
    Task,
    different,
    prompt_of_names,
)
from toque.cooking.recipe import DIFFICULTIES, NUTRITION_CLASSES, Recipe, to_text
from toque.cooking.text_keys import normalised
from toque.keyed_random import key_of
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


SHOWN_STEPS: Final = 3
"""Most steps before the requested one: more would be truncated in a full prompt."""
_FOODS_OF_A_REQUEST: Final = 3
_REQUEST, _NEXT_STEP = 1, 2

NEEDS: Final[dict[Task, str]] = {
    "nutrition": "neither a field nutrition_class, nor nutrition figures per serving, nor "
    "ingredients that tell enough",
    "cuisine": "no field cuisine and no tag that names one cuisine",
    "next_step": "one step alone",
}
"""Reasons for which a record has no example of a task."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A recipe with its labels: the input of the tasks."""

    reading: Reading
    classes: dict[Task, int]
    """Class code of each task of `CLASSES` whose class is known."""
    key: int
    """64-bit seed of its random choices: the wording of a request, the requested step."""

    @property
    def names(self) -> list[str]:
        """Names of its ingredients, as prompts list them."""
        return different(facts.name for facts in self.reading.lines)


Asked = tuple[str, str]
"""A prompt and its answer."""


def ask(task: Task, labelled: Labelled) -> Asked | None:
    """The prompt and the answer of a task; None if the recipe lacks what the task needs.

    Raises:
        KeyError: an unknown task.
    """
    if task not in CLASSES:
        return _ASK[task](labelled)
    number = labelled.classes.get(task)
    return None if number is None else (_question(task, labelled), CLASSES[task][number])


def _write(labelled: Labelled) -> Asked:
    recipe = labelled.reading.recipe
    return prompt_of_names(recipe.title, labelled.names), to_text(recipe)


def _request(labelled: Labelled) -> Asked:
    recipe = labelled.reading.recipe
    known = {
        "title": recipe.title,
        "foods": _listed(labelled.names[:_FOODS_OF_A_REQUEST]),
        "servings": str(recipe.servings or ""),
        "minutes": str(recipe.minutes or ""),
    }
    unknown = [f"{{{name}}}" for name, value in known.items() if not value]
    forms = [form for form in REQUESTS if not any(name in form for name in unknown)]
    form = forms[key_of(labelled.key, _REQUEST) % len(forms)]
    return form.format(**known), to_text(recipe)


def question(task: Task, recipe: Recipe) -> str:
    r"""The prompt of a classification task, as in training; steps and lines may be missing.

    >>> question("nutrition", Recipe("Toast", ("2 slices bread",), ()))
    'Rate how healthy this recipe is (Healthy, Moderate or Indulgent): Toast\n- 2 slices bread'

    Raises:
        KeyError: not a classification task.
    """
    return _question(task, Labelled(read(recipe), {}, 0))


def _question(task: Task, labelled: Labelled) -> str:
    return f"{QUESTIONS[task]}{labelled.reading.recipe.title}\n{_SHOWN[task](labelled)}"


def _lines(labelled: Labelled) -> str:
    return "\n".join(f"- {line}" for line in labelled.reading.recipe.ingredients)


def _names(labelled: Labelled) -> str:
    return f"Ingredients: {', '.join(labelled.names)}"


def _names_and_steps(labelled: Labelled) -> str:
    return f"{_names(labelled)}\n{_numbered(labelled.reading.recipe.steps, 1)}"


def _next_step(labelled: Labelled) -> Asked | None:
    recipe = labelled.reading.recipe
    if len(recipe.steps) < 2:
        return None
    at = 1 + key_of(labelled.key, _NEXT_STEP) % (len(recipe.steps) - 1)
    first = max(0, at - SHOWN_STEPS)
    done = _numbered(recipe.steps[first:at], first + 1)
    prompt = f"{QUESTIONS['next_step']}{recipe.title}\n{_names(labelled)}\n{done}"
    return prompt, f"{at + 1}. {recipe.steps[at]}"


def _title(labelled: Labelled) -> Asked:
    prompt = f"{QUESTIONS['title'].rstrip()}\n{_names_and_steps(labelled)}"
    return prompt, labelled.reading.recipe.title


def _numbered(steps: Sequence[str], first: int) -> str:
    return "\n".join(f"{n}. {step}" for n, step in enumerate(steps, start=first))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


_SHOWN: Final[dict[Task, Callable[[Labelled], str]]] = {
    "nutrition": _lines,
    "difficulty": _names_and_steps,
    "cuisine": _names,
}
"""The part of a recipe that a classification task shows."""

_ASK: Final[dict[Task, Callable[[Labelled], Asked | None]]] = {
    "write": _write,
    "request": _request,
    "next_step": _next_step,
    "title": _title,
}
