"""Builder of one cookbook recipe: draws, ingredients, steps, and checks that they agree.

The kitchen scales amounts, names foods in steps as the ingredient list does, and refuses a recipe
in which a listed food is not used or a used food is not listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from toque.cooking.cookbook.measures import Measured, Specification, measure, specification
from toque.cooking.cookbook.pantry import PANTRY
from toque.cooking.labels.nutrition import GREEN_PER_100_G, RED_PER_100_G, RED_PER_SERVING
from toque.cooking.recipe import NutritionClass, Recipe, difficulty_of
from toque.keyed_random import GOLDEN, mix

SOURCE: Final = "toque cookbook (synthetic)"

_SLOT: Final = re.compile(r"\{([^{}:]+)(?::(\w+))?\}")
_SMALL_WORDS: Final = {"with", "and", "of", "in", "the", "a", "on", "for"}
_SINGULAR_IN_S: Final = {"asparagus", "couscous", "swiss"}
_RICH_KCAL: Final = 600.0
"""Energy of a serving above which it counts one point more: 30 % of 2,000 kcal."""


class Draw:
    """Counter-based draws: the k-th draw of recipe `index` is a function of (seed, index, k)."""

    def __init__(self, seed: int, index: int) -> None:
        self._state = mix(mix(seed - GOLDEN) + index * GOLDEN)

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        drawn = mix(self._state) * n >> 64
        self._state += GOLDEN
        return drawn


class Kitchen:
    """Builder of one recipe; foods first, then title and tags, then steps."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._scale = 1.0
        self.servings = 1
        """Servings of the recipe."""
        self._title = ""
        self._tags: list[str] = []
        self._minutes = 0.0
        self._lines: dict[str, str] = {}
        self._measured: dict[str, Measured] = {}
        self._eaten: dict[str, float] = {}
        self._groups: dict[str, list[str]] = {}
        self._used: set[str] = set()
        self._steps: list[str] = []

    # Draws

    def pick(self, *options: str) -> str:
        """One of the options."""
        return options[self._draw.below(len(options))]

    def chance(self, percent: int) -> bool:
        """True with a probability of `percent` percent."""
        return self._draw.below(100) < percent

    def between(self, low: int, high: int, step: int = 1) -> int:
        """An integer from `low` to `high`, a multiple of `step` above `low`."""
        return low + step * self._draw.below((high - low) // step + 1)

    def some(self, low: int, high: int, options: Iterable[str]) -> list[str]:
        """`low` to `high` different options, in the order given."""
        pool = list(enumerate(options))
        chosen = [pool.pop(self._draw.below(len(pool))) for _ in range(self.between(low, high))]
        return [option for _, option in sorted(chosen)]

    # Ingredients

    def serves(self, *options: int) -> None:
        """Choose the servings; amounts of foods listed afterwards are for one serving."""
        self.servings = options[self._draw.below(len(options))]
        self._scale = float(self.servings)

    def batch(self, servings: int, *scales: float) -> None:
        """Choose how many batches of `servings`; amounts listed afterwards are for one batch."""
        self._scale = scales[self._draw.below(len(scales))]
        self.servings = round(servings * self._scale)

    def add(self, *specifications: str, eaten: float = 1.0) -> None:
        """List ingredients. `eaten` is the share that ends on the plate (salt of pasta water)."""
        for text in specifications:
            self._add(specification(text), eaten)

    def group(self, name: str, low: int, high: int, *specifications: str) -> None:
        """List `low` to `high` of the ingredients and call them `name` in templates."""
        specs = [specification(text) for text in self.some(low, high, specifications)]
        self._groups[name] = [spec.key for spec in specs]
        for spec in specs:
            self._add(spec, 1.0)

    def call(self, name: str, *keys: str) -> None:
        """Let `name` stand for those of the foods that are listed, in templates."""
        self._groups[name] = [key for key in keys if key in self._lines]

    def has(self, name: str) -> bool:
        """True if the food, or a food of the group, is listed."""
        return name in self._lines or bool(self._groups.get(name))

    def count(self, name: str) -> int:
        """Number of foods in the group."""
        return len(self._groups.get(name, []))

    def _add(self, spec: Specification, eaten: float) -> None:
        assert spec.key not in self._lines, f"{spec.key} is listed twice"
        measured = measure(spec, self._scale)
        preparation = self.pick(*spec.preparations)
        self._lines[spec.key] = f"{measured.line}, {preparation}" if preparation else measured.line
        self._measured[spec.key] = measured
        self._eaten[spec.key] = eaten

    # Words

    def title(self, *forms: str) -> None:
        """Name the dish by one of the templates; `{food:one}` is the singular."""
        words = self._fill(self.pick(*forms), used=None).split()
        self._title = " ".join(
            word if word in _SMALL_WORDS and at else word[:1].upper() + word[1:]
            for at, word in enumerate(words)
        )

    def tag(self, *tags: str) -> None:
        """Add tags."""
        self._tags.extend(tags)

    def step(self, *phrasings: str, minutes: int = 0) -> None:
        """Write one step of so many minutes by one of the phrasings.

        `{onion}` names a listed food, `{onion, carrot}` the listed ones of these, `{veg}` a group;
        `{veg:is}` writes "is" or "are", and `{min}` the minutes.
        """
        self._minutes += minutes
        template = self.pick(*phrasings).replace("{min}", write_minutes(minutes))
        text = self._fill(template, used=self._used)
        self._steps.append(text[:1].upper() + text[1:])

    def _fill(self, template: str, used: set[str] | None) -> str:
        def written(match: re.Match[str]) -> str:
            keys = self._keys(match[1])
            if match[2] == "is":
                return "are" if len(keys) > 1 or self._is_plural(keys[0]) else "is"
            if used is not None:
                used.update(keys)
            names = [self._name(key, match[2], in_title=used is None) for key in keys]
            return join_words(list(dict.fromkeys(names)))

        return _SLOT.sub(written, template)

    def _keys(self, names: str) -> list[str]:
        found: list[str] = []
        for name in names.split(", "):
            keys = self._groups.get(name, [name])
            found += [key for key in keys if key in self._lines and key not in found]
        assert found, f"a step of {self._title or 'a dish'} uses {{{names}}}, which is not listed"
        return found

    def _name(self, key: str, form: str | None, *, in_title: bool = False) -> str:
        food = PANTRY[key]
        if in_title and food.title:
            return food.title
        return food.name if form == "one" or self._measured[key].is_single else food.plural

    def _is_plural(self, key: str) -> bool:
        name = self._name(key, None)
        return name.endswith("s") and name not in _SINGULAR_IN_S

    # The finished recipe

    def serve(self) -> Recipe:
        """The recipe, checked: every listed food is used in a step."""
        unused = [key for key in self._lines if key not in self._used]
        assert not unused, f"{self._title} lists {unused} and does not use them"
        facts, grams = self._nutrition()
        minutes = 5 * round((self._minutes + 4 + len(self._lines)) / 5)
        quick = ["quick"] if minutes <= 30 else []
        return Recipe(
            title=self._title,
            ingredients=tuple(self._lines.values()),
            steps=tuple(self._steps),
            tags=tuple(dict.fromkeys([*self._tags, *self._diet(), *quick])),
            servings=self.servings,
            minutes=minutes,
            source=SOURCE,
            nutrition=facts,
            difficulty=difficulty_of(len(self._lines), len(self._steps)),
            nutrition_class=nutrition_class(facts, grams),
        )

    def _nutrition(self) -> tuple[dict[str, float], float]:
        """Rough facts per serving (kcal, and grams of fat, sugar and salt), and its weight."""
        weight = 0.0
        totals: dict[str, float] = {}
        for key, measured in self._measured.items():
            food, share = PANTRY[key], self._eaten[key] * measured.grams / 100.0
            weight += 100.0 * share / self.servings
            for name, figure in food.per_100_g.items():
                totals[name] = totals.get(name, 0.0) + share * figure / self.servings
        return {name: round(total, 1) for name, total in totals.items()}, weight

    def _diet(self) -> list[str]:
        origins = {PANTRY[key].origin for key in self._lines}
        if origins & {"meat", "fish"}:
            return []
        return ["vegetarian"] if origins - {"plant"} else ["vegetarian", "vegan"]


def nutrition_class(facts: Mapping[str, float], grams: float) -> NutritionClass:
    """Class of a serving of `grams`, by the limits of its traffic lights (see `labels.nutrition`).

    Amber counts one point, red two, and a rich serving one more: up to two points are Healthy,
    three Moderate, more Indulgent.
    """
    points = int(facts["energy_kcal"] > _RICH_KCAL)
    for name in ("fat_g", "sugar_g", "salt_g"):
        per_100_g = 100.0 * facts[name] / max(grams, 1.0)
        is_red = per_100_g > RED_PER_100_G[name] or facts[name] > RED_PER_SERVING[name]
        points += 2 if is_red else int(per_100_g > GREEN_PER_100_G[name])
    return "Healthy" if points <= 2 else "Moderate" if points == 3 else "Indulgent"


def join_words(words: list[str]) -> str:
    """List words as a sentence does.

    >>> join_words(["salt"]), join_words(["a", "b"]), join_words(["a", "b", "c"])
    ('salt', 'a and b', 'a, b, and c')
    """
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def write_minutes(minutes: int) -> str:
    """A time in words.

    >>> [write_minutes(m) for m in (1, 45, 60, 90, 120)]
    ['1 minute', '45 minutes', '1 hour', '1 1/2 hours', '2 hours']
    """
    if minutes < 60 or minutes % 30:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours, half = divmod(minutes, 60)
    return f"{hours}{' 1/2' if half else ''} hour{'' if minutes == 60 else 's'}"
