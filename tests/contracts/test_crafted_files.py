"""Files that may come from anyone: refused in a paragraph, nothing allocated, nothing executed."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.processes import python
from toque.cli import main

EXIT_CODES = {
    "checkpoint": (4,),
    "store": (3,),
    "model": (4,),
    "tokenizer": (3,),
    "harmless": (0,),
}
NO_FAMILY = "model: code of its own"
"""Another kind of model is no damage: exit 2."""
WORDS = {
    "checkpoint: a header of 10 GB": "declares a header of 10,737,418,240 bytes",
    "checkpoint: a name twice": "has 'w' more than once",
    "checkpoint: a file outside": "lists the file '../../secret'",
    "checkpoint: a link out of the folder": "is not a regular file",
    "checkpoint: a pickle in place of the weights": "has no model.safetensors, only model.bin",
    "checkpoint: a manifest of 20 MB": "but a manifest has at most",
    "store: a file outside": "lists the file 'shards/../../secret'",
    "store: an absolute name": "lists the file '/etc/hostname'",
    "store: a name twice": "lists shards/00000/",
    "store: a negative count of rows": ">= 0",
    "store: a link out of the folder": "is a symbolic link to",
    "store: a folder that is a link": "is a symbolic link to",
    "store: an array of terabytes": "declares shape (1099511627776,)",
    "store: an array of objects": "is not a valid array of a token store",
    "model: a header of 10 GB": "declares a header of 10,737,418,240 bytes",
    "model: a name twice": "has 'w' more than once",
    "model: only a w.pkl": "only as pickles (w.pkl), which can run arbitrary code",
    "model: an index that points outside": "names the file '../../secret.safetensors'",
    "model: code of its own": "never runs a model's own code (auto_map)",
    "model: ten thousand layers": "n_layer is 10000. Allowed: a whole number from 1 to 1,000",
    "model: a vocabulary beyond its weights": "at least 134,218,560 weights",
    "model: a negative width": "n_embd is -8",
    "model: a size that is a mapping": "vocab_size is {'a': 1}",
    "model: quantisation by an absent package": "reads weights of 16 or 32 bits only",
    "tokenizer: an expression that panics": "retry-limit-in-match over",
    "tokenizer: an id of four billion": "an id of 4,294,967,290",
}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    work = tmp_path_factory.mktemp("crafted")
    done = python(Path(__file__).parent / "crafted.py", work, cwd=work)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_fault_63_each_is_refused_in_a_paragraph_with_its_exit_code(
    said: dict[str, Any],
) -> None:
    wrong = {
        name: (kind, code, text)
        for name, (kind, code, text) in said["said"].items()
        if code not in ((2,) if name == NO_FAMILY else EXIT_CODES[name.split(":")[0]])
        or (code and ("\n" in text or len(text) < 40))
    }
    assert wrong == {}
    assert len(said["said"]) > 85


def test_the_error_says_what_was_found(said: dict[str, Any]) -> None:
    missing = {
        n: said["said"][n][2]
        for n, words in WORDS.items()
        if words not in said["said"][n][2]
    }
    assert missing == {}


def test_nothing_that_was_planted_ran(said: dict[str, Any]) -> None:
    assert said["executed"] is False


@pytest.mark.parametrize("kind", ["pickle", "torch's archive"])
def test_a_pickle_is_no_source(tmp_path: Path, kind: str, capsys) -> None:
    path = tmp_path / "recipes.jsonl"  # known by its content, whatever it is called
    if kind == "pickle":
        path.write_bytes(pickle.dumps([{"title": "soup"}]))
    else:
        torch.save([{"title": "soup"}], path)
    (tmp_path / "run.yaml").write_text(
        "model: {family: gpt2, tokenizer: 'trained:512'}"
    )
    words = [f"data.sources=[{{path: {path}}}]", f"data.store={tmp_path}/store"]
    assert main(["prepare", str(tmp_path / "run.yaml"), *words]) == 3
    error = capsys.readouterr().err
    assert "is a pickle. Toque does not read pickles" in error
    assert not (tmp_path / "store").exists()
