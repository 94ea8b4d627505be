"""Ingredient line parser: quantity, unit, size, name, preparation, remarks.

The parser reads a line from the left: amounts, the food's name, then the rest. It supports English
only. It accepts every line and leaves text that it cannot parse in the name.
"""

from __future__ import annotations

from functools import lru_cache

from toque.cooking.ingredients.amounts import (
    Amount,
    AmountReader,
    IngredientLine,
    read_measures,
)
from toque.cooking.ingredients.number_words import WORDS
from toque.cooking.ingredients.segments import (
    ENDS,
    SPECIAL_WORDS,
    RemarkKind,
    belongs_to_name,
    ends_name,
    join,
    n_named,
    participles_end,
    remark_kind,
    remarks,
    segments,
)
from toque.cooking.ingredients.tokens import CLOSING, Tokens, plain, rewritten
from toque.cooking.ingredients.vocabulary import (
    ADVERBS,
    AFTER_NAME,
    BEFORE_NAME,
    LATE,
    LATE_SPELLINGS,
    PARTS,
    PREPARED,
    PURPOSES,
    QUALITIES,
    SIZES,
    SIZES_OF_MEASURES,
    SPELLINGS,
    UNSAID,
)

_AFTER_JOINS = (
    SPELLINGS.keys() | WORDS.keys() | {"a", "an", "each", "so", "more", "less"}
)
_AT_END = AFTER_NAME | ADVERBS | {"small", "large"}
_NO_BRACKETS = str.maketrans("()", "  ")
MAX_CHARS = 2000  # parsed characters per line; the longest of 90,000 real lines has 604


@lru_cache(maxsize=1 << 16)
def parse_line(line: str) -> IngredientLine:
    """Parse an ingredient line.

    >>> read = parse_line("1 (16 ounce) can black beans, drained and rinsed")
    >>> read.quantity, read.unit, read.name, read.preparation
    ((1.0, 1.0), 'can', 'black beans', 'drained and rinsed')
    >>> parse_line("2-3 large garlic cloves, minced (optional)").amounts
    (Amount(quantity=(2.0, 3.0), unit='clove', role='whole'),)
    """
    return _Line(" ".join(plain(line[:MAX_CHARS]).split())).read()


class _Line:
    __slots__ = ("amounts", "name", "remarks", "sizes", "tokens")

    def __init__(self, text: str) -> None:
        self.tokens = Tokens(rewritten(text))
        self.amounts: list[Amount] = []
        self.sizes: list[str] = []
        self.remarks: list[tuple[RemarkKind, str]] = []
        self.name = ""

    def read(self) -> IngredientLine:
        tokens = self.tokens
        start = self._part_of() if "of" in tokens.words or "from" in tokens.words else 0
        start = self._head(start)

        while self._is_unsaid(start):
            self.remarks.append(("comment", tokens.words[start]))
            start += 1 + (tokens.words[start + 1] == ":")
            start = start if self.amounts else self._head(start)

        runs = segments(tokens, start)
        while len(runs) > 1 and tokens.words[runs[0][0]] in {"preferably", "ideally"}:
            self._file(*runs.pop(0))  # "small, preferably Greek, capers"
        if runs:
            named = n_named(tokens, runs)
            self._name(runs[0][0], runs[named - 1][1])
            for run in runs[named:]:
                self._file(*run)

        if not self.name and "(" in tokens.words:  # "1/2 stick ((4 tbsp) butter)"
            return _Line(" ".join(tokens.text.translate(_NO_BRACKETS).split())).read()

        first = self.amounts[0] if self.amounts else None
        return IngredientLine(
            first.quantity if first else None,
            first.unit if first else None,
            " ".join(self.sizes),
            self.name or tokens.text,
            *remarks(self.remarks),
            tuple(self.amounts),
        )

    def _head(self, i: int) -> int:
        reader = AmountReader(self.tokens, i)
        reader.head()
        self.amounts, self.sizes = reader.amounts, reader.sizes
        return reader.i

    def _part_of(self) -> int:
        """Read "Grated zest and juice of" before an amount. Return the index after it."""
        words, kinds = self.tokens.words, self.tokens.kinds
        for i in range(1, min(7, len(self.tokens))):
            if words[i] in {"of", "from"} and not PARTS.isdisjoint(words[:i]):
                if "N" in kinds[:i]:
                    return 0
                self.remarks.append(("preparation", self.tokens.stripped(0, i + 1)))
                return i + 1
        return 0

    def _is_unsaid(self, i: int) -> bool:
        """Return whether the name follows "additional", "optional:" or "garnish:"."""
        words = self.tokens.words
        if i + 1 >= len(self.tokens):
            return False
        if words[i] not in UNSAID:
            # "garnish: shredded coconut"
            return words[i] in PURPOSES and words[i + 1] == ":"
        return words[i + 1] not in {",", ";", "virgin", "sharp"}

    def _name(self, i: int, end: int) -> None:
        """Split a run of tokens into leading preparations, the name and the text after it."""
        words, kinds = self.tokens.words, self.tokens.kinds
        name_indexes: list[int] = []
        while i < end:
            word = words[i]
            if kinds[i] == "W" and word not in SPECIAL_WORDS:
                name_indexes.append(i)
                i += 1
                continue
            if (name_indexes and word in ENDS and ends_name(self.tokens, i)) or (
                name_indexes and self._opens_preparation(i, end, name_indexes)
            ):
                self._file(i, end)
                break
            i = self._skip(i, end, name_indexes)
        name_indexes = self._without_unit(name_indexes)
        at = 0
        while at < len(name_indexes) - 1 and (
            words[name_indexes[at]] in BEFORE_NAME
            or (at and words[name_indexes[at]] in _AFTER_JOINS)
            or (
                at
                and kinds[name_indexes[at]] == "N"
                and not self._begins_name(name_indexes[at])
            )
        ):
            at += 1
        del name_indexes[:at]
        name_indexes = self._without_measure(name_indexes)
        while len(name_indexes) > 1 and (
            words[name_indexes[-1]] in _AT_END or words[name_indexes[-1] + 1] == "%"
        ):
            del name_indexes[-1]
        self.name = join(self.tokens, name_indexes)

    def _without_measure(self, name_indexes: list[int]) -> list[int]:
        """Remove "slices of" from a name: "4 toasted slices of bread", "can of beans"."""
        words = self.tokens.words
        unit = SPELLINGS.get(words[name_indexes[0]]) if name_indexes else None
        if len(name_indexes) < 3 or unit is None or words[name_indexes[1]] != "of":
            return name_indexes
        if not self.amounts:
            self.amounts.append(Amount(None, unit.name))
        elif self.amounts[0].unit is None:
            self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
        return name_indexes[
            2
            + (words[name_indexes[2]] in {"a", "an", "the"} and len(name_indexes) > 3) :
        ]

    def _begins_name(self, i: int) -> bool:
        """Return whether a number begins a name, as in "7-Up" but not in "6-pack"."""
        return (
            self.tokens.words[i + 1] == "-"
            and self.tokens.words[i + 2] not in SPELLINGS
        )

    def _opens_preparation(self, i: int, end: int, name_indexes: list[int]) -> bool:
        """Return whether "chopped" or "sliced into rings" begins at `i`, after the name."""
        j = participles_end(self.tokens, i, end)
        if j == i or belongs_to_name(
            self.tokens.words[name_indexes[-1]], self.tokens.words[i]
        ):
            return False
        after = self.tokens.words[j]
        if after == "or" and self.tokens.is_number(j + 1):
            return True  # "green beans drained or 2 pounds fresh"
        return j >= end or after in {"into", "in", "(", "with", "for", "from", "until"}

    def _skip(self, i: int, end: int, name_indexes: list[int]) -> int:
        """Skip a token or add it to `name_indexes`, and return the next index."""
        words, tokens = self.tokens.words, self.tokens
        word = words[i]
        if word in CLOSING:
            close = tokens.closing(i, end)
            for part in self._inside(i, close):
                self._file(*part)
            return close + 1
        if name_indexes and tokens.kinds[i] == "N":
            close = next((k for k in range(i, end) if words[k] in CLOSING), end)
            if self._measure(i, close):  # "heavy cream 2 cups"
                return close
        if word in PREPARED or word in ADVERBS:
            j = participles_end(tokens, i, end)
            of_name = bool(name_indexes) and belongs_to_name(
                words[name_indexes[-1]], word
            )
            if i < j < end and not of_name and words[j] not in {"or", "and", "("}:
                self.remarks.append(("preparation", tokens.stripped(i, j)))
                *before, last = [words[k] for k in name_indexes] or [""]
                if last in {"and", "or"} and all(map(QUALITIES.__contains__, before)):
                    name_indexes.pop()  # "pitted and finely chopped dates"
                return j
        elif (
            word in SIZES
            and word not in SIZES_OF_MEASURES
            and words[i + 1] != "grain"
            and all(words[k] in QUALITIES for k in name_indexes)
        ):
            self.sizes.append(word)  # "ripe large avocados", "medium size"
            return i + 1 + (words[i + 1] in {"size", "sized"})
        name_indexes.append(i)
        return i + 1

    def _without_unit(self, name_indexes: list[int]) -> list[int]:
        """Move the unit of "2 garlic cloves" from the name to the amounts."""
        words = self.tokens.words
        if len(name_indexes) < 2 or LATE_SPELLINGS.isdisjoint(
            words[k] for k in name_indexes
        ):
            return name_indexes
        if self.amounts and self.amounts[0].unit is not None:
            if (
                words[name_indexes[-1]] in {"clove", "cloves"}
                and words[name_indexes[-2]] == "garlic"
            ):
                # "50 g garlic cloves"
                self.amounts.append(Amount(None, "clove", "same"))
                name_indexes.pop()
            return name_indexes
        for at in range(len(name_indexes) - 1, 0, -1):
            unit = SPELLINGS.get(words[name_indexes[at]])
            if unit is None or unit.name not in LATE:
                continue
            if unit.name == "slice" and not self.amounts:
                break  # "lime slices"
            foods = LATE[unit.name]
            if at < len(name_indexes) - 1 and words[name_indexes[at + 1]] != "with":
                break
            if foods is not None and foods.isdisjoint(words[k] for k in name_indexes):
                break
            if self.amounts:
                self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
            else:
                self.amounts.append(Amount(None, unit.name))
            return name_indexes[:at] + name_indexes[at + 1 :]
        return name_indexes

    def _inside(self, i: int, close: int) -> list[tuple[int, int]]:
        ends = [at for at in range(i + 1, close) if self.tokens.words[at] == ";"] + [
            close
        ]
        return list(zip([i + 1, *(end + 1 for end in ends)], ends, strict=False))

    def _measure(self, i: int, end: int) -> bool:
        measures = read_measures(self.tokens, i, end)
        if measures and not self.amounts:
            measures[0] = measures[0]._replace(role="whole")
        self.amounts += measures
        return bool(measures)

    def _file(self, i: int, end: int) -> None:
        """Classify a run after the name and each bracket in it."""
        tokens = self.tokens
        words = tokens.words
        kinds = tokens.kinds
        # Brackets may be nested hundreds deep, so recursion is unsafe.
        waiting = [(i, end)]
        while waiting:
            start, end = waiting.pop()
            for at in range(start, end):
                if words[at] in CLOSING:
                    close = tokens.closing(at, end)
                    if at > start and close + 1 < end and kinds[at + 1] == "N":
                        continue  # a measure in the middle: "cut into 3in (7.5cm) pieces"
                    parts = [(start, at), *self._inside(at, close), (close + 1, end)]
                    waiting += reversed(parts)
                    break
            else:
                self._file_plain(start, end)

    def _file_plain(self, i: int, end: int) -> None:
        tokens = self.tokens
        words = tokens.words
        kinds = tokens.kinds
        if end - i > 2 and kinds[end - 2] == "N" and words[end - 1] == "ml":
            end -= 2 * self._measure(end - 2, end)  # "..., divided 325 mL"
        text = tokens.stripped(i, end)
        if text and not self._measure(i, end):
            self.remarks.append((remark_kind(words[i:end]), text))
