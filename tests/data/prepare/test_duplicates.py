"""Near-duplicates: planted ones are found, unrelated recipes are not."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.stores import Made
from store_checks import content, continues, interrupted_after, prepared
from toque.data.prepare import duplicates as near
from toque.data.prepare.dedup_and_split import Division, RowKeys, dedup_and_split
from toque.data.prepare.duplicates import find_clusters, signatures
from toque.data.prepare.store_plan import PrepareSettings

Make = Callable[..., PrepareSettings]
VOCABULARY = [
    f"{a}{b}{c}" for a in "bcdfghklmnpr" for b in "aeiou" for c in ("l", "n", "st", "r")
]


def recipe(rng: random.Random, words: int = 130) -> list[str]:
    return rng.choices(VOCABULARY, k=words)


def edited(words: list[str], edits: int, rng: random.Random) -> list[str]:
    words = list(words)
    for at in rng.sample(range(len(words)), edits):
        words[at] = "edited"
    return words


def jaccard(a: str, b: str) -> float:
    def shingles(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return set(zip(words, words[1:], words[2:], strict=False))

    return len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))


def clusters(recipes: list[list[str]]) -> list[int]:
    found = signatures([" ".join(words) for words in recipes])
    return find_clusters(found)[0].tolist()


def test_the_estimate_is_the_jaccard_similarity() -> None:
    rng = random.Random(0)
    errors = []
    for edits in range(60):
        a = recipe(rng)
        texts = [" ".join(a), " ".join(edited(a, edits, rng))]
        ours, theirs = signatures(texts)
        errors.append((ours == theirs).mean(axis=-1) - jaccard(*texts))
    assert abs(np.mean(errors)) < 0.02
    assert np.std(errors) < 0.05  # 0.5 / sqrt(120), at most


def test_a_signature_depends_on_its_text_alone() -> None:
    rng = random.Random(1)
    texts = [" ".join(recipe(rng, n)) for n in (1, 2, 3, 4, 130, 9000)] + [
        "...",
        "",
        "ÉCLAIR",
    ]
    alone = np.concatenate([signatures([text]) for text in texts])
    assert np.array_equal(signatures(texts), alone)
    assert np.array_equal(signatures(["Éclair"]), signatures(["éclair!"]))
    assert not np.array_equal(signatures(["..."]), signatures(["--"]))
    # Pinned: another value here means that stores made before are no longer those made now.
    pinned = [21464, 54869, 53448, 8227]
    assert signatures(["stir the soup and add salt"])[0, :4].tolist() == pinned


def test_planted_near_duplicates_are_found_and_nothing_else() -> None:
    rng = random.Random(2)
    originals = [recipe(rng) for _ in range(400)]
    light = [
        edited(words, 4, rng) for words in originals[:200]
    ]  # similarity about 0.83
    heavy = [edited(words, 30, rng) for words in originals[200:]]  # about 0.33
    first = clusters(originals + light + heavy)
    assert first[:400] == list(range(400))  # precision: no two unrelated ones
    found = sum(first[400 + i] == i for i in range(200))
    assert found >= 198  # recall where nearly everything is the same
    assert first[600:] == list(range(600, 800))


def test_chains_are_one_cluster_and_its_first_is_named() -> None:
    rng = random.Random(3)
    chain = [recipe(rng)]
    for _ in range(5):
        chain.append(edited(chain[-1], 3, rng))
    assert clusters(chain) == [0] * 6


def test_a_crowded_bucket_is_counted_when_it_is_cut_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = np.random.default_rng(0)
    found = rng.integers(0, 2**16, (40, near.HASHES)).astype(np.uint16)
    found[:, :6] = 7  # all share the first band and nothing else
    assert find_clusters(found)[1] == 40 - near.ROUNDS
    monkeypatch.setattr(near, "ROUNDS", 40)
    assert find_clusters(found)[1] == 0


def near_lines(tmp_path: Path) -> Path:
    """Fifteen recipes, and of every third an edited copy and an exact one."""
    rng = random.Random(4)
    records = []
    for i in range(15):
        words = recipe(rng)
        copies = [words, edited(words, 3, rng), words] if i % 3 == 0 else [words]
        records += [
            {"prompt": f"Dish {i}", "target": " ".join(copy)} for copy in copies
        ]
    path = tmp_path / "near.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.mark.usefixtures("small_groups")
def test_records_that_one_task_asks_alike_are_told_apart_by_the_others(
    made: Made, tmp_path: Path
) -> None:
    rng, path = random.Random(5), tmp_path / "tasks.jsonl"
    records = [
        {
            "prompt": "A great product that works well for everyone in the house",
            "target": f"good {n}",
            "extra": " ".join(rng.choices([f"w{i}" for i in range(900)], k=60)),
        }
        for n in range(12)
    ]
    path.write_text("\n".join(map(json.dumps, records)))
    assert made("s", of=path, dedup="near").report.dropped == {}


def test_prepare_leaves_near_duplicates_out_and_counts_them(
    made: Made, tmp_path: Path
) -> None:
    path = near_lines(tmp_path)
    result = made("s", of=path, dedup="near")
    assert result.report.dropped == {"duplicate": 5, "near duplicate": 5}
    assert result.report.kept == 15
    # The signatures were needed for preparing only.
    assert not list((tmp_path / "s").rglob("near*"))
    assert made("s", of=path, dedup="near").reused
    assert made("t", of=path).report.dropped == {"duplicate": 5}


@pytest.mark.usefixtures("small_groups")
def test_near_duplicates_after_an_interruption_and_a_repair(
    tmp_path: Path, settings_for: Make
) -> None:
    path, settings = near_lines(tmp_path), settings_for(dedup="near")
    store = tmp_path / "s"
    interrupted_after(3, path, store, settings)
    continues(path, store, settings)
    (store / "shards" / "00001" / "key.npy").write_bytes(b"short")
    assert not prepared(path, store, settings).reused
    assert content(store) == content(tmp_path / "calm")


def test_a_kill_after_the_manifest_leaves_nothing_behind(
    made: Made, tmp_path: Path
) -> None:
    store = tmp_path / "s"
    made(store)
    before = content(store)
    (store / "building.json").write_text("{}")
    (store / "shards" / "00000" / "near.npy").write_bytes(b"")
    assert made(store).reused
    assert content(store) == before


Row = tuple[int, int, int]  # record_key, task, and 1 where a record starts


def divided(rows: list[Row], **changes: object) -> Division:
    settings = PrepareSettings(family_kind="decoder", tokenizer="unused", **changes)
    kinds = (np.uint64, np.uint8, np.uint8)
    key, task, starts = (
        np.array(c, k) for c, k in zip(zip(*rows, strict=True), kinds, strict=True)
    )
    return dedup_and_split(
        RowKeys(key, key % np.uint64(3), key, task, starts), settings
    )


def test_the_first_of_equal_records_is_kept_with_all_its_tasks() -> None:
    rows = [(7, 0, 1), (7, 1, 0), (8, 0, 1), (7, 0, 1), (7, 1, 0), (8, 0, 1), (8, 1, 0)]
    division = divided(rows, validation_fraction=0.0)
    assert (division.split == 255).tolist() == [
        False,
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert division.dropped == {
        "duplicate": 1
    }  # the last record still gives its second task
    assert division.records == 3


def test_pieces_of_one_document_are_no_duplicates_of_each_other() -> None:
    rows = [(7, 0, 1), (7, 0, 0), (7, 0, 0), (7, 0, 1), (7, 0, 0)]
    division = divided(rows, validation_fraction=0.0)
    assert (division.split == 255).tolist() == [False, False, False, True, True]
    assert not divided(rows, dedup="none", validation_fraction=0.0).dropped


@given(
    keys=st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=40),
    limit=st.integers(1, 50),
    fraction=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_every_record_is_kept_or_counted(
    keys: list[int], limit: int, fraction: float
) -> None:
    rows = [(key, 0, 1) for key in keys]
    division = divided(rows, max_examples=limit, validation_fraction=fraction)
    used = division.split != 255
    assert int(used.sum()) == min(limit, len(set(keys))) == division.records
    assert division.records + sum(division.dropped.values()) == len(keys)
    assert division.leaked_bodies == 0
    one_side = fraction == 0.0 or division.records == 1
    assert set(division.split[used].tolist()) == ({0} if one_side else {0, 1})


def test_adding_recipes_moves_none_to_the_other_side() -> None:
    rng = np.random.default_rng(0)
    keys = rng.integers(0, 2**63, 2000)
    rows = [(int(key), 0, 1) for key in keys]
    few, many = divided(rows[:500]), divided(rows)
    assert few.split.tolist() == many.split[:500].tolist()
    assert 0.08 < (many.split == 1).mean() < 0.12


def test_titles_on_both_sides_are_counted() -> None:
    division = divided([(key, 0, 1) for key in range(3, 203)], validation_fraction=0.3)
    titles = np.arange(3, 203) % 3
    held_out = division.split == 1
    assert division.leaked_titles == int((held_out & (titles != 0)).sum()) > 0
