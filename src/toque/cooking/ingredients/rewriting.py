"""Rewriting of an ingredient line before it is tokenised: brackets, can numbers, 10x sugar.

Every function takes time linear in the line; no line comes out longer than a constant factor.
"""

from __future__ import annotations

import re
from typing import Final

from toque.cooking.ingredients.tokens import CLOSING
from toque.cooking.ingredients.units import SPELLINGS

_BRACKET: Final = re.compile(r"([()\[\]])")
_PARTING: Final = frozenset({"(", "; "})
_OPENING: Final = frozenset(CLOSING)
_CLOSERS: Final = frozenset(CLOSING.values())
_NUMBERED: Final = re.compile(
    r"(?<![\w(#])(?:no\. ?|# ?)(\d{1,4}(?: ?1/2)?)(?![\w/.,%])", re.IGNORECASE
)
"""A can by its number ("No. 303", "#10"): a size of the trade, never an amount."""
_TEN_X: Final = re.compile(
    r"\b(?:10|6|4) ?-?x,? (?:(?:powdered|confectioners?'?s?|icing) )?sugar\b", re.IGNORECASE
)
"""Sugar by its fineness, of which 10x is the usual one."""
_THICK: Final = re.compile(
    r"(?<=\d)(?:-(inch|in|cm|mm)[ -](?:thick|long|wide|diameter|square|round)\b"
    r"|\"(?:(?=[\s,)])|-(?:thick|long|wide|diameter)\b))"
)
"""A length and how it is measured: "1-inch-thick", 8\"."""

_SPOON: Final = r"\b(?:c(?:uill?(?:[eè]res?)?)?|colh(?:er(?:es)?)?)\.?(?: ?[aà]\b| ?de\b)? ?\(?"
_FOREIGN: Final = [
    (marks, re.compile(pattern, re.IGNORECASE), right)
    for marks, pattern, right in (
        (("soupe", "sopa"), rf"{_SPOON}(?:soupe|sopa)\b\)?(?: de\b)?", "tbsp"),
        (("café", "chá"), rf"{_SPOON}(?:chá|(?<=[àae] |.\()café)\b\)?(?: de\b)?", "tsp"),
        (("c.s", ".à.s", "ст."), r"\bc\.(?:à\.)?s\b\.?(?: de\b)?|ст\. ?л\.", "tbsp"),
        (("c.c", ".à.c", "ч."), r"\bc\.(?:à\.)?c\b\.?(?: de\b)?|ч\. ?л\.", "tsp"),
        (("(s)", "(n)", "q.b", "q. b"), r"(?<=[^\W\d_])\([sn]\)|(?:\+ )?\bq\. ?b\b\.?", ""),
        (("个", "根", "勺", "适量"), r"\A(?:适量|[一两三四五六半]+[个根勺]半?)\s", ""),
        ((" 1/", " 3/"), r"(?<=\A\d) (?:e|i|y|og|und|et) (?=\d/)", " "),
        ((" | ",), r" \| [^|]{1,30}? de\b", " de"),  # both numbers: "lata | latas de"
        ((" *",), r" \*+ ?(?:in|or|see|if|use|you|can|optional)\b.*\Z", ""),
        ((" - ",), r"(?<=\d) - (?=[^\W\d_]{3})|(?<=\)) - (?=[^\W\d_])", " "),
        (('"-',), r'(?<=\d)"-(?=\d)', "-"),
        (
            ("jus d", "saft v", "zumo de", "suco de", "succo di"),
            r"\A(?:le |il |o )?(?:jus|saft|zumo|suco|succo) (?:de?|von|di)[ '](?=\d)",
            "",
        ),
        (("n/a ", "none "), r"(?<![^ ])(?:N/A|None) (?=[^\W\d_])", ""),
        (
            ("as you like ", "as needed ", "to your taste "),
            r"\A(?:as you like|as needed|to your taste) (?=[^\W\d_(])",
            "",
        ),
        ((" d'",), rf"\A(\d[\d /.,]{{0,9}}(?:{'|'.join(sorted(SPELLINGS))})) d'", r"\1 de "),
    )
]
"""Words that databases and other languages write around a food, by marks of such a line."""


def rewritten(text: str) -> str:
    """A line in ASCII punctuation with what would be misread written in another way.

    >>> rewritten("1 lb pasta (such as penne (or rigatoni))"), rewritten("1 cup pasta )")
    ('1 lb pasta (such as penne ; or rigatoni)', '1 cup pasta')
    >>> rewritten("1 cup 10x sugar"), rewritten("1 No.2 can peas")
    ("1 cup confectioners' sugar", '1 (No. 2) can peas')
    """
    lower = text.lower()
    if "x" in lower and "sugar" in lower:
        text = _TEN_X.sub("confectioners' sugar", text)
    if "no." in lower or "#" in lower:
        text = _NUMBERED.sub(r"(No. \1)", text)
    if "-" in lower or '"' in lower:
        text = _THICK.sub(lambda length: f"-{length[1] or 'inch'}", text)
    for marks, pattern, right in _FOREIGN:
        if any(mark in lower for mark in marks):
            text = pattern.sub(right, text).strip()
    if not (_OPENING.isdisjoint(text) and _CLOSERS.isdisjoint(text)):
        text = _level(text)
    return text


def _level(text: str) -> str:
    """Brackets one deep: inner ones become parts of the outer, strays go.

    So no later step has to recurse, however deep a line is nested.
    """
    depth = 0
    out: list[str] = []
    for part in filter(None, _BRACKET.split(text)):
        if part in _OPENING:
            if not (out and out[-1] in _PARTING):
                out.append("(" if depth == 0 else "; ")
            depth += 1
        elif part in _CLOSERS:
            depth -= 1
            out.append(")" if depth == 0 else "")
            depth = max(depth, 0)
        else:
            out.append(part)
    return " ".join("".join(out).split())
