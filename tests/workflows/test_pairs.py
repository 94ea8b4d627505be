"""Preference pairs without a person: from a run to a file, and to a run that learns from it."""

import json
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from fixtures.kitchens import TINY, kitchen_in
from tiny import shape_of
from toque.cli import main
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError, DataError
from toque.workflows.inference import pairs as pair_files
from toque.workflows.inference.pair_texts import Prompt, Text
from workflows.test_chat_bases import chat_base
from workflows.test_conversations import configured

WORDS = ["salt", "pepper", "onion", "garlic", "butter", "flour", "sugar", "egg"]
MODULE = """
def brevity(prompts, texts, references):
    return [-len(text) for text in texts]

def constant(prompts, texts, references):
    return [1.0] * len(texts)

def likeness(prompts, texts, references):
    return [float(text == reference) for text, reference in zip(texts, references)]

def stopping(prompts, texts, references):
    raise KeyboardInterrupt
"""


def base_run(folder: Path, family: str, **sections: Any) -> Path:
    """The run of a model that answers "Say WORD" with two random words."""
    rng = np.random.default_rng(3)
    rows = [
        {"ask": f"Say {n} {rng.choice(WORDS)}", "say": " ".join(rng.choice(WORDS, 2))}
        for n in range(60)
    ]
    file = folder / "words.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "ask", "target": "say"}
    shape = shape_of(family, positions=64, width=32, layers=1, dropout=0.0)
    model = {"family": family, "tokenizer": "trained:512", "shape": shape}
    config = toque.configure(
        TINY | {"model": model} | sections,
        run_dir=str(folder / "base"),
        data={
            "sources": [{"path": str(file), "columns": columns}],
            "store": str(folder / "store"), "max_prompt_tokens": 24, "max_target_tokens": 12,
        },
        train={"stop_after": "20 steps", "batch": "16 examples"},
    )  # fmt: skip
    return toque.train(config).folder


@pytest.fixture(
    scope="module", params=["llama", pytest.param("t5", marks=pytest.mark.slow)]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Path:
    return base_run(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pair_scores.py").write_text(MODULE)
    (tmp_path / "files").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def rows_of(file: str | Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def train_as_printed(result: pair_files.PairsFile) -> Path:
    """Run the printed commands and configuration, and return the run folder."""
    before, _, config = result.usage.partition("better.yaml`:\n\n")
    Path("better.yaml").write_text(config)
    for line in before.splitlines():
        if line.startswith("toque "):
            assert main(line.split()[1:]) == 0
    few = ["evaluation.generate=0", "evaluation.max_examples=4", "evaluation.texts=2"]
    assert main(["train", "better.yaml", *few]) == 0
    return Path(str(toque.configure("better.yaml").run_dir))


def prompts_in(store: Path | str) -> Counter[tuple[int, ...]]:
    """Ids of the prompts of a store."""
    opened = TokenStore.open(store)
    rows = range(opened.n_rows)
    return Counter(tuple(opened.prompt_and_answer(row)[0].tolist()) for row in rows)


def test_texts_of_the_store_are_preferred_to_those_of_the_model(run):
    result = toque.pairs(run, "own.jsonl", limit=40)
    rows = rows_of("own.jsonl")
    assert result.pairs == len(rows) <= 40
    assert result.prompts == result.pairs + sum(result.dropped.values()) >= 40
    written = {row["ask"]: row["say"] for row in rows_of(run.parent / "words.jsonl")}
    for row in rows:
        assert row["chosen"] == written[row["prompt"]] != row["rejected"]
        assert row["score"] == "likelihood"
        assert row["chosen_score"] is None
        assert row["rejected_score"] < 0.0
    assert len({row["prompt"] for row in rows}) == len(rows)


def test_printed_configuration_learns_from_the_file(run):
    result = toque.pairs(run, "own.jsonl", samples=3, by="pair_scores:brevity")
    assert result.scores.keys() == {"pair_scores:brevity"}
    dpo = train_as_printed(result)
    lines = map(json.loads, (dpo / "metrics.jsonl").read_text().splitlines())
    first = next(event for event in lines if event["event"] == "step")
    assert first["loss"] == pytest.approx(math.log(2.0), abs=1e-4)
    store = toque.configure("better.yaml").data.store
    assert TokenStore.open(store).manifest.records.kept == result.pairs
    assert prompts_in(store).keys() <= prompts_in(run.parent / "store").keys()


def test_texts_depend_on_seed_and_prompt_only(run):
    usual = {"chosen": "best", "samples": 2, "by": "pair_scores:brevity"}
    toque.pairs(run, "a.jsonl", limit=30, **usual)
    toque.pairs(run, "b.jsonl", limit=30, **usual)
    toque.pairs(run, "few.jsonl", limit=10, **usual)
    toque.pairs(run, "other.jsonl", limit=30, seed=1, **usual)
    assert Path("a.jsonl").read_bytes() == Path("b.jsonl").read_bytes()
    few = rows_of("few.jsonl")
    assert rows_of("a.jsonl")[: len(few)] == few
    assert rows_of("other.jsonl") != rows_of("a.jsonl")


def test_best_text_is_preferred_to_the_worst(run):
    result = toque.pairs(
        run, "own.jsonl", chosen="best", by="pair_scores:brevity", limit=20
    )
    for row in rows_of("own.jsonl"):
        assert row["chosen_score"] == -len(row["chosen"]) > row["rejected_score"]
        assert row["rejected_score"] == -len(row["rejected"])
    [(better, worse)] = result.scores.values()
    assert better > worse
    with pytest.raises(DataError, match=r"all texts have the same score \(20\)"):
        toque.pairs(
            run, "none.jsonl", chosen="best", by="pair_scores:constant", limit=20
        )
    assert not Path("none.jsonl").exists()


def test_lowest_of_several_texts_is_rejected(run):
    alone = toque.pairs(run, "one.jsonl", limit=20, by="pair_scores:brevity")
    several = toque.pairs(
        run, "four.jsonl", limit=20, samples=4, by="pair_scores:brevity"
    )
    [(_, one)], [(_, lowest)] = alone.scores.values(), several.scores.values()
    assert lowest < one
    toque.pairs(run, "like.jsonl", limit=20, by="pair_scores:likeness")
    assert {row["chosen_score"] for row in rows_of("like.jsonl")} == {1.0}


def test_prompt_is_dropped_if_all_better_texts_are_cut(run):
    with pytest.raises(DataError, match=rf"{pair_files.BETTER_CUT} \(\d"):
        toque.pairs(
            run, "cut.jsonl", chosen="best", max_new_tokens=1, by="likelihood", limit=20
        )


def test_best_complete_text_is_chosen():
    prompt = Prompt([1], "Say salt", "Say salt", "line 1")
    cut, complete, worst = (
        Text(name, is_cut=name == "cut", logprobs=[])
        for name in ("cut", "complete", "worst")
    )
    scored = [(cut, 3.0), (complete, 2.0), (worst, 1.0)]
    make_row = partial(pair_files._make_row, prompt, origin="best")
    row = make_row(pair_files._Ranking("mine", scored, None))
    assert (row["chosen"], row["rejected"]) == ("complete", "worst")
    scored[1] = (complete, 1.0)
    row = make_row(pair_files._Ranking("mine", scored, None))
    assert row == pair_files.BETTER_CUT


def test_prompts_of_a_file(run):
    Path("bare.txt").write_text("Say salt\nSay egg\nSay salt\n")
    lines = [{"prompt": f"Say {word}", "target": "no salt"} for word in WORDS]
    Path("full.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = toque.pairs(run, "bare.jsonl", file="bare.txt")
    assert result.prompts == 3
    rows = rows_of("bare.jsonl")
    assert {row["prompt"] for row in rows} <= {"Say salt", "Say egg"}
    assert len({row["rejected"] for row in rows}) == len(rows)  # also of equal prompts
    toque.pairs(run, "full-pairs.jsonl", file="full.jsonl", limit=4)
    assert {row["chosen"] for row in rows_of("full-pairs.jsonl")} == {"no salt"}
    assert [row["prompt"] for row in rows_of("full-pairs.jsonl")] == [
        line["prompt"] for line in lines[:4]
    ]
    with pytest.raises(ConfigError, match="prompts without a target"):
        toque.pairs(run, "x.jsonl", file="bare.txt", chosen="written")


@pytest.mark.parametrize(
    "family", ["llama", pytest.param("t5", marks=pytest.mark.slow)]
)
def test_run_with_an_adapter(tmp_path, family):
    base = base_run(tmp_path, family)
    config = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(base / "model")}},
        run_dir=str(tmp_path / "adapted"),
        data=toque.configure(base / "config.yaml").data,
        adapter={"dropout": 0.0},
        train={"stop_after": "2 steps", "batch": "8 examples"},
    )
    adapted = toque.train(config)
    result = toque.pairs(adapted, "own.jsonl", limit=20)
    assert f"toque export {adapted.folder} --to" in result.usage
    assert train_as_printed(result).name == "adapted-dpo"


def test_checkpoint_of_a_run(run):
    checkpoint = next((run / "checkpoints").glob("step-*"))
    result = toque.pairs(checkpoint, "own.jsonl", limit=10)
    toque.pairs(run, "finished.jsonl", limit=10)
    assert rows_of("own.jsonl") == rows_of("finished.jsonl")  # the same weights
    assert "--step 20\n" in result.usage


def test_conversations_keep_their_messages(tmp_path, tokenizers_at):
    base = chat_base(tmp_path / "base", tokenizers_at["decoder"], end="<|endoftext|>")
    config = configured(base, tmp_path / "chats")
    folder = toque.train(config).folder
    result = toque.pairs(folder, "own.jsonl", max_new_tokens=16)
    rows = rows_of("own.jsonl")
    assert result.dropped.keys() <= {pair_files.BLANK}
    # A system text and a question, and two or three questions.
    assert {len(row["prompt"]) for row in rows} == {2, 3, 5}
    for row in rows:
        roles = [turn["role"] for turn in row["prompt"]]
        assert roles[-1] == "user"
        assert [turn["role"] for turn in row["chosen"]] == ["assistant"]
        assert row["chosen"][0]["content"].startswith("Stew ")
    train_as_printed(result)
    store = toque.configure("better.yaml").data.store
    assert prompts_in(store).keys() <= prompts_in(config.data.store).keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"to": "there.jsonl"}, "already exists"),
        ({"to": "files"}, "must end with .jsonl"),
        ({"to": "nowhere/own.jsonl"}, "does not exist, or you may not write"),
        ({"limit": 0}, "limit is 0"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"chosen": "best", "samples": 1}, "at least 2 for chosen=best"),
        ({"chosen": "better"}, "must be written or best"),
        ({"samples": 4, "temperature": 0.0}, "all texts of a prompt would be the same"),
        ({"by": "taste"}, "'taste' is not a score"),
        ({"by": "pair_scores:missing"}, "by names pair_scores:missing, which cannot"),
        ({"file": "none.txt"}, "cannot be read"),
    ],
)
def test_arguments_that_are_not_allowed(run, arguments, message):
    Path("there.jsonl").write_text("mine\n")
    with pytest.raises((ConfigError, DataError), match=message):
        toque.pairs(run, **{"to": "own.jsonl"} | arguments)
    assert Path("there.jsonl").read_text() == "mine\n"
    assert not Path("own.jsonl").exists()


def test_file_is_replaced_on_request_and_never_half_written(run):
    Path("files/own.jsonl").write_text("old\n")
    with pytest.raises(KeyboardInterrupt):
        toque.pairs(
            run, "files/own.jsonl", by="pair_scores:stopping", limit=4, replace=True
        )
    assert [file.name for file in Path("files").iterdir()] == ["own.jsonl"]
    assert Path("files/own.jsonl").read_text() == "old\n"
    toque.pairs(run, "files/own.jsonl", limit=4, replace=True)
    assert rows_of("files/own.jsonl")


def test_runs_without_prompts_are_refused(tmp_path, run):
    with pytest.raises(ConfigError, match="is not a run folder"):
        toque.pairs(run / "model", "own.jsonl")
    for n in range(8):
        (tmp_path / "files" / f"{n}.txt").write_text(f"{n} eggs are boiled. " * 20)
    documents = toque.configure(
        TINY,
        run_dir=str(tmp_path / "documents"),
        data={
            "sources": [{"path": str(tmp_path / "files")}],
            "store": str(tmp_path / "store"),
        },
    )
    folder = toque.train(documents).folder
    with pytest.raises(ConfigError, match="documents, which have no prompts"):
        toque.pairs(folder, "own.jsonl")


def test_recipes_are_compared_by_their_score(tmp_path):
    run = toque.train(kitchen_in(tmp_path / "files")).folder
    result = toque.pairs(run, "recipes.jsonl", limit=6)
    chosen, rejected = result.scores["cookable"]
    assert chosen > 0.5 > rejected
    assert all(
        row["prompt"].startswith("Generate recipe for:")
        for row in rows_of("recipes.jsonl")
    )
