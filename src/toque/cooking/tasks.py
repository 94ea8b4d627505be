"""Tasks: the prompt and answer that a recipe gives for each.

| task       | asks                                     | answer                            |
|------------|------------------------------------------|-----------------------------------|
| write      | title and ingredient names               | the recipe                        |
| request    | a free request                           | the recipe                        |
| nutrition  | title and ingredient lines               | Healthy, Moderate or Indulgent    |
| difficulty | title, ingredient names, steps           | easy, medium or hard              |
| cuisine    | title and ingredient names               | one of `cuisines.CUISINES`        |
| next_step  | title, names, up to three steps          | the step that follows             |
| title      | ingredient names, steps                  | the title                         |

All answers are text, so every model family can learn every task.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from toque.cooking.labels.recipe_features import Reading, read
from toque.cooking.prompts import (
    CLASSES,
    QUESTIONS,
    REQUESTS,
    Task,
    different,
    prompt_of_names,
)
from toque.cooking.recipe import Recipe, to_text
from toque.keyed_random import key_of

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
"""Why a record may have no example of a task."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """A recipe with its labels: the input of the tasks."""

    reading: Reading
    classes: dict[Task, int]
    """Its class code for each task of `CLASSES` whose class is known."""
    key: int
    """64-bit seed of its random choices: the wording of a request, the requested step."""

    @property
    def names(self) -> list[str]:
        """Its ingredients' names, as prompts list them."""
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
