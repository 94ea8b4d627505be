r"""List fields: lines from a list, a printed list, or a text with separators.

Printed lists have the syntax of Python, numpy, R or JSON. They are parsed without evaluation:
`['a', "b"]` in RAW_recipes.csv, `c("a", NA)` in recipes.csv, and
`[{'name': array([], dtype=object)}\n {'name': 'b'}]` in Spoonacular's Parquet. For input that
`ast.literal_eval` accepts, the values are equal.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from toque.cooking.schemas.item_objects import ItemReader

_AMOUNT_FOLLOWS = re.compile(
    r",\s+(?=(?:\d|[¼½¾⅓⅔⅛⅜⅝⅞]|an? |pinch |dash |salt\b|pepper\b))", re.IGNORECASE
)
_HEADED = re.compile(r"\s*\[[^\[\]\n\"',]{1,60}\]\s*\n")
# RecipeSage's headings.
_BRACKETED = re.compile(r"^\[([^\[\]\n\"']{1,60})\] *$", re.MULTILINE)
_MARKUP = re.compile(r"<(?:br|p|li|ol|ul)\b", re.IGNORECASE)


class BrokenListError(ValueError):
    """A cell that looks like a list but cannot be parsed, e.g. because it was truncated."""


def lines_in(value: Any, *, commas: bool, reader: ItemReader) -> list[str]:
    """Return lines of a list, a printed list, or a text with one separator. `reader` reads objects.

    A text of ingredients is also split at semicolons and `commas`. A text of steps is one step.

    Raises:
        BrokenListError: If the text looks like a list and cannot be parsed.
    """
    value = printed(value, strict=True)
    if isinstance(value, list) and set(map(type, value)) == {str}:
        return list(value)  # most lists, without a generator per line
    if not isinstance(value, str):
        return reader.ingredients(value) if commas else reader.steps(value)
    if "\n" in value or _MARKUP.search(value):
        return [_BRACKETED.sub(r"\1:", value)]  # cleaning splits it into lines
    return _split_text(value, commas=commas)


def _split_text(text: str, *, commas: bool) -> list[str]:
    """Split a text on one line at its strongest separator: "|", then ";", then commas.

    >>> _split_text("1 onion, chopped, 2 eggs", commas=True)
    ['1 onion, chopped', '2 eggs']
    """
    separator = next((mark for mark in ("|;" if commas else "|") if mark in text), "")
    if separator:
        parts = text.split(separator)
    elif not commas:
        return [text]
    elif any(map(str.isdigit, text)):  # "1 onion, chopped" is one ingredient
        parts = _AMOUNT_FOLLOWS.split(text)
    else:
        parts = text.split(",")
    return [part.strip() for part in parts]


def text_of(value: Any) -> str:
    """Return a text, or the first text of a list."""
    if isinstance(value, list) and value:
        value = value[0]
    return value if isinstance(value, str) else ""


def words_in(value: Any) -> list[str]:
    """Return the tags of a list, a printed list, or a text with commas.

    The tag of an object is its name.
    """
    value = printed(value)
    if isinstance(value, str):
        return [word for part in value.split(",") if (word := part.strip())]
    if isinstance(value, dict):
        return words_in(value.get("name"))
    if not isinstance(value, list):
        return []
    return [word for item in value for word in words_in(item)]


def printed(value: Any, *, strict: bool = False) -> Any:
    """Parse a value printed in a cell. Return other values unchanged, and None on a parse error.

    Raises:
        BrokenListError: If a text looks like a list, cannot be parsed, and `strict` is true.
    """
    if not isinstance(value, str) or not looks_like_literal(value):
        return value
    try:
        return parse_literal(value)
    except ValueError as error:
        if strict and value.lstrip().startswith(("[", "c(", "list(")):
            raise BrokenListError(str(error)) from error
        return value if strict else None


MAX_DEPTH = 24  # maximum depth; recipes need three, and more could exhaust the stack

_MAX_DIGITS = 18  # maximum characters of an integer; more may not fit 64 bits

_TOKEN = re.compile(
    r"""\s*+(?:
      (?P<string>[uUbB]?+(?:'(?:[^'\\]++|\\.)*+'|"(?:[^"\\]++|\\.)*+"))
    | (?P<number>[-+]?(?:\d++(?:\.\d*+)?+|\.\d++)(?:[eE][-+]?\d++)?+)
    | (?P<name>[A-Za-z_][\w.]*+)
    | (?P<mark>[\[\]{}(),:=])
    | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(\n)|(.))",
    re.DOTALL,
)
_SURROGATE = re.compile("[\ud800-\udfff]")
_EQUALS = re.compile(r"\s*=")
_SHORT = dict(zip("ntrabfv/", "\n\t\r\a\b\f\v/", strict=True))
_NAMES: dict[str, Any] = {
    **dict.fromkeys(
        ("None", "null", "NULL", "NA", "NA_character_", "nan", "NaN", "inf")
    ),
    **dict.fromkeys(("True", "true", "TRUE"), True),
    **dict.fromkeys(("False", "false", "FALSE"), False),
}
_LOOKS_LIKE = re.compile(
    r"""\s*(?:\[|\{|\(\s*["']|c\(|list\(|array\(|character\(0\)|["'].*["']\s*\Z)""",
    re.DOTALL,
)


def looks_like_literal(text: str) -> bool:
    """Return whether a cell looks like a list, a dict or a quoted string, e.g. `character(0)`."""
    return _LOOKS_LIKE.match(text) is not None and _HEADED.match(text) is None


def parse_literal(text: str) -> Any:
    """Return the value or values of a printed list, dict, string or number.

    Raises:
        ValueError: If the text cannot be parsed.
    """
    if text.startswith(('["', "[{")):
        try:
            return msgspec.json.decode(text)
        except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
            pass  # a Python list may have the same start
    values = _Parser(text).all()
    return values[0] if len(values) == 1 else values


class _Parser:
    """A recursive descent parser of tokens. As in numpy, commas between elements are optional."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._kind = ""
        self._token = ""
        self._advance()

    def all(self) -> list[Any]:
        """Return all values of the text."""
        values: list[Any] = []
        while self._kind != "end":
            values.append(self._value(0))
            self._skip(",")
        if not values:
            raise ValueError("empty")
        return values

    def _advance(self) -> None:
        """Read the next token."""
        match = _TOKEN.match(self._text, self._at)
        if match is None:
            raise ValueError(
                f"unexpected text at {self._at}: {self._text[self._at :][:20]!r}"
            )
        self._kind = str(match.lastgroup)
        self._token = match[self._kind]
        self._at = match.end()

    def _skip(self, mark: str) -> bool:
        """Skip the token if it is this mark. Return whether it was skipped."""
        if self._kind == "mark" and self._token == mark:
            self._advance()
            return True
        return False

    def _value(self, depth: int) -> Any:
        """Read the value that begins with the current token."""
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        kind, text = self._kind, self._token
        self._advance()
        if kind == "string":
            return _unquoted(text)
        if kind == "number":
            is_integer = set(text).isdisjoint(".eE") and len(text) <= _MAX_DIGITS
            return int(text) if is_integer else float(text)
        if kind == "name":
            return self._named(text, depth)
        if text in ("[", "("):
            return self._elements("]" if text == "[" else ")", depth)
        if text == "{":
            return self._pairs(depth)
        raise ValueError(f"unexpected {text!r}" if text else "it ends in the middle")

    def _elements(self, closing: str, depth: int) -> list[Any]:
        """Read elements up to the closing bracket, without keywords such as dtype=object."""
        elements: list[Any] = []
        while not self._skip(closing):
            if self._kind == "name" and _EQUALS.match(self._text, self._at):
                # Skip the keyword, the equals sign, and the value, which is always a bare name.
                for _ in range(3):
                    self._advance()
            else:
                elements.append(self._value(depth + 1))
            self._skip(",")
        return elements

    def _pairs(self, depth: int) -> Any:
        """Read a dict after its opening brace."""
        values_by_key: dict[Any, Any] = {}
        while not self._skip("}"):
            key = self._value(depth + 1)
            if not self._skip(":"):
                raise ValueError("a key without a value")
            if not isinstance(key, str | int | float | bool | None):
                raise ValueError("a key that is not a plain value")  # noqa: TRY004
            values_by_key[key] = self._value(depth + 1)
            self._skip(",")
        return values_by_key

    def _named(self, name: str, depth: int) -> Any:
        """Return the value of a constant or a call, e.g. `NA` or `c("a", "b")`."""
        if not self._skip("("):
            if name not in _NAMES:
                raise ValueError(f"unexpected {name!r}")
            return _NAMES[name]
        values = self._elements(")", depth)
        if name == "character":  # R's character(0)
            return []
        # array([...]) and np.str_('x') wrap one value. c(...) and list(...) are the list itself.
        return values if name in ("c", "list") else next(iter(values), None)


def _unquoted(token: str) -> str:
    """Return the content of a quoted string, which may have a prefix such as b or u."""
    body = token[1 if token[0] in "'\"" else 2 : -1]
    if "\\" not in body:
        return body
    text = _ESCAPE.sub(_unescaped, body)
    if _SURROGATE.search(text):
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _unescaped(match: re.Match[str]) -> str:
    """Return the character of an escape sequence. Unknown sequences stay as they are."""
    for group, base in ((1, 16), (2, 16), (3, 16), (4, 8)):
        if match[group]:
            code = int(match[group], base)
            return chr(code) if code <= 0x10FFFF else "\ufffd"
    if match[5]:
        return ""  # a line continuation
    character = match[6]
    if character in "\\'\"":
        return character
    return _SHORT.get(character, "\\" + character)
