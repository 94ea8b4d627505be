"""Interpreter of the dishes in the cookbook (`dishes/README.md`).

It scales amounts, uses the same names of foods in the steps and in the list, and checks that the
steps use exactly the foods of the list.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final, TypeVar

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

SOURCE: Final = "toque cookbook (synthetic)"
CHAPTERS: Final = (  # the order determines the dish of a recipe
    "soups", "stews", "pasta", "grains", "mains", "handheld", "vegetables", "breakfast", "baking",
    "sweets", "simple",
)  # fmt: skip

_FOLDER: Final = Path(__file__).with_name("dishes")
# Ten times faster with LibYAML, which some builds of PyYAML do not have.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CHANCE: Final = re.compile(r"(\d+)%")
_RANGE: Final = re.compile(r"(\d+)-(\d+)(?: by (\d+))?")
_GROUP: Final = re.compile(r"(\w+) (\d)(?:-(\d))?")
_SLOT: Final = re.compile(r"\{([^{}:]+)(?::(\w+))?\}")
_SMALL_WORDS: Final = {"with", "and", "of", "in", "the", "a", "on", "for"}
_SINGULAR_IN_S: Final = {"asparagus", "couscous", "swiss"}
_RICH_KCAL: Final = 600.0
"""Energy of a serving that adds a point to its class: 30 % of 2,000 kcal."""

_T = TypeVar("_T")
Entry = Any
"""A text, a list of alternatives, or a mapping that begins with a command."""


class Draw:
    """Random numbers of a recipe. The k-th number is a function of seed, index and k."""

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
    chapters = map(_chapter, CHAPTERS)
    return tuple(
        Dish(name, **data) for chapter in chapters for name, data in chapter.items()
    )


@cache
def _chapter(name: str) -> dict[str, Any]:
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
        if dish.serves:
            self._servings = self._pick(dish.serves)
            self._scale = float(self._servings)
        else:
            self._scale = self._pick(dish.batches)
            self._servings = round(dish.makes * self._scale)
        self._words["servings"] = str(self._servings)
        self._follow(dish.foods, self._list)
        words = self._fill_foods(
            self._pick(self._options(dish.title)), used=None
        ).split()
        self._title = " ".join(
            word if word in _SMALL_WORDS and index else word[:1].upper() + word[1:]
            for index, word in enumerate(words)
        )
        tags = self._options(dish.tags)
        self._follow(dish.steps, lambda text: self._step([text]))
        unused = [key for key in self._lines if key not in self._used]
        assert not unused, f"the steps of {self._title} do not use {unused}"

        facts, grams = self._nutrition()
        minutes = 5 * round((self._minutes + 4 + len(self._lines)) / 5)
        origins = {PANTRY[key].origin for key in self._lines}
        if not origins & {"meat", "fish"}:
            tags.append("vegetarian")
            if not origins - {"plant"}:
                tags.append("vegan")
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

    def _follow(self, entries: Sequence[Entry], write: Callable[[str], None]) -> None:
        """Execute entries. `write` receives texts: foods of the list, or steps."""
        for entry in entries:
            if isinstance(entry, str):
                write(self._fill_words(entry))
            elif isinstance(entry, list):
                self._step(self._options(entry))
            else:
                self._execute(entry, write)

    def _execute(
        self, entry: Mapping[str, Entry], write: Callable[[str], None]
    ) -> None:
        """Execute a command."""
        key, value = next(iter(entry.items()))
        verb, _, rest = key.partition(" ")

        if verb == "if":
            self._follow(self._first_true(entry), write)
        elif verb == "let":
            self._let(rest, value)
        elif verb == "call":
            self._groups[rest] = [
                food for food in value.split("; ") if food in self._lines
            ]
        elif verb == "use":
            for name, argument in entry.items():
                self._let(name, argument)
            self._follow(_chapter("techniques")[value], write)
        elif verb == "eaten":
            self._list(value, eaten=int(rest.rstrip("%")) / 100)
        elif key.endswith(" min"):
            minutes = self._time(key.removesuffix(" min"))
            self._step(self._options(value), minutes=minutes)
        elif group := _GROUP.fullmatch(key):
            name = group[1]
            low, high = int(group[2]), int(group[3] or group[2])
            foods = [
                food for foods in self._options(value) for food in foods.split("; ")
            ]
            pool = list(enumerate(foods))
            n = low + self._draw.below(high - low + 1)
            chosen = sorted(pool.pop(self._draw.below(len(pool))) for _ in range(n))
            specs = [specification(text) for _, text in chosen]
            self._groups[name] = [spec.key for spec in specs]
            for spec in specs:
                self._add(spec, 1.0)
        else:
            raise ValueError(
                f"{key!r} is not a command, a time or a group such as 'herb 1-2'"
            )

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
        self._words[name.capitalize()] = word[:1].upper() + word[1:]

    def _fill_words(self, text: str) -> str:
        return Template(text).substitute(self._words) if "$" in text else text

    def _options(self, value: Entry) -> list[str]:
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
            if any(map(self._is_true, names.split(" or "))) != (names == part):
                return False
        return True

    def _is_true(self, name: str) -> bool:
        """Evaluate "40%", "veg = 2", the name of a flag, or the name of a food or a group."""
        if chance := _CHANCE.fullmatch(name):
            return self._draw.below(100) < int(chance[1])
        word, equals, value = name.partition(" = ")
        if equals:
            return self._words.get(word, str(len(self._groups.get(word, ())))) == value
        if name in self._flags:
            return self._flags[name]
        return name in self._lines or bool(self._groups.get(name))

    def _time(self, cases: str) -> int:
        """Choose the minutes of "8-10", or of "3-4 if shrimp, else 5-6"."""
        for case in cases.split(", "):
            minutes, _, condition = case.removeprefix("else ").partition(" if ")
            if not condition or self._holds(condition):
                return self._number(minutes)
        raise ValueError(f"no time of {cases!r} applies")

    def _pick(self, options: Sequence[_T]) -> _T:
        return options[self._draw.below(len(options))]

    def _number(self, text: str) -> int:
        """Parse a number, or choose one from a range: "8-10", "15-30 by 5"."""
        limits = _RANGE.fullmatch(text)
        if limits is None:
            return int(text)
        low, high, step = (int(limit or 1) for limit in limits.groups())
        return low + step * self._draw.below((high - low) // step + 1)

    def _list(self, foods: str, eaten: float = 1.0) -> None:
        """Add foods to the list. `eaten` is below 1 for salt in pasta water, for example."""
        for text in foods.split("; "):
            self._add(specification(text), eaten)

    def _add(self, spec: Specification, eaten: float) -> None:
        assert spec.key not in self._lines, f"{spec.key} is listed twice"
        measured = measure(spec, self._scale)
        preparation = self._pick(spec.preparations)
        self._lines[spec.key] = (
            f"{measured.line}, {preparation}" if preparation else measured.line
        )
        self._measured[spec.key] = measured
        self._eaten[spec.key] = eaten

    def _step(self, phrasings: Sequence[str], minutes: int = 0) -> None:
        self._minutes += minutes
        template = self._pick(phrasings).replace("{min}", write_minutes(minutes))
        text = self._fill_foods(template, used=self._used)
        self._steps.append(text[:1].upper() + text[1:])

    def _fill_foods(self, template: str, used: set[str] | None) -> str:
        """Fill a template with names of foods. {food:one} is the singular, {food:is} is or are."""

        def fill(match: re.Match[str]) -> str:
            keys = self._keys(match[1])
            if match[2] == "is":
                name = self._name(keys[0], None)
                plural = name.endswith("s") and name not in _SINGULAR_IN_S
                return "are" if plural or len(keys) > 1 else "is"
            if used is not None:
                used.update(keys)
            names = [self._name(key, match[2], in_title=used is None) for key in keys]
            return join_words(list(dict.fromkeys(names)))

        return _SLOT.sub(fill, template)

    def _keys(self, names: str) -> list[str]:
        keys: list[str] = []
        for name in names.split(", "):
            candidates = self._groups.get(name, [name])
            keys += [
                key for key in candidates if key in self._lines and key not in keys
            ]
        assert keys, (
            f"{{{names}}} in {self._title or 'a title'} is not in the list of ingredients"
        )
        return keys

    def _name(self, key: str, form: str | None, *, in_title: bool = False) -> str:
        food = PANTRY[key]
        if in_title and food.title:
            return food.title
        return (
            food.name if form == "one" or self._measured[key].is_single else food.plural
        )

    def _nutrition(self) -> tuple[dict[str, float], float]:
        """Estimate kcal and grams of fat, sugar and salt per serving, and the weight in grams."""
        weight = 0.0
        totals: dict[str, float] = {}
        for key, measured in self._measured.items():
            hundred_grams = self._eaten[key] * measured.grams / 100.0
            weight += 100.0 * hundred_grams / self._servings
            for name, amount in PANTRY[key].per_100_g.items():
                totals[name] = (
                    totals.get(name, 0.0) + hundred_grams * amount / self._servings
                )
        return {name: round(total, 1) for name, total in totals.items()}, weight


def nutrition_class(facts: Mapping[str, float], grams: float) -> NutritionClass:
    """Classify a serving: 1 point per amber light, 2 per red light, 1 for much energy."""
    points = int(facts["energy_kcal"] > _RICH_KCAL)
    for name in ("fat_g", "sugar_g", "salt_g"):
        per_100_g = 100.0 * facts[name] / max(grams, 1.0)
        is_red = per_100_g > RED_PER_100_G[name] or facts[name] > RED_PER_SERVING[name]
        points += 2 if is_red else int(per_100_g > GREEN_PER_100_G[name])
    return "Healthy" if points <= 2 else "Moderate" if points == 3 else "Indulgent"


def join_words(words: list[str]) -> str:
    """Join words as in a sentence: "a, b, and c"."""
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def write_minutes(minutes: int) -> str:
    """Format a time: "45 minutes", "1 1/2 hours"."""
    if minutes < 60 or minutes % 30:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours, half = divmod(minutes, 60)
    return f"{hours}{' 1/2' if half else ''} hour{'' if minutes == 60 else 's'}"
