"""The amounts of an ingredient line: numbers, ranges, units, containers and second measures."""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple

from toque.cooking.ingredient_words import ABOUT, SIZE_ADVERBS, SIZES, SIZES_OF_MEASURES
from toque.cooking.quantities import NUMBER, WORDS, number
from toque.cooking.units_of_measure import SPELLINGS, STARTERS, UNITS, Unit

Range = tuple[float, float]
Role = Literal["whole", "plus", "same", "each"]

_TOKEN: Final = re.compile(rf"[^\W\d_]+(?:['-](?=[^\W\d_])[^\W\d_]+)*'?|{NUMBER}|\S")
_KINDS: Final = dict.fromkeys("abcdefghijklmnopqrstuvwxyz", "W") | dict.fromkeys("123456789", "N")
_CLOSING: Final = {"(": ")", "[": "]"}
_TOTALS: Final = frozenset({"total", "in", "each", "apiece", "all", "altogether", "weight"})
_RANGE_WORDS: Final = frozenset({"to", "or", "-"})
_BETWEEN: Final = frozenset({"/", ",", ";", "or", "-", "and", "plus", "+", "=", "[", "]"})
_PLUS: Final = frozenset({"plus", "+", "and", "&"})
_OPENERS: Final = (
    frozenset(WORDS) | frozenset(SPELLINGS) | SIZES | SIZE_ADVERBS | ABOUT | _PLUS
    | {"a", "an", "x", "or", "fl", "fluid"}
)  # fmt: skip
"""Words that may stand before a food's name."""


class Amount(NamedTuple):
    """One measure of a line."""

    quantity: Range | None
    """Low and high, the same unless the line gives a range; None for "pinch of salt"."""
    unit: str | None
    """A name of `units_of_measure.UNITS`, or None for pieces."""
    role: Role = "whole"
    """`whole`: the line's first measure. `plus`: to be added to the one before. `same`: the same
    amount again ("250ml/9fl oz"). `each`: of one piece ("1 (16 ounce) can", "6 10-inch ...")."""


def _kind(word: str) -> str:
    """The kind of a token whose first character leaves it open."""
    if word[0].isalpha() or word == "00":  # "00 flour"
        return "W"
    return "N" if word[-1].isdigit() else "P"


class Tokens:
    """A line's tokens and three ends: kind ("N" number, "W" word, "P" mark, "E" end) and place."""

    __slots__ = ("_originals", "_starts", "kinds", "text", "words")

    def __init__(self, text: str) -> None:
        self.text = text
        originals: list[str] = _TOKEN.findall(text)
        words = [word.lower() for word in originals]
        self.kinds = [_KINDS.get(word[0]) or _kind(word) for word in words]
        if "T" in originals:  # a tablespoon; "t" is a teaspoon
            words = [old if old == "T" else new for old, new in zip(originals, words, strict=True)]
        self.kinds += ("E", "E", "E")
        words += ("", "", "")
        self.words = words
        self._originals = originals
        self._starts: list[int] | None = None

    @property
    def starts(self) -> list[int]:
        """Where each token begins in `text`."""
        if self._starts is None:
            at = 0
            self._starts = []
            for word in self._originals:
                at = self.text.index(word, at)
                self._starts.append(at)
                at += len(word)
        return self._starts

    def span(self, i: int, j: int) -> str:
        """The text of tokens i to j, as it was written."""
        if "P" not in self.kinds[i:j]:  # the usual case, without looking for places
            return " ".join(self._originals[i:j])
        starts = self.starts
        return self.text[starts[i] : starts[j - 1] + len(self._originals[j - 1])]

    def __len__(self) -> int:
        return len(self._originals)

    def closing(self, i: int, end: int) -> int:
        """Place of the mark that closes the bracket at `i`; `end` when there is none."""
        mark = _CLOSING[self.words[i]]
        for j in range(i + 1, end):
            if self.words[j] == mark:
                return j
        return end

    def is_glued(self, i: int) -> bool:
        """Whether no blank stands before token `i`."""
        if not 0 < i < len(self._originals):
            return False
        return self.starts[i] == self.starts[i - 1] + len(self._originals[i - 1])


class AmountReader:
    """Reads measures from `tokens[i:end]` and leaves `i` at the first token that is none."""

    __slots__ = ("_alone", "_each", "amounts", "end", "i", "sizes", "tokens")

    def __init__(self, tokens: Tokens, i: int = 0, end: int = -1, *, alone: bool = False) -> None:
        self.tokens = tokens
        self.i = i
        self.end = len(tokens) if end < 0 else end
        self.amounts: list[Amount] = []
        self.sizes: list[str] = []
        self._each = False
        self._alone = alone  # no food follows: "(1 stick)"

    def head(self) -> None:
        """Read all measures and sizes that open a line, and the "of" after them."""
        kinds, words = self.tokens.kinds, self.tokens.words
        while self.i < self.end:
            i, word = self.i, words[self.i]
            if kinds[i] == "W" and word not in _OPENERS:
                break
            if kinds[i] == "N" or word in WORDS or word in {"a", "an"}:
                if not self._measure():
                    break
            elif word in ABOUT or word in {"-", "*", "•", "~", "."}:
                self.i += 1
            elif word in _CLOSING:
                if not self._group(before_food=True):
                    break
            elif word == "/" and self.amounts and self._is_number(i + 1):
                self.i += 1
            elif word in _PLUS and self.amounts and self._plus():
                continue
            elif word == "x" and self.amounts and self._is_number(i + 1):
                self.i += 1
                self._each = True
            elif word == "or" and self.sizes and self._is_number(i + 1):
                self.i += 1  # "1 large or 2 small onions"
            elif not (self._late_unit() or self._size()):
                break
        self._drop_of()

    def _drop_of(self) -> None:
        if self.amounts and self.tokens.words[self.i] == "of" and self.i + 1 < self.end:
            self.i += 1

    def _is_number(self, i: int) -> bool:
        return self.tokens.kinds[i] == "N" or self.tokens.words[i] in WORDS

    def _plus(self) -> bool:
        """Read "plus 2 tablespoons" after a measure, when it has a unit of its own."""
        if not self._is_number(self.i + 1):
            return False
        reader = AmountReader(self.tokens, self.i + 1, self.end)
        if not reader._measure() or reader.amounts[0].unit is None or self.amounts[-1].unit is None:
            return False
        self.amounts.append(reader.amounts[0]._replace(role="plus"))
        self.i = reader.i
        return True

    def _measure(self) -> bool:
        """Read one number and its unit."""
        found = self._number()
        if found is None:
            return False
        kinds, words = self.tokens.kinds, self.tokens.words
        quantity, i = found
        if words[i] == "a" and quantity[1] < 1.0:
            i += 1  # "½ a lemon"
        after = words[i]
        if after in {"%", "°"}:
            return False
        if after == "-" and kinds[i + 1] == "W":  # "10-inch"
            i += 1
        unit, j = self._unit(i, numbered=True)
        if unit is not None:
            i = j
            high, k = self._repeated_unit(i, unit)
            if high is not None:
                quantity, i = (quantity[0], high), k
        elif after == "-" and i < self.end and words[i - 1] == "-":
            return False  # "28-day aged beef", "7-Up"
        elif kinds[i] == "E" and not self.amounts and i == self.i:
            return False
        self._append(quantity, unit)
        self.i = i
        return True

    def _append(self, quantity: Range, unit: Unit | None) -> None:
        role: Role = "whole"
        if self.amounts:
            last = self.amounts[-1]
            pieces = self.amounts[0].unit is None and self.amounts[0].quantity is not None
            slash = self.tokens.words[self.i - 1] == "/"
            if self._each or (pieces and unit is not None):
                role = "each"
            elif not slash and last.unit in {"pound", "kilogram"} and self.i > 0:
                role = "plus"  # "1lb 2oz"
            else:
                role = "same"
        self.amounts.append(Amount(quantity, unit.name if unit else None, role))

    def _number(self) -> tuple[Range, int] | None:
        kinds, words, i = self.tokens.kinds, self.tokens.words, self.i
        if kinds[i] != "N":
            return self._number_word()
        low = number(words[i])
        i += 1
        j = i
        while words[j] in _RANGE_WORDS:
            j += 1
        if i < j < self.end and kinds[j] == "N":
            high = number(words[j])
            # "2 to 3", "12- to 16-pound"; but "3-1/2" was one number, and "2 - 1" is no range.
            if high > low:
                return (low, high), j + 1
        if words[i] == "and" and kinds[i + 1] == "N" and "/" in words[i + 1]:
            part = number(words[i + 1])
            if part < 1.0 and low == int(low):
                return (low + part, low + part), i + 2
        return (low, low), i

    def _number_word(self) -> tuple[Range, int] | None:
        words, kinds, i = self.tokens.words, self.tokens.kinds, self.i
        value: Range | None = None
        if words[i] in {"a", "an"}:
            i += 1
            following = words[i]
            if kinds[i] == "N" or following in {"few", "couple", "half", "quarter", "dozen"}:
                self.i = i
                return self._number() if following != "dozen" else ((12.0, 12.0), i + 1)
            if following in {"little", "good", "bit"} and self._unit(i + 1, numbered=True)[0] is None:
                return None
            return (1.0, 1.0), i
        while words[i] in WORDS:
            low, high = WORDS[words[i]]
            value = (low, high) if value is None else (value[0] * low, value[1] * high)
            i += 1
        if value is None:
            return None
        if words[i] in {"a", "an"} and value[0] < 1.0:
            i += 1
        if words[i] == "dozen":
            value, i = (value[0] * 12, value[1] * 12), i + 1
        elif words[i] in {"to", "or", "-"} and words[i + 1] in WORDS:
            value, i = (value[0], WORDS[words[i + 1]][1]), i + 2
        elif words[i] == "of" and value[0] in {2.0, 0.5}:
            i += 1  # "a couple of eggs"
        return value, i

    def _unit(self, i: int, *, numbered: bool) -> tuple[Unit | None, int]:
        """The unit that stands at `i`, sizes before it passed over, and the place after it."""
        words = self.tokens.words
        start = i
        while words[i] in SIZES or words[i] in SIZE_ADVERBS:
            i += 1
        word = words[i]
        if word in {"fl", "fluid"}:
            j = i + 1 + (words[i + 1] == ".")
            if words[j] in {"oz", "ozs", "ounce", "ounces"}:
                return UNITS["fluid ounce"], self._after(j + 1)
            return None, start
        unit = SPELLINGS.get(word)
        if unit is None or (not numbered and unit.name not in STARTERS):
            return None, start
        if word == "in" and not (self.tokens.is_glued(i) or words[i + 1] in {"piece", "x", "thick"}):
            return None, start
        j = self._after(i + 1)
        if unit.kind == "count" and not self._alone and (j >= self.end or words[j] in {",", ";"}):
            return None, start  # "4 cloves", "2 fillets": the food itself
        self.sizes += words[start:i]
        return unit, j

    def _after(self, i: int) -> int:
        """Past a full stop, a hyphen and the same unit said twice ("¼ c cup")."""
        words = self.tokens.words
        if words[i] == "." and i < self.end:
            i += 1
        if words[i] == "-" and self.tokens.kinds[i + 1] == "W" and self.tokens.is_glued(i):
            i += 1
        return i

    def _repeated_unit(self, i: int, unit: Unit) -> tuple[float | None, int]:
        """The second number of "4-pound to 4½-pound ducks" or "½ cup to 1 cup"."""
        kinds, words = self.tokens.kinds, self.tokens.words
        if words[i] in {"to", "or", "-"} and kinds[i + 1] == "N":
            j = i + 2 + (words[i + 2] == "-")
            second, k = self._unit(j, numbered=True)
            if second is unit:
                return number(words[i + 1]), k
        return None, i

    def _late_unit(self) -> bool:
        """A unit without its own number: "pinch of salt", "1 (16 ounce) can", "14 oz package"."""
        sizes = len(self.sizes)
        unit, i = self._unit(self.i, numbered=bool(self.amounts))
        if unit is None or (not self.amounts and i >= self.end):
            return False
        if self.amounts and unit.kind != "count":
            if self.amounts[-1].unit != unit.name:
                del self.sizes[sizes:]
                return False
            self.i = i  # "¼ c cup milk"
            return True
        first = self.amounts[0] if self.amounts else None
        if first is not None and first.unit is None:
            self.amounts[0] = first._replace(unit=unit.name)
        else:
            self.amounts.append(Amount(None, unit.name, "same" if first else "whole"))
        self.i = i
        return True

    def _size(self) -> bool:
        """Sizes of the food itself: "2 large eggs"."""
        words, i = self.tokens.words, self.i
        while words[i] in SIZES or words[i] in SIZE_ADVERBS:
            i += 1
        if i == self.i or words[i - 1] not in SIZES or i >= self.end:
            return False
        if words[i] == "or" and words[i + 1] in SIZES:
            i += 2
        if words[i - 1] in SIZES_OF_MEASURES or (not self.amounts and words[i - 1] == "big"):
            return False
        self.sizes += words[self.i : i]
        self.i = i
        return True

    def _group(self, *, before_food: bool) -> bool:
        """Read a bracket that holds nothing but measures."""
        close = self.tokens.closing(self.i, self.end)
        amounts = read_measures(self.tokens, self.i + 1, close)
        if not amounts:
            return False
        first = self.amounts[0] if self.amounts else None
        each = before_food and first is not None and first.unit is None
        for amount in amounts:
            role: Role = "each" if each or amount.role == "each" else "same"
            self.amounts.append(amount._replace(role=role if first else amount.role))
        self.i = close + 1
        return True


def read_measures(tokens: Tokens, i: int, end: int) -> list[Amount]:
    """The measures of `tokens[i:end]` when nothing else is there ("about 12 ounces each")."""
    words = tokens.words
    each = words[i] == "each"
    i += each
    while i < end and (words[i] in ABOUT or words[i] in {"=", "~", "-", "a", "an"}):
        i += 1
    if i >= end:
        return []
    if not (tokens.kinds[i] == "N" or words[i] in WORDS):
        return _unnumbered(tokens, i, end)
    reader = AmountReader(tokens, i, end, alone=True)
    while reader.i < end:
        at = reader.i
        if reader.amounts and (words[at] in _BETWEEN or words[at] in ABOUT):
            reader.i += 1
        elif words[at] in _TOTALS or (words[at] in SIZES and reader.amounts):
            each |= words[at] in {"each", "apiece"}
            reader.i += 1
        elif not (tokens.kinds[at] == "N" or words[at] in WORDS) or not reader._measure():
            return []
    role: Role = "each" if each else "same"
    return [a if a.role == "plus" else a._replace(role=role) for a in reader.amounts]


def _unnumbered(tokens: Tokens, i: int, end: int) -> list[Amount]:
    """The measure of "(a large handful)"."""
    if tokens.words[i - 1] not in {"a", "an"}:
        return []
    unit, j = AmountReader(tokens, i, end, alone=True)._unit(i, numbered=True)
    return [Amount((1.0, 1.0), unit.name, "same")] if unit is not None and j == end else []
