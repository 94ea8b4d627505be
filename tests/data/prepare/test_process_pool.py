"""Workers forked or spawned: the same bytes."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import toque
from store_checks import content
from toque.data.prepare.prepare_settings import PrepareSettings
from toque.data.tokenizer.tokenizer_training import interruptible

HERE = Path(__file__).parents[2]  # where line_reader is

SCRIPT = """
import json, sys, threading
from pathlib import Path

sys.path.append({here!r})
from line_reader import LineReader
from toque.data.prepare import shard_workers as pool
from toque.sources import source_files as sources
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.prepare_settings import PrepareSettings
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


STUCK = """
import json, os, sys, time
from pathlib import Path

sys.path.append({here!r})
from line_reader import LineReader
from toque.sources import source_files as sources
from toque.data.prepare.pipeline import prepare
from toque.data.prepare.prepare_settings import PrepareSettings
from toque.sources.records import Source

class Stuck(LineReader):
    def examples(self, block):
        if b"Dish 25" in block.payload and {stuck}:
            Path({there!r}).write_text(str(os.getpid()))
            time.sleep(600)
        return super().examples(block)

if __name__ == "__main__":
    sources.GROUP_BYTES = 2000
    prepare([Source({path!r}, Stuck())], store=Path({store!r}),
        settings=PrepareSettings(**json.loads({settings!r})), workers=2)
    print("prepared")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the worker is looked for in /proc")
def test_ctrl_c_ends_the_workers_at_once_and_the_store_goes_on(
    tmp_path: Path, settings_for: Callable[..., PrepareSettings]
) -> None:
    lines = [
        json.dumps({"prompt": f"Dish {i}", "target": "salt the soup " * 20}) for i in range(30)
    ]
    path, store, there = tmp_path / "many.jsonl", tmp_path / "store", tmp_path / "there"
    path.write_text("\n".join(lines) + "\n")
    settings = settings_for()
    asked = {name: getattr(settings, name) for name in ("family_kind", "tokenizer")}
    script = tmp_path / "script.py"

    def started(*, stuck: bool) -> subprocess.Popen[str]:
        script.write_text(
            STUCK.format(
                here=str(HERE),
                path=str(path),
                store=str(store),
                there=str(there),
                stuck=stuck,
                settings=json.dumps(asked),
            )
        )
        paths = os.pathsep.join([str(Path(toque.__file__).parents[1]), *sys.path])
        env = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, str(script)],
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    process = started(stuck=True)
    while not (there.exists() and there.read_text()) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # its worker would sleep for ten minutes
    assert "KeyboardInterrupt" in said
    assert not Path(f"/proc/{there.read_text()}").exists(), "the worker has gone, too"
    out, said = started(stuck=False).communicate(timeout=120)
    assert "prepared" in out, said


@pytest.mark.skipif(sys.platform == "win32", reason="signals are raised otherwise there")
def test_ctrl_c_is_answered_while_a_library_works() -> None:
    """Learning a tokenizer returns to Python after a minute; the main thread must not be in it."""
    script = (
        "import os, signal, threading, time\n"
        "from toque.data.tokenizer.tokenizer_training import interruptible\n"
        "threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()\n"
        "import ctypes\n"
        "interruptible(lambda: ctypes.CDLL(None).sleep(600))\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "KeyboardInterrupt" in done.stderr
    assert done.returncode in (1, 130, -signal.SIGINT)


def test_what_fails_in_the_thread_fails_here() -> None:
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 // 0)
    assert interruptible(lambda: 3) == 3
