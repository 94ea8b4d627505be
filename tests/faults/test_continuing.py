"""Data, settings and tokenizers that changed between two sessions, or while one reads them."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from fixtures.damage import flip
from fixtures.kitchens import StopAt
from fixtures.processes import python
from toque.cli import main
from toque.config import load_config
from toque.cooking.cookbook.recipes import write_cookbook
from toque.workflows.train import train


@pytest.fixture(scope="module")
def begun(kitchen) -> Path:
    """A run that was interrupted after a few steps."""
    words = [f"run_dir={kitchen / 'begun'}"]
    resolved = load_config(str(kitchen / "run.yaml"), words)
    assert train(resolved, callbacks=[StopAt(3)]).interrupted
    return kitchen / "begun"


@pytest.fixture
def go_on(kitchen, begun, tmp_path, capfd):
    """`go_on(settings...)`: exit code and words of the interrupted run with other settings."""

    def train(*words):
        shutil.copytree(begun, tmp_path / "begun", dirs_exist_ok=True)
        code = main(
            [
                "train",
                str(kitchen / "run.yaml"),
                f"run_dir={tmp_path / 'begun'}",
                *words,
            ]
        )
        return code, " ".join(capfd.readouterr().err.split())

    return train


def test_fault_17_a_shard_that_changed_between_two_sessions(kitchen, go_on, tmp_path):
    store = tmp_path / "store"
    shutil.copytree(kitchen / "store", store)
    shard = next(store.glob("shards/*/target_tokens.npy"))
    flip(shard, at=-2)
    code, said = go_on(f"data.store={store}")
    assert code == 3
    assert f"{shard.name} has the right size but the wrong content" in said


def test_fault_17_another_store_under_the_same_name(kitchen, go_on, tmp_path):
    write_cookbook(tmp_path / "b.jsonl", n=60, seed=4)
    words = [
        f"data.sources=[{{path: {tmp_path / 'b.jsonl'}}}]",
        f"data.store={tmp_path / 'store'}",
    ]
    assert main(["prepare", str(kitchen / "run.yaml"), *words]) == 0
    code, said = go_on(*words)
    assert code == 4
    assert "was trained on another store" in said
    assert "run_dir=runs/another" in said


def test_fault_18_another_tokenizer_than_the_stores(kitchen, go_on, tmp_path):
    code, said = go_on("model.tokenizer=trained:600")
    assert code == 3
    assert "its tokenizer was trained:512 and is trained:600" in said
    store = tmp_path / "store"
    shutil.copytree(kitchen / "store", store)
    vocabulary = store / "tokenizer" / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text() + "\n")
    code, said = go_on(f"data.store={store}")
    assert code == 3
    assert "tokenizer.json" in said


def test_fault_19_settings_that_would_make_it_another_run_are_listed(go_on):
    code, said = go_on(
        "optim.peak_lr=2e-2", "train.batch=8 examples", "observe.log_every=2 steps"
    )
    assert code == 4
    assert "optim.peak_lr: 0.01 -> 0.02" in said
    assert "train.batch: 1024 tokens -> 8 examples" in said
    assert "log_every" not in said


def test_fault_19_settings_that_only_watch_may_change(go_on, tmp_path):
    code, said = go_on("observe.log_every=2 steps", "train.save_every=5 steps")
    assert code == 0, said
    assert (tmp_path / "begun" / "model" / "config.json").exists()


CUT = """
import os, sys
from pathlib import Path
import numpy as np
from toque.data.store.token_store import TokenStore
from toque.errors import DataError

folder, way = Path(sys.argv[1]), sys.argv[2]
shard = next(folder.glob("shards/*/target_tokens.npy"))
store, plain = TokenStore.open(folder), np.load(shard, mmap_mode="r")
rows = np.arange(store.n_rows)
read = {
    "row": lambda: [int(store.target(row).sum()) for row in rows.tolist()],
    "rows": lambda: [bytes(part) for part in store.sides(rows)[1].parts],
    "numpy": lambda: int(plain.sum()),
}[way]
before = read()
os.truncate(shard, 200)
try:
    assert read() == before
except DataError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("way", "code"), [("row", 3), ("rows", 3), ("numpy", -signal.SIGBUS)]
)
def test_fault_16_a_shard_that_is_cut_while_it_is_read(kitchen, tmp_path, way, code):
    store = tmp_path / "store"
    shutil.copytree(kitchen / "store", store)
    done = python("-c", CUT, store, way)
    assert done.returncode == code, (done.returncode, done.stderr[-2000:])
    if code == 3:
        assert "target_tokens.npy was truncated while it was being read" in done.stdout


def test_a_signal_while_the_finished_model_is_scored_leaves_a_run_that_continues(
    kitchen, tmp_path, monkeypatch, capfd
):
    words = ["train", str(kitchen / "run.yaml"), f"run_dir={tmp_path / 'run'}"]
    with monkeypatch.context() as patched:
        patched.setattr(
            "toque.workflows.train.finish",
            lambda *_: os.kill(os.getpid(), signal.SIGTERM),
        )
        assert main(words) == 75
    assert "Stopped by a signal and saved at step 12" in " ".join(
        capfd.readouterr().err.split()
    )
    assert not (tmp_path / "run" / "end.json").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert main(words) == 0
    assert (tmp_path / "run" / "model").is_dir()
