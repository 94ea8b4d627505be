"""Baselines, shared data, and an S3 emulator.

The shared folder is $TOQUE_SHARED, or ../shared next to the repository. A missing file raises
`Skipped`, and the record of the benchmark names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Skipped, free_port

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("TOQUE_SHARED") or ROOT.parent / "shared")
TOKENIZERS = {"t5": "t5", "gpt2": "gpt2", "neox": "gpt_neox"}
RECIPES = "data/recipes/allrecipes_epicurious_as_is.jsonl.gz"
ALL = 10**9
BUCKET = "s3://pantry"


def shared(path: str) -> Path:
    """Return the path of a shared file or folder.

    Raises:
        Skipped: The path does not exist.
    """
    shared_path = SHARED / path
    if not shared_path.exists():
        raise Skipped(
            f"{path} is not in {SHARED}. Set TOQUE_SHARED to the folder that contains it"
        )
    return shared_path


def tokenizer_folder(family: str) -> Path:
    """Return the folder of the shared tokenizer of a model family."""
    return shared(f"tokenizers/{TOKENIZERS[family]}")


def mini_shape(family: str) -> Path:
    """Return the JSON file of a shape that two CPU cores can train."""
    return shared(f"peers/{family}_mini.json")


def run(
    command: Sequence[object],
    *,
    threads: int | None = None,
    check: bool = True,
    typed: str | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run Python offline in a child process and capture its output.

    With `check`, a failed command ends the benchmark. `typed` is its standard input.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(  # noqa: S603 - commands of this folder
        words, capture_output=True, text=True, env=environment, check=False, input=typed
    )
    if check and done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        )
    return done


def last_json(printed: str) -> dict[str, Any]:
    """Parse the last line that contains a JSON object."""
    line = [line for line in printed.splitlines() if line.startswith("{")][-1]
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def toque(
    *words: object,
    threads: int | None = None,
    check: bool = True,
    typed: str | None = None,
) -> Any:
    """Run the `toque` command."""
    return run(["-m", "toque", *words], threads=threads, check=check, typed=typed)


def peer(script: str, *words: object, threads: int | None = None) -> str:
    """Run a baseline of the shared peers/ folder. Return its output."""
    return run([shared(f"peers/{script}"), *words], threads=threads).stdout


def flags(values: Mapping[str, object]) -> list[str]:
    """Convert `{"batch_size": 2}` to `--batch-size 2`. Skip None."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in values.items())
    return [str(word) for pair in pairs if pair[1] is not None for word in pair]


def write_pairs(path: Path, n: int = ALL) -> Path:
    """Write the first `n` shared examples to `path` as JSON lines of prompt and target."""
    path.write_text(peer("make_pairs.py", shared(RECIPES), n), encoding="utf-8")
    return path


def write_config(
    folder: Path, family: str, source: Path, *, columns: bool = False, **sections: Any
) -> Path:
    """Write config.yaml of a run from scratch over one file.

    Args:
        folder: Folder of the configuration, the store and the run.
        family: Model family. It selects the shared tokenizer.
        source: Data file.
        columns: Whether the file has {"prompt", "target"} per line instead of recipes.
        sections: Settings to add, by section.
    """
    named = {"columns": {"prompt": "prompt", "target": "target"}} if columns else {}
    config = {
        "run_dir": str(folder / "run"),
        "model": {"family": family, "tokenizer": str(tokenizer_folder(family))},
        "data": {
            "sources": [{"path": str(source)} | named],
            "store": str(folder / "store"),
        },
    }
    for name, section in sections.items():
        config[name] = {**config.get(name, {}), **section}  # type: ignore[dict-item]
    path = folder / "config.yaml"
    path.write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def s3_emulator() -> Iterator[None]:
    """Run an S3 emulator with `BUCKET`. Set the environment that child processes need.

    Raises:
        Skipped: The emulator did not start.
    """
    port = free_port()
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    server = subprocess.Popen(  # noqa: S603
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        _make_bucket(port)
        yield
    finally:
        server.kill()
        server.wait()


def _make_bucket(port: int) -> None:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/pantry", data=b"", method="PUT"
    )
    for _ in range(300):
        try:
            urllib.request.urlopen(request).close()  # noqa: S310
        except urllib.error.URLError:
            time.sleep(0.1)
        else:
            return
    raise Skipped(
        "The S3 emulator did not start. Install it: pip install 'moto[server,s3]'"
    )
