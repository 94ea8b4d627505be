"""Conversations in the forms of other trainers: what becomes of each message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toque.config import SourceConfig
from toque.cooking.schemas.reader import reader_for
from toque.errors import ConfigError, DataError
from toque.sources.conversations import AFTER_LAST, ConversationReader
from toque.sources.documents import PairReader
from toque.sources.file_kinds import FileJudge
from toque.sources.layouts import RefusedFileError
from toque.sources.records import BlockExamples, Located, RecordReader, Turn

TURNS: list[Turn] = [("user", "Which rice?"), ("assistant", "Arborio.")]
ASKED = {"role": "user", "content": "Which rice?"}
SAID = {"role": "assistant", "content": "Arborio."}


def read(records: list[dict[str, Any]], folder: Path, **source: Any) -> BlockExamples:
    """Examples of records in a file of JSON lines, by the reader that its source gets."""
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    reader = judged(path, **source)
    [block] = reader.blocks(path)
    return reader.examples(block)


def judged(path: Path, **source: Any) -> RecordReader:
    judge = FileJudge(SourceConfig(path=str(path), **source), "utf-8", reader_for)
    return judge.judged([Located(str(path), path)], print).reader


@pytest.mark.parametrize(
    ("record", "turns"),
    [
        ({"messages": [ASKED, SAID]}, TURNS),
        (
            {"conversations": [
                {"from": "human", "value": "Which rice?"}, {"from": "gpt", "value": "Arborio."},
            ]},
            TURNS,
        ),
        ({"prompt": [ASKED], "completion": [SAID]}, TURNS),
        (
            {"system": "You cook.", "conversations": [ASKED, SAID], "id": "7"},
            [("system", "You cook."), *TURNS],
        ),
        ({"messages": [{"role": "developer", "content": "You cook."}, ASKED, SAID]},
         [("system", "You cook."), *TURNS]),
        ({"messages": [{**ASKED, "content": [{"type": "text", "text": "Which rice?"}]}, SAID]},
         TURNS),
    ],
)  # fmt: skip
def test_a_file_of_messages_is_known_by_what_it_holds(record, turns, tmp_path):
    found = read([record], tmp_path)
    assert [list(example.turns) for example in found.examples] == [turns]
    assert found.examples[0].target == "Arborio."
    assert found.unused == ({"id": 1} if "id" in record else {})


@pytest.mark.parametrize(
    ("columns", "record", "turns"),
    [
        (
            {"system": "who", "prompt": "{q}\n\nGiven: {with}", "target": "a"},
            {"who": "You cook.", "q": "Which rice?", "with": " ", "a": "Arborio."},
            [("system", "You cook."), *TURNS],
        ),
        (
            {"system": "You are {who}.", "prompt": "q", "target": "{a}"},
            {"who": "a cook", "q": "Which rice?", "a": "Arborio."},
            [("system", "You are a cook."), *TURNS],
        ),
        ({"messages": "chosen"}, {"chosen": [ASKED, SAID], "rejected": [ASKED]}, TURNS),
    ],
)
def test_columns_say_what_a_conversation_is_made_of(columns, record, turns, tmp_path):
    found = read([record], tmp_path, columns=columns)
    assert [list(example.turns) for example in found.examples] == [turns]
    assert found.unused == ({"rejected": 1} if "rejected" in record else {})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([ASKED], "no answer"),
        ([SAID, ASKED], "an answer before the first question"),
        ([ASKED, SAID, SAID], "two answers in a row"),
        ([{"role": "critic", "content": "Hm."}], "a role that nobody knows: 'critic'"),
        ([ASKED, {"role": "assistant", "content": ""}], "a message without text"),
        ([ASKED, {**SAID, "tool_calls": [{}]}], "a message that calls tools"),
        ([{**ASKED, "content": [{"type": "image"}]}, SAID], "a message that holds more than text"),
        ([{"who": "user"}], "a message without role and content"),
        ([], "no answer"),
        (None, "no messages"),
        (7, "messages that are no list"),
    ],
)
def test_what_is_no_conversation_is_dropped_by_its_reason(messages, reason, tmp_path):
    found = read([{"messages": [ASKED, SAID]}, {"messages": messages}], tmp_path)
    assert found.dropped == {reason: [2]}
    assert (found.read, found.kept) == (2, 1)


def test_turns_after_the_last_answer_are_left_out_and_counted(tmp_path):
    found = read([{"messages": [ASKED, SAID, ASKED]}], tmp_path)
    assert list(found.examples[0].turns) == TURNS
    assert found.notes[AFTER_LAST] == 1


def test_conversations_with_one_opening_stay_on_one_side(tmp_path):
    other = {"role": "assistant", "content": "Any."}
    found = read([{"messages": [ASKED, SAID]}, {"messages": [ASKED, other]}], tmp_path)
    one, two = found.examples
    assert one.key == two.key
    assert one.record_key != two.record_key


def test_preference_pairs_are_refused_in_words(tmp_path):
    record = {"prompt": "Which rice?", "chosen": "Arborio.", "rejected": "None."}
    with pytest.raises(RefusedFileError, match=r"preference pairs.*chosen.*rejected") as refused:
        read([record], tmp_path)
    assert "columns: {messages: chosen}" in str(refused.value)


@pytest.mark.parametrize(
    "columns",
    [{"messages": "m", "prompt": "p"}, {"system": "s"}, {"system": "s", "prompt": "p"}],
)
def test_columns_that_are_no_conversation_are_refused(columns):
    with pytest.raises(ConfigError, match="A conversation is a list of messages"):
        reader_for(columns)


@pytest.mark.parametrize("template", ["{question", "{}", "{question!r}", "{question:>9}"])
def test_a_template_that_cannot_be_read_is_refused(template, tmp_path):
    with pytest.raises(ConfigError, match=r"columns of a source .*braces"):
        read([{"question": "q", "answer": "a"}], tmp_path,
             columns={"prompt": template, "target": "answer"})  # fmt: skip


def test_a_template_of_a_field_that_is_not_there_is_refused(tmp_path):
    columns = {"prompt": "{question} {hint}", "target": "answer"}
    with pytest.raises(DataError, match="without the column named for prompt, part 2: hint"):
        read([{"question": "q", "answer": "a"}], tmp_path, columns=columns)


def test_a_pair_made_by_templates_loses_no_field(tmp_path):
    columns = {"prompt": "{{Q}} {q}\n\nHint: {hint}", "target": "{a} ({n})"}
    records = [{"q": "Why?", "hint": "heat", "a": "So.", "n": 3}, {"q": "And?", "a": "No.", "n": 4}]
    found = read(records, tmp_path, columns=columns)
    assert isinstance(reader_for(columns), PairReader)
    assert [(e.prompt, e.target) for e in found.examples] == [
        ("{Q} Why?\n\nHint: heat", "So. (3)"),
        ("{Q} And?", "No. (4)"),
    ]


def test_a_readers_name_says_how_it_reads():
    one, other = (ConversationReader({"messages": name}) for name in ("a", "b"))
    assert one.recorded_name != other.recorded_name
