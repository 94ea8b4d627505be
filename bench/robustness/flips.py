"""Random damage to a store and a checkpoint, and how much of it `toque verify` finds.

    python bench/robustness/flips.py STORE CHECKPOINT [--n 1000] [--seed 1]

Each time one file is flipped in a single random bit, cut at a random place, or exchanged with
another one; then the folder is verified as `toque verify` does, and put back. Found counts when the
error names the file that was damaged (of a manifest, of either kind: the manifest or a file it
lists). Quality fails when one went unseen.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness

from toque.errors import ToqueError
from toque.workflows.report import verify

_NOT_READ = ("report.json", "shard.json", ".lock")
"""Of a finished store: reports for people, what a killed prepare would have continued from, and its
lock."""


def measure(a: argparse.Namespace) -> harness.Result:
    """Damage, verify, put back, count."""
    chance, counts, unseen = random.Random(a.seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        folders = []
        for kind, source in (("store", a.store), ("checkpoint", a.checkpoint)):
            folders.append((kind, Path(name) / source.name))
            shutil.copytree(source, folders[-1][1])
            verify(folders[-1][1])
        for _ in range(a.n):
            kind, folder = chance.choice(folders)
            how, damaged, message = _trial(folder, chance)
            counts[f"{kind}: {how}"] += 1
            if message is None or not any(file in message for file in damaged):
                unseen.append(f"{kind}: {how} of {damaged}: {message}")
    return harness.Result(
        ours={"trials": a.n, "found": a.n - len(unseen)},
        quality={"passes": not unseen, "unseen": unseen[:20]},
        details={"of": dict(sorted(counts.items()))},
    )


def _trial(folder: Path, chance: random.Random) -> tuple[str, list[str], str | None]:
    """One damage: how, the files it touched, and the error of verifying (None: no error)."""
    files = sorted(
        p for p in folder.rglob("*") if p.is_file() and p.stat().st_size and p.name not in _NOT_READ
    )
    path = chance.choice(files)
    data = path.read_bytes()
    others = [p for p in files if p != path and p.read_bytes() != data]
    how = chance.choice(["flip", "cut", "swap"])
    if how == "flip":
        bit = chance.randrange(8 * len(data))
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        back = {path: data}
        path.write_bytes(changed)
    elif how == "cut":
        back = {path: data}
        path.write_bytes(data[: chance.randrange(len(data))])
    else:
        other = chance.choice(others)
        back = {path: data, other: other.read_bytes()}
        path.write_bytes(back[other])
        other.write_bytes(data)
    try:
        verify(folder)
        message = None
    except ToqueError as error:
        message = str(error)
    finally:
        for file, content in back.items():
            file.write_bytes(content)
    return how, [file.name for file in back], message


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("store", type=Path)
    p.add_argument("checkpoint", type=Path)
    p.add_argument("--n", type=int, default=1000)
    p.add_argument("--seed", type=int, default=1)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
