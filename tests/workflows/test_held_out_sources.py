"""Held-out files of the user's own: split by source, whole, and never trained on."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from fixtures.kitchens import tiny_config
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.evaluation.text_samples import held_out_prompts
from toque.workflows.prepared_store import open_store


def pairs(folder: Path, name: str, numbers: range) -> dict[str, str]:
    rows = [
        {"prompt": f"How much is {n}?", "target": f"It is {n} {name}."} for n in numbers
    ]
    return written(folder, name, rows)


def written(folder: Path, name: str, rows: list[dict[str, str]]) -> dict[str, str]:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(path)}


def prepared(folder: Path, store: str = "store", **data: Any) -> tuple[TokenStore, Any]:
    config = tiny_config(
        run_dir=str(folder / "run"), data={"store": str(folder / store)} | data
    )
    result = toque.prepare(config)
    assert open_store(config).fingerprint == result.store.fingerprint
    return result.store, result.report


def targets(store: TokenStore, split: str) -> list[str]:
    return [store.codec().decode(store.target(row)) for row in store.rows(split)]


@pytest.mark.parametrize("max_examples", [None, 7])
def test_held_out_examples_are_those_of_the_files_named(tmp_path, max_examples):
    train, heldout = (
        pairs(tmp_path, "cups", range(40)),
        pairs(tmp_path, "grams", range(5)),
    )
    store, report = prepared(
        tmp_path, sources=[train], validation=[heldout], max_examples=max_examples
    )
    assert targets(store, "validation") == [f"It is {n} grams." for n in range(5)]
    assert targets(store, "train") == [
        f"It is {n} cups." for n in range(max_examples or 40)
    ]
    assert "by source" in report.describe_split()
    assert (
        report.leaked_bodies == 5
    )  # the same questions, answered otherwise, are counted


@pytest.mark.parametrize("dedup", ["exact", "near"])
def test_what_is_held_out_is_not_trained_on(tmp_path, dedup):
    text = " ".join(f"step{n}" for n in range(60)) + " "
    rows = [{"prompt": f"Dish {n}", "target": f"{text}{n}"} for n in range(6)]
    same = {"exact": rows[2], "near": {"prompt": "Dish 2", "target": f"{text}2 !"}}[
        dedup
    ]
    apart = [{"prompt": f"{n} of {n}", "target": " ".join(f"word{n}{i}" for i in range(40))}
             for n in "abc"]  # fmt: skip
    store, report = prepared(
        tmp_path,
        sources=[written(tmp_path, "a", [*rows, *apart])],
        validation=[written(tmp_path, "b", [same])],
        dedup=dedup,
        max_target_tokens=512,
    )
    assert targets(store, "validation") == [same["target"]]
    found = targets(store, "train")
    assert same["target"] not in found
    assert report.dropped == (
        {"duplicate": 1} if dedup == "exact" else {"near duplicate": 6}
    )
    assert len(found) == (8 if dedup == "exact" else 3)


def test_a_store_of_other_held_out_files_is_another(tmp_path):
    train, heldout = (
        pairs(tmp_path, "cups", range(9)),
        pairs(tmp_path, "grams", range(4)),
    )
    plain, _ = prepared(tmp_path, sources=[train, heldout], store="plain")
    assert "held_out_from" not in plain.manifest.settings
    store, _ = prepared(tmp_path, sources=[train], validation=[heldout])
    assert store.fingerprint != plain.fingerprint
    own = tiny_config(data={"store": str(tmp_path / "store"), "sources": []})
    assert open_store(own).fingerprint == store.fingerprint
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, sources=[train, heldout])
    said = str(refused.value)
    assert (
        "grams.jsonl was held out as data.validation, but data.validation is empty now"
        in said
    )
    assert not re.search(r"\[\d|None|validation_fraction", said)  # in the user's terms
    with pytest.raises(DataError) as refused:
        prepared(tmp_path, sources=[train])
    assert "it was prepared from" not in str(
        refused.value
    )  # what is trained on is the same
    with pytest.raises(
        DataError, match=r"10% of data\.sources was held out, but now data\.valid"
    ):
        prepared(tmp_path, sources=[train], validation=[heldout], store="plain")
    (tmp_path / "grams.jsonl").write_text('{"prompt": "a", "target": "b"}\n')
    with pytest.raises(
        DataError, match=r"data\.validation\[0\] is .*grams.jsonl is new or has"
    ):
        prepared(tmp_path, sources=[train], validation=[heldout])
    with pytest.raises(
        ConfigError, match=r"`data\.sources` is empty: validation files"
    ):
        prepared(tmp_path, sources=[], validation=[heldout])


def test_weights_are_those_of_each_source(tmp_path):
    train, heldout = (
        pairs(tmp_path, "cups", range(12)),
        pairs(tmp_path, "grams", range(4)),
    )
    config = tiny_config(
        run_dir=str(tmp_path / "run"),
        data={
            "sources": [train | {"weight": 2.0}], "validation": [heldout],
            "store": str(tmp_path / "store"), "validation_fraction": 0.0,
        },
        train={"stop_after": "2 steps", "early_stopping": {"patience": 9}},
    )  # fmt: skip
    run = toque.train(config)
    assert run.metrics["loss"] > 0
    card = (run.model / "README.md").read_text()
    assert f"{heldout['path']} (held out)" in card
    assert "grams" not in card.partition("## Data")[0]
    assert np.isfinite(toque.evaluate(run).metrics["loss"])


def test_where_everything_is_held_out_it_says_so(tmp_path):
    same = pairs(tmp_path, "cups", range(5))
    config = tiny_config(
        run_dir=str(tmp_path / "run"),
        data={
            "store": str(tmp_path / "store"),
            "sources": [same],
            "validation": [same],
        },
    )
    with pytest.raises(
        ConfigError, match=r"every record in data\.sources is also in data\."
    ):
        toque.train(config)


def test_prompts_are_found_among_many_texts_without_one(tmp_path):
    texts = written(
        tmp_path,
        "texts",
        [{"text": f"Once in {n} there was a cook."} for n in range(99)],
    )
    asked = pairs(tmp_path, "grams", range(6))
    store, _ = prepared(
        tmp_path, sources=[pairs(tmp_path, "cups", range(9))], validation=[texts, asked]
    )
    config = tiny_config()
    found = held_out_prompts(store, 4, config.data)
    assert len(found) == 4
    assert all(prompt.reference.endswith("grams.") for prompt in found)
    assert len(held_out_prompts(store, 20, config.data)) == 6
