"""Every shared file as `toque prepare` reads it: recognised, counted, or refused.

    python bench/quality/shared_files.py [FILE_OR_FOLDER ...]

For each file its schema, the records read, kept and dropped by reason, or the sentence of its
refusal. The files of a folder of web pages count as one line. Quality fails when a record was lost
uncounted: read is kept plus dropped, always.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque.config import RunConfig
from toque.errors import ToqueError
from toque.sources.source_files import blocks_of, find_files
from toque.workflows.prepared_store import sources_of


def counted(path: Path) -> dict[str, Any]:
    """What reading a file, or all files of a folder, gives."""
    config = RunConfig.model_validate(
        {
            "model": {"family": "gpt2", "start_from": "scratch"},
            "data": {"sources": [{"path": str(path)}]},
        }
    )
    read = kept = 0
    dropped: Counter[str] = Counter()
    schemas: Counter[str] = Counter()
    try:
        for file in find_files(sources_of(config)):
            schemas[file.reader.schema(file.path)] += 1
            for block in blocks_of(file):
                found = file.reader.examples(block)
                read += found.read
                kept += found.kept
                for reason, lines in found.dropped.items():
                    dropped[reason] += len(lines)
    except ToqueError as error:
        return {"file": path.name, "refused": str(error).replace(str(path.parent) + "/", "")}
    return {
        "file": path.name,
        "schemas": dict(schemas),
        "read": read,
        "kept": kept,
        "dropped": dict(dropped.most_common()),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Read every file."""
    files = []
    for path in a.paths or [
        *sorted(peers.shared("data/recipes").iterdir()),
        peers.shared("data/html"),
    ]:
        files.append(counted(path))
        harness.note(str(files[-1]))
    lost = [
        f["file"]
        for f in files
        if "read" in f and f["read"] != f["kept"] + sum(f["dropped"].values())
    ]
    return harness.Result(ours=files, quality={"passes": not lost, "lost": lost})


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("paths", nargs="*", type=Path)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
