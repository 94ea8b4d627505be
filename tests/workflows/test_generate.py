"""`toque generate --task` and `--choices`: what is asked, what may be answered, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.generate import write_cookbook
from toque.cooking.prompts import CLASSES
from toque.workflows.assembly.data import open_store
from toque.workflows.classify import questions

SHAPES = {
    "t5": "{d_model: 16, d_kv: 8, d_ff: 16, num_layers: 1, num_heads: 2, dropout_rate: 0.0}",
    "gpt2": "{n_embd: 16, n_layer: 1, n_head: 2, n_positions: 512}",
}


@pytest.fixture(scope="module", params=list(SHAPES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    write_cookbook(folder / "a.jsonl", n=60, seed=3)
    (folder / "a.yaml").write_text(
        f'run_dir: {folder}/run\nmodel: {{family: {request.param}, tokenizer: "trained:512", '
        f"shape: {SHAPES[request.param]}}}\n"
        f"data: {{sources: [{{path: {folder}/a.jsonl}}], store: {folder}/store, tasks: "
        "[difficulty], max_prompt_tokens: 256, max_target_tokens: 256, validation_fraction: 0.2}\n"
        'optim: {warmup: "1 steps", peak_lr: 1e-2}\n'
        'train: {stop_after: "6 steps", batch: "2048 tokens", precision: float32, compile: false}\n'
        "evaluation: {generate: 0}\nobserve: {log_every: 1 steps}\n"
    )
    assert main(["prepare", str(folder / "a.yaml")]) == 0
    assert main(["train", str(folder / "a.yaml")]) == 0
    return folder / "run"


def test_the_answers_are_those_that_evaluation_scores(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load_config(str(run / "config.yaml"), []).config
    store = open_store(config)
    codec = store.codec()
    rows = store.rows("validation").tolist()
    lines = [json.dumps({"prompt": codec.decode(store.prompt(row))}) for row in rows]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    capsys.readouterr()
    words = ["generate", str(run), "--task", "difficulty", "--json"]
    assert main([*words, "--file", str(tmp_path / "asked.jsonl")]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    answers = [record["answer"] for record in found]
    truths = [codec.decode(store.target(row)) for row in rows]
    scored = json.loads((run / "evaluation.json").read_text())["tasks"]["difficulty"]
    right = np.mean([a == t for a, t in zip(answers, truths, strict=True)])
    assert right == pytest.approx(scored["accuracy"], abs=1e-6)
    for record in found:
        assert tuple(record["probabilities"]) == CLASSES["difficulty"]
        assert sum(record["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
        assert record["answer"] == max(record["probabilities"], key=record["probabilities"].get)


def test_choices_of_ones_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(run), "--prompt", "Is it hot?", "--choices", "yes", "--choices", "no"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert said.startswith("Is it hot?\n")
    assert "yes 0." in said
    assert "no 0." in said


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--task", "nutrition", "--prompt", "toast"], "did not learn --task nutrition"),
        (["--task", "write", "--prompt", "toast"], "nutrition, difficulty, cuisine"),
        (["--task", "difficulty"], "Nothing to answer"),
        (["--task", "difficulty", "--choices", "a", "--prompt", "x"], "Leave one"),
        (["--choices", "a", "--prompt", "x"], "two answers or more"),
        (["--choices", "a", "--choices", "a", "--prompt", "x"], "two answers or more"),
        (["--task", "difficulty", "--adapter", "x", "--prompt", "x"], "ask one model"),
        (["--n", "0", "--prompt", "x"], "--n is 0"),
    ],
)
def test_what_is_refused(
    run: Path, words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), *words]) == 2
    assert reason in capsys.readouterr().err


def test_questions_are_in_the_trained_form(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        'Toast: 2 slices bread, butter\n\n{"prompt": "as it is"}\n'
        '{"title": "Toast", "ingredients": ["2 slices bread"], "steps": ["Toast it."]}\n'
    )
    asks = "Rate how difficult this recipe is (easy, medium or hard): "
    assert questions(["Egg"], file, task="difficulty", raw=False) == [
        f"{asks}Egg\nIngredients: \n",
        f"{asks}Toast\nIngredients: bread, butter\n",
        "as it is",
        f"{asks}Toast\nIngredients: bread\n1. Toast it.",
    ]
    assert questions(["Egg: a"], None, task="nutrition", raw=False)[0].endswith(": Egg\n- a")
    assert questions(["Egg: a"], None, task=None, raw=False) == ["Egg: a"]
