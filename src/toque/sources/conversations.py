"""Reader of conversations: lists of messages, in the forms that trainers of the field read.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
{"prompt": [...], "completion": [...]}                 the messages of both, one after the other
{"system": "...", "prompt": "...", "target": "..."}    texts: a question and its answer
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import xxhash

from toque.errors import ConfigError
from toque.sources.decompress import UTF_8
from toque.sources.documents import Columns, fields_in, named_columns, plain_text, text_of
from toque.sources.layouts import FileLayout, layout_with, read_records
from toque.sources.records import Block, BlockExamples, Example, Turn, in_encoding, is_filled

CONVERSATIONS: Final = "toque.sources.conversations:"  # beginning of a recorded name
ASSISTANT: Final = "assistant"
_ROLES: Final = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "model": ASSISTANT, "bot": ASSISTANT,
}  # fmt: skip
"""Roles that are known, and the three that templates know."""
_TEXTS: Final = {"system": "system", "user": "prompt", ASSISTANT: "target"}  # role to column
AFTER_LAST: Final = "turns after the last answer, left out"
_ROLE_AND_TEXT: Final = (("role", "content"), ("from", "value"), ("role", "value"))
_MOST_SHOWN: Final = 30  # characters of a role that nobody knows


@dataclass(frozen=True)
class ConversationReader:
    """Reads conversations by the `columns` of a source; a `RecordReader`.

    Conversations that begin with the same question stay on one side of the split.
    """

    columns: Mapping[str, str | tuple[str, ...]]
    version: int = 2
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests; see `RecordReader`."""
        return in_encoding(f"{CONVERSATIONS}{json.dumps(self.columns)}", self.encoding)

    @cached_property
    def _fields(self) -> dict[str, tuple[str, ...]]:
        """The fields of each column, those of its template among them."""
        return {role: fields_in(given) for role, given in self.columns.items()}

    def blocks(self, path: Path) -> Iterator[Block]:
        """Blocks of `path` by its layout."""
        return self._layout(path).blocks(sorted({n for f in self._fields.values() for n in f}))

    def schema(self, path: Path) -> str:
        """The file's layout, for the report."""
        return f"{self._layout(path).name} conversations"

    def examples(self, block: Block) -> BlockExamples:
        """One example for each record that holds a conversation with an answer."""
        used = {name for fields in self._fields.values() for name in fields}
        return read_records(block, self._example_of, used)

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, named_columns(self.columns), encoding=self.encoding)

    def _example_of(self, record: Mapping[str, Any], notes: Counter[str]) -> Example | str:
        turns: list[Turn] = []
        for role, column in _TEXTS.items():
            if column not in self.columns:
                continue
            text, unread = text_of(record, self.columns[column], notes, is_answer=role == ASSISTANT)
            if unread:
                return f"{unread} holds no text"
            if text.strip():
                turns.append((role, text))
            elif role != "system":
                return f"no {column}"
        for name in self._fields.get("messages", ()):
            found = _turns_of(record.get(name), notes)
            if isinstance(found, str):
                return found
            turns += found
        return _example(turns, notes)


def _turns_of(value: Any, notes: Counter[str]) -> list[Turn] | str:
    """The turns of a list of messages, or the reason for having none."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # as tables hold them
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "messages that are no list"
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return "messages that are no list" if is_filled(value) else "no messages"
    turns: list[Turn] = []
    for message in value:
        names = next((n for n in _ROLE_AND_TEXT if n[0] in message and n[1] in message), None)
        if names is None:
            return "a message without role and content"
        role = _ROLES.get(str(message[names[0]]).strip().lower())
        if role is None:
            return f"a role that nobody knows: {str(message[names[0]])[:_MOST_SHOWN]!r}"
        content = message[names[1]]
        if isinstance(content, list):  # parts, of which pictures are no text
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            if not all(isinstance(text, str) for text in texts):
                return "a message that holds more than text"
            content = "".join(map(str, texts))
        if message.get("tool_calls"):
            return "a message that calls tools"
        if not isinstance(content, str) or not content.strip():
            return "a message without text"
        turns.append((role, plain_text(content, notes)))
    return turns


def _example(turns: list[Turn], notes: Counter[str]) -> Example | str:
    """The example of a conversation up to its last answer, or the reason for having none."""
    answers = [n for n, (role, _) in enumerate(turns) if role == ASSISTANT]
    if not answers:
        return "no answer"
    if answers[0] == 0 or turns[answers[0] - 1][0] != "user":
        return "an answer before the first question"
    if any(b - a == 1 for a, b in pairwise(answers)):
        return "two answers in a row"
    if more := len(turns) - 1 - answers[-1]:
        notes[AFTER_LAST] += more
        turns = turns[: answers[-1] + 1]
    asked = "\n\n".join(text for _, text in turns[:-1])
    opening = "\0".join(text for _, text in turns[: answers[0]]).casefold().encode()
    whole = json.dumps(turns, ensure_ascii=False).casefold().encode("utf-8", "replace")
    return Example(
        asked, turns[-1][1], xxhash.xxh3_64_intdigest(opening), 0,
        xxhash.xxh3_64_intdigest(whole), turns=tuple(turns),
    )  # fmt: skip


def as_conversation(columns: Columns) -> bool:
    """True if a source's columns are those of conversations.

    Raises:
        ConfigError: messages stand beside a prompt or a target, or a part is missing.
    """
    if not columns.keys() & {"messages", "system"}:
        return False
    texts = columns.keys() - {"system"}
    if texts not in ({"messages"}, {"prompt", "target"}):
        raise ConfigError(
            f"columns of a source names {', '.join(sorted(columns))}. A conversation is a list of "
            "messages, columns: {messages: NAME}, or prompt and target, with a system text if "
            "there is one: columns: {system: NAME, prompt: NAME, target: NAME}."
        )
    return True
