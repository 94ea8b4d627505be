"""Ingredients and steps as objects: their lines and their unused keys.

The names of the keys determine how an object is read. Recipe managers, APIs and websites share
these names: amount, unit, food, note, text, heading, and a list of further items. A filled key that
no line uses is noted once per record with its path: "ingredients.aisle".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.tokens import NUMBER, number, replace_glyphs
from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.sources.records import is_filled

UNUSED: Final = "field that no example holds: "  # start of a note about an unused field
HEADINGS: Final = "ingredient sub-headings"
TIPS: Final = "tips beside the steps left out"
NOT_READ: Final = "ingredients and steps left out: objects without a known name or text"

# Maximum depth of lists and objects; real files have a depth of six.
_DEEPEST: Final = 16
_MAX_HEADING_CHARS: Final = 60
# Maximum notes and nested steps that are compared with a line.
_MOST_COMPARED: Final = 50
_PREFIXES: Final = (
    "recipe",
    "ingredient",
    "step",
    "instruction",
    "direction",
    "item",
    "food",
)


class _Roles:
    """The roles of keys by their folded names, most specific name first."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._ranks = {
            role: {name: rank for rank, name in enumerate(text.split())}
            for role, text in names.items()
        }
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, key: str) -> tuple[tuple[str, int], ...]:
        """Return the possible roles of a key with the key's ranks. The value decides the role."""
        return tuple(
            (role, rank)
            for role, ranks in self._ranks.items()
            if (rank := next((ranks[n] for n in _names(key) if n in ranks), None))
            is not None
        )


_INGREDIENT: Final = _Roles(
    {
        "line": """
            originaltext original originalstring originalline wholeline displaytext display
            displayvalue rawtext raw rawline rawingredient
        """,
        "text": "text line label fulltext full phrase sentence string input",
        "amount": """
            quantity amount qty amt amounts quantities quant measurements measure measurement value
            count requiredquantity quantitytext amounttext measures menge cantidad quantit
            quantidade hoeveelheid us imperial metric
        """,
        "also": "weight volume",
        "least": """
            min from minimum low start quantitymin minquantity amountmin minamount minvalue
        """,
        "most": """
            max to maximum high end quantitymax maxquantity amountmax maxamount maxvalue quantityto
            rangeend endrange quantityend amountend
            amountto quantity2 amount2 upperquantity
        """,
        "unit": """
            unit units unittext unitname uom unitofmeasure unitofmeasurement measurementunit
            measureunit quantityunit quantitytype amountunit unitnotation unitlong unitshort
            unitsymbol measure measurement unitcode qu quunit einheit unidad unidade eenheid
        """,
        "food": """
            food ingredient item name foodname foods productname product displayname notation zutat
            ingrediente nombre nome naam nom
        """,
        "title": "title",
        "size": "size prefix",
        "note": """
            note notes preparation prep preparationnote preparationnotes preparationmethod
            processing comment comments extracomment modifier modifiers qualifier extra extras
            extrainfo remark remarks info usageinfo usage state form detail details characteristic
            characteristics iprp descriptor descriptors suffix cut notetext amountnote
            additionalinfo nota bemerkung
        """,
        "described": "description desc spec specification",
        "extract": "meta metainformation",
        "optional": "optional isoptional",
        "no amount": "disableamount noamount",
        "heading": """
            group groupname section sectionname sectiontitle sectionheadingname heading header
            headline purpose part subheading subtitle groupheading
        """,
        "items": """
            ingredients items itemlistelement components ingredientlist children list ing ingdiv
            ingredient item sections groups recipeingredients ingredientlines elements lines data
            content edges nodes groupingredients ingredientgroupingredients
        """,
    }
)
_STEP: Final = _Roles(
    {
        "text": """
            text displaytext instruction step direction description displayvalue content body value
            formattedtext html markdown instructions instructionshtml instructionsmarkdown
            directions method paragraph preparation anweisung
        """,
        "detail": "action detail details",
        "title": """
            name title heading header headline section sectionname sectiontitle group groupname
            sectionheadingname label subtitle
        """,
        "items": """
            itemlistelement item items steps recipesteps substeps instructions directions list
            children content data sections groups elements methodsteps paragraphs step method value
            instruction direction text body
        """,
        "ingredients": "ingredients ingredient",
        "number": "number no num step",
    }
)
_UNIT: Final = _Roles(
    {
        "one": "name displaysingular singular long title label text value unitlong unit",
        "many": "pluralname nameplural displayplural plural",
        "short": "abbreviation abbr short shortname symbol unitshort",
        "short many": "pluralabbreviation abbreviationplural",
        "is short": "useabbreviation",
    }
)
_FOOD: Final = _Roles(
    {
        "one": """
            name displayname displaysingular singular title label text value food ingredient
            description
        """,
        "many": "pluralname nameplural displayplural plural",
    }
)
_FRACTION: Final = _Roles(
    {"whole": "whole", "top": "numerator num", "bottom": "denominator den"}
)
# Keys for the position and kind of an item, which its list and its line already show.
_PLACE: Final = frozenset(
    "position order index ordinal sortorder sequence sort displayorder type context err".split()  # noqa: SIM905
)
_HEADING_FLAGS: Final = frozenset(
    "isheader header isheading heading issection issectionheader headline isgroup istitle".split()  # noqa: SIM905
)
_HEADING_KINDS: Final = frozenset(
    "group section header heading title boldheading".split()  # noqa: SIM905
)
_INLINE: Final = frozenset(
    {"text", "ingredient", "cookware", "timer", "inlineQuantity"}
)

_NOT_FOLDED: Final = re.compile(r"[^a-z0-9]")
_IDENTIFIER: Final = re.compile(
    r"(?:id|guid|uid|uuid|.*(?:[a-z]I|[_-]i)d|.*[Uu]uid)s?", re.DOTALL
)
_NUMBERED: Final = re.compile(r"[a-z]*[ _-]?(\d+)\.?", re.IGNORECASE)
_RANDOM_KEY: Final = re.compile(r"(?=[^ ]*\d)[0-9A-Za-z_-]{6,}")
_NOTHING: Final = frozenset(
    {"n/a", "na", "none", "null", "<unit>", "-", "nan", "undefined"}
)
# Words in "one to two"
_NUMBERS: Final = frozenset({*WORDS, "to", "or", "and", "a", "an"})
_PIECES: Final = frozenset({"unit", "units", "item", "items", "each", "ea", "qty"})
_DECIMAL: Final = re.compile(r"\d{1,9}\.(?:0+|\d{4,})")
_AMOUNT: Final = re.compile(NUMBER)
_AFTER_FOOD: Final = re.compile(r"(?:to|as|for|if|q\.? ?[bs])\b", re.IGNORECASE)
_STEP_NUMBER: Final = re.compile(
    r"\W*+(?:step|schritt|étape|paso|passo)?+\W*+\d*+\W*+", re.IGNORECASE
)
_FRACTIONS: Final = {
    1 / 8: "1/8", 1 / 4: "1/4", 1 / 3: "1/3", 3 / 8: "3/8", 1 / 2: "1/2", 5 / 8: "5/8",
    2 / 3: "2/3", 3 / 4: "3/4", 7 / 8: "7/8",
}  # fmt: skip
_AMOUNT_WORDS: Final = 3  # maximum words of an amount in a description: "2 large cans"
_NEAR: Final = 0.006  # maximum distance to a fraction: 0.33 and 0.667 are thirds
# Units with decimal amounts.
_IN_DECIMALS: Final = frozenset(
    "milligram gram kilogram millilitre centilitre decilitre litre".split()  # noqa: SIM905
)


class Measure(NamedTuple):
    """An amount and its unit."""

    text: str = ""  # the amount as text in the source; "" if it is a number
    low: float = 0.0
    high: float = 0.0  # equal to `low`, unless the amount is a range
    unit: str = ""

    def __str__(self) -> str:
        return " ".join(part for part in (self.amount, self.unit) if part)

    @property
    def is_bare(self) -> bool:
        """True for a number without a unit."""
        words = (word for word in self.text.lower().split() if _has_letter(word))
        return (
            bool(self.amount)
            and not self.unit
            and all(word in _NUMBERS for word in words)
        )

    @property
    def amount(self) -> str:
        """The amount as text: "2", "1/2", "2-3"."""
        if self.text or not self.high:
            return self.text
        low, high = (_written(value, self.unit) for value in (self.low, self.high))
        return low if low == high else f"{low}-{high}"

    def up_to(self, other: Measure) -> Measure:
        """Return the range from this amount to another amount."""
        if not self.high or other.high <= self.high:
            return self
        text = f"{self.amount}-{other.amount}" if self.text or other.text else ""
        return Measure(text, self.low, other.high, self.unit or other.unit)


class _Keys:
    """The filled keys of an object by role. `unread` lists the keys that were not taken."""

    def __init__(self, value: Mapping[Any, Any], roles: _Roles) -> None:
        self._values = {str(key): one for key, one in value.items() if is_filled(one)}
        self._taken: set[str] = set()
        self._by_role: dict[str, list[tuple[int, str]]] = {}
        for key in map(str, value):
            for role, rank in roles.of(key):
                self._by_role.setdefault(role, []).append((rank, key))

    def take(self, role: str, *kinds: type) -> list[Any]:
        """Take the values of a role with these types, in the order of their keys' ranks."""
        keys = [
            key
            for _, key in sorted(self._by_role.get(role, ()))
            if key not in self._taken and isinstance(self._values.get(key), kinds)
        ]
        self._taken.update(keys)
        return [self._values[key] for key in keys]

    def texts(self, role: str) -> list[str]:
        """Take the usable texts of a role."""
        return [text for value in self.take(role, str) if (text := _usable(value))]

    def first(self, role: str) -> list[str]:
        """Take the first usable text of a role, as a list. Texts with more content stay unread."""
        first_text, *others = self.texts(role) or [""]
        for other in others:
            if not _repeats(other, first_text):
                self.leave(other)
        return [first_text] if first_text else []

    def release(self, *roles: str) -> None:
        """Mark the keys of these roles as unused."""
        for role in roles:
            self._taken.difference_update(key for _, key in self._by_role.get(role, ()))

    def leave(self, value: Any) -> None:
        """Mark the keys with this value as unused."""
        for key, one in self._values.items():
            if one == value or (isinstance(one, str) and _usable(one) == value):
                self._taken.discard(key)

    def has(self, *roles: str) -> bool:
        """Return whether the object has a key of one of these roles, even an empty key."""
        return not self._by_role.keys().isdisjoint(roles)

    def path_to(self, value: Any) -> str:
        """Return the path of the key with this value, e.g. ".unit"."""
        return next(
            (f".{key}" for key, one in self._values.items() if one is value), ""
        )

    def use(self, key: str) -> None:
        """Mark a key as used."""
        self._taken.add(key)

    def is_set(self, role: str) -> bool:
        """Return whether a flag of this role is true."""
        return any(self.take(role, bool))

    @property
    def announces(self) -> bool:
        """True if the object is marked as a heading."""
        for key, value in self._values.items():
            name = _names(key)[-1]
            if value is True and name in _HEADING_FLAGS:
                return True
            if name in {"type", "displaytype"} and str(value).lower() in _HEADING_KINDS:
                return True
        return False

    @property
    def unread(self) -> list[str]:
        """Keys that were not taken, without flags, identifiers and positions in a list."""
        return [
            key
            for key, value in self._values.items()
            if key not in self._taken
            and not (isinstance(value, bool) or value == 0 or key.startswith("@"))
            and (isinstance(value, dict | list) or not _is_place(key))
        ]

    @property
    def values(self) -> Mapping[str, Any]:
        """Filled values by key."""
        return self._values


class ItemReader:
    """A reader of the items of a field. It notes the keys that no line uses.

    `record` is the entire record: Cooklang's steps refer to its ingredients by index.
    """

    def __init__(
        self, field: str, notes: Counter[str], record: Mapping[str, Any] | None = None
    ) -> None:
        self._field = field
        self._notes = notes
        self._record = record or {}
        self._unread: dict[str, None] = {}  # paths in order of first appearance
        self._group = ""

    def ingredients(self, value: Any) -> list[str]:
        """Return the ingredient lines of texts, lists and objects. Count the headings."""
        return self._noted(self._ingredients(value, 0))

    def steps(self, value: Any) -> list[str]:
        """Return the steps of texts, lists and objects. A heading becomes a line with a colon."""
        return self._noted(self._steps(value, 0))

    def ingredients_in_steps(self, value: Any) -> list[str]:
        """Return the ingredient lines inside steps that are objects."""
        return self._noted(self._inside_steps(value, 0))

    def _noted(self, lines: Iterator[str]) -> list[str]:
        item_lines = list(lines)
        self._notes.update(f"{UNUSED}{self._field}{path}" for path in self._unread)
        return item_lines

    def _leave(self, keys: _Keys, path: str = "") -> None:
        self._unread.update(dict.fromkeys(f"{path}.{key}" for key in keys.unread))

    def _ends(self, value: Any, depth: int) -> bool:
        """Return whether a value is not a readable list or object, and note it."""
        if isinstance(value, list | dict) and depth < _DEEPEST:
            return False
        if is_filled(value):
            nested = isinstance(value, list | dict)
            self._unread[
                " (nested deeper)" if nested else f" ({type(value).__name__})"
            ] = None
        return True

    # Ingredients

    def _ingredients(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif self._ends(value, depth):
            return
        elif isinstance(value, list):
            for item in value:
                yield from self._ingredients(item, depth + 1)
        else:
            yield from self._ingredient(value, depth)

    def _ingredient(self, value: Mapping[Any, Any], depth: int) -> Iterator[str]:
        if self._ends(value, depth):
            return
        keys = _Keys(value, _INGREDIENT)
        is_group = _is_group(keys)
        inner = [one for one in keys.take("food", dict) if _is_whole(one, keys)]
        keys.release("food")
        if inner and not is_group:  # a wrapper such as {"ingredient": {...}}
            around = {key: one for key, one in value.items() if one is not inner[0]}
            yield from self._ingredient({**around, **inner[0]}, depth + 1)
            return
        if is_group or keys.announces:
            for role in ("heading", "title", "food", "text", "note")[
                : 4 if is_group else 5
            ]:
                self._count_headings(keys.first(role))
            nested = keys.take("items", list, dict) if is_group else []
            self._leave(keys)
            yield from self._ingredients(nested, depth + 1)
            return

        headings = keys.first("heading")
        titles = keys.texts("title")
        if keys.has("food", "line", "text"):
            headings += titles
            titles = []
        line = self._line(keys, titles)
        self._count_headings(headings)
        if line:
            self._leave(keys)
            yield line
        elif not headings and (depth == 0 or _is_named(keys.values)):
            yield from self._named_ingredients(value, depth)
        elif keys.unread:
            self._leave(keys)
            self._notes[NOT_READ] += 1

    def _count_headings(self, headings: list[str]) -> None:
        for heading in headings:
            self._notes[HEADINGS] += heading != self._group
            self._group = heading

    def _named_ingredients(
        self, values: Mapping[Any, Any], depth: int
    ) -> Iterator[str]:
        """Read ingredients by name ({"flour": "200 g"}), by part of the dish, or by number."""
        for key, value in values.items():
            name = str(key)
            is_label = _is_label(name)
            if isinstance(value, dict):
                keys = _Keys(value, _INGREDIENT)
                if (
                    is_label
                    or _is_group(keys)
                    or keys.has("food", "line", "text", "heading")
                ):
                    yield from self._ingredient(value, depth + 1)
                elif keys.has("amount", "least", "unit", "note"):
                    yield from self._ingredient({**value, "food": name}, depth + 1)
                elif not self._ends(value, depth):
                    self._count_headings([name])
                    yield from self._named_ingredients(value, depth + 1)
            elif isinstance(value, list):
                self._count_headings([] if is_label else [name])
                yield from self._ingredients(value, depth + 1)
            elif is_label or (isinstance(value, str) and name.lower() in value.lower()):
                yield from self._ingredients(value, depth + 1)
            else:
                yield from self._ingredient({"food": name, "amount": value}, depth + 1)

    def _line(self, keys: _Keys, titles: list[str]) -> str:
        """Return the line of an ingredient, or "" if it names no food."""
        ready, texts = keys.first("line"), keys.first("text")
        measures = self._measures(keys)
        foods = self._foods(keys, measures[0].high if measures else 0.0) or titles
        notes = [
            note
            for one in keys.take("note", str, list, dict)
            for note in self._remarks(one, keys.path_to(one))
        ]
        measures += self._described(keys, notes, is_measured=bool(measures))
        is_optional = keys.is_set("optional")
        if keys.is_set("no amount"):
            measures = []

        if not ready and not (texts and measures and _is_without_amount(texts[0])):
            ready = texts
        if ready:
            line = ready[0]
            if measures and _is_without_amount(line):
                keys.release("amount", "least", "most", "also", "unit")
            if foods and not _repeats(foods[0], line):
                keys.release("food")
        else:
            line = self._composed(keys, measures, texts or foods, notes)
            if foods and not _repeats(foods[0], line):
                keys.release("food")
        if not line:
            return ""
        if len(notes) <= _MOST_COMPARED:
            notes = [note for note in dict.fromkeys(notes) if not _repeats(note, line)]
        line = ", ".join([line, *notes])
        return (
            f"{line} (optional)"
            if is_optional and "optional" not in line.lower()
            else line
        )

    def _composed(
        self, keys: _Keys, measures: list[Measure], foods: list[str], notes: list[str]
    ) -> str:
        """Compose amounts, size and food. Add remarks that belong after the food to `notes`."""
        extracts = keys.take("extract", list, str)  # Spoonacular's extracts of the line
        notes += [note for value in extracts for note in self._remarks(value, ".meta")]
        if not foods and notes and (measures or not keys.unread):
            foods = [notes.pop(0)]
            if list(map(str, measures)) == ["1"]:
                measures = []  # Mealie's default next to a note that contains the line
        if not foods:
            return ""

        amounts = list(dict.fromkeys(filter(None, map(str, measures))))
        remark = (measures[0].unit or measures[0].text) if measures else ""
        if _AFTER_FOOD.match(remark):
            notes.append(remark[:1].lower() + remark[1:])  # "salt, to taste"
            amounts = amounts[1:]
        others = [f"({'; '.join(amounts[1:])})"] if amounts[1:] else []
        return " ".join([*amounts[:1], *others, *keys.texts("size"), foods[0]])

    def _described(
        self, keys: _Keys, notes: list[str], *, is_measured: bool
    ) -> list[Measure]:
        """Read the amount at the start of a description ("200 g, sifted"). The rest is a note."""
        measures: list[Measure] = []
        for value in keys.take("described", str):
            amount, _, rest = value.strip().partition(",")
            is_short = len(amount.split()) <= _AMOUNT_WORDS
            if (
                is_short
                and not (is_measured or measures)
                and _begins_with_amount(amount)
            ):
                measures.append(Measure(amount.strip()))
            else:
                rest = value
            notes += self._remarks(rest, "")
        return measures

    def _foods(self, keys: _Keys, amount: float) -> list[str]:
        """Return the food's name. A different name stays unread."""
        food_name = ""
        for value in keys.take("food", str, dict):
            name = value
            if isinstance(value, dict):
                inside = _Keys(value, _FOOD)
                one, several = inside.first("one"), inside.first("many")
                name = next(
                    iter([*several, *one] if amount > 1.0 else [*one, *several]), ""
                )
                self._leave(inside, keys.path_to(value))
            name = _usable(name)
            if not food_name:
                food_name = name
            elif not _repeats(name, food_name):
                keys.leave(value)
        return [food_name] if food_name else []

    def _remarks(self, value: Any, path: str) -> Iterator[str]:
        if isinstance(value, str):
            text = _usable(value).strip(" ,;")
            if text.startswith("(") and text.endswith(")") and text.count("(") == 1:
                text = text[1:-1].strip()
            if text:
                yield text
        elif isinstance(value, list):
            for item in value:
                yield from self._remarks(item, path)
        elif isinstance(value, dict):
            inside = _Keys(value, _INGREDIENT)
            for role in ("line", "text", "note", "food"):
                yield from inside.texts(role)
            self._leave(inside, path)

    def _measures(self, keys: _Keys, path: str = "") -> list[Measure]:
        """Return the measures of an object at this path, the main measure first."""

        def measured(value: Any) -> list[Measure]:
            return self._measured(value, path + keys.path_to(value))

        units = keys.take("unit", dict)
        for value in units.copy():
            if _Keys(value, _INGREDIENT).has("amount", "least"):
                units.remove(value)
                keys.leave(value)  # the object itself is a measure
        all_measures: list[Measure] = []
        for value in keys.take("amount", int, float, str, dict, list):
            measures = measured(value)
            if all_measures and measures and measures[0].is_bare:
                keys.leave(value)  # a second number without its own unit
            else:
                all_measures += measures
        low, high = (
            [
                m
                for v in keys.take(role, int, float, str, dict)
                for m in measured(v)
                if m.high
            ]
            for role in ("least", "most")
        )
        all_measures = all_measures or low or high
        if all_measures and high:
            all_measures[0] = all_measures[0].up_to(high[0])

        texts = [text for unit in keys.first("unit") if (text := _unit_text(unit))]
        words = [m for m in all_measures if m.text and not _begins_with_amount(m.text)]
        if words and len(all_measures) > 1 and not (texts or units):
            texts = [words[0].text]  # "measure" may contain the unit "cup"
            all_measures.remove(words[0])
        amount = all_measures[0].high if all_measures else 0.0
        unit = "".join(texts[:1])
        if units:
            unit = self._unit(units[0], amount, path + keys.path_to(units[0]))
        all_measures = [
            m if m.unit or not m.is_bare else m._replace(unit=unit)
            for m in all_measures
        ]
        if not all_measures and unit:
            all_measures = [Measure(unit=unit)]
        for value in keys.take("also", str, dict):
            all_measures += [
                measure for measure in measured(value) if not measure.is_bare
            ]
        return all_measures or self._in_named_units(keys)

    def _in_named_units(self, keys: _Keys) -> list[Measure]:
        """Take the measures with their unit as key, e.g. {"grams": 200}."""
        measures: list[Measure] = []
        for key in keys.unread:
            value, unit = keys.values[key], SPELLINGS.get(key.lower())
            if (
                unit
                and unit.kind in ("mass", "volume")
                and isinstance(value, int | float)
            ):
                measures.append(Measure("", value, value, key))
                keys.use(key)
        return measures

    def _measured(self, value: Any, path: str) -> list[Measure]:
        """Read the measures of an amount: a number, a text, a range, or an object around them."""
        if isinstance(value, bool) or not is_filled(value) or value == 0:
            return []
        if isinstance(value, int | float):
            return [Measure("", value, value)]
        if isinstance(value, str):
            text = _usable(value)
            if _DECIMAL.fullmatch(text):
                return self._measured(float(text), path)
            amount = (
                number(bare)
                if _AMOUNT.fullmatch(bare := replace_glyphs(text).strip())
                else 0.0
            )
            return [Measure(text, amount, amount)] if text.strip("0") else []
        if isinstance(value, list):
            measures = [
                measure for one in value for measure in self._measured(one, path)
            ]
            is_range = len(measures) == 2 and all(
                measure.is_bare for measure in measures
            )
            return [measures[0].up_to(measures[1])] if is_range else measures
        if (fraction := _fraction_of(value)) is not None:
            return self._measured(fraction, path)
        inside = _Keys(value, _INGREDIENT)
        if measures := self._measures(inside, path):
            self._leave(inside, path)
            return measures
        for (
            key,
            one,
        ) in inside.values.items():  # several systems, as in {"us": ..., "metric": ...}
            if isinstance(one, dict) or (
                isinstance(one, str) and _begins_with_amount(one)
            ):
                measures += self._measured(one, f"{path}.{key}")
                inside.use(key)
        self._leave(inside, path)
        return measures

    def _unit(self, unit: Mapping[str, Any], amount: float, path: str) -> str:
        keys = _Keys(unit, _UNIT)
        one, many, short, short_many = map(
            keys.first, ("one", "many", "short", "short many")
        )
        is_short = keys.is_set("is short")
        self._leave(keys, path)
        several = amount > 1.0
        forms = [short_many if several else short, short, many if several else one, one]
        if not is_short:
            forms = [*forms[2:], *forms[:2], many]
        return _unit_text(next((form[0] for form in forms if form), ""))

    # Steps

    def _steps(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, str):
            yield value
        elif self._ends(value, depth):
            return
        elif isinstance(value, dict):
            yield from self._step(value, depth)
        elif _is_inline(value):
            yield "".join(map(self._piece, value))
        else:
            for item in value:
                yield from self._steps(item, depth + 1)

    def _step(self, value: Mapping[Any, Any], depth: int) -> Iterator[str]:
        kinds = value.get("@type") or ""
        kind = str(kinds[0] if isinstance(kinds, list) else kinds).rpartition("/")[2]
        if kind == "HowToTip":
            self._notes[TIPS] += 1
            return
        keys = _Keys(value, _STEP)
        keys.take("ingredients", str, list, dict)  # `ingredients_in_steps` reads them
        text = self._text_of_step(keys)
        titles = [
            title for title in keys.first("title") if not _STEP_NUMBER.fullmatch(title)
        ]
        lines = list(self._steps(keys.take("items", list, dict), depth + 1))
        if not (text or titles or lines):
            yield from self._named_steps(keys, depth)
            return

        if keys.announces and not lines:
            titles, text = [text or titles[0]], ""
        if text and lines:
            text, lines = self._without_repeats(text, lines, is_typed=bool(kind))
        is_heading = bool(lines or text) or kind == "HowToSection" or keys.announces
        title = "".join(titles[:1])
        if text and _joined([title]).rstrip(" .:!") in _joined([text]):
            title = ""  # the text already contains it
        is_apart = kind not in ("", "HowToSection") or len(title) > _MAX_HEADING_CHARS
        if title and is_heading and is_apart:
            keys.leave(title)
            title = ""
        self._leave(keys)
        if title:
            yield f"{title.rstrip(' :')}:" if is_heading else title
        if text:
            yield text
        yield from lines

    def _without_repeats(
        self, text: str, lines: list[str], *, is_typed: bool
    ) -> tuple[str, list[str]]:
        """Return the text of a step and its nested lines, without repetitions."""
        joined = _joined([text])
        if len(lines) <= _MOST_COMPARED and all(
            _joined([line]) in joined for line in lines
        ):
            return text, []
        if joined in _joined(lines):
            return "", lines
        if is_typed:  # pages repeat the directions with different words
            self._unread[".itemListElement"] = None
            return text, []
        return text, lines

    def _text_of_step(self, keys: _Keys) -> str:
        """Return the text of a step. A text with different words stays unread."""
        keys.take("number", int, float)
        for digits in keys.take("number", str):
            if not digits.strip().isdecimal():
                keys.leave(digits)
        chosen = ""
        # The longer of "Fry" and "Fry the onion until golden." is the step.
        details = sorted(keys.take("detail", str), key=len, reverse=True)
        for value in [*keys.take("text", str), *details]:
            text = _usable(value)
            if not _has_letter(text) or _STEP_NUMBER.fullmatch(text):
                continue
            if not chosen:
                chosen = text
            elif text.lower() not in chosen.lower():
                keys.leave(value)
        return chosen

    def _named_steps(self, keys: _Keys, depth: int) -> Iterator[str]:
        """Read steps by number ({"1": "Mix."}) or by part of the dish ({"For the sauce": []})."""
        numbers = {
            name: int(n[1][:9])
            for name in keys.values
            if (n := _NUMBERED.fullmatch(name))
        }
        names = list(keys.values)
        if len(numbers) == len(names):
            names.sort(key=numbers.__getitem__)
        for name in names:
            is_label = _is_label(name)
            value = keys.values[name]
            if name.startswith("@") or not (
                is_label or depth == 0 or isinstance(value, list)
            ):
                continue
            keys.use(name)
            lines = list(self._steps(value, depth + 1))
            if lines and not is_label:
                yield f"{name.rstrip(': ')}:"
            yield from lines
        self._notes[NOT_READ] += bool(keys.unread)
        self._leave(keys)

    def _piece(self, piece: Mapping[str, Any]) -> str:
        """Return a piece of a Cooklang step: a text, or the name of an ingredient, tool or time."""
        index, kind = piece.get("index"), str(piece["type"])
        listed = self._record.get(kind if kind == "cookware" else f"{kind}s")
        if (
            isinstance(index, int)
            and isinstance(listed, list)
            and 0 <= index < len(listed)
        ):
            piece = listed[index] if isinstance(listed[index], dict) else {}
        name = next(
            (
                piece[key]
                for key in ("alias", "value", "text", "name")
                if piece.get(key)
            ),
            "",
        )
        if kind == "timer" or not name:
            name = " ".join(map(str, self._measures(_Keys(piece, _INGREDIENT)))) or name
        return name if isinstance(name, str) else ""

    def _inside_steps(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, str) or self._ends(value, depth):
            return
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, dict):
                keys = _Keys(item, _STEP)
                yield from self._ingredients(
                    keys.take("ingredients", list, dict), depth + 1
                )
                yield from self._inside_steps(keys.take("items", list, dict), depth + 1)
            else:
                yield from self._inside_steps(item, depth + 1)


@lru_cache(maxsize=4096)
def _names(key: str) -> tuple[str, ...]:
    """Return the folded name of a key, also without a prefix for the kind of item."""
    name = _NOT_FOLDED.sub("", key.lower())
    prefix = next(
        (p for p in _PREFIXES if name.startswith(p) and len(name) > len(p) + 1), ""
    )
    return (name, name[len(prefix) :]) if prefix else (name,)


def _is_place(key: str) -> bool:
    return _names(key)[-1] in _PLACE or _IDENTIFIER.fullmatch(key) is not None


def _is_group(keys: _Keys) -> bool:
    """Return whether an object is a list of items, not a single ingredient."""
    values = _Keys(keys.values, _INGREDIENT)
    lists = values.take("items", list)
    return bool(lists) or (
        not any(
            values.take(role, str, int, float) for role in ("line", "food", "amount")
        )
        and any(
            _Keys(one, _INGREDIENT).take("items", list, dict)
            for one in values.take("items", dict)
        )
    )


def _is_named(values: Mapping[str, Any]) -> bool:
    """Return whether an object is one ingredient under its name, e.g. {"flour": "200 g"}."""
    if len(values) != 1:
        return False
    (value,) = values.values()
    return not isinstance(value, str) or bool(
        _begins_with_amount(value)
        or _AFTER_FOOD.match(value)
        or _is_label(next(iter(values)))
    )


def _is_label(key: str) -> bool:
    """Return whether a key is a number or generated by a program: "1", "step 2", "a81f0c2d"."""
    return bool(_NUMBERED.fullmatch(key) or _RANDOM_KEY.fullmatch(key))


def _has_letter(text: str) -> bool:
    return any(map(str.isalpha, text))


def _usable(text: str) -> str:
    text = text.strip()
    return "" if text.lower() in _NOTHING else text


def _unit_text(unit: str) -> str:
    unit = unit.strip()
    if unit.lower() in _PIECES:
        return ""
    return (
        unit.lower()
        if unit.isupper() and len(unit) > 1 and unit.lower() in SPELLINGS
        else unit
    )


def _begins_with_amount(text: str) -> bool:
    first = "".join(text.lower().split(None, 1)[:1])
    return first != "" and (
        not first[0].isalpha() or first in WORDS or first in {"a", "an"}
    )


def _is_without_amount(text: str) -> bool:
    """Return whether a text names a food and has no amount or "to taste"."""
    words = text.split()
    return not any(
        _begins_with_amount(word) or _AFTER_FOOD.match(word) for word in words
    )


def _repeats(text: str, line: str) -> bool:
    """Return whether a line repeats a text: the same words, or the same unit."""
    unit = SPELLINGS.get(text.lower())
    is_same_unit = unit is not None and SPELLINGS.get(line.lower()) == unit
    return is_same_unit or text.lower() in line.lower()


def _is_whole(value: Any, around: _Keys) -> bool:
    """Return whether an object is a complete ingredient in an object with only a food key."""
    if not isinstance(value, dict) or around.has("line", "amount", "least"):
        return False
    keys = _Keys(value, _INGREDIENT)
    return keys.has("food", "line") and keys.has("line", "amount")


def _is_inline(items: list[Any]) -> bool:
    """Return whether objects are the pieces of one step from a Cooklang parser."""
    kinds = {str(item.get("type")) if isinstance(item, dict) else "" for item in items}
    return len(kinds) > 1 and "text" in kinds and kinds <= _INLINE


def _joined(lines: list[str]) -> str:
    return " ".join(" ".join(lines).lower().split())


def _fraction_of(value: Mapping[str, Any]) -> float | None:
    keys = _Keys(value, _FRACTION)
    integers, top, bottom = (
        keys.take(role, int, float) for role in ("whole", "top", "bottom")
    )
    if not bottom:
        return None
    return float(sum(integers) + sum(top) / float(bottom[0]))


def _written(value: float, unit: str) -> str:
    """Format a number for a recipe: 2, 1 1/2, or 0.5 for metric units.

    >>> _written(1.5, "cup"), _written(0.5, "kg"), _written(0.333, "")
    ('1 1/2', '0.5', '1/3')
    """
    if isinstance(value, int):
        return str(value)
    integer = int(value)
    spelling = SPELLINGS.get(unit.lower())
    if not (spelling and spelling.name in _IN_DECIMALS):
        for part, fraction in _FRACTIONS.items():
            if abs(value - integer - part) < _NEAR:
                return f"{integer} {fraction}" if integer else fraction
    return f"{value:.3f}".rstrip("0").rstrip(".")
