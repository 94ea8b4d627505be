"""Peers and shared data: where the baselines and the real recipes lie, and how each is run.

The folder is $TOQUE_SHARED, else ../shared beside the repository. What is missing there raises
`Skipped`, so that a benchmark says so in its record instead of failing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Skipped

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TOQUE_SHARED") or ROOT.parent / "shared")
TOKENIZERS = {"t5": "t5", "gpt2": "gpt2", "neox": "gpt_neox"}
RECIPES = "data/recipes/allrecipes_epicurious_as_is.jsonl.gz"
ALL = 10**9


def shared(path: str) -> Path:
    """A file or folder of the shared data.

    Raises:
        Skipped: it is not there.
    """
    found = SHARED / path
    if not found.exists():
        raise Skipped(f"{path} is not in {SHARED}: set TOQUE_SHARED to the folder that holds it")
    return found


def tokenizer_folder(family: str) -> Path:
    """The shared tokenizer of a model family."""
    return shared(f"tokenizers/{TOKENIZERS[family]}")


def mini_shape(family: str) -> Path:
    """The peers' JSON file of config arguments that 2 CPU cores can train."""
    return shared(f"peers/{family}_mini.json")


def run(
    command: Sequence[object],
    *,
    threads: int | None = None,
    check: bool = True,
    typed: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """A process of its own, offline, its output captured; ends the benchmark when it fails.

    What is `typed` comes to it through a pipe.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(  # noqa: S603 - commands of this folder
        words, capture_output=True, text=True, env=environment, check=False, input=typed
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done


def last_json(printed: str) -> dict[str, Any]:
    """The JSON object on the last line that holds one."""
    line = [line for line in printed.splitlines() if line.startswith("{")][-1]
    found: dict[str, Any] = json.loads(line)
    return found


def toque(
    *words: object, threads: int | None = None, check: bool = True, typed: str | None = None
) -> Any:
    """The command line of Toque, as a user runs it."""
    return run(["-m", "toque", *words], threads=threads, check=check, typed=typed)


def peer(script: str, *words: object, threads: int | None = None) -> str:
    """The output of a baseline from the shared peers/ folder."""
    return run([shared(f"peers/{script}"), *words], threads=threads).stdout


def flags(values: Mapping[str, object]) -> list[str]:
    """`{"batch_size": 2}` as `--batch-size 2`; None is left out."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in values.items())
    return [str(word) for pair in pairs if pair[1] is not None for word in pair]


def write_pairs(path: Path, n: int = ALL) -> Path:
    """The first `n` common examples, {"prompt", "target"} a line, written to `path`."""
    path.write_text(peer("make_pairs.py", shared(RECIPES), n), encoding="utf-8")
    return path


def write_config(
    folder: Path, family: str, source: Path, *, columns: bool = False, **sections: Any
) -> Path:
    """config.yaml of a run from scratch over one file, its store and run within `folder`.

    Args:
        folder: Where the file, `store` and `run` lie.
        family: Its shared tokenizer is taken.
        source: The data file.
        columns: It holds {"prompt", "target"} a line, no recipes.
        sections: Settings to add, by section.
    """
    named = {"columns": {"prompt": "prompt", "target": "target"}} if columns else {}
    config = {
        "run_dir": str(folder / "run"),
        "model": {"family": family, "tokenizer": str(tokenizer_folder(family))},
        "data": {"sources": [{"path": str(source)} | named], "store": str(folder / "store")},
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}  # type: ignore[dict-item]
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path
