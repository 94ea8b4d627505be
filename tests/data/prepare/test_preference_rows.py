"""Preference pairs in a store: two adjacent rows per pair, complete or left out together."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fixtures.stores import WORDS
from store_checks import content
from toque.cooking.schemas.reader import reader_for
from toque.data.prepare.data_report import BEYOND
from toque.data.prepare.pipeline import PrepareResult, prepare
from toque.data.prepare.preference_rows import CUT_PAIRS, SAME_TOKENS
from toque.data.prepare.source_sample import choose_limits
from toque.data.prepare.store_plan import PrepareSettings
from toque.data.store.store_manifest import form_of
from toque.data.store.token_store import LEFT_OUT, TokenStore
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError, DataError
from toque.sources.preference_pairs import EQUAL, EQUAL_WORDS, PREFERRED
from toque.sources.records import Source
from toque.sources.source_files import find_files

pytestmark = pytest.mark.usefixtures("small_groups")
COLUMNS = {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
READER = reader_for(COLUMNS)
Record = dict[str, Any]
Prepare = Callable[..., PrepareResult]


def sentence(rng: random.Random, n_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=n_words))


def pairs(n: int, *, n_words: int = 8, seed: int = 0) -> list[Record]:
    rng = random.Random(seed)
    return [
        {
            "prompt": sentence(rng, 7),
            "chosen": sentence(rng, n_words),
            "rejected": sentence(rng, n_words),
        }
        for _ in range(n)
    ]


def write(path: Path, records: list[Record]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def prepared(tmp_path: Path, settings_for: Callable[..., PrepareSettings]) -> Prepare:
    """`prepared(records, family, name=..., held_out=[...], **settings)`: a store of pairs."""

    def make(
        records: list[Record],
        family: str = "decoder",
        *,
        name: str = "store",
        held_out: list[Record] | None = None,
        **changes: object,
    ) -> PrepareResult:
        sources = [Source(str(write(tmp_path / "pairs.jsonl", records)), READER)]
        if held_out is not None:
            file = write(tmp_path / "held.jsonl", held_out)
            sources.append(Source(str(file), READER))
            changes |= {"held_out_from": 1, "validation_fraction": 0.0}
        settings = settings_for(family, **changes)
        return prepare(sources, store=tmp_path / name, settings=settings, workers=1)

    return make


def texts_of(store: TokenStore, rows: Any) -> list[tuple[str, str]]:
    codec = store.codec()
    return [
        (codec.decode(store.prompt(row)).strip(), codec.decode(store.target(row)))
        for row in np.asarray(rows).tolist()
    ]


@pytest.mark.parametrize("family", ["decoder", "encoder-decoder"])
def test_a_pair_is_two_adjacent_rows_of_one_split(family, prepared):
    records = pairs(30)
    result = prepared(records, family)
    store = result.store
    assert store.has_pairs
    assert store.column(PREFERRED).tolist() == [1.0, 0.0] * 30
    chosen = np.concatenate([store.pair_rows("train"), store.pair_rows("validation")])
    assert sorted(chosen.tolist()) == list(range(0, 60, 2))
    assert 0 < len(store.pair_rows("validation")) < 30
    assert (store.split[::2] == store.split[1::2]).all()
    read = zip(texts_of(store, chosen), texts_of(store, chosen + 1), strict=True)
    by_prompt = {r["prompt"]: (r["chosen"], r["rejected"]) for r in records}
    for (prompt, good), (same_prompt, bad) in read:
        assert prompt == same_prompt
        assert by_prompt.pop(prompt) == (good, bad)
    assert not by_prompt
    assert (result.report.read, result.report.kept, result.report.examples) == (
        30,
        30,
        60,
    )
    assert form_of(entry.reader for entry in store.manifest.sources) == "pairs"
    assert {e.reason for e in result.report.kept_examples} >= {
        "train, chosen",
        "train, rejected",
    }


def test_workers_write_the_same_store(settings_for, tmp_path):
    records = pairs(60, n_words=20)
    (tmp_path / "files").mkdir()
    for n in range(6):
        write(tmp_path / "files" / f"{n}.jsonl", records[10 * n : 10 * n + 10])
    sources = [Source(str(tmp_path / "files"), READER)]
    for name, workers in (("one", 1), ("three", 3)):
        settings = settings_for(max_examples=95)
        prepare(sources, store=tmp_path / name, settings=settings, workers=workers)
    store = TokenStore.open(tmp_path / "one")
    assert len({entry.file.split("/")[1] for entry in store.manifest.shards}) == 5
    assert len(store.pair_rows("train")) + len(store.pair_rows("validation")) == 47
    assert content(tmp_path / "one") == content(tmp_path / "three")


def test_equal_and_nearly_equal_answers_are_counted(prepared):
    records = pairs(10)
    records[3]["rejected"] = records[3]["chosen"]
    records[5]["rejected"] = records[5]["chosen"] + " "
    records[6]["rejected"] = records[6]["chosen"].replace(" ", "  ")
    result = prepared(records)
    assert result.report.dropped == {EQUAL: 1, EQUAL_WORDS: 2}
    assert result.report.lines[EQUAL_WORDS] == ["pairs.jsonl:6", "pairs.jsonl:7"]
    assert (result.report.kept, result.store.n_rows) == (7, 14)


def test_an_answer_over_the_limit_leaves_out_its_pair(prepared):
    rng = random.Random(3)
    records = pairs(10)
    records[2]["chosen"] = sentence(rng, 90)
    records[4]["rejected"] = sentence(rng, 90)
    records[7] |= {"chosen": sentence(rng, 90), "rejected": sentence(rng, 90)}
    result = prepared(records, max_target_tokens=50, on_overlong="drop")
    assert result.report.dropped == {"target over 50 tokens": 3}
    assert (result.report.kept, result.store.n_rows) == (7, 14)
    assert len(result.store.pair_rows("train")) + len(
        result.store.pair_rows("validation")
    ) == 7  # fmt: skip


def test_cut_answers_are_counted_by_pair_and_equal_ones_are_dropped(prepared):
    rng = random.Random(3)
    records = pairs(10)
    long = sentence(rng, 90)
    records[2]["chosen"] = long
    records[4] |= {"chosen": f"stir {long}", "rejected": f"salt {long}"}
    records[7] |= {"chosen": f"{long} salt", "rejected": f"{long} milk"}
    result = prepared([*records, records[2]], max_target_tokens=50)
    assert result.report.notes[CUT_PAIRS] == 2
    assert result.report.cut["targets"] == 3
    assert result.report.dropped == {SAME_TOKENS: 1, "duplicate": 1}
    assert "note" not in prepared(pairs(5), name="short").report.notes


def test_a_duplicate_has_the_same_prompt_and_both_answers(prepared):
    first, *others = pairs(6)
    swapped = first | {"chosen": first["rejected"], "rejected": first["chosen"]}
    other_answer = first | {"rejected": "stir the milk"}
    result = prepared([first, swapped, other_answer, first, *others])
    assert result.report.dropped == {"duplicate": 1}
    left_out = result.store.split == LEFT_OUT
    assert left_out.nonzero()[0].tolist() == [6, 7]
    assert len(set(result.store.split[:6].tolist())) == 1  # one prompt, one split


def test_near_duplicates_leave_out_the_entire_pair(prepared):
    records = pairs(12, n_words=60)
    similar = records[4] | {"chosen": records[4]["chosen"] + " salt"}
    result = prepared([*records, similar], dedup="near")
    assert result.report.dropped == {"near duplicate": 1}
    assert (result.store.split == LEFT_OUT).nonzero()[0].tolist() == [24, 25]
    assert len(result.store.pair_rows("train")) > 0


@pytest.mark.parametrize(("limit", "n_pairs"), [(8, 4), (9, 4), (19, 9), (50, 20)])
def test_max_examples_never_separates_a_pair(limit, n_pairs, prepared):
    result = prepared(pairs(20), max_examples=limit, validation_fraction=0.0)
    assert len(result.store.pair_rows("train")) == n_pairs
    assert result.report.examples == 2 * n_pairs
    assert result.report.dropped.get(BEYOND, 0) == result.report.read - n_pairs


def test_validation_files_hold_out_pairs(prepared):
    records = pairs(9)
    held_out = [*pairs(4, seed=1), records[2]]
    store = prepared(records, held_out=held_out, max_examples=11).store
    held = texts_of(store, store.pair_rows("validation") + 1)
    assert held == [(r["prompt"], r["rejected"]) for r in held_out]
    trained = texts_of(store, store.pair_rows("train"))
    expected = [r for r in records if r is not records[2]][:5]
    assert trained == [(r["prompt"], r["chosen"]) for r in expected]


def test_both_answers_are_measured_for_the_limits(prepared, settings_for, tmp_path):
    records = pairs(50)
    for record in records:
        record["rejected"] = sentence(random.Random(1), 120) + record["prompt"]
    settings = settings_for(max_prompt_tokens=None, max_target_tokens=None)
    file = write(tmp_path / "pairs.jsonl", records)
    codec = load_codec(Path(settings.tokenizer))
    chosen = choose_limits(find_files([Source(str(file), READER)]), codec, settings)
    assert chosen.settings.max_prompt_tokens == 64
    assert (chosen.settings.max_target_tokens or 0) > 128
    result = prepared(records, max_prompt_tokens=None, max_target_tokens=None)
    assert CUT_PAIRS not in result.report.notes


def test_a_tokenizer_is_trained_on_both_answers(prepared):
    records = [
        r | {"rejected": f"{r['rejected']} Ж{n}"} for n, r in enumerate(pairs(9))
    ]
    result = prepared(records, tokenizer="trained:400")
    text = texts_of(result.store, [1])[0][1]
    assert text.endswith("Ж0")


def test_one_store_has_only_pairs(prepared, settings_for, tmp_path):
    file = write(tmp_path / "qa.jsonl", [{"prompt": "stir", "target": "the soup"}])
    answers = Source(str(file), reader_for({"prompt": "prompt", "target": "target"}))
    file = write(tmp_path / "pairs.jsonl", pairs(4))
    with pytest.raises(ConfigError, match=r"preference pairs \(.*and other examples"):
        prepare(
            [Source(str(file), READER), answers],
            store=tmp_path / "store",
            settings=settings_for(),
        )
    with pytest.raises(
        ConfigError, match="on_overlong=split applies only to documents"
    ):
        prepared(pairs(4), on_overlong="split")


def test_other_stores_have_no_pairs_and_damaged_pairs_are_refused(made, prepared):
    other = made("other").store
    assert not other.has_pairs
    with pytest.raises(DataError, match="has no column 'preferred'"):
        other.pair_rows("train")
    store = prepared(pairs(6), name="damaged").store
    split = store.split.copy()
    split[0] = LEFT_OUT
    np.save(store.path / "split.npy", split)
    with pytest.raises(DataError, match="rows that are not pairs of a chosen answer"):
        TokenStore(store.path, store.manifest).pair_rows(
            "train" if store.split[1] == 0 else "validation"
        )
