"""Interpreter of the cookbook's dishes. `dishes/README.md` describes their language.

It scales amounts, uses the same names of foods in the steps and in the list, and checks that the
steps use exactly the foods of the list.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import yaml

from toque.cooking.cookbook.measures import (
    PANTRY,
    Measured,
    Specification,
    measure,
    specification,
)
from toque.cooking.labels.nutrition import (
    GREEN_PER_100_G,
    RED_PER_100_G,
    RED_PER_SERVING,
)
from toque.cooking.recipe import NutritionClass, Recipe, difficulty_of
from toque.keyed_random import GOLDEN, mix

SOURCE = "toque cookbook (synthetic)"
CHAPTERS = (  # the order determines the dish of a recipe
    "soups", "stews", "pasta", "grains", "mains", "handheld", "vegetables", "breakfast", "baking",
    "sweets", "simple",
)  # fmt: skip

_FOLDER = Path(__file__).with_name("dishes")
# Ten times faster with LibYAML, which some builds of PyYAML do not have.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CHANCE = re.compile(r"(\d+)%")
_RANGE = re.compile(r"(\d+)-(\d+)(?: by (\d+))?")
_GROUP = re.compile(r"(\w+) (\d)(?:-(\d))?")
_SLOT = re.compile(r"\{([^{}:]+)(?::(\w+))?\}")
_SMALL_WORDS = {"with", "and", "of", "in", "the", "a", "on", "for"}
_SINGULAR_IN_S = {"asparagus", "couscous", "swiss"}
_RICH_KCAL = 600.0
"""Energy above which a serving gets a point: 30 % of 2,000 kcal."""

_T = TypeVar("_T")
Entry = Any
"""A text, a list of alternatives, or a mapping that begins with a command."""


class Draw:
    """Random number generator of a recipe. The k-th number is a function of seed, index and k."""

    def __init__(self, seed: int, index: int) -> None:
        self._state = mix(mix(seed - GOLDEN) + index * GOLDEN)

    def below(self, n: int) -> int:
        """Return the next random integer in [0, n)."""
        value = mix(self._state) * n >> 64
        self._state += GOLDEN
        return value


@dataclass(frozen=True)
class Dish:
    """Description of a dish from its file."""

    name: str
    foods: Sequence[Entry]
    title: Sequence[Entry]
    tags: Sequence[Entry]
    steps: Sequence[Entry]
    serves: Sequence[int] = ()
    """Possible numbers of servings, if the amounts are for one serving."""
    makes: int = 0
    """Servings of a batch, if the amounts are for a batch."""
    batches: Sequence[float] = ()
    """Possible numbers of batches."""

    def recipe(self, draw: Draw) -> Recipe:
        """Create a random recipe for this dish."""
        try:
            return _Kitchen(draw).cook(self)
        except Exception as error:
            error.add_note(f"in the dish {self.name!r} of the cookbook")
            raise


@cache
def dishes() -> tuple[Dish, ...]:
    """Load all dishes of the cookbook in the order of its chapters."""
    chapters = map(_load_chapter, CHAPTERS)
    return tuple(
        Dish(name, **data) for chapter in chapters for name, data in chapter.items()
    )


@cache
def _load_chapter(name: str) -> dict[str, Any]:
    """Load the dishes of a chapter by name, or the entries of each technique."""
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    entries: dict[str, Any] = yaml.load(text, _Loader)  # noqa: S506  # a safe loader
    return entries


class _Kitchen:
    """State of the interpreter for one recipe."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self._scale = 1.0
        self._servings = 1
        self._title = ""
        self._minutes = 0
        self._words: dict[str, str] = {}
        self._flags: dict[str, bool] = {}
        self._lines: dict[str, str] = {}
        self._measured: dict[str, Measured] = {}
        self._eaten: dict[str, float] = {}
        self._groups: dict[str, list[str]] = {}
        self._used: set[str] = set()
        self._steps: list[str] = []

    def cook(self, dish: Dish) -> Recipe:
        """Create the recipe, and check that its steps use all foods."""
        # The order of these calls determines the random numbers, and so every recipe.
        self._choose_servings(dish)
        self._follow(dish.foods, self._list_foods)
        title = self._pick(self._options(dish.title))
        self._title = _capitalise(self._fill_foods(title, in_title=True))
        tags = self._options(dish.tags)
        self._follow(dish.steps, lambda text: self._add_step([text]))
        unused = [key for key in self._lines if key not in self._used]
        assert not unused, f"the steps of {self._title} do not use {unused}"

        facts, grams = self._nutrition()
        # Preparation takes 4 minutes and a minute per food. The total is a multiple of 5.
        minutes = 5 * round((self._minutes + 4 + len(self._lines)) / 5)
        tags += self._diet_tags()
        if minutes <= 30:
            tags.append("quick")
        return Recipe(
            title=self._title,
            ingredients=tuple(self._lines.values()),
            steps=tuple(self._steps),
            tags=tuple(dict.fromkeys(tags)),
            servings=self._servings,
            minutes=minutes,
            source=SOURCE,
            nutrition=facts,
            difficulty=difficulty_of(len(self._lines), len(self._steps)),
            nutrition_class=nutrition_class(facts, grams),
        )

    def _choose_servings(self, dish: Dish) -> None:
        """Choose the number of servings or batches, and the scale factor for the amounts."""
        if dish.serves:
            self._servings = self._pick(dish.serves)
            self._scale = float(self._servings)
        else:
            self._scale = self._pick(dish.batches)
            self._servings = round(dish.makes * self._scale)
        self._words["servings"] = str(self._servings)

    def _diet_tags(self) -> list[str]:
        origins = {PANTRY[key].origin for key in self._lines}
        if origins & {"meat", "fish"}:
            return []
        return ["vegetarian"] if origins - {"plant"} else ["vegetarian", "vegan"]

    def _follow(self, entries: Sequence[Entry], write: Callable[[str], None]) -> None:
        """Execute entries. `write` receives texts: foods of the list, or steps."""
        for entry in entries:
            if isinstance(entry, str):
                write(self._fill_words(entry))
            elif isinstance(entry, list):
                self._add_step(self._options(entry))
            else:
                self._execute(entry, write)

    def _execute(
        self, entry: Mapping[str, Entry], write: Callable[[str], None]
    ) -> None:
        """Execute a command, which is the first key of an entry. `write` is as in `_follow`."""
        key, value = next(iter(entry.items()))
        verb, _, rest = key.partition(" ")

        if verb == "if":
            self._follow(self._first_true(entry), write)
        elif verb == "let":
            self._let(rest, value)
        elif verb == "call":
            foods = value.split("; ")
            self._groups[rest] = [food for food in foods if food in self._lines]
        elif verb == "use":
            for name, argument in entry.items():
                self._let(name, argument)
            self._follow(_load_chapter("techniques")[value], write)
        elif verb == "eaten":
            self._list_foods(value, eaten=int(rest.rstrip("%")) / 100)
        elif key.endswith(" min"):
            minutes = self._choose_time(key.removesuffix(" min"))
            self._add_step(self._options(value), minutes=minutes)
        elif group := _GROUP.fullmatch(key):
            name, low, high = group.groups()
            self._list_group(name, self._options(value), int(low), int(high or low))
        else:
            raise ValueError(
                f"{key!r} is not a command, a time or a group such as 'herb 1-2'"
            )

    def _list_group(self, name: str, options: list[str], low: int, high: int) -> None:
        """Add `low` to `high` of the optional foods to the list, as a group with a name."""
        foods = [food for option in options for food in option.split("; ")]
        n = low + self._draw.below(high - low + 1)
        pool = list(enumerate(foods))
        chosen = [pool.pop(self._draw.below(len(pool))) for _ in range(n)]
        specs = [specification(food) for _, food in sorted(chosen)]
        self._groups[name] = [spec.key for spec in specs]
        for spec in specs:
            self._list_food(spec, 1.0)

    def _let(self, name: str, value: Entry) -> None:
        """Define a word, a random choice or number, or a random flag."""
        if isinstance(value, dict):
            value = self._first_true(value)[0]
        if isinstance(value, list):
            value = self._pick(self._options(value))
        text = self._fill_words(str(value))
        if _CHANCE.fullmatch(text):
            self._flags[name] = self._is_true(text)
            return
        word = str(self._number(text)) if _RANGE.fullmatch(text) else text
        self._words[name] = word
        self._words[name.capitalize()] = _upper_first(word)

    def _fill_words(self, text: str) -> str:
        """Replace each "$name" with its word."""
        return Template(text).substitute(self._words) if "$" in text else text

    def _options(self, value: Entry) -> list[str]:
        """List the texts of a value: a text, a list, or the first true case of a mapping."""
        if isinstance(value, str):
            return [self._fill_words(value)]
        entries = self._first_true(value) if isinstance(value, dict) else value
        return [text for entry in entries for text in self._options(entry)]

    def _first_true(self, cases: Mapping[str, Entry]) -> list[Entry]:
        """Return the entries of the first true case, or nothing."""
        for case, value in cases.items():
            if case == "else" or self._holds(case.removeprefix("if ")):
                return value if isinstance(value, list) else [value]
        return []

    def _holds(self, condition: str) -> bool:
        """Evaluate a condition such as "a or b and no c". "and" and "no" apply after "or"."""
        for part in self._fill_words(condition).split(" and "):
            names = part.removeprefix("no ")
            is_negated = names != part
            if any(map(self._is_true, names.split(" or "))) == is_negated:
                return False
        return True

    def _is_true(self, name: str) -> bool:
        """Evaluate "40%", "veg = 2", the name of a flag, or the name of a food or a group."""
        if chance := _CHANCE.fullmatch(name):
            return self._draw.below(100) < int(chance[1])
        word, equals, value = name.partition(" = ")
        if equals:  # a word's value, or the number of foods in a group
            group_size = len(self._groups.get(word, ()))
            return self._words.get(word, str(group_size)) == value
        if name in self._flags:
            return self._flags[name]
        return name in self._lines or bool(self._groups.get(name))

    def _choose_time(self, cases: str) -> int:
        """Choose the minutes of "8-10", or of "3-4 if shrimp, else 5-6"."""
        for case in cases.split(", "):
            minutes, _, condition = case.removeprefix("else ").partition(" if ")
            if not condition or self._holds(condition):
                return self._number(minutes)
        raise ValueError(f"no time of {cases!r} applies")

    def _pick(self, options: Sequence[_T]) -> _T:
        """Choose an option at random."""
        return options[self._draw.below(len(options))]

    def _number(self, text: str) -> int:
        """Parse a number, or choose one from a range: "8-10", "15-30 by 5"."""
        limits = _RANGE.fullmatch(text)
        if limits is None:
            return int(text)
        low, high, step = (int(limit or 1) for limit in limits.groups())
        return low + step * self._draw.below((high - low) // step + 1)

    def _list_foods(self, foods: str, eaten: float = 1.0) -> None:
        """Add foods to the list. `eaten` is the eaten fraction, e.g. of the salt in pasta water."""
        for text in foods.split("; "):
            self._list_food(specification(text), eaten)

    def _list_food(self, spec: Specification, eaten: float) -> None:
        """Add a food to the list, with its amount for all servings and a random preparation."""
        assert spec.key not in self._lines, f"{spec.key} is listed twice"
        measured = measure(spec, self._scale)
        preparation = self._pick(spec.preparations)
        self._lines[spec.key] = (
            f"{measured.line}, {preparation}" if preparation else measured.line
        )
        self._measured[spec.key] = measured
        self._eaten[spec.key] = eaten

    def _add_step(self, phrasings: Sequence[str], minutes: int = 0) -> None:
        """Add a step in one of several phrasings."""
        self._minutes += minutes
        template = self._pick(phrasings).replace("{min}", write_minutes(minutes))
        text = self._fill_foods(template)
        self._steps.append(_upper_first(text))

    def _fill_foods(self, template: str, *, in_title: bool = False) -> str:
        """Fill a template with names of foods. {food:one} is the singular, {food:is} is or are.

        The named foods count as used, except in a title.
        """

        def fill(match: re.Match[str]) -> str:
            keys = self._listed_keys(match[1])
            form = match[2]
            if form == "is":
                name = self._name_of(keys[0], form)
                is_plural = name.endswith("s") and name not in _SINGULAR_IN_S
                return "are" if is_plural or len(keys) > 1 else "is"
            if not in_title:
                self._used.update(keys)
            names = [self._name_of(key, form, in_title=in_title) for key in keys]
            return join_words(list(dict.fromkeys(names)))

        return _SLOT.sub(fill, template)

    def _listed_keys(self, names: str) -> list[str]:
        """Return the keys of the foods and groups in `names` that are in the list."""
        keys: dict[str, None] = {}
        for name in names.split(", "):
            candidates = self._groups.get(name, [name])
            keys |= dict.fromkeys(key for key in candidates if key in self._lines)
        place = self._title or "a title"
        assert keys, f"{{{names}}} in {place} is not in the list of ingredients"
        return list(keys)

    def _name_of(self, key: str, form: str | None, *, in_title: bool = False) -> str:
        """Return the singular of a food for the form "one" or a single piece, or its plural."""
        food = PANTRY[key]
        if in_title and food.title:
            return food.title
        is_single = form == "one" or self._measured[key].is_single
        return food.name if is_single else food.plural

    def _nutrition(self) -> tuple[dict[str, float], float]:
        """Compute kcal and grams of fat, sugar and salt per serving, and the weight in grams."""
        weight = 0.0
        totals: defaultdict[str, float] = defaultdict(float)
        for key, measured in self._measured.items():
            hundred_grams = self._eaten[key] * measured.grams / 100.0
            weight += 100.0 * hundred_grams / self._servings
            for name, amount in PANTRY[key].per_100_g.items():
                totals[name] += hundred_grams * amount / self._servings
        return {name: round(total, 1) for name, total in totals.items()}, weight


def _capitalise(title: str) -> str:
    """Capitalise the words of a title, except small words after the first."""
    first, *others = title.split()
    words = [word if word in _SMALL_WORDS else _upper_first(word) for word in others]
    return " ".join([_upper_first(first), *words])


def _upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]


def nutrition_class(facts: Mapping[str, float], grams: float) -> NutritionClass:
    """Classify a serving: 1 point per amber light, 2 per red light, 1 for much energy.

    A serving is Healthy up to 2 points, Moderate with 3, and Indulgent with more.
    """
    points = 1 if facts["energy_kcal"] > _RICH_KCAL else 0
    for name in ("fat_g", "sugar_g", "salt_g"):
        per_100_g = 100.0 * facts[name] / max(grams, 1.0)
        if per_100_g > RED_PER_100_G[name] or facts[name] > RED_PER_SERVING[name]:
            points += 2
        elif per_100_g > GREEN_PER_100_G[name]:
            points += 1
    if points <= 2:
        return "Healthy"
    return "Moderate" if points == 3 else "Indulgent"


def join_words(words: list[str]) -> str:
    """Join words as in a sentence: "a", "a and b", "a, b, and c"."""
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def write_minutes(minutes: int) -> str:
    """Format a time: "45 minutes", "1 1/2 hours"."""
    if minutes < 60 or minutes % 30:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours, half = divmod(minutes, 60)
    return f"{hours}{' 1/2' if half else ''} hour{'' if minutes == 60 else 's'}"
