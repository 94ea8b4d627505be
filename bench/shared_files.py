"""Every shared file as `toque prepare` reads it: recognised, counted, or refused; prints JSON.

    python bench/shared_files.py [FILE_OR_FOLDER ...]

For each file its schema, the records read, kept and dropped by reason, or the sentence of its
refusal. The files of a folder of web pages count as one line. Exit code 1 when a record was lost
uncounted: read is kept plus dropped, always.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from toque.config import RunConfig
from toque.errors import ToqueError
from toque.sources.files import blocks_of, find_files
from toque.workflows.assembly.data import sources_of

SHARED = Path(os.environ.get("TOQUE_SHARED") or Path(__file__).resolve().parents[2] / "shared")


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


def main() -> int:
    """Read and print."""
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("paths", nargs="*", type=Path)
    a = p.parse_args()
    paths = a.paths or [*sorted((SHARED / "data" / "recipes").iterdir()), SHARED / "data" / "html"]
    files = []
    for path in paths:
        files.append(counted(path))
        print(json.dumps(files[-1]), file=sys.stderr, flush=True)
    lost = [f["file"] for f in files if f.get("read", 0) != f.get("kept", 0) + _all(f)]
    versions = {name: version(name) for name in ("toque", "pyarrow")}
    print(json.dumps({"bench": "shared_files", "lost": lost, "files": files, "versions": versions}))
    return 1 if lost else 0


def _all(file: dict[str, Any]) -> int:
    return sum(file.get("dropped", {}).values())


if __name__ == "__main__":
    sys.exit(main())
