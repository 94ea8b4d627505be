"""`python prepare_child.py JSON`: prepare in a process of its own, for tests that kill or watch it.

{"path": ..., "store": ..., "settings": {...}, "workers": 2, "limit": bytes of a file that is full,
"thread": another thread is there, "stuck": file that a worker names itself in before it sleeps}
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import toque
from line_reader import LineReader
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.shards import has_one_thread
from toque.data.prepare.store_plan import PrepareSettings
from toque.errors import DataError
from toque.sources import source_files
from toque.sources.records import Block, BlockExamples, Source


class Stuck(LineReader):
    def examples(self, block: Block) -> BlockExamples:
        if b"Dish 25" in block.payload and asked.get("stuck"):
            Path(asked["stuck"]).write_text(str(os.getpid()))
            time.sleep(600)
        return super().examples(block)


def started(
    path: Path, store: Path, settings: PrepareSettings, **more: object
) -> subprocess.Popen:
    """This script, preparing."""
    held = asdict(settings) | {"tasks": list(settings.tasks), "max_files": []}
    options = {
        "path": str(path),
        "store": str(store),
        "settings": held,
        "workers": 2,
    } | more
    paths = [
        str(Path(toque.__file__).parents[1]),
        str(Path(__file__).parent),
        *sys.path,
    ]
    return subprocess.Popen(
        [
            sys.executable,
            "-W",
            "error::DeprecationWarning",
            __file__,
            json.dumps(options),
        ],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "OPENBLAS_NUM_THREADS": "1",
        },
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


asked = json.loads(sys.argv[1]) if sys.argv[1:2] and sys.argv[1][:1] == "{" else {}

if __name__ == "__main__":
    source_files.GROUP_BYTES = 2000
    if asked.get("limit"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (asked["limit"], asked["limit"]))
    if asked.get("thread"):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    print("alone" if has_one_thread() else "not alone", flush=True)
    held = asked["settings"]
    settings = PrepareSettings(
        **(held | {"tasks": tuple(held["tasks"]), "max_files": ()})
    )
    try:
        prepare(
            [Source(asked["path"], Stuck())],
            store=Path(asked["store"]),
            settings=settings,
            workers=asked["workers"],
        )
    except DataError as error:
        print(error)
        sys.exit(3)
    print("prepared")
