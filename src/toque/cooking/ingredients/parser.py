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
from toque.cooking.ingredients.tokens import (
    CLOSING,
    Tokens,
    replace_glyphs,
    rewrite_line,
)
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
MAX_CHARS = 2000
"""Maximum number of parsed characters per line. The longest of 90,000 real lines has 604.
"""


@lru_cache(maxsize=1 << 16)
def parse_line(line: str) -> IngredientLine:
    """Parse an ingredient line.

    >>> read = parse_line("1 (16 ounce) can black beans, drained and rinsed")
    >>> read.quantity, read.unit, read.name, read.preparation
    ((1.0, 1.0), 'can', 'black beans', 'drained and rinsed')
    >>> parse_line("2-3 large garlic cloves, minced (optional)").amounts
    (Amount(quantity=(2.0, 3.0), unit='clove', role='whole'),)
    """
    return _Line(" ".join(replace_glyphs(line[:MAX_CHARS]).split())).read()


class _Line:
    """State of the parser for one line."""

    __slots__ = ("amounts", "name", "remarks", "sizes", "tokens")

    def __init__(self, text: str) -> None:
        self.tokens = Tokens(rewrite_line(text))
        self.amounts: list[Amount] = []
        self.sizes: list[str] = []
        self.remarks: list[tuple[RemarkKind, str]] = []
        self.name = ""

    def read(self) -> IngredientLine:
        """Read amounts, remarks before the name, the name, and remarks after it, in this order."""
        tokens = self.tokens
        start = 0
        if "of" in tokens.words or "from" in tokens.words:
            start = self._read_part_of()
        start = self._read_amounts(start)

        while self._is_unsaid(start):
            self.remarks.append(("comment", tokens.words[start]))
            start += 2 if tokens.words[start + 1] == ":" else 1
            if not self.amounts:
                start = self._read_amounts(start)

        runs = segments(tokens, start)
        while len(runs) > 1 and tokens.words[runs[0][0]] in {"preferably", "ideally"}:
            self._read_remarks(*runs.pop(0))  # "small, preferably Greek, capers"
        if runs:
            named = n_named(tokens, runs)
            self._read_name(runs[0][0], runs[named - 1][1])
            for run in runs[named:]:
                self._read_remarks(*run)

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

    def _read_amounts(self, i: int) -> int:
        """Read the amounts and sizes at `i`. Return the index after them."""
        reader = AmountReader(self.tokens, i)
        reader.read_all()
        self.amounts, self.sizes = reader.amounts, reader.sizes
        return reader.i

    def _read_part_of(self) -> int:
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
        """Check whether the word at `i` is "additional", "optional:" or "garnish:"."""
        words = self.tokens.words
        if i + 1 >= len(self.tokens):
            return False
        if words[i] not in UNSAID:
            # "garnish: shredded coconut"
            return words[i] in PURPOSES and words[i + 1] == ":"
        return words[i + 1] not in {",", ";", "virgin", "sharp"}

    def _read_name(self, i: int, end: int) -> None:
        """Split a run of tokens into leading preparations, the name and the text after it."""
        words, kinds = self.tokens.words, self.tokens.kinds
        name_indexes: list[int] = []
        while i < end:
            word = words[i]
            if kinds[i] == "W" and word not in SPECIAL_WORDS:
                name_indexes.append(i)
                i += 1
                continue
            is_end = word in ENDS and ends_name(self.tokens, i)
            if name_indexes and (
                is_end or self._opens_preparation(i, end, name_indexes)
            ):
                self._read_remarks(i, end)
                break
            i = self._read_special(i, end, name_indexes)

        self._move_unit(name_indexes)
        self._drop_joining_words(name_indexes)
        self._move_measure(name_indexes)
        while len(name_indexes) > 1:
            last = name_indexes[-1]
            if words[last] not in _AT_END and words[last + 1] != "%":
                break
            del name_indexes[-1]
        self.name = join(self.tokens, name_indexes)

    def _drop_joining_words(self, name_indexes: list[int]) -> None:
        """Remove the words and numbers between amounts and the name: "of", "x", "or 2 cups"."""
        words, kinds = self.tokens.words, self.tokens.kinds
        n_dropped = 0
        for i in name_indexes[:-1]:
            is_number = kinds[i] == "N" and not self._begins_name(i)
            after_joint = n_dropped and (words[i] in _AFTER_JOINS or is_number)
            if words[i] not in BEFORE_NAME and not after_joint:
                break
            n_dropped += 1
        del name_indexes[:n_dropped]

    def _move_measure(self, name_indexes: list[int]) -> None:
        """Move "slices of" to the amounts: "4 toasted slices of bread", "can of beans"."""
        words = self.tokens.words
        if len(name_indexes) < 3 or words[name_indexes[1]] != "of":
            return
        unit = SPELLINGS.get(words[name_indexes[0]])
        if unit is None:
            return
        if not self.amounts:
            self.amounts.append(Amount(None, unit.name))
        elif self.amounts[0].unit is None:
            self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
        has_article = words[name_indexes[2]] in {"a", "an", "the"}
        del name_indexes[: 3 if has_article and len(name_indexes) > 3 else 2]

    def _begins_name(self, i: int) -> bool:
        """Check whether a number begins a name, as in "7-Up" but not in "6-pack"."""
        words = self.tokens.words
        return words[i + 1] == "-" and words[i + 2] not in SPELLINGS

    def _opens_preparation(self, i: int, end: int, name_indexes: list[int]) -> bool:
        """Check whether "chopped" or "sliced into rings" begins at `i`, after the name."""
        words = self.tokens.words
        j = participles_end(self.tokens, i, end)
        if j == i or belongs_to_name(words[name_indexes[-1]], words[i]):
            return False
        after = words[j]
        if after == "or" and self.tokens.is_number(j + 1):
            return True  # "green beans drained or 2 pounds fresh"
        return j >= end or after in {"into", "in", "(", "with", "for", "from", "until"}

    def _read_special(self, i: int, end: int, name_indexes: list[int]) -> int:
        """Read a bracket, measure, preparation or size, or add the token to `name_indexes`.

        Return the next index.
        """
        words, tokens = self.tokens.words, self.tokens
        word = words[i]
        if word in CLOSING:
            close = tokens.closing(i, end)
            for part in self._parts_inside(i, close):
                self._read_remarks(*part)
            return close + 1
        if name_indexes and tokens.kinds[i] == "N":
            close = next((k for k in range(i, end) if words[k] in CLOSING), end)
            if self._read_measures(i, close):  # "heavy cream 2 cups"
                return close
        if word in PREPARED or word in ADVERBS:
            j = self._read_preparation(i, end, name_indexes)
            if j > i:
                return j
        elif (
            word in SIZES
            and word not in SIZES_OF_MEASURES
            and words[i + 1] != "grain"
            and all(words[k] in QUALITIES for k in name_indexes)
        ):
            self.sizes.append(word)  # "ripe large avocados", "medium size"
            return i + 2 if words[i + 1] in {"size", "sized"} else i + 1
        name_indexes.append(i)
        return i + 1

    def _read_preparation(self, i: int, end: int, name_indexes: list[int]) -> int:
        """Read a preparation inside a name. Return the index after it, or `i` without one."""
        words = self.tokens.words
        j = participles_end(self.tokens, i, end)
        if not i < j < end or words[j] in {"or", "and", "("}:
            return i
        if name_indexes and belongs_to_name(words[name_indexes[-1]], words[i]):
            return i
        self.remarks.append(("preparation", self.tokens.stripped(i, j)))
        *before, last = [words[k] for k in name_indexes] or [""]
        if last in {"and", "or"} and all(map(QUALITIES.__contains__, before)):
            name_indexes.pop()  # "pitted and finely chopped dates"
        return j

    def _move_unit(self, name_indexes: list[int]) -> None:
        """Move the unit of "2 garlic cloves" from the name to the amounts."""
        name_words = [self.tokens.words[k] for k in name_indexes]
        if len(name_words) < 2 or LATE_SPELLINGS.isdisjoint(name_words):
            return
        if self.amounts and self.amounts[0].unit is not None:
            if name_words[-2:] in (["garlic", "clove"], ["garlic", "cloves"]):
                # "50 g garlic cloves"
                self.amounts.append(Amount(None, "clove", "same"))
                name_indexes.pop()
            return

        late_units = [
            at for at in range(1, len(name_words)) if name_words[at] in LATE_SPELLINGS
        ]
        if not late_units:
            return
        at = late_units[-1]
        unit = SPELLINGS[name_words[at]]
        foods = LATE[unit.name]
        is_food = unit.name == "slice" and not self.amounts  # "lime slices"
        is_at_end = name_words[at + 1 : at + 2] in ([], ["with"])
        if is_food or not is_at_end or (foods and foods.isdisjoint(name_words)):
            return
        if self.amounts:
            self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
        else:
            self.amounts.append(Amount(None, unit.name))
        del name_indexes[at]

    def _parts_inside(self, i: int, close: int) -> list[tuple[int, int]]:
        """Return the start and end of each text between the bracket at `i` and `close`."""
        words = self.tokens.words
        ends = [at for at in range(i + 1, close) if words[at] == ";"]
        ends.append(close)
        starts = [i + 1, *(end + 1 for end in ends)]
        return list(zip(starts, ends, strict=False))

    def _read_measures(self, i: int, end: int) -> bool:
        """Add the measures between two indexes to the amounts. Return False for other words."""
        measures = read_measures(self.tokens, i, end)
        if measures and not self.amounts:
            measures[0] = measures[0]._replace(role="whole")
        self.amounts += measures
        return bool(measures)

    def _read_remarks(self, i: int, end: int) -> None:
        """Read a run after the name, and each bracket in it."""
        tokens = self.tokens
        words = tokens.words
        kinds = tokens.kinds
        # A line may have hundreds of brackets, so recursion is unsafe.
        waiting = [(i, end)]
        while waiting:
            start, end = waiting.pop()
            for at in range(start, end):
                if words[at] in CLOSING:
                    close = tokens.closing(at, end)
                    if at > start and close + 1 < end and kinds[at + 1] == "N":
                        continue  # a measure in the middle: "cut into 3in (7.5cm) pieces"
                    inside = self._parts_inside(at, close)
                    waiting += reversed([(start, at), *inside, (close + 1, end)])
                    break
            else:
                self._read_remark(start, end)

    def _read_remark(self, i: int, end: int) -> None:
        """Read a run without brackets as measures, or as a remark of a kind."""
        tokens = self.tokens
        words = tokens.words
        has_ml = tokens.kinds[end - 2] == "N" and words[end - 1] == "ml"
        if end - i > 2 and has_ml and self._read_measures(end - 2, end):
            end -= 2  # "..., divided 325 mL"
        text = tokens.stripped(i, end)
        if text and not self._read_measures(i, end):
            self.remarks.append((remark_kind(words[i:end]), text))
