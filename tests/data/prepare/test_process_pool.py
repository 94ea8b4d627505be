"""Workers forked or spawned: the same bytes."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import toque
from store_checks import content
from toque.data.prepare.settings import PrepareSettings

HERE = Path(__file__).parents[2]  # where line_reader is

SCRIPT = """
import json, sys, threading
from pathlib import Path

sys.path.append({here!r})
from line_reader import LineReader
from toque.data.prepare import process_pool as pool
from toque.sources import files as sources
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.settings import PrepareSettings
from toque.sources.records import Source

if __name__ == "__main__":
    sources.GROUP_BYTES = 2000
    if {threaded}:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    alone = pool.has_one_thread()
    settings = PrepareSettings(**json.loads({settings!r}))
    prepare([Source({path!r}, LineReader())], store=Path({store!r}),
        settings=settings, workers=2)
    print(alone)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere workers are always spawned")
def test_forked_and_spawned_workers_write_the_same_store(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    words = ["salt", "stir", "bake", "egg", "soup", "flour", "warm"]
    rng = random.Random(2)
    lines = [
        json.dumps({"prompt": f"Dish {i}", "target": " ".join(rng.choices(words, k=60))})
        for i in range(60)
    ]
    path = tmp_path / "many.jsonl"
    path.write_text("\n".join(lines) + "\n")
    settings = settings_for()
    asked = {name: getattr(settings, name) for name in ("family_kind", "tokenizer")}
    for threaded in (False, True):
        script = tmp_path / "script.py"
        script.write_text(
            SCRIPT.format(
                here=str(HERE),
                threaded=threaded,
                settings=json.dumps(asked),
                path=str(path),
                store=str(tmp_path / f"store-{threaded}"),
            )
        )
        done = subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning", str(script)],
            env=os.environ
            | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(Path(toque.__file__).parents[1])},
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(not threaded)
    assert content(tmp_path / "store-False") == content(tmp_path / "store-True")
