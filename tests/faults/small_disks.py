"""What happens on tiny disks; a script for a namespace of its own: `unshare -Urm python ...`.

    python small_disks.py RUNS WORK CONFIG

RUNS is the conftest of the loop's tests, WORK an empty folder, CONFIG a run whose store is
prepared. Prints one JSON object; torch is loaded once for all of it.
"""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from toque.cli import main
from toque.data.store.store_manifest import read_manifest
from toque.training.callbacks import Callback
from toque.training.observers.metrics_log import MetricsLog
from toque.units import Duration


def mounted(folder: Path, options: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], check=True)
    return folder


def remounted(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)


class Between(Callback):
    """Does something to the disk after one step, and undoes it after another."""

    def __init__(self, begin: int, end: int, *, act: Any, undo: Any) -> None:
        self.acts = {begin: act, end: undo}

    def on_step(self, info: Any) -> None:
        self.acts.get(info.progress.step, lambda: None)()


def fill(folder: Path) -> None:
    """To the last byte."""
    with (
        contextlib.suppress(OSError),
        (folder / "filler").open("wb", buffering=0) as file,
    ):
        while True:
            file.write(bytes(4096) if file.tell() < 1 << 30 else b"")
    with (
        contextlib.suppress(OSError),
        (folder / "filler2").open("wb", buffering=0) as file,
    ):
        while True:
            file.write(b"x")


def empty(folder: Path) -> None:
    for path in folder.glob("filler*"):
        path.unlink()


def use_up_names(folder: Path) -> None:
    """All inodes."""
    with contextlib.suppress(OSError):
        for number in range(10**6):
            (folder / f"filler{number}").touch()


def run_on(make_run: Any, folder: Path, callback: Callback) -> dict[str, Any]:
    """18 steps, saved after each second one, on the disk at `folder`."""
    log = MetricsLog(folder / "run" / "metrics.jsonl", log_every=Duration(1, "steps"))
    run = make_run(
        folder=folder / "run",
        save_every="2 steps",
        keep_last=2,
        callbacks=(callback, log),
    )
    end = run.trainer.fit()
    lines = [json.loads(x) for x in log.path.read_text().splitlines() if x]
    newest = run.trainer.checkpoints.newest_valid()
    return {
        "reason": end.reason,
        "losses": run.losses,
        "failed": end.saves.failed,
        "written": end.saves.written,
        "warnings": run.recorder.warnings,
        "dropped": lines[-1].get("dropped_records"),
        "logged": [x["step"] for x in lines if x["event"] == "step"],
        "newest": newest and newest.step,
    }


def full(make_run: Any, work: Path) -> dict[str, Any]:
    disk = mounted(work / "full", "size=400k")
    return run_on(
        make_run, disk, Between(5, 11, act=lambda: fill(disk), undo=lambda: empty(disk))
    )


def no_names(make_run: Any, work: Path) -> dict[str, Any]:
    disk = mounted(work / "names", "nr_inodes=60,size=20m")
    act = Between(5, 11, act=lambda: use_up_names(disk), undo=lambda: empty(disk))
    return run_on(make_run, disk, act)


def command(*words: str) -> dict[str, Any]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = main(list(words))
    return {"code": code, "said": " ".join(said.getvalue().split())}


def preparing(work: Path, config: str) -> dict[str, Any]:
    disk = mounted(work / "store-disk", "size=60k")
    words = [config, f"data.store={disk / 'store'}"]
    first = command("prepare", *words)
    remounted(disk, "size=20m")
    again = command("prepare", *words)
    manifest = read_manifest(disk / "store") if again["code"] == 0 else None
    hashes = [entry.sha256 for entry in manifest.shards] if manifest else []
    return {"first": first, "again": again, "hashes": hashes}


def refused(work: Path, config: str) -> dict[str, Any]:
    disk = mounted(work / "closed", "ro")
    return command("train", config, f"run_dir={disk / 'run'}")


def all_of_it(runs: str, folder: str, config: str) -> None:
    spec = importlib.util.spec_from_file_location("runs", runs)
    module = importlib.util.module_from_spec(spec)
    sys.modules["runs"] = module
    spec.loader.exec_module(module)
    torch.set_num_threads(1)
    work = Path(folder)
    make_run = module.RunMaker(work / "elsewhere")
    calm = make_run(folder=work / "calm", save_every=None)
    calm.trainer.fit()
    found: dict[str, Any] = {"calm": calm.losses}
    scenarios = {
        "full": lambda: full(make_run, work),
        "no_names": lambda: no_names(make_run, work),
        "preparing": lambda: preparing(work, config),
        "refused": lambda: refused(work, config),
    }
    for name, scenario in scenarios.items():
        try:
            found[name] = scenario()
        except Exception:  # noqa: BLE001 - the test that reads it fails with this text
            found[name] = {"crashed": traceback.format_exc()}
    print("FOUND " + json.dumps(found))


if __name__ == "__main__":
    all_of_it(*sys.argv[1:])
