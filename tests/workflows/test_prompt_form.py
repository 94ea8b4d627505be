"""Prompts in the form a model was trained on: recipes, pairs of one's own, texts, ids; and none."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import toque
from fixtures.asked import texts_asked
from fixtures.kitchens import TINY
from plain_transformers import plain
from tiny import shape_of
from toque.cooking.cookbook.recipes import write_cookbook
from toque.errors import ConfigError
from toque.models.loading.from_scratch import build_model
from toque.models.loading.model_export import save_model
from toque.workflows.inference.open_model import open_model

PAIRS = [
    {"question": f"What is {i} plus 1?", "answer": f"It is {i + 1}."} for i in range(40)
]
SOURCES: dict[str, dict[str, Any]] = {
    "recipes": {},
    "pairs": {"columns": {"prompt": "question", "target": "answer"}},
    "documents": {"format": "text"},
    "tokens": {"format": "tokens"},
}
TYPED = "Once there was: one, two"
ASKED = {"recipes": "Generate recipe for: Once there was using ingredients: one, two"}
CARD = {
    "recipes": "The prompt it was trained on: `Generate recipe for: NAME using ingredients: a, b",
    "pairs": "Toque sends it each prompt unchanged",
    "documents": "It continues the text of a prompt",
    "tokens": "It continues the text of a prompt",
}


def source_file(kind: str) -> str:
    """A source of the kind in the working folder."""
    if kind == "recipes":
        write_cookbook(Path("data.jsonl"), n=40, seed=3)
    elif kind == "pairs":
        Path("data.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    elif kind == "documents":
        for i in range(12):
            text = f"Once there was a soup number {i}. It was stirred and salted. " * 4
            Path(f"data{i}.txt").write_text(text)
        return "data*.txt"
    else:
        rng = np.random.default_rng(0)
        ids = rng.integers(5, 300, 600).astype(np.uint32)
        np.savez("data.npz", ids=ids, ends=np.arange(30, 601, 30))
        return "data.npz"
    return "data.jsonl"


def config_of(kind: str, family: str, tokenizer: str, **more: Any) -> dict[str, Any]:
    shape = shape_of(family, positions=512)
    config: dict[str, Any] = TINY | {
        "model": {"family": family, "shape": shape, "tokenizer": tokenizer},
        "data": {
            "sources": [{"path": source_file(kind), **SOURCES[kind]}], "store": "store",
            "max_prompt_tokens": 64, "max_target_tokens": 160, "validation_fraction": 0.2,
        },
        "train": TINY["train"] | {"stop_after": "2 steps", "batch": "512 tokens"},
    }  # fmt: skip
    for name, values in more.items():
        config[name] = config.get(name, {}) | values
    return config


@pytest.fixture
def trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizers_at: dict[str, Path]
):
    monkeypatch.chdir(tmp_path)

    def train(kind: str, family: str = "gpt2", **more: Any) -> Path:
        learnt = tokenizers_at["encoder-decoder" if family == "t5" else "decoder"]
        config = config_of(kind, family, str(learnt), **more)
        toque.train(config)
        return Path("run")

    return train


def written(folder: Path) -> tuple[str, str]:
    (one,) = toque.generate(folder, TYPED, temperature=0, max_new_tokens=8)
    return one.prompt, one.text


@pytest.mark.parametrize("kind", SOURCES)
def test_a_run_is_asked_in_its_own_form_wherever_it_went(
    kind: str, trained: Any
) -> None:
    run = trained(kind)
    expected = written(run)
    assert expected[0] == ASKED.get(kind, TYPED)
    if kind == "documents":  # it is continued, and no line break put behind it
        opened = open_model(run)
        codec = opened.codec
        assert opened.prompt_ids(TYPED) == [codec.bos_id, *codec.encode(TYPED)]
    toque.export(run, "exported")
    shutil.copytree(run / "model", "alone")
    shutil.copytree(run, "unfinished", ignore=shutil.ignore_patterns("model"))
    assert written(Path("unfinished"))[0] == expected[0]  # it is known by its store
    shutil.rmtree("store")
    for folder in ("exported", "alone", run):
        assert written(Path(folder)) == expected
        card = Path(folder if folder != run else run / "model") / "README.md"
        assert CARD[kind] in card.read_text()
    assert plain(Path("exported"), [expected[0]], encoder=False, most=8) == [
        expected[1]
    ]


def test_the_texts_shown_while_training_are_asked_alike(trained: Any) -> None:
    run = trained("documents", evaluation={"generate": 1, "prompts": [TYPED]})
    shown = [
        json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()
    ]
    texts = [one["text"] for one in shown if one["prompt"] == TYPED]
    (one,) = toque.generate(run, TYPED, temperature=0, max_new_tokens=160)
    assert texts[-1] == one.text


def test_an_adapter_is_asked_in_its_form_whatever_its_base_is(
    trained: Any, tokenizers_at: dict[str, Path]
) -> None:
    model = build_model(
        family="gpt2", shape=shape_of("gpt2", positions=512), vocab_size=400, pad_id=0, eos_id=0,
        bos_id=0, seed=1,
    )  # fmt: skip
    save_model(model, tokenizers_at["decoder"], Path("base"), card="")
    run = trained(
        "pairs", model={"start_from": "base", "shape": {}}, adapter={"r": 4},
        optim={"peak_lr": 0.05, "warmup": "1 steps"},
    )  # fmt: skip
    expected = written(run)
    assert expected[0] == TYPED
    (one,) = toque.generate(
        "base", TYPED, adapters=[run / "model"], temperature=0, max_new_tokens=8
    )
    assert (one.prompt, one.text) == expected
    assert "merges this adapter" in (run / "model" / "README.md").read_text()
    toque.export(run, "merged")
    assert written(Path("merged")) == expected
    assert plain(Path("merged"), [TYPED], encoder=False, most=8) == [expected[1]]
    assert "merges this adapter" not in Path("merged/README.md").read_text()


def test_tasks_without_a_recipe_are_not_asked_for_one(trained: Any) -> None:
    run = trained("recipes", data={"tasks": ["difficulty"]})
    assert written(run)[0] == TYPED
    card = (run / "model" / "README.md").read_text()
    assert "`Rate how difficult this recipe is" in card
    assert "Generate recipe for" not in card


def test_a_model_that_fills_gaps_says_so(trained: Any) -> None:
    run = trained("documents", family="t5", span_corruption={})
    card = (run / "model" / "README.md").read_text()
    assert "fill gaps" in card
    assert "```python" not in card


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gpt2", "llama", "lora"])
def test_fault_69_a_trained_model_writes_the_same_in_plain_transformers(
    family: str, trained: Any, tokenizers_at: dict[str, Path]
) -> None:
    """Twenty prompts, of a model that has learnt enough to answer each otherwise."""
    more: dict[str, Any] = {
        "train": {
            "stop_after": "80 steps",
            "batch": "1024 tokens",
            "micro_batch_rows": 2,
        },
        "optim": {"peak_lr": 0.01, "warmup": "8 steps"},
        "data": {"max_target_tokens": 300},
    }
    if family == "lora":
        model = build_model(
            family="gpt2", shape=shape_of("gpt2", positions=512, initializer_range=0.2),
            vocab_size=400, pad_id=0, eos_id=0, bos_id=0, seed=1,
        )  # fmt: skip
        save_model(model, tokenizers_at["decoder"], Path("base"), card="")
        more |= {"model": {"start_from": "base", "shape": {}}, "adapter": {"r": 8}}
    run = trained("recipes", family="gpt2" if family == "lora" else family, **more)
    toque.export(run, "exported")
    typed = [f"{dish}: {food}" for dish in ("Soup", "Bread", "Salad", "Cake", "Toast")
             for food in ("eggs", "milk, flour", "sugar, salt, pepper", "butter")]  # fmt: skip
    expected = toque.generate(run, typed, temperature=0, max_new_tokens=60)
    prompts = [one.prompt for one in expected]
    found = plain(Path("exported"), prompts, encoder=family == "t5", most=60)
    assert found == [one.text for one in expected]


def test_a_model_whose_tokenizer_was_saved_again_is_scored_on_its_store(
    trained: Any,
) -> None:
    run = trained("pairs")
    before = toque.evaluate(run).metrics["loss"]
    toque.export(run, "exported")
    AutoTokenizer.from_pretrained("exported").save_pretrained("exported")
    held = json.loads(Path("exported/tokenizer.json").read_text())
    Path("exported/tokenizer.json").write_text(json.dumps(held, indent=2))
    config = str(run / "config.yaml")
    assert toque.evaluate("exported", config=config).metrics["loss"] == pytest.approx(
        before
    )


@pytest.mark.parametrize("blank", ["", "  ", "\n\t", " : , "])
@pytest.mark.parametrize(
    "how", [{"task": "write"}, {"task": None}, {"task": "write", "raw": True}]
)
def test_a_prompt_of_nothing_is_refused(blank: str, how: dict[str, object]) -> None:
    with pytest.raises(
        ConfigError,
        match=r"prompts, number 2 is blank.*nothing to (generate from|answer)",
    ):
        texts_asked(["soup", blank], None, **{"raw": False} | how)


def test_a_model_of_whole_texts_may_begin_one_from_nothing() -> None:
    found = texts_asked("", None, task="write", raw=False, recipes=False, blanks=True)
    assert found == [""]


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt": " "}',
        '{"title": ""}',
        '{"title": " ", "ingredients": ["", " "]}',
        ":",
    ],
)
def test_one_of_a_file_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text(f"soup\n\n{line}\n")
    with pytest.raises(ConfigError, match=r"prompts\.txt:3 is blank"):
        texts_asked((), file, task="write", raw=False)


def test_what_says_something_is_not_blank(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"title": "", "ingredients": ["2 eggs"]}\n{"prompt": "?"}\n')
    asked = texts_asked(": eggs", file, task="write", raw=False)
    assert asked[0].endswith("using ingredients: eggs")
    assert asked[2] == "?"
