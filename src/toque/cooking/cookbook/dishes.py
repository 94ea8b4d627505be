"""Dishes of the cookbook: the data of `dishes/*.yaml`, and the one interpreter that cooks it.

`dishes/README.md` describes the format; a new dish is new data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Final

import yaml

from toque.cooking.cookbook.kitchen import Draw, Kitchen
from toque.cooking.recipe import Recipe

CHAPTERS: Final = (
    "soups", "stews", "pasta", "grains", "mains", "handheld", "vegetables", "breakfast", "baking",
    "sweets", "simple",
)  # fmt: skip
"""Files of dishes. The order counts: recipe `index` of a seed draws the number of its dish."""

_FOLDER: Final = Path(__file__).with_name("dishes")
# The parser in C is ten times faster; a few builds of PyYAML come without it.
_Loader: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CHANCE: Final = re.compile(r"(\d+)%")
_RANGE: Final = re.compile(r"(\d+)-(\d+)(?: by (\d+))?")
_GROUP: Final = re.compile(r"(\w+) (\d)(?:-(\d))?")

Entry = Any
"""A text, a list of phrasings, or a mapping whose first key is a command."""


@dataclass(frozen=True)
class Dish:
    """One dish as its file describes it."""

    name: str
    foods: Sequence[Entry]
    title: Sequence[Entry]
    tags: Sequence[Entry]
    steps: Sequence[Entry]
    serves: Sequence[int] = ()
    """Servings to choose from; amounts are for one serving."""
    makes: int = 0
    """Servings of one batch, if amounts are for a batch."""
    batches: Sequence[float] = ()
    """Numbers of batches to choose from."""

    def recipe(self, draw: Draw) -> Recipe:
        """One recipe for this dish; the draws decide which."""
        try:
            return _Cook(Kitchen(draw)).cook(self)
        except Exception as error:
            error.add_note(f"in the dish {self.name!r} of the cookbook")
            raise


@cache
def dishes() -> tuple[Dish, ...]:
    """Every dish of the cookbook, chapter by chapter."""
    chapters = map(_read, CHAPTERS)
    return tuple(Dish(name, **data) for chapter in chapters for name, data in chapter.items())


@cache
def _techniques() -> Mapping[str, Sequence[Entry]]:
    return _read("techniques")


def _read(name: str) -> dict[str, Any]:
    text = (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    found: dict[str, Any] = yaml.load(text, _Loader)  # noqa: S506  # a safe loader, and our own file
    return found


class _Cook:
    """Interpreter of one dish: follows its entries in order, and decides in a kitchen."""

    def __init__(self, kitchen: Kitchen) -> None:
        self._kitchen = kitchen
        self._words: dict[str, str] = {}
        self._flags: dict[str, bool] = {}

    def cook(self, dish: Dish) -> Recipe:
        kitchen = self._kitchen
        if dish.serves:
            kitchen.serves(*dish.serves)
        else:
            kitchen.batch(dish.makes, *dish.batches)
        self._words["servings"] = str(kitchen.servings)
        self._follow(dish.foods, lambda foods: kitchen.add(*foods.split("; ")))
        kitchen.title(*self._options(dish.title))
        kitchen.tag(*self._options(dish.tags))
        self._follow(dish.steps, kitchen.step)
        return kitchen.serve()

    def _follow(self, entries: Sequence[Entry], write: Callable[[str], None]) -> None:
        """Carry out entries; `write` takes a text, which lists foods or tells a step."""
        for entry in entries:
            if isinstance(entry, str):
                write(self._filled(entry))
            elif isinstance(entry, list):
                self._kitchen.step(*self._options(entry))
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
            self._kitchen.call(rest, *value.split("; "))
        elif verb == "use":
            for name, given in entry.items():
                self._let(name, given)
            self._follow(_techniques()[value], write)
        elif verb == "eaten":
            self._kitchen.add(value, eaten=int(rest.rstrip("%")) / 100)
        elif key.endswith(" min"):
            minutes = self._minutes(key.removesuffix(" min"))
            self._kitchen.step(*self._options(value), minutes=minutes)
        elif group := _GROUP.fullmatch(key):
            name, low, high = group.groups()
            foods = [food for foods in self._options(value) for food in foods.split("; ")]
            self._kitchen.group(name, int(low), int(high or low), *foods)
        else:
            raise ValueError(f"{key!r} is no command, no time and no group such as 'herb 1-2'")

    def _let(self, name: str, value: Entry) -> None:
        """Give a name to a word, a drawn word or number, or the outcome of a chance."""
        if isinstance(value, dict):
            value = self._chosen(value)[0]
        if isinstance(value, list):
            value = self._kitchen.pick(*self._options(value))
        text = self._filled(str(value))
        if chance := _CHANCE.fullmatch(text):
            self._flags[name] = self._kitchen.chance(int(chance[1]))
            return
        word = str(self._number(text)) if _RANGE.fullmatch(text) else text
        self._words[name] = word
        self._words[name.capitalize()] = word[:1].upper() + word[1:]

    def _filled(self, text: str) -> str:
        """A text with its `$words`."""
        return Template(text).substitute(self._words) if "$" in text else text

    def _options(self, value: Entry) -> list[str]:
        """The texts to choose from, without those whose condition does not hold."""
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
        return all(self._holds_one(part) for part in self._filled(condition).split(" and "))

    def _holds_one(self, condition: str) -> bool:
        names = condition.removeprefix("no ")
        return any(map(self._is_true, names.split(" or "))) == (names == condition)

    def _is_true(self, name: str) -> bool:
        """The answer to "40%", "veg = 2", a chance with a name, or the name of a food or group."""
        if chance := _CHANCE.fullmatch(name):
            return self._kitchen.chance(int(chance[1]))
        word, equals, value = name.partition(" = ")
        if equals:
            return self._words.get(word, str(self._kitchen.count(word))) == value
        return self._flags[name] if name in self._flags else self._kitchen.has(name)

    def _minutes(self, cases: str) -> int:
        """The minutes of "8-10", or of "3-4 if shrimp, else 5-6"."""
        for case in cases.split(", "):
            minutes, _, condition = case.removeprefix("else ").partition(" if ")
            if not condition or self._holds(condition):
                return self._number(minutes)
        raise ValueError(f"no time of {cases!r} applies")

    def _number(self, text: str) -> int:
        """A number, drawn if the text is a range: "8-10", "15-30 by 5"."""
        limits = _RANGE.fullmatch(text)
        if limits is None:
            return int(text)
        return self._kitchen.between(*(int(limit) for limit in limits.groups() if limit))
