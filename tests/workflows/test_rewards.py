"""Runs that learn from rewards of generated texts."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import toque
from fixtures.kitchens import TINY, StopAt
from tiny import shape_of
from toque.cli import main
from toque.config.dump import to_yaml
from toque.errors import CheckpointError, ConfigError
from toque.evaluation.rewards import Rewards
from toque.storage.atomic import sha256_of

WORDS = ["salt", "pepper", "onion", "garlic", "butter", "flour", "sugar", "egg"]
GRPO = {"kind": "grpo", "rewards": {"kitchen_rewards:has_word": 1.0}, "samples": 8}
MODULE = """
import itertools
import math
import numpy as np

def has_word(prompts, texts, references):
    return [float(p.split()[-1] in t.split()) for p, t in zip(prompts, texts)]

def brevity(prompts, texts, references):
    return [-len(text) / 100 for text in texts]

def constant(prompts, texts, references):
    return [1.0] * len(texts)

def too_few(prompts, texts, references):
    return [1.0]

def nothing(prompts, texts, references):
    return None

def words(prompts, texts, references):
    return ["1.0"] * len(texts)

def nones(prompts, texts, references):
    return [0.5, None] * (len(texts) // 2)

def nested(prompts, texts, references):
    return [[1.0]] * len(texts)

def mapped(prompts, texts, references):
    return {n: 1.0 for n, _ in enumerate(texts)}

def lazy(prompts, texts, references):
    return (1 / 0 for _ in texts)

def endless(prompts, texts, references):
    return itertools.repeat(1.0)

def scalar(prompts, texts, references):
    return np.array(1.0)

def nan(prompts, texts, references):
    return [math.nan] + [1.0] * (len(texts) - 1)

def leaving(prompts, texts, references):
    raise SystemExit(0)

def huge(prompts, texts, references):
    return [1e200] * len(texts)

def long(prompts, texts, references):
    return [10 ** 400] * len(texts)

def broken(prompts, texts, references):
    raise KeyError("salt")
"""


FAMILIES = ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "t5"))]


@pytest.fixture(scope="module", params=FAMILIES)
def begun(request: pytest.FixtureRequest, tmp_path_factory: Any) -> toque.RunConfig:
    """A configuration that starts from a model that says two random words."""
    folder = tmp_path_factory.mktemp(request.param)
    rng = np.random.default_rng(3)
    rows = [
        {"ask": f"Say {rng.choice(WORDS)}", "say": " ".join(rng.choice(WORDS, 2))}
        for _ in range(200)
    ]
    (folder / "w.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"prompt": "ask", "target": "say"}
    data = {
        "sources": [{"path": str(folder / "w.jsonl"), "columns": columns}],
        "store": str(folder / "store"), "max_target_tokens": 12, "dedup": "none",
    }  # fmt: skip
    shape = shape_of(request.param, width=48, dropout=0.0)
    model = {"family": request.param, "tokenizer": "trained:512", "shape": shape}
    config = toque.configure(
        TINY | {"model": model}, run_dir=str(folder / "base"), data=data,
        train={"stop_after": "60 steps", "batch": "32 examples"},
    )  # fmt: skip
    toque.train(config)
    return toque.configure(
        TINY | {"model": {"family": "auto", "start_from": str(folder / "base/model")}},
        run_dir=str(folder / "run"),
        data=data,
        objective=GRPO,
        optim={"peak_lr": 3e-3, "schedule": "constant"},
        train={"stop_after": "100 steps", "batch": "8 examples"},
    )


one_family = pytest.mark.parametrize("begun", ["llama"], indirect=True)
"""For tests of messages and settings, which do not depend on the family."""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kitchen_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def train(config: toque.RunConfig, name: str, **sections: Any) -> Path:
    folder = Path(config.run_dir).parent / name
    callbacks = sections.pop("callbacks", [])
    settings = toque.configure(config, run_dir=str(folder)).model_dump(mode="json")
    # Not merged: a mapping such as the rewards would keep its old entries.
    settings["objective"] = GRPO | sections.pop("objective", {})
    sections = {"train": {"stop_after": "4 steps"}} | sections
    toque.train(toque.configure(settings, **sections), callbacks=callbacks)
    return folder


def steps_of(run: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [event for event in lines if event["event"] == "step"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", "best_of"])
def test_obvious_reward_is_learnt(begun, kind):
    length = {"stop_after": "60 steps"}
    run = train(begun, f"learnt-{kind}", objective={"kind": kind}, train=length)
    rewards = [step["reward"] for step in steps_of(run)]
    assert np.mean(rewards[-10:]) > np.mean(rewards[:3]) + 0.1


def weights_of(run: Path) -> str:
    (file,) = (run / "model").glob("*model.safetensors")
    return sha256_of(file)


@pytest.mark.parametrize("adapter", [None, "lora"])
@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_continued_run_has_the_same_weights(begun, kl, adapter):
    settings: dict[str, Any] = {"objective": {"kl": kl}}
    if adapter is not None:
        settings["adapter"] = {"kind": adapter}
    name = f"stopped-{kl}-{adapter}"
    whole = train(begun, f"whole-{kl}-{adapter}", **settings)
    stopped = train(begun, name, **settings, callbacks=[StopAt(2)])
    assert len(steps_of(stopped)) == 3  # the signal ends the next update
    train(begun, name, **settings)
    names = ["reward", "loss", "entropy", "text_tokens", *(["kl"] if kl else [])]
    assert [[s[n] for n in names] for s in steps_of(stopped)] == [
        [s[n] for n in names] for s in steps_of(whole)
    ]
    assert weights_of(whole) == weights_of(stopped)


def test_recomputed_blocks_do_not_change_the_reference(begun):
    usual = train(begun, "saved", objective={"kl": 0.5})
    settings = {"stop_after": "4 steps", "gradient_checkpointing": True}
    recomputed = train(begun, "recomputed", objective={"kl": 0.5}, train=settings)
    assert [s["kl"] for s in steps_of(recomputed)] == [s["kl"] for s in steps_of(usual)]
    assert weights_of(recomputed) == weights_of(usual)


@pytest.mark.parametrize("kl", [0.0, 0.5])
def test_changed_start_weights_are_refused_if_they_are_the_reference(begun, kl):
    start = Path(begun.model.start_from)
    model = start.parent.parent / f"moved-{kl}"
    shutil.copytree(start, model)
    section = begun.model.model_copy(update={"start_from": str(model)})
    config = begun.model_copy(update={"model": section})
    length = {"stop_after": "2 steps"}
    train(config, f"other-start-{kl}", objective={"kl": kl}, train=length)

    weights = model / "model.safetensors"
    tensors = load_file(weights)
    first = next(iter(tensors))
    save_file(tensors | {first: tensors[first] * 1.5}, weights, {"format": "pt"})
    again = partial(train, config, f"other-start-{kl}", objective={"kl": kl})
    if kl:
        with pytest.raises(CheckpointError, match="the weights there have changed"):
            again()
        shutil.rmtree(model)
        with pytest.raises(ConfigError, match=f"moved-{kl}"):
            again()
    else:
        again()  # checkpoints have all weights
        assert len(steps_of(Path(config.run_dir).parent / f"other-start-{kl}")) == 4


def test_micro_batches_do_not_change_the_update(begun):
    one = train(
        begun, "one-row", train={"stop_after": "2 steps", "micro_batch_rows": 1}
    )
    usual = steps_of(train(begun, "usual", train={"stop_after": "2 steps"}))
    for step, expected in zip(steps_of(one), usual, strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-5)


def test_penalty_measures_the_divergence(begun):
    run = train(begun, "kl", objective={"kl": 0.5}, train={"stop_after": "12 steps"})
    divergences = [step["kl"] for step in steps_of(run)]
    assert divergences[0] == pytest.approx(0.0, abs=1e-6)
    assert all(0.0 <= value < 1.0 for value in divergences[1:])
    assert divergences[-1] > 0.0


@one_family
def test_constant_reward_ends_the_run(begun):
    constant = {"rewards": {"kitchen_rewards:constant": 1.0}, "samples": 2}
    length = {"batch": "2 examples", "save_every": "4 steps"}
    for _ in range(2):  # the second continues from update 8
        with pytest.raises(ConfigError, match=r"first 10 updates .*mean is 1\)"):
            train(begun, "constant", objective=constant,
                  train=length | {"stop_after": "20 steps"})  # fmt: skip


@one_family
def test_best_and_worst_text_of_an_update_are_samples(begun):
    length = {"stop_after": "4 steps", "evaluate_every": "2 steps"}
    run = train(begun, "shown", train=length)
    samples = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
    rewarded = [s for s in samples if "reward" in s["metrics"]]
    assert {s["step"] for s in rewarded} == {2, 4}
    for sample in rewarded:
        word = sample["prompt"].split()[-1]
        assert sample["metrics"]["reward"] == float(word in sample["text"].split())


@one_family
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_few", "returned 1 numbers for 64 texts"),
        ("nothing", "returned NoneType instead of a list of numbers"),
        ("words", "returned '1.0' for text 1. It must"),
        ("nones", "returned None for text 2. It must"),
        ("nested", r"returned \[1\.0\] for text 1. It must"),
        ("lazy", "failed with ZeroDivisionError"),
        ("endless", "returned more than 64 numbers for 64 texts"),
        ("mapped", "returned dict instead of a list of numbers"),
        ("scalar", "returned ndarray instead of a list of numbers"),
        ("nan", "returned nan for text 1. It must"),
        ("broken", "failed with KeyError: 'salt'"),
        ("leaving", "failed with SystemExit: 0"),
        ("huge", "absolute value may be at most"),
        ("long", "returned 1000.* for text 1. It must"),
        ("missing", "which cannot be imported"),
    ],
)
def test_bad_rewards_name_their_prompt(begun, name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        train(
            begun,
            f"bad-{name}",
            objective={"rewards": {f"kitchen_rewards:{name}": 1.0}},
        )
    assert name == "missing" or "Prompt: 'Say " in str(caught.value)


@one_family
def test_unknown_score_is_refused_before_training(begun):
    with pytest.raises(ConfigError, match="recipe_scor, which is not a score"):
        train(begun, "unknown", objective={"rewards": {"recipe_scor": 1.0}})


@one_family
def test_reward_of_a_run_folder_is_not_imported(begun, capsys):
    run = train(begun, "theirs")
    (run / "end.json").unlink(missing_ok=True)
    assert main(["train", str(run / "config.yaml"), "train.stop_after=6 steps"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "kitchen_rewards:has_word (objective.rewards" in error


@one_family
@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"objective": {"samples": 1}}, "samples"),
        ({"objective": {"beta": 0.2}}, "only dpo uses it"),
        ({"train": {"batch": "1024 tokens"}}, "number of examples"),
        ({"objective": {"kl": 0.1}, "train": {"strategy": "fsdp"}}, "or use ddp"),
    ],
)
def test_settings_that_do_not_fit(begun, sections, message):
    with pytest.raises(ConfigError, match=message):
        toque.configure(begun, **sections)


def test_rewards_are_needed():
    usual = TINY | {"model": {"family": "auto", "start_from": "model"}}
    with pytest.raises(ConfigError, match="nothing to learn from"):
        toque.configure(usual, objective={"kind": "grpo"})


@one_family
@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            {"kitchen_rewards:brevity": 1.0},
            r"kitchen_rewards:has_word: 1\.0 -> None; .*:brevity: None -> 1\.0",
        ),
        ({"kitchen_rewards:has_word": 0.5}, r"kitchen_rewards:has_word: 1\.0 -> 0\.5"),
    ],
)
def test_other_reward_cannot_continue_a_run(begun, rewards, message):
    name = f"changed-{len(message)}"
    run = train(begun, name, train={"stop_after": "2 steps"})
    before = sha256_of(run / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=rf"objective\.rewards\.{message}"):
        train(begun, name, objective={"rewards": rewards})
    assert sha256_of(run / "metrics.jsonl") == before


@one_family
def test_cut_prompts_are_counted_once(begun):
    folder = Path(begun.run_dir).parent
    data = begun.data.model_dump(mode="json")
    rows = [{"ask": f"Say {word} and " * 9, "say": word} for word in WORDS * 25]
    (folder / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data["sources"][0]["path"] = str(folder / "long.jsonl")
    data |= {"store": str(folder / "long"), "max_prompt_tokens": 8}
    config = begun.model_copy(update={"data": type(begun.data)(**data)})
    run = train(config, "cut", train={"stop_after": "2 steps"})
    log = (run / "metrics.jsonl").read_text()
    assert log.count("prompts were cut to 8 tokens") == 1
    assert (
        "prompts were cut" not in (train(begun, "uncut") / "metrics.jsonl").read_text()
    )


def test_recipe_scores_are_rewards():
    settings = toque.configure(
        TINY | {"model": {"family": "auto", "start_from": "m"}},
        objective={"kind": "best_of", "rewards": {"recipe_score": 2.0}},
        train={"batch": "8 examples"},
    )
    rewards = Rewards.from_settings(settings.objective, {})
    scores = rewards.score(["write a recipe: rice"], ["nonsense"], [""])
    assert scores.shape == (1,)
    assert to_yaml(settings).count("recipe_score") == 1
