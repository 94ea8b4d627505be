"""Conversations in the forms of other trainers: what becomes of each message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from toque.config import SourceConfig
from toque.cooking.schemas.reader import reader_for
from toque.errors import ConfigError, DataError
from toque.sources.conversations import (
    AFTER_LAST,
    IN_PROMPT,
    NOT_LEARNT,
    ONLY_READ,
    UNUSED_OF_PARTS,
    ConversationReader,
    join_parts,
)
from toque.sources.documents import PairReader
from toque.sources.file_kinds import FileJudge
from toque.sources.records import BlockExamples, Located, RecordReader, Turn

TURNS = [Turn("user", "Which rice?"), Turn("assistant", "Arborio.")]
SYSTEM = Turn("system", "You cook.")
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
    return judge.judge([Located(str(path), path)], print).reader


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
            [SYSTEM, *TURNS],
        ),
        ({"messages": [{"role": "developer", "content": "You cook."}, ASKED, SAID]},
         [SYSTEM, *TURNS]),
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
            [SYSTEM, *TURNS],
        ),
        (
            {"system": "You are {who}.", "prompt": "q", "target": "{a}"},
            {"who": "a cook", "q": "Which rice?", "a": "Arborio."},
            [Turn("system", "You are a cook."), *TURNS],
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
        ([{"role": "critic", "content": "Hm."}], "an unknown role: 'critic'"),
        ([ASKED, {"role": "assistant", "content": ""}], "a message without text"),
        ([ASKED, {**SAID, "tool_calls": [{}]}], "a message that calls tools"),
        (
            [ASKED, {**SAID, "function_call": {"name": "f"}}],
            "a message that calls tools",
        ),
        ([ASKED, {**SAID, "weight": 0.5}], "a message with weight neither 0 nor 1"),
        ([ASKED, {**SAID, "train": "half"}], "a message with train neither 0 nor 1"),
        ([ASKED, {**SAID, "weight": 0}], "no learnt answer"),
        (
            [ASKED, {**SAID, "train_detail": [{"begin_offset": 0, "train": False}]}],
            "a message to be learnt only in parts",
        ),
        (
            [
                ASKED,
                {**SAID, "content": [{"type": "text", "text": "Any.", "weight": 0}]},
            ],
            "a message to be learnt only in parts",
        ),
        (
            [ASKED, {**SAID, "content": [{"type": "thinking", "text": "Hm."}]}],
            "a message with more than text",
        ),
        (
            [{**ASKED, "content": [{"type": "image"}]}, SAID],
            "a message with more than text",
        ),
        ([{"who": "user"}], "a message without role and content"),
        ([], "no answer"),
        (None, "no messages"),
        (7, "messages that are not a list"),
    ],
)
def test_what_is_no_conversation_is_dropped_by_its_reason(messages, reason, tmp_path):
    found = read([{"messages": [ASKED, SAID]}, {"messages": messages}], tmp_path)
    assert found.dropped == {reason: [2]}
    assert (found.read, found.kept) == (2, 1)


@pytest.mark.parametrize(
    ("name", "mark"),
    [
        ("weight", 0), ("weight", 0.0), ("weight", "0"), ("weight", False), ("train", False),
        ("training", False), ("training", "false"), ("loss", False), ("loss_mask", 0),
        ("loss_scale", 0.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", [("role", "content"), ("from", "value")])
def test_an_answer_marked_not_to_be_learnt_is_only_read_and_counted(
    name, mark, form, tmp_path
):
    first = {"role": "assistant", "content": "Burn it.", name: mark}
    messages = [ASKED, first, ASKED, {**SAID, name: None}, ASKED, {**SAID, name: 1}]
    names = dict(zip(("role", "content"), form, strict=True))
    messages = [
        {names.get(k, k): v for k, v in message.items()} for message in messages
    ]
    [example] = (found := read([{"messages": messages}], tmp_path)).examples
    assert [turn.learnt for turn in example.turns] == [
        True,
        False,
        True,
        True,
        True,
        True,
    ]
    assert all(turn.fields == {} for turn in example.turns)
    assert found.notes == {NOT_LEARNT.format(repr(name)): 1}


def test_a_question_that_is_marked_to_be_learnt_is_counted(tmp_path):
    messages = [
        {**ASKED, "weight": 1},
        {**SAID, "weight": 1},
        {**ASKED, "weight": 0},
        SAID,
    ]
    assert read([{"messages": messages}], tmp_path).notes == {
        ONLY_READ.format("'weight'"): 1
    }


def test_turns_behind_the_last_learnt_answer_are_left_out_and_counted(tmp_path):
    messages = [ASKED, SAID, ASKED, {**SAID, "weight": 0}]
    found = read([{"messages": messages}], tmp_path)
    assert list(found.examples[0].turns) == TURNS
    assert found.notes[AFTER_LAST] == 2


def test_answers_of_a_prompt_are_only_read(tmp_path):
    found = read([{"prompt": [ASKED, SAID, ASKED], "completion": [SAID]}], tmp_path)
    assert [turn.learnt for turn in found.examples[0].turns] == [
        True,
        False,
        True,
        True,
    ]
    assert found.notes == {IN_PROMPT: 1}


def test_other_fields_of_a_message_are_for_the_template(tmp_path):
    fields = {
        "thinking": "Ris\x0botto.",
        "name": "",
        "prefix": True,
        "meta": {"at": [1, "\ud83c"]},
    }
    empty = {"tool_calls": [], "audio": None, "refusal": None, "annotations": {}}
    found = read([{"messages": [ASKED, {**SAID, **fields, **empty}]}], tmp_path)
    plain = {**fields, "thinking": "Ris\notto.", "meta": {"at": [1, "\ufffd"]}}
    assert found.examples[0].turns[-1].fields == plain


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (("One thing.", "", "Which rice?"), "One thing. Which rice?"),
        (("That is ", "rice."), "That is rice."),
        (("That is", "\n\nrice."), "That is\n\nrice."),
        ((), ""),
    ],
)
def test_parts_of_a_message_that_would_touch_get_a_blank(parts, text):
    assert join_parts(parts) == text


def test_a_field_of_a_part_is_counted(tmp_path):
    part = {
        "type": "text",
        "text": "Which rice?",
        "cache_control": {"type": "ephemeral"},
    }
    found = read([{"messages": [{**ASKED, "content": [part]}, SAID]}], tmp_path)
    assert found.notes == {UNUSED_OF_PARTS.format("'cache_control'"): 1}


def test_conversations_that_differ_in_capitals_or_marks_are_no_duplicates(tmp_path):
    answers = [
        SAID,
        {**SAID, "content": "ARBORIO."},
        {**SAID, "thinking": "Ris."},
        SAID,
    ]
    found = read([{"messages": [ASKED, answer]} for answer in answers], tmp_path)
    keys = [example.record_key for example in found.examples]
    assert len(set(keys)) == 3
    assert keys[0] == keys[3]


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


@pytest.mark.parametrize(
    "columns",
    [{"messages": "m", "prompt": "p"}, {"system": "s"}, {"system": "s", "prompt": "p"}],
)
def test_columns_that_are_no_conversation_are_refused(columns):
    with pytest.raises(
        ConfigError, match="For conversations, use either a list of messages"
    ):
        reader_for(columns)


@pytest.mark.parametrize(
    "template", ["{question", "{}", "{question!r}", "{question:>9}"]
)
def test_a_template_that_cannot_be_read_is_refused(template, tmp_path):
    with pytest.raises(ConfigError, match=r"columns of a source .*braces"):
        read([{"question": "q", "answer": "a"}], tmp_path,
             columns={"prompt": template, "target": "answer"})  # fmt: skip


def test_a_template_of_a_field_that_is_not_there_is_refused(tmp_path):
    columns = {"prompt": "{question} {hint}", "target": "answer"}
    with pytest.raises(DataError, match="has no column for prompt, part 2: hint"):
        read([{"question": "q", "answer": "a"}], tmp_path, columns=columns)


def test_a_pair_made_by_templates_loses_no_field(tmp_path):
    columns = {"prompt": "{{Q}} {q}\n\nHint: {hint}", "target": "{a} ({n})"}
    records = [
        {"q": "Why?", "hint": "heat", "a": "So.", "n": 3},
        {"q": "And?", "a": "No.", "n": 4},
    ]
    found = read(records, tmp_path, columns=columns)
    assert isinstance(reader_for(columns), PairReader)
    assert [(e.prompt, e.target) for e in found.examples] == [
        ("{Q} Why?\n\nHint: heat", "So. (3)"),
        ("{Q} And?", "No. (4)"),
    ]


def test_a_readers_name_says_how_it_reads():
    one, other = (ConversationReader({"messages": name}) for name in ("a", "b"))
    assert one.recorded_name != other.recorded_name
