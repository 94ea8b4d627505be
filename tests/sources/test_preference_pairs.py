"""Preference pairs: the two examples of a record in every form, and the dropped records."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from toque.config import SourceConfig
from toque.cooking.schemas.reader import reader_for
from toque.errors import ConfigError, DataError
from toque.sources.conversations import AFTER_LAST
from toque.sources.documents import NO_PROMPT
from toque.sources.file_kinds import FileJudge
from toque.sources.preference_pairs import (
    EQUAL,
    EQUAL_WORDS,
    IMPLICIT,
    OTHER_PROMPTS,
    OTHER_TYPE,
    PREFERRED,
    PROMPT_NOT_INSIDE,
    SEVERAL_TURNS,
    PreferenceReader,
    refuse_mixture,
    split_common_prompt,
    with_one_turn,
)
from toque.sources.records import BlockExamples, Located, Source, Turn

Record = dict[str, Any]
TEXTS = {"prompt": "Which rice?", "chosen": "Arborio.", "rejected": "None."}
SYSTEM = {"role": "system", "content": "You cook."}
ASKED = {"role": "user", "content": "Which rice?"}
GOOD = {"role": "assistant", "content": "Arborio."}
BAD = {"role": "assistant", "content": "None."}
SAID = {"role": "assistant", "content": "Hello."}


def source_of(path: Path, **settings: Any) -> Source:
    judge = FileJudge(SourceConfig(path=str(path), **settings), "utf-8", reader_for)
    return judge.judge([Located(str(path), path)], print)


def read_file(path: Path, **settings: Any) -> BlockExamples:
    reader = source_of(path, **settings).reader
    assert isinstance(reader, PreferenceReader)
    [block] = reader.blocks(path)
    return reader.examples(block)


def write_lines(records: list[Record], folder: Path) -> Path:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_json(records: list[Record], folder: Path) -> Path:
    path = folder / "pairs.json"
    path.write_text(json.dumps(records))
    return path


def write_csv(records: list[Record], folder: Path) -> Path:
    path = folder / "pairs.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(records[0]))
        writer.writeheader()
        for record in records:
            cells = {
                name: value if isinstance(value, str) else json.dumps(value)
                for name, value in record.items()
            }
            writer.writerow(cells)
    return path


def write_parquet(records: list[Record], folder: Path) -> Path:
    path = folder / "pairs.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(records), path)
    return path


WRITERS: dict[str, Callable[[list[Record], Path], Path]] = {
    "JSON lines": write_lines,
    "JSON": write_json,
    "CSV": write_csv,
    "Parquet": write_parquet,
}


def read(records: list[Record], folder: Path, **settings: Any) -> BlockExamples:
    return read_file(write_lines(records, folder), **settings)


def sides(found: BlockExamples) -> list[tuple[str, str, float]]:
    return [(e.prompt, e.target, e.columns[PREFERRED]) for e in found.examples]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(
    "record",
    [
        TEXTS,
        {
            "chosen": "Q: Which rice?\nA: Arborio.",
            "rejected": "Q: Which rice?\nA: Any.",
        },
        {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "Which rice?", "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
        {"prompt": "Which rice?", "chosen": [GOOD], "rejected": [BAD]},
    ],
    ids=["texts", "implicit", "messages", "conversations", "UltraFeedback", "answers"],
)
def test_every_form_is_recognised_in_every_kind_of_file(record, writer, tmp_path):
    # Three rows, because one row alone is not a table.
    others = [json.loads(json.dumps(record).replace("rice", n)) for n in ("pan", "pot")]
    found = read_file(WRITERS[writer]([record, *others], tmp_path))
    assert (found.read, found.kept, found.per_record) == (3, 3, [2, 2, 2])
    chosen, rejected = found.examples[:2]
    assert (chosen.columns, rejected.columns) == ({PREFERRED: 1.0}, {PREFERRED: 0.0})
    assert chosen.prompt == rejected.prompt
    assert chosen.prompt.removeprefix("Q: ").removesuffix("\nA:") == "Which rice?"
    assert chosen.target == "Arborio."
    assert rejected.target in ("None.", "Any.")
    assert (chosen.key, chosen.record_key) == (rejected.key, rejected.record_key)
    if isinstance(record["chosen"], list):
        assert [turn.learnt for turn in rejected.turns] == [False, True]


def test_columns_name_other_fields_and_the_texts_are_unchanged(tmp_path):
    record = {
        "q": " What of\r\nrice? ",
        "hint": "Short.",
        "response_j": "1. Boil  it.\n",
        "response_k": "- Fry it. ",
        "score": 2,
    }
    columns = {"chosen": "response_j", "rejected": "response_k"}
    found = read([record], tmp_path, columns={"prompt": ["q", "hint"], **columns})
    prompt = " What of\r\nrice? \n\nShort."
    assert sides(found) == [
        (prompt, "1. Boil  it.\n", 1.0),
        (prompt, "- Fry it. ", 0.0),
    ]
    assert found.unused == {"score": 1}
    template = {
        "prompt": "Q: {q}",
        "chosen": "A: {response_j}",
        "rejected": "response_k",
    }
    [(prompt, answer, _), _] = sides(read([record], tmp_path, columns=template))
    assert (prompt, answer) == ("Q:  What of\r\nrice? ", "A: 1. Boil  it.\n")


def test_chosen_answers_alone_are_still_prompts_and_targets(tmp_path):
    path = write_lines([TEXTS], tmp_path)
    reader = source_of(path, columns={"prompt": "prompt", "target": "chosen"}).reader
    [block] = reader.blocks(path)
    found = reader.examples(block)
    assert [(e.prompt, e.target, dict(e.columns)) for e in found.examples] == [
        ("Which rice?", "Arborio.", {})
    ]
    assert found.unused == {"rejected": 1}


def test_texts_next_to_the_prompt_are_in_the_prompt(tmp_path):
    orca = {"system": "You cook.", "question": "Which rice?"}
    answers = {"chosen": "Arborio.", "rejected": "None."}
    found = read([orca | answers], tmp_path)
    assert found.examples[0].prompt == "You cook.\n\nWhich rice?"
    talks = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD], "messages": [ASKED]}
    found = read([orca | talks], tmp_path)
    assert found.examples[0].turns[0] == Turn("system", "You cook.", learnt=False)
    assert found.unused == {"messages": 1}
    columns = {"system": "system", "prompt": "question"}
    columns |= {"chosen": "chosen", "rejected": "rejected"}
    found = read([orca | answers], tmp_path, columns=columns)
    assert [turn.text for turn in found.examples[1].turns] == [
        "You cook.",
        "Which rice?",
        "None.",
    ]


def test_a_prompt_of_several_turns_is_only_read(tmp_path):
    before = [SYSTEM, ASKED, SAID, ASKED]
    asked_again = {"chosen": [*before, GOOD, ASKED], "rejected": [*before, BAD]}
    explicit = {"prompt": before, "chosen": [GOOD], "rejected": [BAD]}
    both = explicit | {"chosen": [*before, GOOD], "rejected": [*before, BAD]}
    for record in (asked_again, explicit, both):
        found = read([record], tmp_path)
        assert [len(e.turns) for e in found.examples] == [5, 5]
        assert [t.learnt for t in found.examples[0].turns] == [False] * 4 + [True]
        assert found.notes.get(AFTER_LAST, 0) == (record is asked_again)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (TEXTS | {"rejected": "Arborio."}, EQUAL),
        (TEXTS | {"rejected": " Arborio. \n"}, EQUAL_WORDS),
        (TEXTS | {"rejected": "None", "chosen": "No\tne"}, None),
        (TEXTS | {"chosen": "a  b", "rejected": "a\nb"}, EQUAL_WORDS),
        (TEXTS | {"rejected": ""}, "no rejected answer"),
        (TEXTS | {"rejected": None}, "no rejected answer"),
        (TEXTS | {"chosen": " \n"}, "no chosen answer"),
        ({"prompt": "Which?", "chosen": "This."}, "no rejected answer"),
        (TEXTS | {"prompt": " "}, NO_PROMPT),
        (TEXTS | {"prompt": {"a": 1}}, "prompt is not a text"),
        (TEXTS | {"rejected": [BAD]}, OTHER_TYPE),
        (TEXTS | {"chosen": {"text": "a"}}, OTHER_TYPE),
        (TEXTS | {"chosen": ["a"], "rejected": [["b"]]}, "chosen is not a text"),
        (TEXTS | {"chosen": 4, "rejected": 5.5}, None),
        (TEXTS | {"chosen": float("nan")}, "no chosen answer"),
    ],
)
def test_texts_that_are_no_pair_are_dropped_with_the_reason(record, reason, tmp_path):
    found = read([TEXTS, record], tmp_path)
    assert found.dropped == ({} if reason is None else {reason: [2]})
    assert found.read == found.kept + len(found.dropped) == 2


TALK = {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (TALK | {"rejected": [ASKED, GOOD]}, EQUAL),
        (TALK | {"rejected": [ASKED, BAD | {"content": "Arborio. "}]}, EQUAL_WORDS),
        (TALK | {"rejected": [ASKED, GOOD | {"thinking": "Risotto."}]}, None),
        (TALK | {"rejected": [SYSTEM, ASKED, BAD]}, OTHER_PROMPTS),
        (TALK | {"rejected": [ASKED, SAID, ASKED, BAD]}, OTHER_PROMPTS),
        (TALK | {"rejected": [ASKED]}, "no rejected answer"),
        (TALK | {"rejected": []}, "no rejected answer"),
        (TALK | {"rejected": "None."}, OTHER_TYPE),
        (TALK | {"chosen": [GOOD], "rejected": [BAD]},
         "chosen: an answer before the first question"),
        (TALK | {"chosen": [ASKED, 7]}, "chosen: messages that are not a list"),
        (TALK | {"chosen": [{"a": [{}]}], "rejected": [[]]}, "chosen is not a text"),
        (TALK | {"rejected": [ASKED, BAD | {"content": ""}]},
         "rejected: a message without text"),
        (TALK | {"rejected": [ASKED, BAD | {"weight": 0}]}, "rejected: no learnt answer"),
    ],
)  # fmt: skip
def test_messages_that_are_no_pair_are_dropped_with_the_reason(
    record, reason, tmp_path
):
    found = read([TALK, record], tmp_path)
    assert found.dropped == ({} if reason is None else {reason: [2]})


def test_a_prompt_that_the_messages_do_not_contain_is_dropped(tmp_path):
    record = TALK | {"prompt": "Which rice?"}
    found = read([record, record | {"prompt": "Which pan?"}], tmp_path)
    assert found.dropped == {PROMPT_NOT_INSIDE: [2]}


def test_a_pair_is_known_by_its_prompt_and_both_answers(tmp_path):
    swapped = {"prompt": "Which rice?", "chosen": "None.", "rejected": "Arborio."}
    upper = TEXTS | {"prompt": "WHICH RICE?"}
    other = TEXTS | {"rejected": "Any."}
    found = read([TEXTS, swapped, upper, other, TEXTS], tmp_path)
    keys = [example.record_key for example in found.examples[::2]]
    assert len(set(keys)) == 4
    assert keys[0] == keys[4]
    assert len({example.key for example in found.examples}) == 1


@pytest.mark.parametrize(
    ("chosen", "rejected", "pair"),
    [
        (
            "\n\nHuman: Hi\n\nAssistant: Hello",
            "\n\nHuman: Hi\n\nAssistant: Hell no",
            ("\n\nHuman: Hi\n\nAssistant:", "Hello", "Hell no"),
        ),
        ("It is blue", "It is black", ("It is", "blue", "black")),
        ("Say hi: hi", "Say hi: hi there", ("Say hi:", "hi", "hi there")),
        ("Soup?\nStir it.", "Soup?\nStew it.", ("Soup?", "Stir it.", "Stew it.")),
        ("<|assistant|>\nYes", "<|assistant|>\nNo", ("<|assistant|>", "Yes", "No")),
        ("### Response:\nA\nB", "### Response:\nA\nC",
         ("### Response:", "A\nB", "A\nC")),
        ("Hello", "Hello world", None),
        ("Soup", "Bread", None),
        ("  a", "  b", None),
        ("\na b", "\na c", ("\na", "b", "c")),
    ],
)  # fmt: skip
def test_an_implicit_prompt_ends_at_a_border(chosen, rejected, pair, tmp_path):
    assert split_common_prompt(chosen, rejected) == pair
    found = read([{"chosen": chosen, "rejected": rejected}], tmp_path)
    assert found.notes == ({IMPLICIT: 1} if pair else {})
    assert found.dropped == ({} if pair else {NO_PROMPT: [1]})


@pytest.mark.parametrize(
    "columns",
    [
        {"chosen": "c"},
        {"prompt": "p", "rejected": "r"},
        {"chosen": "c", "rejected": "r", "target": "t"},
        {"chosen": "c", "rejected": "r", "messages": "m"},
    ],
)
def test_columns_that_are_no_pair_are_refused(columns):
    with pytest.raises(ConfigError, match="Preference pairs need chosen and rejected"):
        reader_for(columns)


def test_only_a_prompt_has_several_fields():
    with pytest.raises(ConfigError, match="a list for rejected"):
        reader_for({"chosen": "c", "rejected": ("a", "b")})


def test_a_file_without_the_rejected_field_is_refused(tmp_path):
    path = write_lines([{"prompt": "Why?", "chosen": "So."}], tmp_path)
    columns = {"prompt": "prompt", "chosen": "chosen", "rejected": "worse"}
    message = r"pairs\.jsonl .*no column for rejected: worse.* are 'prompt', 'chosen'"
    with pytest.raises(DataError, match=message):
        source_of(path, columns=columns)


def test_a_model_with_an_encoder_reads_one_turn_as_text(tmp_path):
    several = [ASKED, SAID, ASKED]
    talk = {"chosen": [SYSTEM, ASKED, GOOD], "rejected": [SYSTEM, ASKED, BAD]}
    long = {"chosen": [*several, GOOD], "rejected": [*several, BAD]}
    path = write_lines([talk, long], tmp_path)
    source = with_one_turn(source_of(path))
    [block] = source.reader.blocks(path)
    found = source.reader.examples(block)
    assert sides(found) == [
        ("You cook.\n\nWhich rice?", "Arborio.", 1.0),
        ("You cook.\n\nWhich rice?", "None.", 0.0),
    ]
    assert [example.turns for example in found.examples] == [(), ()]
    assert found.dropped == {SEVERAL_TURNS: [2]}
    with pytest.raises(ConfigError, match="several turns, which need a decoder-only"):
        with_one_turn(source_of(write_lines([long, talk], tmp_path)))


def test_pairs_and_other_examples_are_refused_in_one_store(tmp_path):
    pairs = source_of(write_lines([TEXTS], tmp_path))
    (tmp_path / "qa.jsonl").write_text('{"question": "Why?", "answer": "So."}\n')
    answers = source_of(tmp_path / "qa.jsonl")
    refuse_mixture([pairs, pairs])
    refuse_mixture([answers])
    with pytest.raises(
        ConfigError, match=r"pairs \(.*pairs\.jsonl\) and other examples \(.*qa\.jsonl"
    ):
        refuse_mixture([pairs, answers])
