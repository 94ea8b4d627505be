"""Weights meet the store they were meant for, or are refused; a run keeps its own."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config

import toque
from fixtures.kitchens import tiny_config
from toque.cli import main
from toque.config import load_config
from toque.config.dump import to_yaml
from toque.cooking.cookbook.recipes import write_cookbook
from toque.data.loader.batch_stream import ExampleLengths, row_shape
from toque.data.loader.epoch_plan import EpochPlan, Mixture
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.sources.records import NO_TASK
from toque.training.runtime import Runtime
from toque.workflows.build import build_heldout, build_stream


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two sources, one of them a folder."""
    folder = tmp_path_factory.mktemp("mixing")
    (folder / "dump").mkdir()
    write_cookbook(folder / "a.jsonl", n=40, seed=1)
    write_cookbook(folder / "dump" / "b.jsonl", n=20, seed=2)
    toque.prepare(config_of(folder, 1.0, 1.0))
    return folder


def config_of(
    folder: Path, *weights: float, paths: tuple[str, ...] = ("a.jsonl", "dump")
) -> Path:
    sources = [
        {"path": str(folder / path), "weight": weight}
        for path, weight in zip(paths, weights, strict=True)
    ]
    config = tiny_config(
        run_dir=str(folder / "run"),
        data={
            "sources": sources,
            "store": str(folder / "store"),
            "validation_fraction": 0.3,
        },
        train={"stop_after": "2 steps", "micro_batch_rows": 1},
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder / "config.yaml"


def test_weights_become_draws_of_the_stores_sources(folder: Path) -> None:
    config = load_config(str(config_of(folder, 1.0, 2.5)), []).config
    store = TokenStore.open(folder / "store")
    rows = store.rows("train")
    mixture = Mixture.for_rows(config.data, store, rows, seed=1)
    assert mixture is not None
    n = [int((store.column("source")[rows] == number).sum()) for number in (0, 1)]
    assert mixture.draws == [n[0], round(2.5 * n[1])]
    assert f"dump {n[1]} x 2.5 = {round(2.5 * n[1])}" in mixture.describe(config.data)
    plain = load_config(str(config_of(folder, 1.0, 1.0)), []).config
    assert Mixture.for_rows(plain.data, store, rows, seed=1) is None


@pytest.mark.parametrize(
    ("weights", "paths", "words"),
    [
        ((2.0,), ("a.jsonl",), "weights for 1 sources"),
        (
            (2.0, 1.0),
            ("dump", "a.jsonl"),
            r"data\.sources\[0\] is .*dump, but source 0",
        ),
        ((2.0, 1.0), ("a.jsonl", "*.json"), r"data\.sources\[1\] is"),
    ],
)
def test_weights_of_other_sources_are_refused(
    folder: Path, weights: tuple[float, ...], paths: tuple[str, ...], words: str
) -> None:
    config = load_config(str(config_of(folder, *weights, paths=paths)), []).config
    store = TokenStore.open(folder / "store")
    with pytest.raises(ConfigError, match=words):
        Mixture.for_rows(config.data, store, store.rows("train"), seed=1)


def test_a_run_continues_with_its_own_weights_only(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(config_of(folder, 1.0, 2.0))]) == 0
    assert "an epoch draws" in (folder / "run" / "training.log").read_text()
    capfd.readouterr()
    assert main(["train", str(config_of(folder, 1.0, 3.0))]) == 4
    assert "data.sources.1.weight: 2.0 -> 3.0" in capfd.readouterr().err
    # A new weight needs no new store.
    assert main(["prepare", str(config_of(folder, 1.0, 3.0))]) == 0
    assert "Reused" in capfd.readouterr().out


def test_held_out_examples_weigh_as_in_training(folder: Path) -> None:
    config = load_config(
        str(config_of(folder, 1.0, 2.5)), ["evaluation.max_examples=null"]
    ).config
    store = TokenStore.open(folder / "store")
    rows = store.rows("validation")
    sources = np.asarray(store.column("source"))[rows]
    assert set(sources.tolist()) == {0, 1}
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=512, n_embd=8, n_layer=1, n_head=1, n_positions=512)
    )
    runtime = Runtime.detect(device="cpu", precision="float32")
    stream = build_stream(config, store, model)
    heldout = build_heldout(config, store, stream.layout, runtime)
    found = heldout(model)
    nats = tokens = 0.0
    for source, weight in ((0, 1.0), (1, 2.5)):
        own = [(row,) for row in rows[sources == source].tolist()]
        alone = replace(heldout, rows=own, weights=None)(model)
        nats += weight * alone["loss"] * alone["target_tokens"]
        tokens += weight * alone["target_tokens"]
    assert found["loss"] == pytest.approx(nats / tokens, abs=1e-6)
    alike = replace(heldout, weights=None)(model)
    assert alike["target_tokens"] == found["target_tokens"]
    assert alike["loss"] != pytest.approx(found["loss"], abs=1e-6)
    shares = [replace(heldout, share=(rank, 2), rows_per_batch=1) for rank in (0, 1)]
    sums: list[list[float]] = []
    for part in shares:
        replace(part, total=lambda values: sums.append(list(values)) or values)(model)
    assert sum(s[0] for s in sums) / sum(s[1] for s in sums) == pytest.approx(
        found["loss"]
    )


def test_rows_are_shaped_for_what_is_drawn(folder: Path) -> None:
    # Long targets that are hardly drawn, short ones that fill the epoch.
    source, target = np.full(400, 200), np.repeat([190, 4], 200)
    lengths = ExampleLengths(source, target, encoder=True)
    mixture = Mixture(group=np.repeat([0, 1], 200), weights=[0.05, 1.0], seed=3)
    sampled = lengths.sample(mixture)[1]
    assert 10 <= (sampled == 190).sum() <= 11  # 10 of 210 drawn, and the longest of all
    config = load_config(
        str(config_of(folder, 1.0, 1.0)), ["train.batch=8192 tokens"]
    ).config
    share = []
    for shape in (
        row_shape(config.train, lengths),
        row_shape(config.train, lengths, mixture),
    ):
        rows = EpochPlan(
            np.arange(400),
            source,
            target,
            shape,
            seed=1,
            update_rows=2,
            mixture=mixture,
        ).window_rows(0, 0)
        share.append(sum(len(row) for row in rows) * 200 / (len(rows) * shape.tokens))
    assert share[1] > 1.2 * share[0]


def test_texts_of_no_task_count_as_none_of_recipes(tmp_path: Path) -> None:
    """Documents in a mixture neither weigh as `write` nor stand in its loss."""
    write_cookbook(tmp_path / "a.jsonl", n=30, seed=1)
    texts = [
        {"text": f"Once upon a time in {n} there lived a cook."} for n in range(25)
    ]
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps(text) + "\n" for text in texts)
    )
    config = tiny_config(
        run_dir=str(tmp_path / "run"),
        data={
            "sources": [{"path": str(tmp_path / name)} for name in ("a.jsonl", "b.jsonl")],
            "store": str(tmp_path / "store"), "validation_fraction": 0.3,
            "tasks": ["write", "title"], "task_weights": {"write": 3.0},
        },
        train={"stop_after": "2 steps"},
        evaluation={"max_examples": None},
    )  # fmt: skip
    store = toque.prepare(config).store
    tasks, sources = (np.asarray(store.column(name)) for name in ("task", "source"))
    assert set(tasks[sources == 0].tolist()) == {0, 6}
    assert set(tasks[sources == 1].tolist()) == {NO_TASK}
    rows = store.rows("train")
    mixture = Mixture.for_rows(config.data, store, rows, seed=1)
    assert mixture is not None
    n_texts = int((tasks[rows] == NO_TASK).sum())
    assert f"of no task {n_texts} x 1 = {n_texts}" in mixture.describe(config.data)
    toque.train(config)
    scored = json.loads((tmp_path / "run" / "evaluation.json").read_text())["tasks"]
    held_out = tasks[store.rows("validation")]
    assert {name: own["examples"] for name, own in scored.items()} == {
        "write": (held_out == 0).sum(),
        "title": (held_out == 6).sum(),
    }


@pytest.mark.parametrize("path", [".", "..", "~"])
def test_a_folder_named_by_its_place_is_the_stores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Its name is not among those of its files."""
    (tmp_path / "dump" / "in").mkdir(parents=True)
    write_cookbook(tmp_path / "dump" / "b.jsonl", n=12, seed=1)
    write_cookbook(tmp_path / "a.jsonl", n=12, seed=2)
    monkeypatch.setenv("HOME", str(tmp_path / "dump"))
    monkeypatch.chdir(tmp_path / "dump" / ("in" if path == ".." else "."))
    sources = [{"path": path, "weight": 2.0}, {"path": str(tmp_path / "a.jsonl")}]
    data = {"sources": sources, "store": str(tmp_path / "store")}
    config = tiny_config(run_dir=str(tmp_path / "run"), data=data)
    store = toque.prepare(config).store
    n = int((store.column("source")[store.rows("train")] == 0).sum())
    mixture = Mixture.for_rows(config.data, store, store.rows("train"), seed=1)
    assert mixture is not None
    assert mixture.draws[0] == 2 * n
