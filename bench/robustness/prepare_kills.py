"""Kill `toque prepare` at random moments, fill its disk, and compare the store with a calm one.

    python bench/prepare_kills.py --source recipes.jsonl.gz --tokenizer FOLDER [--kills 10]

Every round prepares one store: SIGKILL after a random share of the calm run's seconds, again and
again with the same command until `--kills` kills have hit, then once in peace. Then the same on a
disk that is too small (a tmpfs of half the store's size; needs root), which is enlarged after the
refusal. Each time every file's SHA-256 is compared with the undisturbed store's. `report.json` is
compared without its `seconds`, which are the command's own. Prints one JSON object; exit code 1
when a byte differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    """Run both trials and print what came of them."""
    options = _arguments()
    with tempfile.TemporaryDirectory(prefix="prepare-kills-") as name:
        work = Path(name)
        started = time.perf_counter()
        calm = _run(options, work / "calm")
        calm.wait()
        seconds = time.perf_counter() - started
        if calm.returncode:
            raise SystemExit(calm.stderr.read().decode() if calm.stderr else "prepare failed")
        wanted = _hashes(work / "calm")
        kills = _killed(options, work / "killed", seconds)
        kills["differ"] = _differing(wanted, _hashes(work / "killed"))
        disk = _full_disk(options, work, wanted) if os.geteuid() == 0 else {"skipped": "not root"}
        result = {
            "what": "toque prepare, killed and with a full disk, against an undisturbed store",
            "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
            "files": len(wanted),
            "calm_seconds": round(seconds, 2),
            "kills": kills,
            "full_disk": disk,
        }
        print(json.dumps(result, indent=1))
        return int(bool(kills["differ"] or disk.get("differ")))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="kill `toque prepare` and compare its store")
    parser.add_argument("--source", required=True, help="a file of recipes")
    parser.add_argument("--tokenizer", required=True, help="a folder")
    parser.add_argument("--family", default="gpt2")
    parser.add_argument("--dedup", default="near")
    parser.add_argument("--group-bytes", type=int, default=1 << 20, help="raw bytes of a shard")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


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
        "import sys; from toque.cli import main; from toque.sources import files as sources\n"
        f"if __name__ == '__main__': sources.GROUP_BYTES = {options.group_bytes}; "
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
    _, said = last.communicate()
    return {
        "hit": len(moments),
        "after_seconds": moments,
        "whole_shards_then": shards,
        "exit_code_at_last": last.returncode,
        "said_at_last": said.decode().strip(),
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
        _, said = process.communicate()
        refused = process.returncode
        _mount("-o", f"remount,size={size * 4}", str(disk))
        kept = len(list(store.glob("shards/[0-9]*/shard.json")))
        again = _run(options, store)
        again.wait()
        return {
            "exit_code": refused,
            "said": said.decode().replace(str(work), "...").strip(),
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
        if name not in ("report.md", ".lock"):  # report.md tells the same, seconds among it
            found[name] = hashlib.sha256(data).hexdigest()
    return found


def _differing(wanted: dict[str, str], found: dict[str, str]) -> list[str]:
    names = sorted(wanted.keys() | found.keys())
    return [name for name in names if wanted.get(name) != found.get(name)]


if __name__ == "__main__":
    sys.exit(main())
