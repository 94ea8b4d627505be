"""Cleaning of titles, ingredient lines and steps: brackets, bullets, numbering, headings.

`notes` counts the repairs for the data report.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

from toque.cooking.ingredients.vocabulary import ADVERBS, PREPARED
from toque.cooking.normalised_words import has_action_verb, words_of
from toque.cooking.schemas.headings import with_heading
from toque.cooking.schemas.markup import clean_text
from toque.cooking.schemas.repairs import (
    CONJUNCTIONS,
    LOST_SPACES,
    only_measures,
    rejoin_sentences,
)

_SIGNS: Final = "•·▪▫●○◦‣□■▢◻◼◽◾⬜☐☑☒✓✔❏❑❒➢➤►▸◆"  # bullets and checkbox characters
_BULLET = re.compile(rf"(?:[-–—*{_SIGNS}]++\s++|[{_SIGNS}]++\s*+|\[[ xX]?\]\s*+)")
_INNER_BULLET = re.compile(rf"(?<=\w )[{_SIGNS}] ?(?=\w)")  # "1 teaspoon • coriander"
_LISTS_WITH_TABS = re.compile(r"(?:(?:\A|\n) ?\t[^\n]{2,}){3,}")
_STEP_NUMBER = re.compile(
    r"(?:(?:step|[ée]tape|schritt|pass?o|stap|krok)\s*\d{1,2}\s*(?:[:.)–-]|(?=[A-Z]|$))"
    r"|\d{1,2}\s*(?:[.:](?!\d)|\))|\(\d{1,2}\))\s*",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]")
_STRAY_HYPHEN: Final = re.compile(
    rf"(?<=[a-z]{{2}})-(?:\Z| (?=(?!(?:{CONJUNCTIONS})\b)[a-z]{{3}}|to taste)|(?=[\d½¼¾⅓⅔]))"
)
# The unit of "cup sugar", which lost its number.
_LOST_NUMBER: Final = re.compile(
    r"(?:(?:cups?|tsps?|tbsps?|teaspoons?|tablespoons?|pounds?|ounces?|pints?|quarts?)\.?"
    r" (?=[A-Za-z])"
    r"|(?:Cups?|Tsps?|Tbsps?|Teaspoons?|Tablespoons?)\.? (?=[a-z]))"
    r"(?!(?:of|or|and|plus|cakes?|noodles?|jars?|cans?)\b)"
)
_STEP_IN_LIST: Final = re.compile(
    r"\d{1,2} Serve with\b"
    r"|(?:\d{1,2}[.)]?\s*)?(?:(?:Add|Bake|Boil|Bring|Combine|Cook|Cover|Cut|Drain|Fill"
    r"|Fold|Fry|Grind|Heat|Line|Mix|Place|Pour|Preheat|Put|Remove|Return|Spread|Sprinkle|Stir|Take"
    r"|Toss|Transfer|Turn|Whisk)"
    r" (?!of\b)(?:[\w'-]+,? ){0,4}?"
    r"(?:the|all|it|them|in|into|until|together|over|oven|on an?|to an?|with more)\b)"
)
_AMOUNT_OF_WORD: Final = re.compile(r"[\d½¼¾⅓⅔⅛][ \d/.½¼¾⅓⅔⅛-]{0,8}(?=[^\W\d_])")
_REMARK: Final = re.compile(r"\([^()]*\)")
_CHOICE: Final = re.compile(r" or | plus |\d-inch| / ", re.IGNORECASE)
_CHOICE_OF_AMOUNT: Final = re.compile(r" (?:or|plus) [\d½¼¾⅓⅔⅛]", re.IGNORECASE)
_AMOUNT_WITH_UNIT: Final = re.compile(
    r"[\d½¼¾⅓⅔⅛] ?(?:cups?|tsps?|tbsps?|teaspoons?|tablespoons?|ounces?|oz|pounds?|lbs?)\b",
    re.IGNORECASE,
)
_MIN_AMOUNTS: Final = 4  # minimum amounts in a line that contains a list
# Minimum amounts with units in a line that contains a list and a choice
_MIN_UNITS: Final = 3
_MIN_LIST_CHARS: Final = 60  # minimum characters of such a line
_PREPARING: Final = (PREPARED | ADVERBS | {"and", "or", "juice", "peel", "reserved", "skin"}) - {
    "ground", "dried", "smoked", "mixed",
}  # fmt: skip
_DANGLING: Final = re.compile(r"\b(?:about|such as|see|or|and|with|plus)\Z")
_LOOSE: Final = " \t\n,;"
_END_MARKS: Final = " ,;–—"  # after the last word: "4 tablespoons ghee –" and "Curd,"
_STRAY: Final = frozenset("-'‘’`")  # characters of a stray last word
_HEADING_CHARS: Final = 24
_MIN_STEP_WORDS: Final = 3  # a longer heading with a verb is a step
_MOST_TITLE_WORDS: Final = 10  # maximum words of a heading that is written like a title
_LONG_WORD: Final = re.compile(r"[^\W\d_]{4,}")
STEPS_IN_LIST: Final = "steps among the ingredients removed"
BRACKETS: Final = "brackets closed or removed"
_ROUND_BRACKET: Final = re.compile(r"[()]")
_NESTED: Final = re.compile(r"(\([^()]*?),? ?\([^()]*\)")
# "((1 cup), chopped)"
_BRACKET_FIRST: Final = re.compile(r"\(\(([^()]*)\)(?=[^()]*\))")
_MOST_NESTED: Final = 8  # maximum brackets removed from one remark
_REPEATED_REMARK: Final = re.compile(r"\b((?:to|for) [a-z]+),? \([^()]*\b\1\)")
# Lines that only announce a step, or ingredients among the steps.
_BARE_HEADING: Final = re.compile(
    r"\W*(?:(?:step|etape|étape|schritt|paso|passo|stap|passaggio)(?:\s*\d{1,2})?"
    r"|method|methods|directions?|instructions?|preparation|steps"
    r"|(?:first|första|erste|première|primera) (?:instruction|instruktionen|anweisung|instrucción)"
    r"|(?:what |things )?you(?:['’]ll| will)? need)\W*",
    re.IGNORECASE,
)
_GLUED_NOTE: Final = re.compile(r"(?<=[a-z0-9)])(?=(?:Notes?|NOTES?|Tips?|TIPS?) ?:)")
_GLUED: Final = re.compile(
    r"[.!?:](?:(?:(?<=[a-z][a-z].)|(?<=[FC)][.!?])|(?<=[A-Z]{3}[.!?]))"
    r"(?=(?!Com\b)[A-ZÀ-Þ][\w'’-]*(?:[,:!.?]?(?:\s|\Z)|/[a-z]))"
    r"|(?<=[a-z]{4}[.!])(?=[a-z]{3,} )(?!(?:com|org|net|edu|gov|html?|gif|jpg)\b))"
)
_GLUED_CAPITALS: Final = re.compile(
    r"[A-Z]{4}(?=(?:In|On|Add|Mix|Heat|Place|Preheat) )"
)
# A unit that lost its number: "combine cup sugar and tsp. of salt"
LOST_NUMBERS: Final = tuple(
    f"{word} {unit} "
    for word, units in (
        (" add", "cup teaspoon tablespoon tsp tbsp"),
        ("ombine", "cup teaspoon tablespoon tsp tbsp"),
        (" and", "teaspoon tablespoon tsp tsp. tbsp"),
        (",", "teaspoon tablespoon teaspoons tablespoons tsp tbsp"),
    )
    for unit in units.split()
)
_BARE_NUMBER: Final = re.compile(r"\A\d{1,2} (?=[A-ZÀ-Þ])")
_GLUED_NUMBER: Final = re.compile(r"(\d{1,2})(?=([A-ZÀ-Þ][a-zà-ÿ]+)\b)")
_INLINE_NUMBER: Final = re.compile(r"(?:(?<=\s)|\A)(\d{1,2})[.)]\s*(?=[A-Z])")
_DIGIT = re.compile(r"\d")
_FOR_THE = re.compile(r"(?:for )(?:the )?(?:[^\W\d_]++[ '&-]*+){1,4}+", re.IGNORECASE)
_FOR_A_USE = re.compile(
    r"for (?:garnish|serving|dusting|frying|greasing|rolling|brushing|topping)",
    re.IGNORECASE,
)


_YIELD_OF_TITLE: Final = re.compile(
    r"(?<=\w) ?\((?:(?:yields?|serves|makes|servings?)\b[^()]{1,60}|\d{1,3} servings?)\)\Z",
    re.IGNORECASE,
)
_END_OF_TITLE: Final = re.compile(
    r" ?\((?:(?:recipe )?(?:by|courtesy|adapted from) [^()]{3,40}|copycat|rachael ray|paula deen"
    r"|emeril"
    r"(?: lagasse)?|martha stewart|ina garten|jamie oliver|alton brown|bobby flay|julia child)\)\Z"
    r"|(?<!death) by (?-i:[A-Z][a-z]{2,}(?: [A-Z][\w.]*){1,2})\Z"
    r"| ?\{[^{}]{1,40}\}\Z|(?<=\w) \| [^|]{3,60}\Z",
    re.IGNORECASE,
)
_GLUED_BRACKET: Final = re.compile(r"(?<=[a-z])\((?=[\dA-Z])")


def clean_title(text: str, notes: Counter[str]) -> str:
    """Return a title on one line, without a yield, the word "recipe" or a writer at its end.

    >>> clean_title("Mint Shake(Yield:  Two 8 Oz. Drinks)", Counter())
    'Mint Shake'
    """
    title = " ".join(clean_text(text, notes).split())
    if title.endswith(")"):  # "Mint Shake(Serves 2)" and "Jam(Sugar-Free)"
        title = _GLUED_BRACKET.sub(" (", _YIELD_OF_TITLE.sub("", title))
    if "_" in title and " " not in title:  # a file name
        title = title.replace("_", " ").strip()
    title = _END_OF_TITLE.sub("", title)  # "Plum Jam by Ann Lee" and "Plum Jam | Podco"
    # "Plum Jam Recipe", not "Mom's Recipe"
    dish, _, last = title.rpartition(" ")
    is_dish = " " in dish and not dish.endswith(("'s", "’s", "amily"))
    return dish if is_dish and last.casefold() == "recipe" else title


def clean_ingredients(items: Sequence[str], notes: Counter[str]) -> tuple[str, ...]:
    """Return the ingredient lines of a record without bullets, empty items and sub-headings."""
    lines_and_notes = [_ingredient_item(text) for text in _item_lines(items, notes)]
    notes.update(note for _, note in lines_and_notes if note)
    return tuple(line for line, _ in lines_and_notes if line)


@lru_cache(maxsize=1 << 15)
def _ingredient_item(line: str) -> tuple[str, str]:
    """Clean an ingredient line. Return the line and the note on its repair; either may be ""."""
    line = line.strip()
    bullet = _BULLET.match(line)
    line = line[bullet.end() :] if bullet else line
    if not line:
        return "", "empty lines"

    note = ""
    line = _without_stray_marks(line)
    if number := _GLUED_NUMBER.match(line):
        if line[-1] == ".":  # a sentence
            return "", STEPS_IN_LIST
        line = f"{number[1]} {line[number.end() :]}"
        note = LOST_SPACES

    if "(" in line or ")" in line:
        repaired = _with_flat_brackets(line)
        note = BRACKETS if repaired != line else note
        line = repaired

    if unit := _LOST_NUMBER.match(line):
        line = line[unit.end() :]
        note = "units that lost their number removed"

    if reason := _why_no_ingredient(line):
        return "", reason
    return line, note


def _why_no_ingredient(line: str) -> str:
    """Return the note on a line that names no ingredient, or ""."""
    if not _WORD.search(line):
        return "ingredient lines without a word"
    if len(line) <= _HEADING_CHARS and only_measures(line):  # "2 cups"
        return "ingredient lines that are only an amount"
    is_short = len(line) <= 2 * _HEADING_CHARS
    if is_short and _PREPARING.issuperset(words_of(line)):  # "peeled and chopped"
        return "ingredient lines that only name a preparation"
    if _STEP_IN_LIST.match(line):  # "Bake in the oven"
        return STEPS_IN_LIST

    # "Toss the peas with the dill:" is a part of the method.
    is_long = len(line.split()) > _MIN_STEP_WORDS
    if line[-1] == ":" and is_long and has_action_verb(line):
        return STEPS_IN_LIST
    return "ingredient sub-headings" if is_subheading(line) else ""


def _without_stray_marks(line: str) -> str:
    """Return an ingredient line without marks at its end, inner bullets and stray hyphens.

    >>> _without_stray_marks("4 tablespoons ghee –"), _without_stray_marks("1 tsp • Cumin-")
    ('4 tablespoons ghee', '1 tsp Cumin')
    """
    if not line[-1].isalnum():
        line = line.rstrip(_END_MARKS)
        rest, _, last = line.rpartition(" ")
        if rest and _STRAY.issuperset(last):
            line = rest.rstrip(_END_MARKS)
    if not line.isascii():
        line = _INNER_BULLET.sub("", line, count=1)
    if " *" in line:
        line = line.replace(" *to taste", " to taste")
    if not line.endswith(":"):
        line = line.removeprefix("of ")
    if "-" in line:  # "Oil-", "Salt- to taste" and "Turmeric-1/4 tsp"
        line = _STRAY_HYPHEN.sub(" - ", line).removesuffix(" - ")
    return line


def is_list_in_line(line: str) -> bool:
    """Return whether a line contains an entire list: "1 cup milk 2 eggs 3 cups flour 1 leek"."""
    if len(line) < _MIN_LIST_CHARS:
        return False
    without_remarks = _REMARK.sub(" ", line)
    if not _CHOICE.search(line):
        return len(_AMOUNT_OF_WORD.findall(without_remarks)) >= _MIN_AMOUNTS
    # A choice may have two more amounts: "1 cup milk or 1 cup cream plus 1/2 cup water".
    n_choices = len(_CHOICE_OF_AMOUNT.findall(without_remarks))
    n_amounts = len(_AMOUNT_WITH_UNIT.findall(without_remarks))
    return n_amounts - 2 * n_choices >= _MIN_UNITS


def _with_flat_brackets(line: str) -> str:
    """Return an ingredient line without nested or truncated remarks in brackets.

    >>> _with_flat_brackets("butter, (softened (close to")
    'butter'
    >>> _with_flat_brackets("parsley to garnish, (optional to garnish)")
    'parsley to garnish'
    """
    if "((" in line:
        line = _BRACKET_FIRST.sub(r"(\1", line)
    n_open = line.count("(") - line.count(")")
    if n_open > 1:
        line = _without_remark_cut_off(line)
    elif n_open:
        line = _with_brackets(line)
    for _ in range(_MOST_NESTED):
        flat = _NESTED.sub(r"\1", line)
        if flat == line:
            break
        line = flat.replace("( ", "(")
    return _REPEATED_REMARK.sub(r"\1", line)


def _without_remark_cut_off(line: str) -> str:
    """Cut a line at the first unclosed bracket, if a food precedes it."""
    open_brackets: list[int] = []
    for bracket in _ROUND_BRACKET.finditer(line):
        if bracket[0] == "(":
            open_brackets.append(bracket.start())
        elif open_brackets:
            open_brackets.pop()
    food = line[: open_brackets[0]].rstrip(_LOOSE) if open_brackets else line
    return line if only_measures(food) or not _WORD.search(food) else food


def _with_brackets(text: str) -> str:
    """Close or remove an open bracket, or remove an extra bracket at the end.

    >>> _with_brackets("1 cup stock (such as Knorr"), _with_brackets("1 pork loin (about")
    ('1 cup stock (such as Knorr)', '1 pork loin')
    """
    n_open = text.count("(") - text.count(")")
    if n_open == -1 and text.endswith(")"):
        return text[:-1]
    start = text.rfind("(")
    if n_open != 1 or start < text.rfind(")"):
        return text

    inside = text[start + 1 :].rstrip(_LOOSE)
    inside = _DANGLING.sub("", inside).rstrip(_LOOSE)
    sentence, stop, rest = inside.partition(". ")
    if stop and sentence[:1].islower():  # "(as for a pie. Chop the pecans."
        return f"{text[:start]}({sentence}). {rest}"
    if not _WORD.search(inside):
        return text[:start].rstrip(" ,")
    return f"{text[:start]}({inside})"


def is_subheading(line: str) -> bool:
    """Return whether an ingredient line names a part of the dish ("Filling:", "For the sauce")."""
    if _DIGIT.search(line):
        return False
    bare = line.strip(" *_#-=")
    if bare.endswith(":"):
        return _announces(bare)
    return _FOR_THE.fullmatch(bare) is not None and _FOR_A_USE.match(bare) is None


def _announces(line: str) -> bool:
    """Return whether a line with a final colon is a heading, unlike "of soy sauce:"."""
    words = line.split()
    return len(words) <= 6 and words[0] not in {"of", "and", "or", "with", "plus"}


def _is_in_title_case(line: str) -> bool:
    """Return whether a line is short and all its long words are capitalised."""
    words = _LONG_WORD.findall(line)
    if len(words) < 2 or len(line.split()) > _MOST_TITLE_WORDS:
        return False
    return all(word[0].isupper() for word in words)


def listed_lines(text: str, notes: Counter[str]) -> str:
    r"""Return the first list of an article that is written as one text, or the entire text.

    WordPress writes the items of a list as lines that begin with a tab.

    >>> listed_lines("I love jam.\n \tWash.\n \tBoil.\n \tFill.\nMore jam:", Counter())
    ' \tWash.\n \tBoil.\n \tFill.'
    """
    lists = _LISTS_WITH_TABS.search(text)
    if lists is None or lists[0] == text:
        return text
    notes["texts around the list of steps removed"] += 1
    return lists[0].strip("\n")


def clean_steps(items: Sequence[str], notes: Counter[str]) -> tuple[str, ...]:
    """Return the steps of a record without numbers. Headings are joined to the steps below them."""
    steps: list[str] = []
    heading = ""
    lines = rejoin_sentences(list(_item_lines(items, notes)), notes)
    lines = _without_bare_numbers(list(_split_lines(lines, notes)))

    for line in lines:
        step = _without_number(line, position=len(steps) + 1)
        step = _repair_step(step, notes)
        if not step:
            continue
        if step[-1] == ":" and (_announces(step) or _is_in_title_case(step)):
            heading = f"{step} "
            notes["step sub-headings joined to their step"] += 1
            continue
        steps.append(with_heading(heading, step))
        heading = ""
    return tuple(steps)


def _without_number(line: str, *, position: int) -> str:
    """Remove the bullet and the number of the step at this position, counted from 1."""
    step = line.strip()
    if bullet := _BULLET.match(step):
        step = step[bullet.end() :]
    number = _STEP_NUMBER.match(step)
    if number is None:
        number = _GLUED_NUMBER.match(step)
        if number is None or not _is_number_of_step(number, position):
            return step
    return step[number.end() :]


def _repair_step(step: str, notes: Counter[str]) -> str:
    """Repair the brackets and the last mark of a step. Return "" for a step without content."""
    if not _WORD.search(step):
        notes["steps without a word"] += 1
        return ""

    if step.count("(") != step.count(")") and step[-1] in ".!?)":
        closed = _with_brackets(step)
        notes[BRACKETS] += closed != step
        step = closed

    if len(step) <= _HEADING_CHARS and _BARE_HEADING.fullmatch(step):
        notes["step lines that only say Step 1, Method or the like"] += 1
        return ""

    if step[-1] == "," and step[0].isupper():
        notes["commas at the end of a step replaced"] += 1
        return f"{step[:-1]}."
    if step[-1] == "-" and step[-2:-1].isalpha():  # "For the icing-"
        return f"{step[:-1]}:"
    return step


def _without_bare_numbers(steps: list[str]) -> list[str]:
    """Remove step numbers without a point if they count from 1."""
    numbers = [int(number[0]) for step in steps if (number := _BARE_NUMBER.match(step))]
    if len(numbers) < 2 or numbers[0] != 1:
        return steps
    # Each part of a recipe may count from 1 again.
    if not all(after in {1, before + 1} for before, after in pairwise(numbers)):
        return steps
    return [_BARE_NUMBER.sub("", step) for step in steps]


def _is_number_of_step(glued: re.Match[str], position: int) -> bool:
    """Return whether a number glued to a word is a step number: "3Stir in the peas"."""
    number, word = glued.groups()
    return has_action_verb(word) or (
        int(number) == position and not only_measures(word)
    )


def _split_lines(lines: Iterable[str], notes: Counter[str]) -> Iterable[str]:
    """Split glued sentences, and numbered steps on one line."""
    for line in lines:
        sentences = _separate(_GLUED, r"\g<0> ", line, notes)
        # "FOR THE SAUCEIn a bowl"
        sentences = _separate(_GLUED_CAPITALS, r"\g<0>: ", sentences, notes)
        if ":" in sentences:
            sentences = _separate(_GLUED_NOTE, ". ", sentences, notes)

        has_numbers = "2." in sentences or "2)" in sentences
        steps = _split_at_numbers(sentences) if has_numbers else [sentences]
        if len(steps) > 1:
            notes["numbered steps on one line parted"] += 1
        yield from steps


def _separate(
    glued: re.Pattern[str], replacement: str, line: str, notes: Counter[str]
) -> str:
    """Separate the glued sentences of a line, and count the line."""
    separated, n_glued = glued.subn(replacement, line)
    if n_glued:
        notes["sentences glued together parted"] += 1
    return separated


def _split_at_numbers(line: str) -> list[str]:
    """Split "1. Mix. 2. Bake." into steps. If the numbers do not count from 1, return one line."""
    starts: list[int] = []
    for mark in _INLINE_NUMBER.finditer(line):
        if int(mark[1]) == len(starts) + 1:
            starts.append(mark.start(1))
    if len(starts) < 2 or line[: starts[0]].strip():
        return [line]
    ends = [*starts[1:], len(line)]
    return [line[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def _item_lines(items: Iterable[str], notes: Counter[str]) -> Iterable[str]:
    """Read the clean lines of items. Empty lines are counted and left out."""
    for item in items:
        for line in clean_text(item, notes).split("\n"):
            if line:
                yield line
            else:
                notes["empty lines"] += 1
