from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import toque
from toque.cooking.cookbook.generate import write_cookbook
from toque.errors import ConfigError

TINY = {
    "model": {
        "family": "gpt2",
        "tokenizer": "trained:512",
        "shape": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 512},
    },
    "data": {"max_prompt_tokens": 64, "max_target_tokens": 256},
    "optim": {"warmup": "1 steps", "peak_lr": 1e-2},
    "train": {"stop_after": "3 steps", "batch": "1024 tokens", "precision": "float32"},
    "evaluation": {"max_examples": 4, "generate": 1},
    "observe": {"log_every": "1 step"},
}


def test_importing_is_light_and_every_name_is_there():
    code = (
        "import sys, toque\n"
        "assert not {'torch', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "for name in toque.__all__: getattr(toque, name)\n"
        "assert 'torch' not in sys.modules\n"
        "assert not hasattr(toque, 'nothing')\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_sections_are_merged_and_lists_replaced(tmp_path):
    base = toque.configure("demo", optim={"peak_lr": 1e-4})
    assert (base.optim.peak_lr, str(base.optim.warmup)) == (1e-4, "5 %")
    changed = toque.configure(base, data={"sources": [{"path": tmp_path / "a.jsonl"}]}, seed=3)
    assert [s.path for s in changed.data.sources] == [str(tmp_path / "a.jsonl")]
    assert (changed.seed, changed.optim.peak_lr, base.seed) == (3, 1e-4, 17)
    again = toque.configure(toque.configure(observe={"webhook": "https://example.org/t"}), seed=4)
    assert again.observe.webhook == "https://example.org/t"
    with pytest.raises(ConfigError, match=r"peak_lr"):
        toque.configure(optim={"peak_lrr": 1.0})


def test_the_whole_job_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_cookbook(Path("a.jsonl"), n=60, seed=3)
    config = toque.configure(TINY, data={"sources": [{"path": "a.jsonl"}], "store": "store"})
    seen = []

    class Watcher:
        def on_step_end(self, state):
            seen.append((state.step, state.loss))

    run = toque.train(config, callbacks=[Watcher()])  # prepares first
    assert toque.prepare(config).reused
    assert (run.step, run.reason, run.losses) == (3, "finished", seen)
    scored = toque.evaluate(run)
    assert scored.metrics["loss"] == run.metrics["loss"]
    (text,) = toque.generate(run, "soup: lentils", max_new_tokens=4, temperature=0.0)
    assert text.prompt == "Generate recipe for: soup using ingredients: lentils"
    assert text.tokens <= 4
    with pytest.raises(ConfigError, match="not a run folder"):
        toque.evaluate(run.model)
