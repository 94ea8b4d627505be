r"""Reader of preference pairs: a prompt with a chosen and a rejected answer.

{"prompt": "...", "chosen": "...", "rejected": "..."}       texts
{"chosen": "...", "rejected": "..."}                        texts that begin with the same prompt
{"prompt": [...], "chosen": [...], "rejected": [...]}       messages; chosen and rejected: answers
{"chosen": [...], "rejected": [...]}                        entire conversations
{"prompt": "...", "chosen": [...], "rejected": [...]}       conversations that contain the prompt

A pair becomes two examples, the chosen answer first. Only the answers contribute to the loss.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
import xxhash

from toque.errors import ConfigError, join_first
from toque.sources.conversations import (
    AFTER_LAST,
    ASSISTANT,
    CONVERSATIONS,
    are_messages,
    conversation_example,
    read_turns,
)
from toque.sources.decompress import UTF_8
from toque.sources.documents import (
    NO_PROMPT,
    PAIRS,
    fields_in,
    named_columns,
    text_of,
)
from toque.sources.layouts import (
    RECORD_FUNCTIONS,
    Columns,
    FileLayout,
    columns_in_words,
    layout_with,
    read_records,
    shown_names,
)
from toque.sources.records import (
    Block,
    BlockExamples,
    Example,
    RecordReader,
    Source,
    Turn,
    add_encoding,
    attempt,
    is_filled,
    unpack,
)

CHOSEN, REJECTED = "chosen", "rejected"
PREFERRED = "preferred"
"""Column of a store with pairs: 1 for a chosen answer, 0 for a rejected answer."""
EQUAL = "chosen and rejected are equal"
EQUAL_WORDS = "chosen and rejected differ only in white space"
OTHER_TYPE = "chosen and rejected are of different types"
OTHER_PROMPTS = "the prompts of chosen and rejected differ"
PROMPT_NOT_INSIDE = "the messages of chosen and rejected do not contain the prompt"
SEVERAL_TURNS = "a conversation of several turns, which needs a decoder-only model"
IMPLICIT = "prompts taken from the common beginning of chosen and rejected"
_SIDES = (CHOSEN, REJECTED)
_MAX_BLOCKS = 8  # number of blocks that are searched for a first pair
_ANSWER_MARK = re.compile(
    r"^[#* \t]*+(?:assistant|response|answer|a|tl;dr)[* \t]*+:"
    r"|<\|im_start\|>assistant|<\|assistant\|>|<start_of_turn>model|\[/INST\]"
    r"|<\|start_header_id\|>assistant<\|end_header_id\|>",
    re.IGNORECASE | re.MULTILINE,
)
"""Text before an answer in dialogues that are written as one text, e.g. "Assistant:"."""
_WHITE_SPACE = re.compile(r"\s")

Form = Literal["texts", "messages", "one turn"]
"""Form of the examples. one turn: prompts and answers from messages with a single question."""
Pair = tuple[str, str, str]  # prompt, chosen answer and rejected answer


@dataclass(frozen=True)
class PreferenceReader:
    """`RecordReader` of preference pairs in the columns of a source.

    Pairs with the same prompt stay on one side of the split.
    """

    columns: Columns
    form: Form = "texts"
    version: int = 1
    encoding: str = UTF_8

    @property
    def recorded_name(self) -> str:
        """Name in manifests, see `RecordReader`."""
        prefix = CONVERSATIONS if self.form == "messages" else PAIRS
        content = json.dumps({"preferences": self.columns, "form": self.form})
        return add_encoding(f"{prefix}{content}", self.encoding)

    def for_file(self, path: Path) -> Self:
        """Return the reader for the first pair in a file: of texts or of messages.

        Raises:
            DataError: A column is missing.
        """
        record = self._find_first_record(path)
        fields = [field for part in self._fields.values() for field in part]
        has_messages = any(are_messages(record.get(field)) for field in fields)
        if has_messages or "system" in self.columns:
            return replace(self, form="messages")
        return replace(self, form="texts")

    def has_one_turn(self, path: Path) -> bool:
        """Check that the first pair in a file has a single question, or that it is not usable."""
        record = self._find_first_record(path)
        reader = replace(self, form="one turn")
        return attempt(reader.examples_of, record, Counter()) != SEVERAL_TURNS

    def blocks(self, path: Path) -> Iterator[Block]:
        """Read blocks of records."""
        return self._layout(path).blocks(sorted(self._used))

    def schema(self, path: Path) -> str:
        """Return the layout of a file, for the report."""
        kind = "texts" if self.form == "texts" else "messages"
        return f"{self._layout(path).name} chosen and rejected {kind}"

    def examples(self, block: Block) -> BlockExamples:
        """Make two examples from each record with two different answers, the chosen one first."""
        return read_records(block, self.examples_of, self._used)

    def examples_of(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Example] | str:
        """Make the two examples of a record, or return the reason for dropping the record."""
        if self.form == "texts":
            return self._examples_of_texts(record, notes)
        return self._examples_of_messages(record, notes)

    @cached_property
    def _fields(self) -> dict[str, tuple[str, ...]]:
        """Fields of each column, including the fields of templates."""
        return {part: fields_in(column) for part, column in self.columns.items()}

    @cached_property
    def _used(self) -> set[str]:
        return {name for fields in self._fields.values() for name in fields}

    def _layout(self, path: Path) -> FileLayout:
        return layout_with(path, named_columns(self.columns), encoding=self.encoding)

    def _find_first_record(self, path: Path) -> Mapping[str, Any]:
        """Return the first record of a file with two answers, or {} without such a record."""
        for block in islice(self.blocks(path), _MAX_BLOCKS):
            contents = unpack(block)
            for _, record in RECORD_FUNCTIONS[contents.kind](contents):
                if isinstance(record, dict) and all(
                    is_filled(record.get(self._fields[side][0])) for side in _SIDES
                ):
                    return record
        return {}

    def _examples_of_texts(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Example] | str:
        """Make the examples of two texts, or return the reason for dropping the record."""
        texts = self._read_answers(record, notes)
        if isinstance(texts, str):
            return texts
        chosen, rejected = texts
        if reason := compare_answers(chosen, rejected):
            return reason

        if "prompt" not in self.columns:
            pair = split_common_prompt(chosen, rejected)
            if pair is None:
                return NO_PROMPT
            notes[IMPLICIT] += 1
            return _text_examples(pair)

        prompt, unread = text_of(record, self.columns["prompt"], notes)
        if unread:
            return f"{unread} is not a text"
        if not prompt.strip():
            return NO_PROMPT
        return _text_examples((prompt, chosen, rejected))

    def _read_answers(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[str] | str:
        """Read the two answers as texts, or return the reason for dropping the record."""
        texts: list[str] = []
        # Sides with a list or an object.
        no_texts: list[str] = []
        for side in _SIDES:
            values = [record.get(field) for field in self._fields[side]]
            text, unread = text_of(record, self.columns[side], notes)
            if unread or any(isinstance(value, list | dict) for value in values):
                no_texts.append(side)
            elif not text.strip():
                return f"no {side} answer"
            texts.append(text)
        if len(no_texts) == 1:
            return OTHER_TYPE
        return f"{CHOSEN} is not a text" if no_texts else texts

    def _examples_of_messages(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Example] | str:
        """Make the examples of two conversations, or return the reason for dropping the record."""
        before = self._read_prompt(record, notes)
        if isinstance(before, str):
            return before
        answers = self._read_answer_turns(record, notes)
        if isinstance(answers, str):
            return answers

        conversations: list[Example] = []
        for side, turns in zip(_SIDES, answers, strict=True):
            conversation = _join_turns(before, turns, side, notes)
            if isinstance(conversation, str):
                return conversation
            conversations.append(conversation)
        chosen, rejected = conversations
        if _contents(chosen.turns[:-1]) != _contents(rejected.turns[:-1]):
            return OTHER_PROMPTS
        if chosen.turns[-1].fields == rejected.turns[-1].fields and (
            reason := compare_answers(chosen.target, rejected.target)
        ):
            return reason

        if self.form == "one turn":
            if sum(turn.role != "system" for turn in chosen.turns) > 2:
                return SEVERAL_TURNS
            return _text_examples((chosen.prompt, chosen.target, rejected.target))
        key = _hash(f"{chosen.record_key}\0{rejected.record_key}")
        return [
            msgspec.structs.replace(example, columns=columns, record_key=key)
            for example, columns in zip(conversations, _COLUMNS, strict=True)
        ]

    def _read_prompt(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[Turn] | str:
        """Read the turns of the columns `system` and `prompt`, or return a reason to drop them."""
        turns: list[Turn] = []
        for role, part in (("system", "system"), ("user", "prompt")):
            if part not in self.columns:
                continue
            value = record.get(self._fields[part][0])
            if are_messages(value):
                messages = read_turns(value, notes)
                if isinstance(messages, str):
                    return f"{part}: {messages}"
                turns += messages
                continue
            text, unread = text_of(record, self.columns[part], notes)
            if unread:
                return f"{unread} is not a text"
            if text.strip():
                turns.append(Turn(role, text))
        return turns

    def _read_answer_turns(
        self, record: Mapping[str, Any], notes: Counter[str]
    ) -> list[list[Turn]] | str:
        """Read the turns of both answers, or return the reason for dropping the record."""
        values = [record.get(self._fields[side][0]) for side in _SIDES]
        for side in _SIDES:
            if not any(is_filled(record.get(field)) for field in self._fields[side]):
                return f"no {side} answer"
        is_of_messages = [are_messages(value) for value in values]
        if len(set(is_of_messages)) > 1:
            return OTHER_TYPE
        if not is_of_messages[0]:
            texts = self._read_answers(record, notes)
            if isinstance(texts, str):
                return texts
            return [[Turn(ASSISTANT, text)] for text in texts]

        answers: list[list[Turn]] = []
        for side, value in zip(_SIDES, values, strict=True):
            turns = read_turns(value, notes)
            if isinstance(turns, str):
                return f"{side}: {turns}"
            answers.append(turns)
        return answers


_COLUMNS: tuple[Mapping[str, float], ...] = ({PREFERRED: 1.0}, {PREFERRED: 0.0})
"""Values of the columns of a chosen and a rejected answer."""


def _text_examples(pair: Pair) -> list[Example]:
    """Make the examples of a prompt with two answers."""
    prompt, *answers = pair
    # Prompts that differ in case stay on one side of the split, but are not duplicates.
    key = _hash(prompt.casefold())
    record_key = _hash("\0".join(pair))
    return [
        Example(
            prompt, answer, key, title_key=0, record_key=record_key, columns=columns
        )
        for answer, columns in zip(answers, _COLUMNS, strict=True)
    ]


def _join_turns(
    before: Sequence[Turn], turns: Sequence[Turn], side: str, notes: Counter[str]
) -> Example | str:
    """Make the conversation of an answer, or return the reason for dropping the record.

    Args:
        before: Turns of the columns `system` and `prompt`.
        turns: Turns of the column `chosen` or `rejected`: an answer or an entire conversation.
        side: The name of the column.
        notes: Counts for the report, which this call increases.
    """
    is_entire_conversation = bool(turns) and turns[0].role != ASSISTANT
    if is_entire_conversation:
        contents = {*_contents(turns[:-1])}
        missing = [turn for turn in before if contents.isdisjoint(_contents([turn]))]
        if any(turn.role != "system" for turn in missing):
            return PROMPT_NOT_INSIDE
        before = missing

    conversation = [*before, *turns]
    answers = [n for n, turn in enumerate(conversation) if turn.role == ASSISTANT]
    if not answers:
        return f"no {side} answer"
    last = answers[-1]
    if n_after := len(conversation) - 1 - last:
        notes[AFTER_LAST] += n_after
    # Only the last answer contributes to the loss.
    read_only = [
        msgspec.structs.replace(turn, learnt=False) for turn in conversation[:last]
    ]
    example = conversation_example([*read_only, conversation[last]], notes)
    return f"{side}: {example}" if isinstance(example, str) else example


def _contents(turns: Iterable[Turn]) -> list[tuple[str, str]]:
    """List the role and the text of each turn, without surrounding white space."""
    return [(turn.role, turn.text.strip()) for turn in turns]


def compare_answers(chosen: str, rejected: str) -> str:
    """Return the reason for dropping a pair with equal answers, or "" if they differ.

    >>> compare_answers("Stir.", "Stir. "), compare_answers("Stir.", "Fold.")
    ('chosen and rejected differ only in white space', '')
    """
    if chosen == rejected:
        return EQUAL
    return EQUAL_WORDS if chosen.split() == rejected.split() else ""


def split_common_prompt(chosen: str, rejected: str) -> Pair | None:
    r"""Divide two texts into their common prompt and their answers, without space between them.

    The prompt ends after the last mark of an answer in the common beginning, such as "Assistant:".
    Without a mark, it ends at the last line break, and without a line break at the last white
    space.

    >>> split_common_prompt("Q: Which rice?\nA: Arborio.", "Q: Which rice?\nA: Any.")
    ('Q: Which rice?\nA:', 'Arborio.', 'Any.')

    Returns:
        Prompt, chosen answer and rejected answer. None if the texts have no common prompt.
    """
    common = os.path.commonprefix([chosen, rejected])  # noqa: RUF071  # by character
    # Both answers need at least one character.
    lengths = (len(chosen.rstrip()), len(rejected.rstrip()))
    beginning = common[: max(0, min(lengths) - 1)]
    end = _find_prompt_end(beginning)
    prompt = chosen[:end].rstrip()
    if not prompt:
        return None
    return prompt, chosen[end:].lstrip(), rejected[end:].lstrip()


def _find_prompt_end(beginning: str) -> int:
    """Find the end of the prompt in the common beginning of two texts. 0 means no prompt."""
    marks = [mark.end() for mark in _ANSWER_MARK.finditer(beginning)]
    if marks:
        return marks[-1]
    stripped = beginning.lstrip()
    n_blanks = len(beginning) - len(stripped)
    if "\n" in stripped:
        return n_blanks + stripped.rindex("\n")
    blanks = [blank.start() for blank in _WHITE_SPACE.finditer(stripped)]
    return n_blanks + blanks[-1] if blanks else 0


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def check_columns(columns: Columns) -> bool:
    """Check whether the columns of a source describe preference pairs.

    Raises:
        ConfigError: An answer is missing, or another part cannot be used for pairs.
    """
    if columns.keys().isdisjoint(_SIDES):
        return False
    parts = columns.keys() - {"system"}
    if parts not in ({*_SIDES}, {"prompt", *_SIDES}):
        pair = {"prompt": "NAME", CHOSEN: "NAME", REJECTED: "NAME"}
        raise ConfigError(
            f"The columns of a source are {', '.join(sorted(columns))}. Preference pairs need "
            f"chosen and rejected, with an optional prompt and system text: "
            f"{columns_in_words(pair)}. To train on the chosen answers alone, use "
            "columns: {prompt: NAME, target: NAME}."
        )
    return True


def has_message_pairs(source: Source) -> bool:
    """Check whether a source has preference pairs of messages."""
    return any(
        isinstance(reader, PreferenceReader) and reader.form == "messages"
        for _, reader in _readers_by_file(source)
    )


def with_one_turn(source: Source) -> Source:
    """Return a source with readers that turn messages with a single question into texts.

    Raises:
        ConfigError: The first pair of a file has several questions.
    """
    for file in source.files or ():
        reader = source.readers.get(file.name, source.reader)
        if not isinstance(reader, PreferenceReader) or reader.form != "messages":
            continue
        if not reader.has_one_turn(file.path):
            raise ConfigError(
                f"{file.name} has preference pairs with conversations of several turns, which need "
                "a decoder-only model. Use a GPT-2, NeoX or Llama model, or write each "
                "conversation before the answers as one text and name it in the source: "
                f"{columns_in_words({'prompt': 'NAME', CHOSEN: 'NAME', REJECTED: 'NAME'})}."
            )

    def convert(reader: RecordReader) -> RecordReader:
        if isinstance(reader, PreferenceReader) and reader.form == "messages":
            return replace(reader, form="one turn")
        return reader

    readers = {name: convert(reader) for name, reader in source.readers.items()}
    return replace(source, reader=convert(source.reader), readers=readers)


def refuse_mixture(sources: Sequence[Source]) -> None:
    """Check that all sources have preference pairs, or none.

    Raises:
        ConfigError: Some files have preference pairs, and other files do not.
    """
    pairs: list[str] = []
    others: list[str] = []
    for source in sources:
        for name, reader in _readers_by_file(source):
            names = pairs if isinstance(reader, PreferenceReader) else others
            names.append(name)
    if not pairs or not others:
        return
    raise ConfigError(
        f"The sources have preference pairs ({join_first(pairs)}) and other examples "
        f"({join_first(others)}), but a store has only one of the two. Train on the other examples "
        "first, then on the pairs with a second configuration that starts from the finished "
        "model. To imitate the chosen answers instead, name them in the source of the pairs: "
        f"{columns_in_words({'prompt': 'NAME', 'target': CHOSEN})}."
    )


def describe_missing_pairs(path: str, fields: Sequence[str] = ()) -> str:
    """Return the message about a source without preference pairs, for the objective dpo.

    `fields` are the field names of its records, if they are known.
    """
    known_fields = f" (its fields: {shown_names(fields)})" if fields else ""
    columns = columns_in_words({"prompt": "NAME", CHOSEN: "NAME", REJECTED: "NAME"})
    return (
        f"objective.kind is dpo, but {path} has no preference pairs{known_fields}. Each record "
        "needs a chosen and a rejected answer, and their prompt unless both answers begin with it. "
        f"If the fields have other names, name them in the source: {columns}. To imitate answers "
        "instead, remove objective.kind."
    )


def refuse_sources_without_pairs(sources: Sequence[Source]) -> None:
    """Check that every file has preference pairs.

    Raises:
        ConfigError: A file has other examples.
    """
    refuse_mixture(sources)
    for source in sources:
        for name, reader in _readers_by_file(source):
            if not isinstance(reader, PreferenceReader):
                raise ConfigError(describe_missing_pairs(name))


def _readers_by_file(source: Source) -> list[tuple[str, RecordReader]]:
    """List the files of a source with their readers, or its path with each reader."""
    if source.files is None:
        readers = [source.reader, *source.readers.values()]
        return [(source.path, reader) for reader in readers]
    return [
        (file.name, source.readers.get(file.name, source.reader))
        for file in source.files
    ]
