"""A task with an obvious reward: the answer contains the word that the prompt asks for.

An answer has at most 24 tokens. So a model may also learn to write several words.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import toque
from tiny import shape_of
from toque.runs.history import read_metrics

WORDS = ["salt", "pepper", "onion", "garlic", "butter", "flour", "sugar", "egg"]
SENTENCES = ["We add {} now.", "Take {} today.", "You need {} here.", "Put {} in."]
USUAL = {
    "seed": 5,
    "evaluation": {"max_examples": 8, "generate": 0},
    "observe": {"log_every": "1 steps"},
}
MACHINE = {"precision": "float32", "compile": False}
LORA = {"r": 16, "dropout": 0, "target_modules": "all"}
REWARD = """
def has_word(prompts, texts, references):
    words = [prompt.split()[-1].strip(".") for prompt in prompts]
    return [float(word in text) for word, text in zip(words, texts)]
"""


def write_rows(path: Path) -> None:
    """Prompts that ask for a word, and sentences with any word."""
    rng = np.random.default_rng(3)
    with path.open("w") as file:
        for _ in range(400):
            sentence = rng.choice(SENTENCES).format(rng.choice(WORDS))
            row = {"ask": f"Use the word {rng.choice(WORDS)}.", "say": sentence}
            file.write(json.dumps(row) + "\n")


@pytest.mark.timeout(1200)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "adapter"),
    [("llama", None), ("gpt2", None), ("t5", None), ("llama", LORA)],
    ids=["llama", "gpt2", "t5", "lora"],
)
def test_obvious_reward_is_learnt_in_100_updates(
    family: str, adapter: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "obvious_reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    write_rows(tmp_path / "words.jsonl")
    columns = {"prompt": "ask", "target": "say"}
    data = {
        "sources": [{"path": "words.jsonl", "columns": columns}],
        "store": "store",
        "max_target_tokens": 24,
        "dedup": "none",
    }
    shape = shape_of(family, width=48, dropout=0.0)
    imitation = toque.configure(
        USUAL,
        run_dir="base",
        data=data,
        model={"family": family, "tokenizer": "trained:512", "shape": shape},
        optim={"peak_lr": 3e-3, "warmup": "10 steps"},
        train=MACHINE | {"stop_after": "100 steps", "batch": "32 examples"},
    )
    toque.train(imitation)
    learning = toque.configure(
        USUAL,
        run_dir="run",
        data=data,
        model={"family": "auto", "start_from": "base/model"},
        adapter=adapter,
        objective={
            "kind": "grpo",
            "rewards": {"obvious_reward:has_word": 1.0},
            "samples": 8,
        },
        optim={"peak_lr": 3e-3, "schedule": "linear"},
        train=MACHINE | {"stop_after": "100 steps", "batch": "16 examples"},
    )
    toque.train(learning)
    steps = [e for e in read_metrics(Path("run/metrics.jsonl")) if e["event"] == "step"]
    rewards = [step["reward"] for step in steps]
    assert len(rewards) == 100
    assert np.mean(rewards[:3]) < 0.2
    assert np.mean(rewards[-5:]) > 0.9
