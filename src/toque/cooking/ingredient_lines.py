"""Ingredient lines read: quantity, unit, size, name, preparation, remarks.

A line is cut into numbers, words and marks and read from the left: amounts first, then the
food's name up to the first mark or word that ends it, then what was done to it and remarks.
English only; no line is refused: what cannot be read stays in the name.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple

from toque.cooking.amount_reader import Amount, AmountReader, Range, Tokens, read_measures
from toque.cooking.ingredient_words import (
    ADVERBS,
    KEPT_WITH,
    PART_OF_NAME,
    PARTS,
    PREPARED,
    PURPOSES,
    QUALITIES,
    REMARKS,
    SEGMENT_PREPARED,
    SIZES,
    SIZES_OF_MEASURES,
    UNSAID,
)
from toque.cooking.quantities import WORDS, plain
from toque.cooking.units_of_measure import LATE, LATE_SPELLINGS, unit_of

_OPENING: Final = frozenset({"(", "["})
_COMMAS: Final = frozenset({",", ";", ":", "|", "--"})
_ENDS: Final = frozenset(
    "plus preferably optional such about including divided + from see or and to for as if at "
    "cut".split()
)
"""Words that may end a name; `_Line._ends_name` looks closer at some."""
_AMOUNT_WORDS: Final = frozenset({"taste", "needed", "required", "desired", "wish", "like"})
_SPECIAL_WORDS: Final = _ENDS | PREPARED | ADVERBS | SIZES


class IngredientLine(NamedTuple):
    """One ingredient line, read. Texts are "" where the line says nothing."""

    quantity: Range | None
    """The first number: low and high, the same unless the line gives a range."""
    unit: str | None
    """Of that number, one of `units_of_measure.UNITS`; None for pieces."""
    size: str
    """ "large", "small", "heaped"; of the food or of the measure."""
    name: str
    preparation: str
    comment: str
    purpose: str
    """ "for dusting", "to serve"."""
    optional: bool
    amounts: tuple[Amount, ...]
    """Every measure of the line, the first included."""


@lru_cache(maxsize=1 << 16)
def parse_line(line: str) -> IngredientLine:
    """Read one ingredient line.

    >>> read = parse_line("1 (16 ounce) can black beans, drained and rinsed")
    >>> read.quantity, read.unit, read.name, read.preparation
    ((1.0, 1.0), 'can', 'black beans', 'drained and rinsed')
    >>> parse_line("2-3 large garlic cloves, minced (optional)").amounts
    (Amount(quantity=(2.0, 3.0), unit='clove', role='whole'),)
    """
    return _Line(" ".join(plain(line).split())).read()


class _Line:
    """The reading of one line."""

    __slots__ = ("amounts", "comment", "name", "preparation", "purpose", "reader", "sizes", "tokens")

    def __init__(self, text: str) -> None:
        self.tokens = Tokens(text)
        self.preparation: list[str] = []
        self.comment: list[str] = []
        self.purpose: list[str] = []
        self.name = ""

    def read(self) -> IngredientLine:
        tokens = self.tokens
        reader = AmountReader(tokens)
        if "of" in tokens.words or "from" in tokens.words:
            reader.i = self._part_of()
        reader.head()
        self.reader = reader
        self.amounts, self.sizes = reader.amounts, reader.sizes
        self._food(self._unsaid(reader.i) if tokens.words[reader.i] in UNSAID else reader.i)
        first = self.amounts[0] if self.amounts else None
        comment = ", ".join(self.comment) if self.comment else ""
        said = comment.lower()
        return IngredientLine(
            quantity=first.quantity if first else None,
            unit=first.unit if first else None,
            size=" ".join(self.sizes),
            name=self.name or tokens.text,
            preparation=", ".join(self.preparation),
            comment=comment,
            purpose=", ".join(self.purpose),
            optional=bool(said) and ("optional" in said or "if desired" in said),
            amounts=tuple(self.amounts),
        )

    def _text(self, i: int, j: int) -> str:
        """The text of tokens i to j, without marks at its ends."""
        if i >= j:
            return ""
        return self.tokens.span(i, j).strip(" ,;:.-*")

    def _part_of(self) -> int:
        """Read "Grated zest and juice of" before the amount; the place after it."""
        words = self.tokens.words
        for i in range(min(7, len(self.tokens))):
            if words[i] in {"of", "from"} and i and any(word in PARTS for word in words[:i]):
                if self.tokens.kinds[i + 1] == "N" or words[i + 1] in {"a", "an", "half"} or (
                    "N" not in self.tokens.kinds[:i]
                ):
                    if "N" in self.tokens.kinds[:i]:
                        return 0
                    self.preparation.append(self._text(0, i + 1))
                    return i + 1
                return 0
        return 0

    def _unsaid(self, i: int) -> int:
        """Past "additional" and "optional:" before the name."""
        words = self.tokens.words
        while words[i] in UNSAID and i + 1 < len(self.tokens) and words[i + 1] not in {",", ";", "virgin"}:
            self.comment.append(words[i])
            i += 1 + (words[i + 1] == ":")
            if not self.amounts:
                self.reader.i = i
                self.reader.head()
                i = self.reader.i
        return i

    def _food(self, i: int) -> None:
        """Read the name and everything after it."""
        segments = self._segments(i, len(self.tokens))
        if not segments:
            return
        n_named = self._named_segments(segments)
        start, end = segments[0][0], segments[n_named - 1][1]
        self._name(start, end)
        for start, end in segments[n_named:]:
            self._segment(start, end)

    def _segments(self, i: int, end: int) -> list[tuple[int, int]]:
        """Runs of tokens between commas; brackets are read and left out at the runs' ends."""
        kinds, words, tokens = self.tokens.kinds, self.tokens.words, self.tokens
        segments: list[tuple[int, int]] = []
        start = i
        while i < end:
            word = words[i]
            if kinds[i] == "P":
                if word in _OPENING:
                    i = tokens.closing(i, end) + 1
                    continue
                if word in _COMMAS or (word == "-" and not tokens.is_glued(i) and i > start):
                    if i > start:
                        segments.append((start, i))
                    start = i + 1
            i += 1
        if end > start:
            segments.append((start, min(i, end)))
        return segments

    def _named_segments(self, segments: list[tuple[int, int]]) -> int:
        """How many of the first segments the name spans."""
        words = self.tokens.words
        start, end = segments[0]
        n = 1
        while n < len(segments) and all(
            w in QUALITIES
            or w in PREPARED
            or w in ADVERBS
            or w in {"and", "or"}
            or w.endswith(("-fat", "-free", "-style"))
            for w in words[start:end]
        ):
            start, end = segments[n]
            n += 1
        for m in range(n, min(len(segments), n + 4)):
            start, end = segments[m]
            if words[start - 1] != ",":
                break
            if words[start] in {"or", "and", "and/or"}:
                return m + 1 if self._continues(start + 1) else n
            if not self._is_food_like(start, end):
                break
            if any(word in {"or", "and", "/"} for word in words[start:end]):
                return m + 1
        return n

    def _continues(self, i: int) -> bool:
        """Whether what follows ", or" is another food of the name."""
        word = self.tokens.words[i]
        return not (
            self.tokens.kinds[i] == "N"
            or word in WORDS
            or word in REMARKS
            or word in PURPOSES
            or word in SEGMENT_PREPARED
            or word in {"a", "more", "less", "you", "another"}
        )

    def _is_food_like(self, start: int, end: int) -> bool:
        """Whether a run may be one of several foods: "water, chicken broth, or stock"."""
        words = self.tokens.words[start:end]
        if end - start > 5 or self.tokens.kinds[start] != "W" or words[0] in REMARKS:
            return False
        return not any(
            word in SEGMENT_PREPARED or word in ADVERBS or word in PARTS or word in {"only", "part"}
            for word in words
        )

    def _name(self, i: int, end: int) -> None:
        """Split a run of tokens into leading preparations, the name and what follows it."""
        words, kinds = self.tokens.words, self.tokens.kinds
        kept: list[int] = []
        while i < end:
            word = words[i]
            if kinds[i] == "W" and word not in _SPECIAL_WORDS:
                kept.append(i)
                i += 1
                continue
            if word in _OPENING:
                close = self.tokens.closing(i, end)
                self._bracket(i, close)
                i = close + 1
                continue
            if kept and kinds[i] == "N":
                close = next((k for k in range(i, end) if words[k] in _OPENING), end)
                measures = read_measures(self.tokens, i, close)
                if measures:  # "heavy cream 2 cups"
                    self._add(measures)
                    i = close
                    continue
            if kept and word in _ENDS and self._ends_name(i):
                self._segment(i, end)
                break
            if word in PREPARED or word in ADVERBS:
                j = self._participles(i, end)
                if j > i and not (kept and self._is_kept(words[kept[-1]], word)):
                    if j >= end or words[j] in {"into", "in", "("}:
                        if kept:
                            self._segment(i, end)
                            break
                    elif words[j] != "or":
                        self.preparation.append(self._text(i, j))
                        i = j
                        continue
            if word in SIZES and word not in SIZES_OF_MEASURES and all(
                words[k] in QUALITIES for k in kept
            ):
                self.sizes.append(word)  # "ripe large avocados"
                i += 1
                continue
            kept.append(i)
            i += 1
        kept = self._late_unit(kept)
        self.name = self._join(kept)

    def _is_kept(self, before: str, word: str) -> bool:
        """Whether a participle belongs to the name: "frozen chopped", "berries or sliced fruit"."""
        return before in KEPT_WITH or (before in {"or", "and"} and word not in ADVERBS)

    def _participles(self, i: int, end: int) -> int:
        """The place after "finely chopped and toasted" that starts at `i`; `i` when none does."""
        words = self.tokens.words
        j = i
        last = i
        while j < end:
            word = words[j]
            if word in PREPARED and words[j + 1] not in PART_OF_NAME.get(word, ()):
                last = j + 1
            elif word == "ground" and j > i and words[j - 1] in ADVERBS | {"or"}:
                last = j + 1
            elif word not in ADVERBS and not (word in {"and", "or", ","} and last == j):
                break
            j += 1
        return last

    def _ends_name(self, i: int) -> bool:
        """Whether the name ends before token `i`."""
        words, kinds = self.tokens.words, self.tokens.kinds
        word, following = words[i], words[i + 1]
        if word in {"or", "and"}:
            return kinds[i + 1] == "N" or following in {"more", "to", "a", "as", "half"}
        if word in {"to", "for"}:
            return following in PURPOSES or (word == "for" and following.endswith("ing"))
        if word in {"as", "if"}:
            return following in _AMOUNT_WORDS
        if word == "at":
            return following in {"room", "least"}
        if word == "cut":
            return following in {"into", "in", "up", "from", "to", "on", "across", "crosswise"}
        return True

    def _join(self, kept: list[int]) -> str:
        """The text of the kept tokens, gaps made one blank."""
        if not kept:
            return ""
        if kept[-1] - kept[0] == len(kept) - 1:
            return self._text(kept[0], kept[-1] + 1)
        parts: list[str] = []
        run = kept[0]
        for last, this in zip(kept, [*kept[1:], -1], strict=True):
            if this != last + 1:
                parts.append(self._text(run, last + 1))
                run = this
        return " ".join(part for part in parts if part)

    def _late_unit(self, kept: list[int]) -> list[int]:
        """Take the unit of "2 garlic cloves" out of the name."""
        words = self.tokens.words
        if len(kept) < 2 or LATE_SPELLINGS.isdisjoint(words[k] for k in kept):
            return kept
        if self.amounts and self.amounts[0].unit is not None:
            if words[kept[-1]] in {"clove", "cloves"} and words[kept[-2]] == "garlic":
                self.amounts.append(Amount(None, "clove", "same"))  # "50 g garlic cloves"
                kept.pop()
            return kept
        for at in range(len(kept) - 1, 0, -1):
            unit = unit_of(words[kept[at]])
            if unit is None or unit.name not in LATE:
                continue
            if at < len(kept) - 1 and words[kept[at + 1]] != "with":
                break
            foods = LATE[unit.name]
            if foods is not None and not any(words[k] in foods for k in kept):
                return kept
            if self.amounts:
                self.amounts[0] = self.amounts[0]._replace(unit=unit.name)
            else:
                self.amounts.append(Amount(None, unit.name))
            return kept[:at] + kept[at + 1 :]
        return kept

    def _bracket(self, i: int, close: int) -> None:
        start = i + 1
        for at in range(start, close + 1):
            if at == close or self.tokens.words[at] == ";":
                self._segment(start, at)
                start = at + 1

    def _add(self, measures: list[Amount]) -> None:
        if self.amounts:
            self.amounts += measures
        else:
            self.amounts = [measures[0]._replace(role="whole"), *measures[1:]]

    def _segment(self, i: int, end: int) -> None:
        """File one run after the name under measures, purpose, preparation or remark."""
        words, kinds = self.tokens.words, self.tokens.kinds
        for at in range(i, end):
            if words[at] in _OPENING:
                close = self.tokens.closing(at, end)
                if at > i and close + 1 < end and self.tokens.kinds[at + 1] == "N":
                    continue  # "cut into 3in (7.5cm) pieces"
                self._segment(i, at)
                self._bracket(at, close)
                self._segment(close + 1, end)
                return
        if kinds[end - 2] == "N" and kinds[end - 1] == "W" and end - 2 > i:
            measures = read_measures(self.tokens, end - 2, end)
            if measures and measures[0].unit == "millilitre":  # "..., divided 325 mL"
                self._add(measures)
                end -= 2
        text = self._text(i, end)
        if not text:
            return
        measures = read_measures(self.tokens, i, end)
        if measures:
            self._add(measures)
            return
        word = words[i]
        if word in {"for", "to"} and words[i + 1] not in {"taste"}:
            self.purpose.append(text)
        elif word in REMARKS and word not in {"at"} or words[i:i+2] == ["at", "least"]:
            self.comment.append(text)
        elif any(w in SEGMENT_PREPARED or w in ADVERBS for w in words[i : min(end, i + 4)]):
            self.preparation.append(text)
        else:
            self.comment.append(text)
