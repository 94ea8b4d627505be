"""Number words in ingredient lines: "one and a half", "three-quarters of a", "twenty-four"."""

from __future__ import annotations

import re

from toque.cooking.ingredients.vocabulary import SPELLINGS

WORDS: dict[str, float] = {  # includes some words of other languages; "few" is 3
    "one": 1, "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8,
    "nine": 9, "ten": 10, "eleven": 11, "twelve": 12, "thirteen": 13, "fourteen": 14,
    "fifteen": 15, "sixteen": 16, "seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20,
    "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80,
    "ninety": 90, "half": 0.5, "quarter": 0.25, "couple": 2,
    "few": 3, "several": 3, "een": 1, "eine": 1, "una": 1, "halve": 0.5, "meia": 0.5, "mezza": 0.5,
}  # fmt: skip
_PARTS = {
    "half": 2, "halves": 2, "quarter": 4, "quarters": 4, "third": 3, "thirds": 3, "fourth": 4,
    "fourths": 4, "fifth": 5, "fifths": 5, "sixth": 6, "sixths": 6, "eighth": 8, "eighths": 8,
    "tenth": 10, "tenths": 10, "twelfth": 12, "sixteenth": 16, "sixteenths": 16,
}  # fmt: skip
_ORDINALS = ("third", "fourth", "fifth", "xth", "ighth", "enth", "lfth")


def _either(words: list[str]) -> str:
    return "|".join(sorted(words, key=len, reverse=True))


_SMALL = _either([word for word, value in WORDS.items() if value in range(1, 20)])
_ONES = _either("one two three four five six seven eight nine".split())  # noqa: SIM905
_TENS = _either([word for word in WORDS if word.endswith("ty")])
_UNITS = _either(
    [word for word, unit in SPELLINGS.items() if unit.size and len(word) > 1]
)
_START = r"(?<![\w-])"
# Text after a comma describes the preparation: "bacon, three-quarters minced"
_FRACTION = re.compile(
    rf"{_START}(?<!, )(?:(?P<whole>{_SMALL}|\d+) (?:and|&|\+) )?(?:(?P<top>an?|{_SMALL})[ -])?"
    rf"(?P<part>{_either([*_PARTS])})\b(?! and half| & half)"
    rf"(?P<of> of an? | an? )?(?P<unit>[ -]?(?:{_UNITS}|c|t)\b)?",
    re.IGNORECASE,
)
_LARGE = re.compile(
    rf"{_START}(?:(?P<hundreds>a|{_ONES})[ -]hundred(?:(?: and)? (?P<rest>"
    rf"(?:{_TENS})(?:[ -](?:{_ONES}))?|{_SMALL})\b)?|(?P<tens>(?:{_TENS})[ -](?:{_ONES})))"
    r"\b(?![\w-]| percent| ?%| \d+/)",
    re.IGNORECASE,
)
_HYPHENATED = re.compile(
    rf"(\A|\A\w+ )(?:(?P<low>{_SMALL})-(?=(?:{_SMALL})\b)(?P<high>{_SMALL})\b(?!-)"
    rf"|(?P<word>{_SMALL}|half|quarter)-(?=(?:{_UNITS})\b))",
    re.IGNORECASE,
)

_DIGITS_OR_WORD = rf"(?:\d+(?: \d/\d{{1,2}}|/\d{{1,2}})?|(?:{_SMALL}|half|quarter)\b)"
_RANGE = re.compile(
    rf"\A(?:between (?P<low>{_DIGITS_OR_WORD}) and|from (?P<low_2>{_DIGITS_OR_WORD}) to"
    rf"|(?P<low_3>{_SMALL}),(?: (?:{_SMALL}),?)? or|(?P<low_4>{_SMALL})-(?:to|or)-"
    rf"|(?P<low_5>{_DIGITS_OR_WORD}) (?:to|or)(?= an? dozen| \d))"
    rf" ?(?P<high>an? dozen\b|{_DIGITS_OR_WORD})",
    re.IGNORECASE,
)
# Not "a cup or two tablespoons"
_OR_TWO = re.compile(
    rf"\A(?:an?|one) (?P<item>[^\W\d_]+) or two\b(?! (?:{_UNITS})\b)", re.IGNORECASE
)
_RANGE_MARKS = ("between ", "from ", " or ", " to ", "-to-", "-or-")


def digits_for_words(text: str) -> str:
    """Replace number words of a line with digits.

    >>> digits_for_words("Three-quarters of a cup cream")
    '3/4 cup cream'
    >>> digits_for_words("two hundred fifty grams of half and half")
    '250 grams of half and half'
    >>> digits_for_words("between two and three cups"), digits_for_words("a cup or two of water")
    ('2 to 3 cups', '1 to 2 cup of water')
    """
    lower = text.lower()
    has_ordinal = "th" in lower and any(map(lower.__contains__, _ORDINALS))
    if has_ordinal or "hal" in lower or "quarter" in lower:
        text = _FRACTION.sub(_fraction, text)
    if "ty-" in lower or "ty " in lower or "hundred" in lower:
        text = _LARGE.sub(_large, text)
    if "-" in text and _HYPHENATED.match(text):
        text = _HYPHENATED.sub(_hyphenated, text, count=1)
    if any(map(lower.__contains__, _RANGE_MARKS)):
        text = _OR_TWO.sub(r"1 to 2 \g<item>", text)
        text = _RANGE.sub(_range, text)
    return text


def _range(match: re.Match[str]) -> str:
    """Replace both ends of a range with digits: "half to 3/4" becomes "1/2 to 3/4"."""
    low = next(
        text for name, text in match.groupdict().items() if name != "high" and text
    )
    return f"{_in_digits(low)} to {_in_digits(match['high'])}"


def _in_digits(number: str) -> str:
    """Return one end of a range in digits: "half" is "1/2", and "a dozen" is "12"."""
    lower = number.lower()
    if lower.endswith("dozen"):
        return "12"
    part = _PARTS.get(lower)
    if part is not None:
        return f"1/{part}"
    return number if number[0].isdecimal() else str(_value(number))


def _value(words: str) -> int:
    """Return the sum of number words, e.g. 24 for "twenty-four". "a" counts as one."""
    total = 0
    for word in words.lower().replace("-", " ").split():
        total += int(word) if word.isdecimal() else int(WORDS.get(word, 1))
    return total


def _fraction(match: re.Match[str]) -> str:
    """Replace "three-quarters of a cup" with "3/4 cup". Other matches stay unchanged."""
    integer, top, part, of, unit = match.group("whole", "top", "part", "of", "unit")
    bottom = _PARTS[part.lower()]
    if top is None and integer is None:
        return match[0]  # the single word "half"
    count = _value(top or "a")
    is_common = bottom in (2, 4) and (count == 1 or part.lower().endswith("s"))
    if count >= bottom or not (is_common or unit or of):
        return match[0]  # "two half breasts", "one fifth of gin"
    number = f"{count}/{bottom}"
    if integer is not None:
        return f"{_value(integer)} {number}{of or ''}{unit or ''}"
    if of:
        return f"{number} {(unit or '').lstrip()}"
    return f"{number}{unit or ''}"


def _large(match: re.Match[str]) -> str:
    """Replace "two hundred fifty" with "250", or "twenty-four" with "24"."""
    if match["hundreds"] is None:
        return str(_value(match["tens"]))
    return str(100 * _value(match["hundreds"]) + _value(match["rest"] or ""))


def _hyphenated(match: re.Match[str]) -> str:
    """Replace "two-three" with "2-3", or "half-pint" with "1/2-pint"."""
    if match["low"] is not None:
        return f"{match[1]}{_value(match['low'])}-{_value(match['high'])}"
    part = _PARTS.get(match["word"].lower())
    if part is not None and match[1]:
        return match[0]  # "1 half-pint": "1 1/2-pint" would be a different amount
    number = f"1/{part}" if part is not None else str(_value(match["word"]))
    return f"{match[1]}{number}-"
