"""`toque prepare` killed at random moments and on a full disk, against an undisturbed store.

    python bench/robustness/prepare_kills.py --source FILE --tokenizer FOLDER [--kills 10]

Every round prepares one store: SIGKILL after a random share of the calm run's seconds, again and
again with the same command until `--kills` kills have hit, then once in peace. Then the same on a
disk that is too small (a tmpfs of half the store's size; needs root), which is enlarged after the
refusal. Each time every file's SHA-256 is compared with the undisturbed store's. `report.json` is
compared without its `seconds`, which are the command's own. Quality fails when a byte differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness


def measure(a: argparse.Namespace) -> harness.Result:
    """Both trials."""
    with tempfile.TemporaryDirectory(prefix="prepare-kills-") as name:
        work = Path(name)
        calm = _run(a, work / "calm")
        run = harness.timed(calm.communicate)
        if calm.returncode:
            raise SystemExit(run.value[1].decode())
        wanted = _hashes(work / "calm")
        kills = _killed(a, work / "killed", run.wall)
        kills["differ"] = _differing(wanted, _hashes(work / "killed"))
        disk = _full_disk(a, work, wanted) if os.geteuid() == 0 else {"skipped": "not root"}
    return harness.Result(
        ours={"kills": kills, "full_disk": disk},
        quality={"passes": not (kills["differ"] or disk.get("differ"))},
        details={"files": len(wanted), "calm_seconds": round(run.wall, 2)},
    )


def _run(options: argparse.Namespace, store: Path) -> subprocess.Popen[bytes]:
    words = [
        "demo",
        f"model.family={options.family}",
        f"model.tokenizer={Path(options.tokenizer).resolve()}",
        "model.shape={}",
        f"data.sources=[{{path: {json.dumps(str(Path(options.source).resolve()))}}}]",
        f"data.dedup={options.dedup}",
        f"data.store={store}",
    ]
    # Shards of a megabyte instead of eight: a file of a few thousand recipes gives several.
    script = (
        "import sys; from toque.cli import main; from toque.sources import source_files\n"
        f"if __name__ == '__main__': source_files.GROUP_BYTES = {options.group_bytes}; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(  # noqa: S603 - our own command
        [sys.executable, "-c", script, "prepare", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def _killed(options: argparse.Namespace, store: Path, seconds: float) -> dict[str, object]:
    rng = random.Random(options.seed)
    moments: list[float] = []
    shards: list[int] = []
    while len(moments) < options.kills:
        wait = rng.uniform(0.2, seconds)
        process = _run(options, store)
        try:
            process.wait(timeout=wait)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            moments.append(round(wait, 2))
            shards.append(len(list(store.glob("shards/[0-9]*/shard.json"))))
            continue
        # It was done before its time had come: the next kill meets a store from the beginning.
        shutil.rmtree(store)
    last = _run(options, store)
    _, message = last.communicate()
    return {
        "hit": len(moments),
        "after_seconds": moments,
        "whole_shards_then": shards,
        "exit_code_at_last": last.returncode,
        "message_at_last": message.decode().strip(),
    }


def _full_disk(
    options: argparse.Namespace, work: Path, wanted: dict[str, str]
) -> dict[str, object]:
    disk, store = work / "disk", work / "disk" / "store"
    disk.mkdir()
    size = sum(p.stat().st_size for p in (work / "calm").rglob("*") if p.is_file())
    if not _mount("-t", "tmpfs", "-o", f"size={size // 2}", "tmpfs", str(disk)):
        return {"skipped": "a tmpfs cannot be mounted here"}
    try:
        process = _run(options, store)
        _, message = process.communicate()
        refused = process.returncode
        _mount("-o", f"remount,size={size * 4}", str(disk))
        kept = len(list(store.glob("shards/[0-9]*/shard.json")))
        again = _run(options, store)
        again.wait()
        return {
            "exit_code": refused,
            "message": message.decode().replace(str(work), "...").strip(),
            "whole_shards_then": kept,
            "exit_code_after_space": again.returncode,
            "differ": _differing(wanted, _hashes(store)),
        }
    finally:
        subprocess.run(["umount", str(disk)], check=False, capture_output=True)  # noqa: S603, S607


def _mount(*words: str) -> bool:
    done = subprocess.run(["mount", *words], check=False, capture_output=True)  # noqa: S603, S607
    return done.returncode == 0


def _hashes(store: Path) -> dict[str, str]:
    found = {}
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        name, data = str(path.relative_to(store)), path.read_bytes()
        if name == "report.json":
            data = json.dumps(json.loads(data) | {"seconds": 0}).encode()
        if name != ".lock":
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def _differing(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    names = sorted(wanted.keys() | found.keys())
    return [name for name in names if wanted.get(name) != found.get(name)]


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--source", required=True, help="a file of recipes")
    p.add_argument("--tokenizer", required=True, help="a folder")
    p.add_argument("--family", default="gpt2")
    p.add_argument("--dedup", default="near")
    p.add_argument("--group-bytes", type=int, default=1 << 20, help="raw bytes of a shard")
    p.add_argument("--kills", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
