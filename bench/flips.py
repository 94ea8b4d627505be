"""Damage a store and a checkpoint in random ways, and count what `toque verify` finds.

    python bench/flips.py STORE CHECKPOINT [--n 1000] [--seed 1]

Each time one file is flipped in a single random bit, cut at a random place, or exchanged with
another one; then the folder is verified as `toque verify` does, and put back. Found counts when the
error names the file that was damaged (of a manifest, of either kind: the manifest or a file it
lists). Prints one JSON object; exit code 1 when one went unseen.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from toque.errors import ToqueError
from toque.workflows.verify import verify

_NOT_READ = ("report.json", "report.md", "shard.json")
"""Of a finished store: reports for people, and what a killed prepare would have continued from."""


def main() -> int:
    """Damage, verify, put back, count."""
    parser = argparse.ArgumentParser(description="flips, cuts and swaps against toque verify")
    parser.add_argument("store", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    chance, counts, unseen = random.Random(options.seed), Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="flips-") as name:
        folders = []
        for kind, source in (("store", options.store), ("checkpoint", options.checkpoint)):
            folders.append((kind, Path(name) / source.name))
            shutil.copytree(source, folders[-1][1])
            verify(folders[-1][1])
        for _ in range(options.n):
            kind, folder = chance.choice(folders)
            how, damaged, said = _trial(folder, chance)
            counts[f"{kind}: {how}"] += 1
            if said is None or not any(file in said for file in damaged):
                unseen.append(f"{kind}: {how} of {damaged}: {said}")
    print(
        json.dumps(
            {
                "what": "damage found by toque verify, with the file named",
                "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
                "python": platform.python_version(),
                "trials": options.n,
                "found": options.n - len(unseen),
                "of": dict(sorted(counts.items())),
                "unseen": unseen[:20],
            },
            indent=1,
        )
    )
    return int(bool(unseen))


def _trial(folder: Path, chance: random.Random) -> tuple[str, list[str], str | None]:
    """One damage: how, the files it touched, and what verifying said (None: nothing)."""
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
        said = None
    except ToqueError as error:
        said = str(error)
    finally:
        for file, content in back.items():
            file.write_bytes(content)
    return how, [file.name for file in back], said


if __name__ == "__main__":
    sys.exit(main())
