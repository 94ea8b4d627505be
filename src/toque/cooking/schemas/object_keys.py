"""Object keys: their roles in ingredients and steps, and which keys no line uses.

Recipe managers, APIs and websites share the names of keys: amount, unit, food, note, text, heading,
and a list of further items.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from toque.cooking.ingredients.vocabulary import SPELLINGS
from toque.sources.records import is_filled

# Note about an object without a line.
NOT_READ: Final = "ingredients and steps left out: objects without a known name or text"

# Maximum depth of lists and objects; real files have a depth of six.
_MAX_DEPTH: Final = 16
_PREFIXES: Final = (
    "recipe",
    "ingredient",
    "step",
    "instruction",
    "direction",
    "item",
    "food",
)


class KeyRoles:
    """The roles of keys by their folded names, most specific name first."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._ranks = {
            role: {name: rank for rank, name in enumerate(text.split())}
            for role, text in names.items()
        }
        self.of = lru_cache(maxsize=4096)(self._of)

    def _of(self, key: str) -> tuple[tuple[str, int], ...]:
        """Return the possible roles of a key with the key's ranks. The value decides the role."""
        roles: list[tuple[str, int]] = []
        names = _folded_names(key)
        for role, ranks in self._ranks.items():
            rank = next((ranks[name] for name in names if name in ranks), None)
            if rank is not None:
                roles.append((role, rank))
        return tuple(roles)


INGREDIENT: Final = KeyRoles(
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
STEP: Final = KeyRoles(
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
UNIT: Final = KeyRoles(
    {
        "one": "name displaysingular singular long title label text value unitlong unit",
        "many": "pluralname nameplural displayplural plural",
        "short": "abbreviation abbr short shortname symbol unitshort",
        "short many": "pluralabbreviation abbreviationplural",
        "is short": "useabbreviation",
    }
)
FOOD: Final = KeyRoles(
    {
        "one": """
            name displayname displaysingular singular title label text value food ingredient
            description
        """,
        "many": "pluralname nameplural displayplural plural",
    }
)
FRACTION: Final = KeyRoles(
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

_NOT_FOLDED: Final = re.compile(r"[^a-z0-9]")
_IDENTIFIER: Final = re.compile(
    r"(?:id|guid|uid|uuid|.*(?:[a-z]I|[_-]i)d|.*[Uu]uid)s?", re.DOTALL
)
_NUMBERED: Final = re.compile(r"[a-z]*[ _-]?(\d+)\.?", re.IGNORECASE)
_RANDOM_KEY: Final = re.compile(r"(?=[^ ]*\d)[0-9A-Za-z_-]{6,}")
# Texts that exporters write for a missing value.
_EMPTY_TEXTS: Final = frozenset(
    {"n/a", "na", "none", "null", "<unit>", "-", "nan", "undefined"}
)


class Keys:
    """The filled `values` of an object by key. `unread` lists the keys that were not taken."""

    def __init__(self, value: Mapping[Any, Any], roles: KeyRoles) -> None:
        self.values = {str(key): one for key, one in value.items() if is_filled(one)}
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
            if key not in self._taken and isinstance(self.values.get(key), kinds)
        ]
        self._taken.update(keys)
        return [self.values[key] for key in keys]

    def texts(self, role: str) -> list[str]:
        """Take the usable texts of a role."""
        return [text for value in self.take(role, str) if (text := usable_text(value))]

    def first(self, role: str) -> list[str]:
        """Take the first usable text of a role, as a list. Texts with more content stay unread."""
        first_text, *others = self.texts(role) or [""]
        for other in others:
            if not repeats(other, first_text):
                self.leave(other)
        return [first_text] if first_text else []

    def release(self, *roles: str) -> None:
        """Mark the keys of these roles as unused."""
        for role in roles:
            self._taken.difference_update(key for _, key in self._by_role.get(role, ()))

    def leave(self, value: Any) -> None:
        """Mark the keys with this value as unused."""
        for key, one in self.values.items():
            if one == value or (isinstance(one, str) and usable_text(one) == value):
                self._taken.discard(key)

    def has(self, *roles: str) -> bool:
        """Return whether the object has a key of one of these roles, even an empty key."""
        return not self._by_role.keys().isdisjoint(roles)

    def path_to(self, value: Any) -> str:
        """Return the path of the key with this value, e.g. ".unit"."""
        return next((f".{key}" for key, one in self.values.items() if one is value), "")

    def use(self, key: str) -> None:
        """Mark a key as used."""
        self._taken.add(key)

    def is_set(self, role: str) -> bool:
        """Return whether a flag of this role is true."""
        return any(self.take(role, bool))

    @property
    def announces(self) -> bool:
        """True if the object is marked as a heading."""
        for key, value in self.values.items():
            name = _folded_names(key)[-1]
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
            for key, value in self.values.items()
            if key not in self._taken and _may_be_content(key, value)
        ]


class UnreadPaths:
    """Paths of the keys that no line uses, in order of first appearance."""

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def add(self, path: str) -> None:
        """Add a path, e.g. ".aisle"."""
        self._paths[path] = None

    def add_keys(self, keys: Keys, path: str = "") -> None:
        """Add the unread keys of the object at this path."""
        self._paths.update(dict.fromkeys(f"{path}.{key}" for key in keys.unread))

    def add_value(self, value: Any) -> None:
        """Add a filled value for which `is_readable` is false."""
        if is_filled(value):
            is_nested = isinstance(value, list | dict)
            kind = "nested deeper" if is_nested else type(value).__name__
            self.add(f" ({kind})")


def is_readable(value: Any, depth: int) -> bool:
    """Return whether a value is a list or an object at a readable depth."""
    return isinstance(value, list | dict) and depth < _MAX_DEPTH


@lru_cache(maxsize=4096)
def _folded_names(key: str) -> tuple[str, ...]:
    """Return the folded name of a key, also without a prefix for the kind of item."""
    name = _NOT_FOLDED.sub("", key.lower())
    prefix = next(
        (p for p in _PREFIXES if name.startswith(p) and len(name) > len(p) + 1), ""
    )
    return (name, name[len(prefix) :]) if prefix else (name,)


def _may_be_content(key: str, value: Any) -> bool:
    """Return False if a value is a flag, an identifier or a position in a list."""
    if isinstance(value, bool) or value == 0 or key.startswith("@"):
        return False
    if isinstance(value, dict | list):
        return True
    return _folded_names(key)[-1] not in _PLACE and not _IDENTIFIER.fullmatch(key)


def is_label(key: str) -> bool:
    """Return whether a key is a number or generated by a program: "1", "step 2", "a81f0c2d"."""
    return bool(_NUMBERED.fullmatch(key) or _RANDOM_KEY.fullmatch(key))


def number_of(key: str) -> str:
    """Return the digits of a key that is only a number or a name with a number: "step 2"."""
    match = _NUMBERED.fullmatch(key)
    return match[1] if match else ""


def has_letter(text: str) -> bool:
    """Return whether a text contains a letter."""
    return any(map(str.isalpha, text))


def usable_text(text: str) -> str:
    """Return a text without spaces around it, or "" if it means a missing value."""
    text = text.strip()
    return "" if text.lower() in _EMPTY_TEXTS else text


def repeats(text: str, line: str) -> bool:
    """Return whether a line repeats a text: the same words, or the same unit."""
    unit = SPELLINGS.get(text.lower())
    is_same_unit = unit is not None and SPELLINGS.get(line.lower()) == unit
    return is_same_unit or text.lower() in line.lower()
