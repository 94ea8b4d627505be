"""Reader of conversations: lists of messages in the common forms of training data.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
{"prompt": [...], "completion": [...]}                 messages; only the completion is learnt
{"system": "...", "prompt": "...", "target": "..."}    texts: a question and its answer
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import msgspec
import xxhash

from toque.errors import ConfigError
from toque.sources.decompress import UTF_8
from toque.sources.documents import fields_in, named_columns, plain_text, text_of
from toque.sources.layouts import Columns, FileLayout, layout_with, read_records
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    Turn,
    add_encoding,
    count_field_note,
    is_filled,
    is_not_finite,
)

CONVERSATIONS: Final = "toque.sources.conversations:"
"""Prefix of recorded names."""
ASSISTANT: Final = "assistant"
_ROLES: Final = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "model": ASSISTANT, "bot": ASSISTANT,
}  # fmt: skip
"""Names of roles, with the role in chat templates."""
_TEXTS: Final = {"system": "system", "user": "prompt", ASSISTANT: "target"}
"""Column of each role."""
AFTER_LAST: Final = "turns after the last answer, left out"
NOT_LEARNT: Final = "answers that are read and not learnt, as their field {} says"
IN_PROMPT: Final = "answers in a prompt, which are read and not learnt"
ONLY_READ: Final = (
    "messages of a user or system that are only read, though {} would have them learnt"
)
UNWRITTEN: Final = "messages with a field {}, which the chat template does not write"
UNUSED_OF_PARTS: Final = "parts of messages with {}, which is not used"
_MARKS: Final = (
    "weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight",
    "loss_scale",
)  # fmt: skip
"""Fields of a message or a part that decide whether it is learnt."""
_DETAILS: Final = ("train_detail", "training_detail")
"""Fields with the characters of a message that are learnt."""
_CALLS: Final = ("tool_calls", "function_call")
_TEXT_PARTS: Final = (None, "text", "input_text", "output_text")
_ROLE_AND_TEXT: Final = (("role", "content"), ("from", "value"), ("role", "value"))
_MAX_ROLE_CHARS: Final = 30
"""Characters of an unknown role in a report."""


@dataclass(frozen=True)
class ConversationReader:
    """`RecordReader` of conversations in the columns of a source.

    Conversations with the same first question stay on one side of the split.
    """

    columns: Mapping[str, str | tuple[str, ...]]
    version: int = 3
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`."""
        return add_encoding(f"{CONVERSATIONS}{json.dumps(self.columns)}", self.encoding)

    @cached_property
    def _fields(self) -> dict[str, tuple[str, ...]]:
        """Fields of each column, including the fields of templates."""
        return {role: fields_in(column) for role, column in self.columns.items()}

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of records."""
        return self._layout(path).blocks(
            sorted({n for f in self._fields.values() for n in f})
        )

    def schema(self, path: Path) -> str:
        """Return the layout of a file, for the report."""
        return f"{self._layout(path).name} conversations"

    def examples(self, block: Block) -> BlockExamples:
        """Make an example of each record with a conversation and an answer."""
        used = {name for fields in self._fields.values() for name in fields}
        return read_records(block, self._example_of, used)

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, named_columns(self.columns), encoding=self.encoding)

    def _example_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> Example | str:
        turns: list[Turn] = []
        for role, column in _TEXTS.items():
            if column not in self.columns:
                continue
            text, unread = text_of(
                record, self.columns[column], notes, is_answer=role == ASSISTANT
            )
            if unread:
                return f"{unread} is not a text"
            if text.strip():
                turns.append(Turn(role, text))
            elif role != "system":
                return f"no {column}"

        *prompt_fields, last = self._fields.get("messages", ("",))
        for name in prompt_fields:
            prompt = _turns_of(record.get(name), notes)
            if isinstance(prompt, str):
                return prompt
            if n_answers := sum(
                turn.role == ASSISTANT and turn.learnt for turn in prompt
            ):
                notes[IN_PROMPT] += n_answers
            turns += (
                msgspec.structs.replace(
                    turn, learnt=turn.learnt and turn.role != ASSISTANT
                )
                for turn in prompt
            )

        if last:
            messages = _turns_of(record.get(last), notes)
            if isinstance(messages, str):
                return messages
            turns += messages

        return _example(turns, notes)


def _turns_of(value: Any, notes: Counter[str]) -> list[Turn] | str:
    """Read a list of messages, or return the reason for dropping the record."""
    if isinstance(value, str) and value.lstrip().startswith("["):  # a cell of a table
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return "messages that are not a list"
    if not isinstance(value, list) or not all(
        isinstance(message, dict) for message in value
    ):
        return "messages that are not a list" if is_filled(value) else "no messages"
    turns: list[Turn] = []
    for message in value:
        turn = _turn_of(message, notes)
        if isinstance(turn, str):
            return turn
        turns.append(turn)
    return turns


def _turn_of(message: Mapping[str, Any], notes: Counter[str]) -> Turn | str:
    """Read a message, or return the reason for dropping the record."""
    names = next(
        (n for n in _ROLE_AND_TEXT if n[0] in message and n[1] in message), None
    )
    if names is None:
        return "a message without role and content"
    role = _ROLES.get(str(message[names[0]]).strip().lower())
    if role is None:
        return f"an unknown role: {str(message[names[0]])[:_MAX_ROLE_CHARS]!r}"
    if any(is_filled(message.get(name)) for name in _CALLS):
        return "a message that calls tools"

    content = message[names[1]]
    if isinstance(content, list):
        content, reason = _join_text_parts(content, notes)
        if reason:
            return reason
    if not isinstance(content, str) or not content.strip():
        return "a message without text"

    learnt = _is_learnt(message, role, notes)
    if isinstance(learnt, str):
        return learnt

    fields = {
        name: _clean_value(field, notes)
        for name, field in message.items()
        if name not in (*names, *_MARKS) and field not in (None, [], {})
    }
    for name in (
        "role",
        "content",
    ):  # the template receives `from` and `value` under these names
        if is_filled(fields.pop(name, None)):
            count_field_note(notes, UNWRITTEN, name)
    return Turn(role, plain_text(content, notes), learnt, fields)


def _is_learnt(
    message: Mapping[str, Any], role: str, notes: Counter[str]
) -> bool | str:
    """Check whether a message is learnt, or return the reason for dropping the record."""
    names = [name for name in _MARKS if is_filled(message.get(name))]
    marks = [_read_mark(message[name]) for name in names]
    if None in marks:
        return f"a message with {names[marks.index(None)]} neither 0 nor 1"
    if any(is_filled(message.get(name)) for name in _DETAILS):
        return "a message to be learnt only in parts"

    is_excluded = False in marks
    if role == ASSISTANT and is_excluded:
        count_field_note(notes, NOT_LEARNT, names[marks.index(False)])
    if role != ASSISTANT and names and not is_excluded:
        count_field_note(notes, ONLY_READ, names[0])
    return not is_excluded


def _join_text_parts(parts: list[Any], notes: Counter[str]) -> tuple[str, str]:
    """Join the parts of a message. Also return the reason for dropping the record, or ""."""
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") in _TEXT_PARTS
        if not is_text or not isinstance(part.get("text"), str):
            return "", "a message with more than text"
        filled = [
            name
            for name in part
            if name not in ("type", "text") and is_filled(part[name])
        ]
        for name in filled:
            if name in _MARKS and _read_mark(part[name]) is not True:
                return "", "a message to be learnt only in parts"
            if name not in _MARKS:
                count_field_note(notes, UNUSED_OF_PARTS, name)
    return join_parts(part["text"] for part in parts), ""


def join_parts(texts: Iterable[str]) -> str:
    """Join the texts of the parts of a message, with a blank between texts without one."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1][-1].isspace() or text[0].isspace()):
            pieces.append(" ")
        pieces.append(text)
    return "".join(pieces)


def _read_mark(mark: object) -> bool | None:
    """Convert the mark of a message to a boolean, or to None for any other value."""
    if isinstance(mark, str):
        mark = {"1": True, "true": True, "0": False, "false": False}.get(
            mark.strip().lower()
        )
    return bool(mark) if isinstance(mark, int | float) and mark in (0, 1) else None


def _clean_value(value: Any, notes: Counter[str]) -> Any:
    """Convert a value to JSON, and clean its texts."""
    if isinstance(value, dict):
        return {str(name): _clean_value(inner, notes) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_value(inner, notes) for inner in value]
    if value is None or isinstance(value, bool | int | float):
        return None if is_not_finite(value) else value
    return plain_text(str(value), notes)


def _example(turns: list[Turn], notes: Counter[str]) -> Example | str:
    """Make an example up to the last learnt answer, or return the reason for dropping it."""
    answers = [n for n, turn in enumerate(turns) if turn.role == ASSISTANT]
    learnt = [n for n in answers if turns[n].learnt]
    if not answers:
        return "no answer"
    if not learnt:
        return "no learnt answer"
    if learnt[0] == 0 or turns[learnt[0] - 1].role == "system":
        return "an answer before the first question"
    if any(b - a == 1 for a, b in pairwise(answers)):
        return "two answers in a row"
    if more := len(turns) - 1 - learnt[-1]:
        notes[AFTER_LAST] += more
        turns = turns[: learnt[-1] + 1]
    prompt = "\n\n".join(turn.text for turn in turns[:-1])
    # Conversations with the same opening, ignoring case, stay on one side of the split.
    opening = "\0".join(turn.text for turn in turns[: learnt[0]]).casefold()
    entire = json.dumps(msgspec.to_builtins(turns), sort_keys=True)
    return Example(
        prompt,
        turns[-1].text,
        xxhash.xxh3_64_intdigest(opening.encode()),
        title_key=0,
        record_key=xxhash.xxh3_64_intdigest(entire.encode()),
        turns=tuple(turns),
    )


def describes_conversation(columns: Columns) -> bool:
    """Check whether the columns of a source describe conversations.

    Raises:
        ConfigError: A column is missing, or messages are combined with a prompt or a target.
    """
    if not columns.keys() & {"messages", "system"}:
        return False
    texts = columns.keys() - {"system"}
    if texts not in ({"messages"}, {"prompt", "target"}):
        raise ConfigError(
            f"The columns of a source are {', '.join(sorted(columns))}. For conversations, use "
            "either a list of messages, columns: {messages: NAME}, or a prompt and a target with "
            "an optional system text, columns: {system: NAME, prompt: NAME, target: NAME}."
        )
    return True
