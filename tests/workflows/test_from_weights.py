"""A new run from the weights of another: of the same tokens, and beside the same frozen weights."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import toque
from fixtures.kitchens import TINY, Notices, tiny_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import CheckpointError

pytestmark = pytest.mark.usefixtures("shared_kitchen")


@pytest.fixture(scope="module")
def old(shared_kitchen: Path) -> toque.TrainedRun:
    """A run that learnt its tokenizer, and other recipes, of other words, in b.jsonl."""
    other = shared_kitchen / "b.jsonl"
    write_cookbook(other, n=60, seed=4)
    words = other.read_text()
    other.write_text(words.replace("cup", "kumpir").replace("oven", "zbornik"))
    return toque.train(tiny_config(run_dir="old"))


def on_other_data(name: str, **model: Any) -> toque.RunConfig:
    data = {"sources": [{"path": "b.jsonl"}], "store": f"store-{name}"}
    return tiny_config(run_dir=f"run-{name}", data=data, model=model)


def train(config: toque.RunConfig, start: toque.TrainedRun | Path) -> list[str]:
    """The notes that a run began with."""
    heard = Notices()
    assert toque.train(config, start=start, reporter=heard).step == 3
    return [text for text in heard.notices if text.startswith("note: ")]


def test_a_tokenizer_learnt_from_other_data_is_refused_and_the_advice_works(old):
    with pytest.raises(
        CheckpointError, match=r"was trained with another tokenizer"
    ) as refused:
        toque.train(on_other_data("other"), start=old)
    assert "entries differ" in str(refused.value)
    assert "model.tokenizer=store/tokenizer" in str(refused.value)
    assert not Path("run-other").exists()
    config = on_other_data("kept", tokenizer="store/tokenizer")
    assert train(config, old) == []
    assert train(tiny_config(run_dir="again"), old) == []  # of the same store


def test_without_the_old_store_the_finished_model_is_compared_and_else_it_is_said(old):
    lost = Path("lost/run")
    shutil.copytree(old.folder, lost)
    shutil.move("store", "store-moved")
    try:
        config = on_other_data("second", tokenizer="old/model")
        assert train(config, lost) == []
        with pytest.raises(CheckpointError, match=r"model\.tokenizer=.*lost/run/model"):
            toque.train(on_other_data("third"), start=lost)
        shutil.rmtree(lost / "model")
        (told,) = train(on_other_data("fourth"), lost)
        assert (
            "its tokenizer could not be compared with the tokenizer of store-fourth"
            in told
        )
    finally:
        shutil.move("store-moved", "store")


def adapted(name: str, base: Path) -> toque.RunConfig:
    sections = {
        "model": {"family": "auto", "start_from": str(base)},
        "adapter": {"kind": "lora", "r": 4, "dropout": 0.0},
        "data": TINY["data"] | {"store": "store-adapted"},
    }
    return toque.configure(TINY | {"run_dir": name} | sections)


def test_an_adapter_of_another_base_is_refused(old):
    other = toque.train(tiny_config(run_dir="other-base", seed=99))
    first = toque.train(adapted("first", old.model))
    with pytest.raises(CheckpointError, match=r"was trained with other frozen weights"):
        toque.train(adapted("beside", other.model), start=first)
    assert train(adapted("second", old.model), first) == []
    best = next((first.folder / "best").iterdir())
    assert "base_sha256" not in json.loads((best / "state.json").read_text())
    (told,) = train(adapted("third", old.model), best)
    assert "does not record the frozen weights" in told
