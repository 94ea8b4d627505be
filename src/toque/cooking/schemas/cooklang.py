"""Cooklang: a recipe as a text with marked ingredients, tools and times.

See https://github.com/cooklang/spec. A file is one recipe. Its title may be the name of the file.
Also the marks of cooklang-rs are read: references (@&flour), hidden (@-salt) and optional (@?nuts)
ingredients, and other names (@white wine|wine{}).
"""

from __future__ import annotations

import re
from typing import Any, Final

_MARKED: Final = re.compile(
    r"(?<![\w.@])(?P<mark>[@#~])(?P<signs>[&?+@-]{0,3})"
    r"(?:(?P<long>[^@#~{}\n]{0,120}?)\{(?P<amount>[^{}\n]{0,120})\}"
    r"|(?P<word>[^\W_][\w'’-]{0,60}))"
    r"(?P<note>\([^()\n]{0,200}\))?"
)
_SURE: Final = re.compile(
    rb"(?<![\w.])@[^\W\d_][\w '\-./|\x80-\xff]{0,80}\{=?\s*[\d./-]{1,12}\s*(?:%[^{}%\n]{1,30})?\}"
)
"""Ingredient with a name and a number, such as @red wine{1/2%cup}."""
_CODE: Final = re.compile(rb"(?m)[;{][ \t]*+$|^[ \t]*+[})\\]")
"""Line of a program or a style sheet."""
_MAX_CODE: Final = 0.2
_FRONT_MATTER: Final = re.compile(
    r"\A\s*---[ \t]*\n(.*?\n)---[ \t]*(?:\n|\Z)", re.DOTALL
)
_ENTRY: Final = re.compile(r"(?:>>\s*)?([^\s:#-][^:\n]{0,60}):[ \t]*(.*)")
_PARAGRAPHS: Final = re.compile(r"\n[ \t]*\n")
_SPACES: Final = re.compile(r"\s{2,}")
_ITEM: Final = re.compile(r"\s*-\s+(.*)")
_COMMENT: Final = re.compile(r"(?m)(?:^|(?<=\s))--(?!-)[ \t]*(.*)$")
_KEYS: Final = {
    "time required": "minutes",
    "duration": "minutes",
    "time.prep": "prep time",
    "time.cook": "cook time",
    "course": "category",
}
"""Canonical keys of the specification that `columns` does not know, with names that it knows."""
_OURS: Final = ("ingredients", "steps", "notes", "comments", "timers")
_BLOCK_SIGNS: Final = ("|", ">", "|-", ">-", "|+", ">+")
"""Signs in YAML that the value follows in the next lines."""


def is_cooklang(start: bytes) -> bool:
    """Check whether a text has a marked ingredient with a number, and is not a program."""
    if _SURE.search(start) is None:
        return False
    n_lines = 1 + start.strip().count(b"\n")
    return len(_CODE.findall(start)) <= _MAX_CODE * n_lines


def record_of_cooklang(text: str, name: str) -> dict[str, Any]:
    """Convert a recipe into a record.

    Args:
        text: The text.
        name: Title without metadata.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    metadata: dict[str, Any] = {}
    if front := _FRONT_MATTER.match(text):
        metadata |= _read_entries(front[1])
        text = text[front.end() :]
    text, comments = _without_block_comments(text)
    comments += [comment.strip() for comment in _COMMENT.findall(text)]
    text = _COMMENT.sub("", text)

    parts = _Parts()
    for paragraph in _PARAGRAPHS.split(text):
        parts.add(paragraph, metadata)
    record = {_KEYS.get(key.lower(), key): value for key, value in metadata.items()}
    title = record.get("title") or name
    others = {
        f"{key} (metadata)" if key.lower() in _OURS else key: value
        for key, value in record.items()
        if key.lower() != "title"
    }
    return others | {
        "title": title,
        "ingredients": parts.ingredients,
        "steps": parts.steps,
        "notes": parts.notes,
        "comments": comments,
        "timers": parts.timers,
    }


def _without_block_comments(text: str) -> tuple[str, list[str]]:
    """Remove the comments such as [- salted -]. Also return them."""
    kept: list[str] = []
    comments: list[str] = []
    position = 0
    while (start := text.find("[-", position)) >= 0:
        end = text.find("-]", start + 2)
        if end < 0:
            break
        kept.append(text[position:start])
        comments.append(text[start + 2 : end].strip())
        position = end + 2
    return "".join([*kept, text[position:]]), comments


def _read_entries(text: str) -> dict[str, Any]:
    """Read the keys of a front matter, each with a text or a list of texts."""
    entries: dict[str, Any] = {}
    key = ""
    for line in text.splitlines():
        if item := _ITEM.fullmatch(line):
            if key:
                earlier = entries[key] if isinstance(entries[key], list) else []
                entries[key] = [*earlier, item[1].strip("\"' ")]
        elif key and line[:1].isspace() and line.strip():
            # A line of a longer text, or of an object in the value.
            earlier = entries[key]
            if isinstance(earlier, list):
                entries[key] = [*earlier, line.strip()]
            else:
                entries[key] = f"{earlier} {line.strip()}".strip()
        elif entry := _ENTRY.fullmatch(line):
            key = entry[1].strip()
            value = entry[2].strip().strip("\"'")
            entries[key] = "" if value in _BLOCK_SIGNS else value
    return entries


class _Parts:
    """Ingredients, steps and notes of a recipe."""

    def __init__(self) -> None:
        self.ingredients: list[str] = []
        self.steps: list[str] = []
        self.notes: list[str] = []
        self.timers: list[str] = []
        self._names: set[str] = set()

    def add(self, paragraph: str, metadata: dict[str, Any]) -> None:
        """Add a paragraph: a step, sections, notes, or old metadata such as `>> servings: 4`."""
        lines: list[str] = []
        for line in paragraph.splitlines():
            stripped = line.strip()
            if stripped.startswith(">>") and (entry := _ENTRY.fullmatch(stripped)):
                metadata[entry[1].strip()] = entry[2].strip()
            elif stripped.startswith(">"):
                self.notes.append(self._plain(stripped.lstrip("> ")))
            elif stripped.startswith("="):
                self._add_step(lines)
                lines = []
                if section := stripped.strip("= \t"):
                    self.steps.append(f"{section}:")
            elif stripped:
                lines.append(stripped)
        self._add_step(lines)

    def _add_step(self, lines: list[str]) -> None:
        if text := self._plain(" ".join(lines)).strip():
            self.steps.append(_SPACES.sub(" ", text))

    def _plain(self, text: str) -> str:
        return _MARKED.sub(self._replace, text)

    def _replace(self, match: re.Match[str]) -> str:
        """Return the text of a mark, and add its ingredient to the list."""
        name = (match["long"] if match["word"] is None else match["word"]).strip()
        quantity, _, unit = (match["amount"] or "").strip().lstrip("=").partition("%")
        amount = f"{quantity.strip()} {unit.strip()}".strip()
        note = match["note"] or ""
        if match["mark"] == "~":
            if amount and name:
                self.timers.append(name)
            return (amount or name) + note
        if name.startswith(("./", "../", "/")):  # another recipe
            name = name.rpartition("/")[2]
        name, _, shown = name.partition("|")
        shown = (shown or name).strip()
        if match["mark"] == "#":
            return f"{amount} {shown}".strip() + note
        is_added = bool(name) and self._add_ingredient(
            name, amount, note, match["signs"]
        )
        if is_added or not (amount or note):
            return shown
        details = ", ".join(filter(None, (amount, note.strip("() "))))
        return f"{shown} ({details})"

    def _add_ingredient(self, name: str, amount: str, note: str, signs: str) -> bool:
        """Add an ingredient, unless it was added before. Return whether it was added."""
        is_known = name.lower() in self._names
        if "&" in signs or (is_known and not amount):
            return False
        self._names.add(name.lower())
        line = f"{amount} {name}".strip()
        preparation = note.strip("() ")
        if "?" in signs:
            preparation = f"{preparation}, optional".lstrip(", ")
        self.ingredients.append(f"{line}, {preparation}" if preparation else line)
        return True
