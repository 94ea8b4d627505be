"""Amounts of an ingredient line: numbers, ranges, units, containers and second measures."""

from __future__ import annotations

from typing import Literal, NamedTuple

from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.tokens import CLOSING, Range, Tokens, number, read_number
from toque.cooking.ingredients.vocabulary import (
    ABOUT,
    CONTAINERS,
    PACKED,
    SIZE_ADVERBS,
    SIZES,
    SIZES_OF_MEASURES,
    SPELLINGS,
    STARTERS,
    UNITS,
    Unit,
)

Role = Literal["whole", "plus", "same", "each"]

_TOTALS = frozenset({"total", "in", "each", "apiece", "all", "altogether", "weight"})
_BETWEEN = frozenset({"/", ",", ";", "or", "-", "and", "plus", "+", "=", "[", "]"})
_BULLETS = frozenset({"-", "*", "•", "~", "."})
_CLOSES = frozenset(CLOSING.values())
_OF = frozenset({"de", "di", "du", "del", "da"})  # "of" in other languages
_PLUS = frozenset({"plus", "+", "and", "&"})
OPENERS = (  # words that may precede a food's name
    frozenset(WORDS) | frozenset(SPELLINGS) | SIZES | SIZE_ADVERBS | PACKED | ABOUT | _PLUS
    | {"a", "an", "x", "or", "fl", "fluid"}
)  # fmt: skip


class Amount(NamedTuple):
    """A measure of an ingredient line."""

    # Low and high, equal for one number. None for "pinch of salt".
    quantity: Range | None
    unit: str | None  # a name in `vocabulary.UNITS`, or None for pieces
    role: Role = "whole"
    """`whole` is the line's first measure. `plus` is added to the measure before it. `same` repeats
    that amount ("250ml/9fl oz"). `each` is per piece ("1 (16 ounce) can", "6 10-inch ...")."""


class IngredientLine(NamedTuple):
    """A parsed ingredient line. A missing text is ""."""

    # First number as (low, high), both equal unless it is a range.
    quantity: Range | None
    # Unit of the first number, a name in `vocabulary.UNITS`. None for pieces.
    unit: str | None
    size: str  # "large", "small", "heaped": size of the food or of the measure
    name: str
    preparation: str
    comment: str
    purpose: str  # "for dusting", "to serve"
    optional: bool
    amounts: tuple[Amount, ...]  # all measures of the line, including the first


class AmountReader:
    """Reader of the measures in `tokens[i:end]`. Afterwards `i` is the index of the next token."""

    __slots__ = ("_alone", "_each", "amounts", "end", "i", "sizes", "tokens")

    def __init__(
        self, tokens: Tokens, i: int, end: int = -1, *, alone: bool = False
    ) -> None:
        self.tokens = tokens
        self.i = i
        self.end = len(tokens) if end < 0 else end
        self.amounts: list[Amount] = []
        self.sizes: list[str] = []
        self._each = False  # True after "x": "2 x 400 g"
        self._alone = alone  # True if no food follows: "(1 stick)"

    def read_all(self) -> None:
        """Read all measures and sizes at the beginning of a line, and the "of" after them."""
        kinds, words = self.tokens.kinds, self.tokens.words
        while self.i < self.end and (kinds[self.i] != "W" or words[self.i] in OPENERS):
            if not (
                self._read_amount()
                or self._skip_joint()
                or self._read_late_unit()
                or self._read_sizes()
            ):
                break
        # The case of the text matters: "Del Monte" is a name.
        joins = words[self.i] == "of" or self.tokens.span(self.i, self.i + 1) in _OF
        if self.amounts and joins and self.i + 1 < self.end:
            self.i += 1
            if words[self.i] in {"a", "an"} and self.i + 1 < self.end:
                self.i += 1

    def _read_amount(self) -> bool:
        """Read a measure, or a bracket with measures or a size."""
        i, word = self.i, self.tokens.words[self.i]
        if self.tokens.kinds[i] == "N" or word in WORDS or word in {"a", "an"}:
            return self.read_measure()
        return word in CLOSING and (self._read_group() or self._read_remark())

    def _skip_joint(self) -> bool:
        """Skip a word or mark that joins measures: "about", "/", "x", "or". Also read a "plus"."""
        i, word = self.i, self.tokens.words[self.i]
        if word in _PLUS and self.amounts and self._read_plus():
            return True
        if word in ABOUT or word in _BULLETS:
            self.i += 1
            return True

        before_number = self.tokens.is_number(i + 1)
        if word in {"x", "/"}:
            if not (self.amounts and before_number):
                return False
            self._each |= word == "x"
            self.i += 1
            return True
        if word != "or":
            return False
        unit = SPELLINGS.get(self.tokens.words[i + 1])
        before_container = unit is not None and unit.name in CONTAINERS
        if (self.sizes and before_number) or (self.amounts and before_container):
            self.i += 1  # "2 large or 3 small", "1 can or bottle"
            return True
        return False

    def _read_plus(self) -> bool:
        """Read "plus 2 tablespoons" after a measure, if both have a unit."""
        if not self.tokens.is_number(self.i + 1):
            return False
        reader = AmountReader(self.tokens, self.i + 1, self.end)
        if not reader.read_measure():
            return False
        added = reader.amounts[0]
        if added.unit is None or self.amounts[-1].unit is None:
            return False
        self.amounts.append(added._replace(role="plus"))
        self.i = reader.i
        return True

    def read_measure(self) -> bool:
        """Read a number and its unit. Return whether it is an amount."""
        number_and_end = read_number(self.tokens, self.i, self.end)
        if number_and_end is None:
            return False
        kinds, words = self.tokens.kinds, self.tokens.words
        quantity, i = number_and_end
        if words[i] == "a" and quantity[1] < 1.0:
            i += 1  # "½ a lemon"
        after = words[i]
        if after in {"%", "°"}:
            return False
        if after == "-" and kinds[i + 1] == "W":  # "10-inch"
            i += 1

        unit, i = self.read_unit(i, numbered=True)
        if unit is not None:
            high, i = self._read_second_number(i, unit)
            if high is not None:
                quantity = (quantity[0], high)
        elif after == "-" and i < self.end and words[i - 1] == "-":
            return False  # "28-day aged beef", "7-Up"

        role = self._role_of(unit) if self.amounts else "whole"
        self.amounts.append(Amount(quantity, unit.name if unit else None, role))
        self.i = i
        return True

    def _role_of(self, unit: Unit | None) -> Role:
        """Return the role of a measure with this unit after other measures."""
        first, last = self.amounts[0], self.amounts[-1]
        counts_pieces = first.unit is None and first.quantity is not None
        if self._each or (counts_pieces and unit is not None):
            return "each"
        if last.unit in {"pound", "kilogram"} and self.tokens.words[self.i - 1] != "/":
            return "plus"  # "1lb 2oz"
        return "same"

    def read_unit(self, i: int, *, numbered: bool) -> tuple[Unit | None, int]:
        """Read the unit at `i` after any sizes. Return the unit and the index after it.

        `numbered` is True after a number. Without a number, only `STARTERS` are units.
        """
        words = self.tokens.words
        start = i
        while words[i] in SIZES or words[i] in SIZE_ADVERBS or words[i] in PACKED:
            i += 1
        word = words[i]

        if word in {"fl", "fluid"}:
            j = i + 2 if words[i + 1] == "." else i + 1
            if words[j] in {"oz", "ozs", "ounce", "ounces"}:
                return UNITS["fluid ounce"], self._skip_marks(j + 1)
            return None, start

        unit = SPELLINGS.get(word)
        if unit is None:
            return None, start
        if not numbered and (unit.name not in STARTERS or len(word) < 3):
            return None, start
        if word == "in":
            is_inch = self.tokens.is_glued(i) or words[i + 1] in {"piece", "x", "thick"}
            if not is_inch:
                return None, start

        j = self._skip_marks(i + 1)
        is_last = j >= self.end or words[j] in {",", ";"}
        if unit.kind == "count" and is_last and not self._alone:
            return None, start  # "4 cloves", "2 fillets": the food itself
        self.sizes += words[start:i]
        return unit, j

    def _skip_marks(self, i: int) -> int:
        """Return the index after the full stop and the hyphen of a unit."""
        words = self.tokens.words
        if words[i] == "." and i < self.end:
            i += 1
        before_word = words[i] == "-" and self.tokens.kinds[i + 1] == "W"
        return i + 1 if before_word and self.tokens.is_glued(i) else i

    def _read_second_number(self, i: int, unit: Unit) -> tuple[float | None, int]:
        """Read the second number of "4-pound to 4½-pound ducks" or "½ cup to 1 cup"."""
        kinds, words = self.tokens.kinds, self.tokens.words
        if words[i] in {"to", "or", "-"} and kinds[i + 1] == "N":
            j = i + 3 if words[i + 2] == "-" else i + 2
            second, k = self.read_unit(j, numbered=True)
            if second is unit:
                return number(words[i + 1]), k
        return None, i

    def _read_late_unit(self) -> bool:
        """Read a unit without a number: "pinch of salt", "1 (16 ounce) can", "14 oz package"."""
        n_sizes = len(self.sizes)
        unit, i = self.read_unit(self.i, numbered=bool(self.amounts))
        if unit is None or (not self.amounts and i >= self.end):
            return False

        if self.amounts and unit.kind != "count":
            if not self._add_unit(unit):
                # The sizes belong to the food, because the word is not a unit here.
                del self.sizes[n_sizes:]
                return False
            self.i = i
            return True

        if not self.amounts:
            self.amounts.append(Amount(None, unit.name))
        elif self.amounts[0].unit is None:
            self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
        elif self.amounts[0].unit not in CONTAINERS or unit.name not in CONTAINERS:
            # Not the second container of "1 can or bottle beer".
            self.amounts.append(Amount(None, unit.name, "same"))
        self.i = i
        return True

    def _add_unit(self, unit: Unit) -> bool:
        """Add a mass, volume or length after measures to one of them, if it belongs to one."""
        first, *others = self.amounts
        last = self.amounts[-1]
        if last.role == "each" and last.unit is None:  # "1 (3 1/2) pound chicken"
            self.amounts[-1] = last._replace(unit=unit.name)
            return True
        if self._follows_bracket(unit):  # "4 (1 liter) cups"
            self.amounts = [first._replace(unit=unit.name)]
            for amount in others:
                role: Role = "same" if amount.role == "each" else amount.role
                self.amounts.append(amount._replace(role=role))
            return True
        return last.unit == unit.name  # "¼ c cup milk"

    def _follows_bracket(self, unit: Unit) -> bool:
        """Check whether a measure in brackets is between the first number and its unit."""
        words, i = self.tokens.words, self.i
        return (
            self.amounts[0].unit is None
            and words[i - 1] in _CLOSES
            and unit.kind in {"mass", "volume"}
            and len(words[i]) > 2
            and not words[i + 1].startswith("cake")
        )

    def _read_sizes(self) -> bool:
        """Read the sizes of the food itself: "2 large eggs"."""
        words, i = self.tokens.words, self.i
        while words[i] in SIZES or words[i] in SIZE_ADVERBS:
            i += 1
        if i == self.i or words[i - 1] not in SIZES:
            return False
        if i >= self.end or words[i] == "grain":  # "large grain"
            return False
        if words[i] in {"or", "to"} and words[i + 1] in SIZES:
            i += 2
        if words[i] == "sized" or words[i : i + 2] == ["size", ","]:
            i += 1
        if words[i - 1] in SIZES_OF_MEASURES:
            return False
        if words[i - 1] == "big" and not self.amounts:
            return False
        self.sizes += words[self.i : i]
        self.i = i
        return True

    def _read_group(self) -> bool:
        """Read measures in brackets: "1 (16 ounce) can"."""
        close = self.tokens.closing(self.i, self.end)
        amounts = read_measures(self.tokens, self.i + 1, close)
        if not amounts:
            return False
        if self.amounts:
            counts_pieces = self.amounts[0].unit is None
            for amount in amounts:
                is_each = counts_pieces or amount.role == "each"
                self.amounts.append(amount._replace(role="each" if is_each else "same"))
        else:
            self.amounts += amounts
        self.i = close + 1
        return True

    def _read_remark(self) -> bool:
        """Read "(1-inch-thick)" or "(8 count)" before a unit as a size."""
        close = self.tokens.closing(self.i, self.end)
        if not self.amounts or close >= self.end:
            return False
        after = self.tokens.words[close + 1]
        if after != "of" and after not in _OF and after not in SPELLINGS:
            return False
        self.sizes.append(self.tokens.span(self.i + 1, close))
        self.i = close + 1
        return True


def read_measures(tokens: Tokens, i: int, end: int) -> list[Amount]:
    """Return the measures of `tokens[i:end]`, or none if they contain other words.

    "about 12 ounces each" contains one measure.
    """
    words = tokens.words
    each = words[i] == "each"
    if each:
        i += 1
    while i < end and (words[i] in ABOUT or words[i] in {"=", "~", "-", "a", "an"}):
        i += 1
    if i >= end:
        return []
    reader = AmountReader(tokens, i, end, alone=True)
    if not tokens.is_number(i):
        if words[i - 1] in {"a", "an"}:  # "(a large handful)"
            unit, j = reader.read_unit(i, numbered=True)
            if unit is not None and j == end:
                return [Amount((1.0, 1.0), unit.name, "same")]
        return []

    while reader.i < end:
        at = reader.i
        if reader.amounts and (words[at] in _BETWEEN or words[at] in ABOUT):
            reader.i += 1
        elif words[at] in _TOTALS or (words[at] in SIZES and reader.amounts):
            each |= words[at] in {"each", "apiece"}
            reader.i += 1
        elif not tokens.is_number(at) or not reader.read_measure():
            return []
    role: Role = "each" if each else "same"
    return [a if a.role == "plus" else a._replace(role=role) for a in reader.amounts]
