"""Reader of conversations: lists of messages in the common forms of training data.

{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}
{"prompt": [...], "completion": [...]}                 messages; only the completion has a loss
{"system": "...", "prompt": "...", "target": "..."}    texts: a question and its answer

A *learnt* message contributes to the loss.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

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

CONVERSATIONS = "toque.sources.conversations:"
"""Prefix of recorded names."""
ASSISTANT = "assistant"
_ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "model": ASSISTANT, "bot": ASSISTANT,
}  # fmt: skip
"""Roles of chat templates by the role's name in data."""
_TEXTS = {"system": "system", "user": "prompt", ASSISTANT: "target"}
"""Columns of a source by role."""
AFTER_LAST = "turns after the last answer, left out"
NOT_LEARNT = "answers that are read and not learnt, as their field {} says"
IN_PROMPT = "answers in a prompt, which are read and not learnt"
ONLY_READ = (
    "messages of a user or system that are only read, though {} would have them learnt"
)
UNWRITTEN = "messages with a field {}, which the chat template does not write"
UNUSED_OF_PARTS = "parts of messages with {}, which is not used"
_MARKS = (
    "weight", "train", "training", "trainable", "loss", "loss_mask", "loss_weight",
    "loss_scale",
)  # fmt: skip
"""Fields of a message or a part that decide whether it contributes to the loss."""
_DETAILS = ("train_detail", "training_detail")
"""Fields that list the characters of a message that contribute to the loss."""
_CALLS = ("tool_calls", "function_call")
_TEXT_PARTS = (None, "text", "input_text", "output_text")
_ROLE_AND_TEXT = (("role", "content"), ("from", "value"), ("role", "value"))
_MAX_ROLE_CHARS = 30
"""Maximum length of an unknown role in a report, in characters."""


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
        return self._layout(path).blocks(sorted(self._used))

    def schema(self, path: Path) -> str:
        """Return the layout of a file, for the report."""
        return f"{self._layout(path).name} conversations"

    def examples(self, block: Block) -> BlockExamples:
        """Make an example from each record that has a conversation and an answer."""
        return read_records(block, self._example_of, self._used)

    @cached_property
    def _used(self) -> set[str]:
        return {name for fields in self._fields.values() for name in fields}

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, named_columns(self.columns), encoding=self.encoding)

    def _example_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> Example | str:
        """Build an example from a record, or return the reason for dropping the record."""
        turns = self._turns_of_texts(record, notes)
        if isinstance(turns, str):
            return turns

        # Messages in several fields are a prompt and, in the last field, its completion.
        *prompt_fields, last = self._fields.get("messages", ("",))
        for name in prompt_fields:
            prompt = read_turns(record.get(name), notes)
            if isinstance(prompt, str):
                return prompt
            turns += [_exclude_answer(turn, notes) for turn in prompt]
        if last:
            messages = read_turns(record.get(last), notes)
            if isinstance(messages, str):
                return messages
            turns += messages

        return conversation_example(turns, notes)

    def _turns_of_texts(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Turn] | str:
        """Read the columns of texts, or return the reason for dropping the record."""
        turns: list[Turn] = []
        for role, column in _TEXTS.items():
            if column not in self.columns:
                continue
            is_answer = role == ASSISTANT
            text, unread = text_of(
                record, self.columns[column], notes, is_answer=is_answer
            )
            if unread:
                return f"{unread} is not a text"
            if text.strip():
                turns.append(Turn(role, text))
            elif role != "system":
                return f"no {column}"
        return turns


def _exclude_answer(turn: Turn, notes: Counter[str]) -> Turn:
    """Exclude an answer in a prompt from the loss. Return any other turn unchanged."""
    if turn.role != ASSISTANT or not turn.learnt:
        return turn
    notes[IN_PROMPT] += 1
    return msgspec.structs.replace(turn, learnt=False)


def read_turns(value: Any, notes: Counter[str]) -> list[Turn] | str:
    """Read a list of messages, or return the reason for dropping the record."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _decode_cell(value)
        if value is None:
            return "messages that are not a list"
    is_list = isinstance(value, list)
    if not is_list or not all(isinstance(message, dict) for message in value):
        return "messages that are not a list" if is_filled(value) else "no messages"
    turns: list[Turn] = []
    for message in value:
        turn = _turn_of(message, notes)
        if isinstance(turn, str):
            return turn
        turns.append(turn)
    return turns


def _decode_cell(cell: str) -> Any:
    """Decode the JSON in a cell of a table, or return None."""
    try:
        return json.loads(cell)
    except (ValueError, RecursionError):
        return None


def are_messages(value: Any) -> bool:
    """Check whether a value, or the JSON in a cell of a table, is a list of messages."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _decode_cell(value)
    if not isinstance(value, list) or not value or not isinstance(value[0], dict):
        return False
    return any(all(name in value[0] for name in names) for names in _ROLE_AND_TEXT)


def _turn_of(message: Mapping[str, Any], notes: Counter[str]) -> Turn | str:
    """Read a message, or return the reason for dropping the record."""
    pairs = (names for names in _ROLE_AND_TEXT if all(n in message for n in names))
    names = next(pairs, None)
    if names is None:
        return "a message without role and content"
    role_name, content = (message[name] for name in names)
    role = _ROLES.get(str(role_name).strip().lower())
    if role is None:
        return f"an unknown role: {str(role_name)[:_MAX_ROLE_CHARS]!r}"
    if any(is_filled(message.get(name)) for name in _CALLS):
        return "a message that calls tools"

    if isinstance(content, list):
        content, reason = _join_text_parts(content, notes)
        if reason:
            return reason
    if not isinstance(content, str) or not content.strip():
        return "a message without text"

    learnt = _read_marks(message, role, notes)
    if isinstance(learnt, str):
        return learnt

    fields = {
        name: _clean_value(field, notes)
        for name, field in message.items()
        if name not in (*names, *_MARKS) and field not in (None, [], {})
    }
    # The template receives the role and the text under these names, e.g. instead of `from`.
    for name in ("role", "content"):
        if is_filled(fields.pop(name, None)):
            count_field_note(notes, UNWRITTEN, name)
    return Turn(role, plain_text(content, notes), learnt, fields)


def _read_marks(
    message: Mapping[str, Any], role: str, notes: Counter[str]
) -> bool | str:
    """Read whether a message is learnt, or return the reason for dropping the record.

    Add the marks without an effect, and the answers that are not learnt, to `notes`.
    """
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
        for name, value in part.items():
            if name in ("type", "text") or not is_filled(value):
                continue
            if name not in _MARKS:
                count_field_note(notes, UNUSED_OF_PARTS, name)
            elif _read_mark(value) is not True:
                return "", "a message to be learnt only in parts"
    return join_parts(part["text"] for part in parts), ""


def join_parts(texts: Iterable[str]) -> str:
    """Join the texts of a message's parts, with a space between two texts without one."""
    pieces: list[str] = []
    for text in filter(None, texts):
        if pieces and not (pieces[-1][-1].isspace() or text[0].isspace()):
            pieces.append(" ")
        pieces.append(text)
    return "".join(pieces)


def _read_mark(mark: object) -> bool | None:
    """Convert a message's mark to a boolean. Return None for a value other than 0 and 1."""
    if isinstance(mark, str):
        words = {"1": True, "true": True, "0": False, "false": False}
        return words.get(mark.strip().lower())
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


def conversation_example(turns: list[Turn], notes: Counter[str]) -> Example | str:
    """Make an example up to the last learnt answer, or return the reason for dropping it."""
    answers = [n for n, turn in enumerate(turns) if turn.role == ASSISTANT]
    learnt = [n for n in answers if turns[n].learnt]
    if not answers:
        return "no answer"
    if not learnt:
        return "no learnt answer"
    if learnt[0] == 0 or turns[learnt[0] - 1].role == "system":
        return "an answer before the first question"
    if any(following == n + 1 for n, following in pairwise(answers)):
        return "two answers in a row"
    if n_after := len(turns) - 1 - learnt[-1]:
        notes[AFTER_LAST] += n_after
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
            "either a list of messages (columns: {messages: NAME}) or a prompt and a target with "
            "an optional system text (columns: {system: NAME, prompt: NAME, target: NAME})."
        )
    return True
