"""Classification: what is asked, what may be answered, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from fixtures.asked import texts_asked
from fixtures.kitchens import TINY
from plain_transformers import model_folder
from tiny import shape_of
from toque.config import load_config
from toque.cooking.prompts import CLASSES
from toque.data.tokenizer.codec import load_codec
from toque.errors import ConfigError
from toque.workflows.inference.open_model import open_model
from toque.workflows.prepared_store import open_store


@pytest.fixture(scope="module", params=["t5", "gpt2"])
def run(request: pytest.FixtureRequest, shared_kitchen: Path) -> Path:
    shape = shape_of(request.param, width=16, layers=1, heads=2, positions=512)
    model = {"family": request.param, "tokenizer": "trained:512", "shape": shape}
    config = toque.configure(
        TINY | {"model": model},
        run_dir=str(shared_kitchen / request.param),
        data={"store": str(shared_kitchen / f"of-{request.param}"), "tasks": ["difficulty"],
              "max_prompt_tokens": 256, "validation_fraction": 0.2},
        train={"stop_after": "6 steps", "batch": "2048 tokens"},
        evaluation={"max_examples": None},
    )  # fmt: skip
    return toque.train(config).folder


def test_the_answers_are_those_that_evaluation_scores(
    run: Path, tmp_path: Path
) -> None:
    config = load_config(str(run / "config.yaml"), []).config
    store = open_store(config)
    codec = store.codec()
    rows = store.rows("validation").tolist()
    lines = [json.dumps({"prompt": codec.decode(store.prompt(row))}) for row in rows]
    (tmp_path / "asked.jsonl").write_text("\n".join(lines))
    found = toque.classify(run, file=tmp_path / "asked.jsonl", task="difficulty")
    answers = [each.answer for each in found]
    truths = [codec.decode(store.target(row)) for row in rows]
    scored = json.loads((run / "evaluation.json").read_text())["tasks"]["difficulty"]
    right = np.mean([a == t for a, t in zip(answers, truths, strict=True)])
    assert right == pytest.approx(scored["accuracy"], abs=1e-6)
    for each in found:
        assert tuple(each.probabilities) == CLASSES["difficulty"]
        assert sum(each.probabilities.values()) == pytest.approx(1.0, abs=1e-5)
        assert each.answer == max(each.probabilities, key=each.probabilities.get)


def test_choices_of_ones_own(run: Path) -> None:
    (found,) = toque.classify(run, "Is it hot?", choices=["yes", "no"])
    assert str(found).startswith("Is it hot?\n")
    assert "yes 0." in str(found)
    assert "no 0." in str(found)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (
            {"task": "nutrition", "prompts": "toast"},
            "was not trained for task=nutrition",
        ),
        ({"task": "difficulty"}, "Nothing to answer"),
        (
            {"task": "difficulty", "choices": ["a"], "prompts": "x"},
            "cannot be combined",
        ),
        (
            {"choices": ["a", "a"], "prompts": "x"},
            r"two or more different answers.* choices=\['Healthy', 'Indul",
        ),
        (
            {"choices": "yes", "prompts": "x"},
            r"choices must be a list of texts, not 'yes'.* choices=\['Healthy', 'Indul",
        ),
        (
            {"choices": ["a", 2], "prompts": "x"},
            r"choices must be a list of texts, not \['a', 2\]",
        ),
        ({"choices": ["a", "\udcff"], "prompts": "x"}, "is not UTF-8 text"),
    ],
)
def test_what_is_refused(run: Path, asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        toque.classify(run, **asked)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_prompt_that_leaves_no_positions_for_an_answer_is_refused(
    family: str, tokenizers_at: dict[str, Path], tmp_path: Path
) -> None:
    codec = load_codec(tokenizers_at["decoder"])
    model = model_folder(tmp_path, family, codec, "pairs")
    choices = ["yes", "not at all"]
    longest = max(len(codec.encode(codec.normalise(one))) for one in choices)
    n = 256 - longest - len(open_model(model).prompt_ids(""))
    unit = codec.encode("a a")[len(codec.encode("a")) :]
    assert len(unit) == 1, "a word more is a token more"
    fits = codec.decode([*codec.encode("a"), *unit * (n - len(codec.encode("a")))])
    assert len(toque.classify(model, fits, choices=choices, device="cpu")) == 1
    said = (
        rf"The prompt at prompts, number 2 has {257 - longest} tokens and the longest answer "
        rf"{longest}, but this model's context length is only 256"
    )
    with pytest.raises(ConfigError, match=said):
        toque.classify(model, ["b", fits + " a"], choices=choices, device="cpu")


def test_questions_are_in_the_trained_form(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(
        'Toast: 2 slices bread, butter\n\n{"prompt": "as it is"}\n'
        '{"title": "Toast", "ingredients": ["2 slices bread"], "steps": ["Toast it."]}\n'
    )
    asks = "Rate how difficult this recipe is (easy, medium or hard): "
    assert texts_asked(["Egg"], file, task="difficulty", raw=False) == [
        f"{asks}Egg\nIngredients: \n",
        f"{asks}Toast\nIngredients: bread, butter\n",
        "as it is",
        f"{asks}Toast\nIngredients: bread\n1. Toast it.",
    ]
    asks = "Name the dish of this recipe:\nIngredients: "
    assert texts_asked(
        ["2 eggs, salt", "Egg: 1 egg", {"ingredients": ["1 egg"], "steps": ["Boil."]}],
        None, task="title", raw=False,
    ) == [f"{asks}eggs, salt\n", f"{asks}egg\n", f"{asks}egg\n1. Boil."]  # fmt: skip
    fields = {"title": "Egg", "ingredients": ["1 egg"]}
    assert texts_asked(fields, None, task="write", raw=False) == texts_asked(
        [fields], None, task="write", raw=False
    ), "one record is one prompt"
    toast = {
        "title": "Toast",
        "ingredients": ["bread"],
        "steps": ["Cut.", "Toast.", "Eat."],
    }
    assert texts_asked([toast], None, task="next_step", raw=False) == [
        "Write the next step of this recipe: Toast\nIngredients: bread\n1. Cut.\n2. Toast.\n3. Eat."
    ]
    assert texts_asked(["How is it?"], None, task="request", raw=False) == [
        "How is it?"
    ]
    assert texts_asked(["Egg: a"], None, task="nutrition", raw=False)[0].endswith(
        ": Egg\n- a"
    )
    assert texts_asked(["Egg: a"], None, task=None, raw=False) == ["Egg: a"]
