"""Kitchen of the cookbook: the interpreter of its dishes' data (`dishes/README.md`).

It scales amounts, names foods in steps as the ingredient list does, and refuses a recipe in which a
listed food is not used or a used food is not listed.
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

from toque.cooking.cookbook.measures import PANTRY, Measured, Specification, measure, specification
from toque.cooking.labels.nutrition import GREEN_PER_100_G, RED_PER_100_G, RED_PER_SERVING
from toque.cooking.recipe import NutritionClass, Recipe, difficulty_of
from toque.keyed_random import GOLDEN, mix

SOURCE: Final = "toque cookbook (synthetic)"
CHAPTERS: Final = (  # the order counts: recipe `index` of a seed draws the number of its dish
    "soups", "stews", "pasta", "grains", "mains", "handheld", "vegetables", "breakfast", "baking",
    "sweets", "simple",
)  # fmt: skip

_FOLDER: Final = Path(__file__).with_name("dishes")
# The parser in C is ten times faster; a few builds of PyYAML come without it.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CHANCE: Final = re.compile(r"(\d+)%")
_RANGE: Final = re.compile(r"(\d+)-(\d+)(?: by (\d+))?")
_GROUP: Final = re.compile(r"(\w+) (\d)(?:-(\d))?")
_SLOT: Final = re.compile(r"\{([^{}:]+)(?::(\w+))?\}")
_SMALL_WORDS: Final = {"with", "and", "of", "in", "the", "a", "on", "for"}
_SINGULAR_IN_S: Final = {"asparagus", "couscous", "swiss"}
_RICH_KCAL: Final = 600.0  # energy above which a serving counts one point more: 30 % of 2,000

_T = TypeVar("_T")
Entry = Any  # a text, a list of phrasings, or a mapping whose first key is a command


class Draw:
    """Counter-based draws: the k-th draw of recipe `index` is a function of (seed, index, k)."""

    def __init__(self, seed: int, index: int) -> None:
        self._state = mix(mix(seed - GOLDEN) + index * GOLDEN)

    def below(self, n: int) -> int:
        """An integer in [0, n)."""
        drawn = mix(self._state) * n >> 64
        self._state += GOLDEN
        return drawn


@dataclass(frozen=True)
class Dish:
    """One dish as its file describes it."""

    name: str
    foods: Sequence[Entry]
    title: Sequence[Entry]
    tags: Sequence[Entry]
    steps: Sequence[Entry]
    serves: Sequence[int] = ()  # servings to choose from; amounts are for one serving
    makes: int = 0  # servings of one batch, if amounts are for a batch
    batches: Sequence[float] = ()  # numbers of batches to choose from

    def recipe(self, draw: Draw) -> Recipe:
        """One recipe for this dish; the draws decide which."""
        try:
            return _Kitchen(draw).cook(self)
        except Exception as error:
            error.add_note(f"in the dish {self.name!r} of the cookbook")
            raise


@cache
def dishes() -> tuple[Dish, ...]:
    """Every dish of the cookbook, chapter by chapter."""
    chapters = map(_chapter, CHAPTERS)
    return tuple(Dish(name, **data) for chapter in chapters for name, data in chapter.items())


@cache
def _chapter(name: str) -> dict[str, Any]:
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, _Loader)  # noqa: S506  # a safe loader, and our own file
    return found


class _Kitchen:
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
        """The recipe, checked: every listed food is used in a step."""
        if dish.serves:
            self._servings = self._pick(dish.serves)
            self._scale = float(self._servings)
        else:
            self._scale = self._pick(dish.batches)
            self._servings = round(dish.makes * self._scale)
        self._words["servings"] = str(self._servings)
        self._follow(dish.foods, self._list)
        words = self._named(self._pick(self._options(dish.title)), used=None).split()
        self._title = " ".join(
            word if word in _SMALL_WORDS and at else word[:1].upper() + word[1:]
            for at, word in enumerate(words)
        )
        tags = self._options(dish.tags)
        self._follow(dish.steps, lambda text: self._step([text]))
        unused = [key for key in self._lines if key not in self._used]
        assert not unused, f"{self._title} lists {unused} and does not use them"
        facts, grams = self._nutrition()
        minutes = 5 * round((self._minutes + 4 + len(self._lines)) / 5)
        origins = {PANTRY[key].origin for key in self._lines}
        if not origins & {"meat", "fish"}:
            tags += ["vegetarian"] if origins - {"plant"} else ["vegetarian", "vegan"]
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
        """Carry out entries; `write` takes a text, which lists foods or tells a step."""
        for entry in entries:
            if isinstance(entry, str):
                write(self._filled(entry))
            elif isinstance(entry, list):
                self._step(self._options(entry))
            else:
                self._command(entry, write)

    def _command(self, entry: Mapping[str, Entry], write: Callable[[str], None]) -> None:
        key, value = next(iter(entry.items()))
        verb, _, rest = key.partition(" ")
        if verb == "if":
            self._follow(self._chosen(entry), write)
        elif verb == "let":
            self._let(rest, value)
        elif verb == "call":
            self._groups[rest] = [food for food in value.split("; ") if food in self._lines]
        elif verb == "use":
            for name, given in entry.items():
                self._let(name, given)
            self._follow(_chapter("techniques")[value], write)
        elif verb == "eaten":
            self._list(value, eaten=int(rest.rstrip("%")) / 100)
        elif key.endswith(" min"):
            minutes = self._time(key.removesuffix(" min"))
            self._step(self._options(value), minutes=minutes)
        elif group := _GROUP.fullmatch(key):
            name, low, high = group[1], int(group[2]), int(group[3] or group[2])
            foods = [food for foods in self._options(value) for food in foods.split("; ")]
            pool = list(enumerate(foods))
            n = low + self._draw.below(high - low + 1)
            chosen = sorted(pool.pop(self._draw.below(len(pool))) for _ in range(n))
            specs = [specification(text) for _, text in chosen]
            self._groups[name] = [spec.key for spec in specs]
            for spec in specs:
                self._add(spec, 1.0)
        else:
            raise ValueError(f"{key!r} is no command, no time and no group such as 'herb 1-2'")

    def _let(self, name: str, value: Entry) -> None:
        """Give a name to a word, a drawn word or number, or the outcome of a chance."""
        if isinstance(value, dict):
            value = self._chosen(value)[0]
        if isinstance(value, list):
            value = self._pick(self._options(value))
        text = self._filled(str(value))
        if _CHANCE.fullmatch(text):
            self._flags[name] = self._holds(text)
            return
        word = str(self._number(text)) if _RANGE.fullmatch(text) else text
        self._words[name] = word
        self._words[name.capitalize()] = word[:1].upper() + word[1:]

    def _filled(self, text: str) -> str:
        return Template(text).substitute(self._words) if "$" in text else text

    def _options(self, value: Entry) -> list[str]:
        if isinstance(value, str):
            return [self._filled(value)]
        entries = self._chosen(value) if isinstance(value, dict) else value
        return [text for entry in entries for text in self._options(entry)]

    def _chosen(self, cases: Mapping[str, Entry]) -> list[Entry]:
        """The entries of the first case that holds; none if no case does."""
        for case, value in cases.items():
            if case == "else" or self._holds(case.removeprefix("if ")):
                return value if isinstance(value, list) else [value]
        return []

    def _holds(self, condition: str) -> bool:
        """True if "a or b and no c" holds: each part by any of its names, or by none of them."""
        for part in self._filled(condition).split(" and "):
            names = part.removeprefix("no ")
            if any(map(self._is_true, names.split(" or "))) != (names == part):
                return False
        return True

    def _is_true(self, name: str) -> bool:
        """The answer to "40%", "veg = 2", a chance with a name, or the name of a food or group."""
        if chance := _CHANCE.fullmatch(name):
            return self._draw.below(100) < int(chance[1])
        word, equals, value = name.partition(" = ")
        if equals:
            return self._words.get(word, str(len(self._groups.get(word, ())))) == value
        if name in self._flags:
            return self._flags[name]
        return name in self._lines or bool(self._groups.get(name))

    def _time(self, cases: str) -> int:
        """The minutes of "8-10", or of "3-4 if shrimp, else 5-6"."""
        for case in cases.split(", "):
            minutes, _, condition = case.removeprefix("else ").partition(" if ")
            if not condition or self._holds(condition):
                return self._number(minutes)
        raise ValueError(f"no time of {cases!r} applies")

    def _pick(self, options: Sequence[_T]) -> _T:
        return options[self._draw.below(len(options))]

    def _number(self, text: str) -> int:
        """A number, drawn if the text is a range: "8-10", "15-30 by 5"."""
        limits = _RANGE.fullmatch(text)
        if limits is None:
            return int(text)
        low, high, step = (int(limit or 1) for limit in limits.groups())
        return low + step * self._draw.below((high - low) // step + 1)

    def _list(self, foods: str, eaten: float = 1.0) -> None:
        """List foods; `eaten` is the share that ends on the plate (salt of pasta water)."""
        for text in foods.split("; "):
            self._add(specification(text), eaten)

    def _add(self, spec: Specification, eaten: float) -> None:
        assert spec.key not in self._lines, f"{spec.key} is listed twice"
        measured = measure(spec, self._scale)
        preparation = self._pick(spec.preparations)
        self._lines[spec.key] = f"{measured.line}, {preparation}" if preparation else measured.line
        self._measured[spec.key] = measured
        self._eaten[spec.key] = eaten

    def _step(self, phrasings: Sequence[str], minutes: int = 0) -> None:
        self._minutes += minutes
        template = self._pick(phrasings).replace("{min}", write_minutes(minutes))
        text = self._named(template, used=self._used)
        self._steps.append(text[:1].upper() + text[1:])

    def _named(self, template: str, used: set[str] | None) -> str:
        """A template with the names of foods; `{food:one}` is the singular, `{food:is}` a verb."""

        def written(match: re.Match[str]) -> str:
            keys = self._keys(match[1])
            if match[2] == "is":
                name = self._name(keys[0], None)
                plural = name.endswith("s") and name not in _SINGULAR_IN_S
                return "are" if plural or len(keys) > 1 else "is"
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

    def _nutrition(self) -> tuple[dict[str, float], float]:
        """Rough facts per serving (kcal, and grams of fat, sugar and salt), and its weight."""
        weight = 0.0
        totals: dict[str, float] = {}
        for key, measured in self._measured.items():
            food, share = PANTRY[key], self._eaten[key] * measured.grams / 100.0
            weight += 100.0 * share / self._servings
            for name, figure in food.per_100_g.items():
                totals[name] = totals.get(name, 0.0) + share * figure / self._servings
        return {name: round(total, 1) for name, total in totals.items()}, weight


def nutrition_class(facts: Mapping[str, float], grams: float) -> NutritionClass:
    """Class of a serving of `grams` by its lights: amber is a point, red two; rich is one more."""
    points = int(facts["energy_kcal"] > _RICH_KCAL)
    for name in ("fat_g", "sugar_g", "salt_g"):
        per_100_g = 100.0 * facts[name] / max(grams, 1.0)
        is_red = per_100_g > RED_PER_100_G[name] or facts[name] > RED_PER_SERVING[name]
        points += 2 if is_red else int(per_100_g > GREEN_PER_100_G[name])
    return "Healthy" if points <= 2 else "Moderate" if points == 3 else "Indulgent"


def join_words(words: list[str]) -> str:
    """List words as a sentence does: "a, b, and c"."""
    if len(words) < 3:
        return " and ".join(words)
    return f"{', '.join(words[:-1])}, and {words[-1]}"


def write_minutes(minutes: int) -> str:
    """A time in words: "45 minutes", "1 1/2 hours"."""
    if minutes < 60 or minutes % 30:
        return f"{minutes} minute{'' if minutes == 1 else 's'}"
    hours, half = divmod(minutes, 60)
    return f"{hours}{' 1/2' if half else ''} hour{'' if minutes == 60 else 's'}"
