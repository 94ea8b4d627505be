"""Faults 1 to 47 upon `transformers.Trainer`: a column of docs/explanation/reliability.md.

    python bench/robustness/trainer_faults.py [--only NUMBER ...]

One scenario per fault number, with the lives of `bench/trainer_lives.py`. `theirs` has for each
fault what was done, the exit status, the last line of output, and the facts that the page states.
"""

from __future__ import annotations

import argparse
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from torch import Tensor
from trainer_lives import (
    At,
    Rows,
    Scenarios,
    add_options,
    damaged,
    ended,
    kept,
    killed_at,
    life,
    lived,
    measured,
    scenario_of,
    train,
)
from transformers import GPT2LMHeadModel, TrainerCallback

SCENARIOS: Scenarios = {}
scenario = scenario_of(SCENARIOS)


class OnLog(TrainerCallback):
    """A message to the outside that takes its time."""

    def on_log(self, *_: Any, **__: Any) -> None:
        """Take half a second."""
        time.sleep(0.5)


class SmallMemory(GPT2LMHeadModel):
    """Has room for four rows."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Any:
        """As stock, for four rows at most."""
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def signalled(work: Path, number: int) -> dict[str, Any]:
    """Killed by a signal before step 5, then resumed."""
    act = At(5, lambda *_: os.kill(os.getpid(), number))
    first = lived(work, callbacks=(act,))
    found = {"first": first, "checkpoints": kept(work), "again": lived(work, resume=True)}
    whole = ended(*life(work, lambda: train(work / "whole")))
    return found | {"same bits": found["again"].get("sha256") == whole["sha256"]}


scenario("1")(lambda work: signalled(work, signal.SIGKILL))
scenario("5")(lambda work: signalled(work, signal.SIGTERM))


@scenario("13")
def _flipped(work: Path) -> dict[str, Any]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-3] ^= 4
        (folder / "model.safetensors").write_bytes(data)

    return damaged(work, flip)


def cut(name: str, size: int) -> Callable[[Path], dict[str, Any]]:
    """A file of the newest checkpoint that was cut short."""
    return lambda work: damaged(work, lambda folder: os.truncate(folder / name, size))


scenario("14")(cut("model.safetensors", 1000))
scenario("15")(cut("trainer_state.json", 100))


class Payload:
    """What a hostile file would run."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.place, "w"))


@scenario("42")
def _pickled(work: Path) -> dict[str, Any]:
    def poison(folder: Path) -> None:
        (folder / "optimizer.pt").write_bytes(pickle.dumps(Payload(str(work / "ran"))))

    return damaged(work, poison) | {"executed": (work / "ran").exists()}


@scenario("17")
def _other_data(work: Path) -> dict[str, Any]:
    lived(work, callbacks=(killed_at(7),))
    return {"again": lived(work, resume=True, rows=Rows(seed=9))}


@scenario("19")
def _other_settings(work: Path) -> dict[str, Any]:
    lived(work, callbacks=(killed_at(7),))
    return {"again": lived(work, resume=True, learning_rate=5e-2, weight_decay=0.5)}


@scenario("26")
def _not_a_number(work: Path) -> dict[str, Any]:
    def spoil(model: Any, _: Any) -> None:
        model.transformer.wte.weight.data[3, 3] = float("nan")

    return lived(work, callbacks=(At(5, spoil),)) | {"checkpoints": kept(work)}


@scenario("27")
def _spike(work: Path) -> dict[str, Any]:
    def inflate(model: Any, _: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * 1e4 if model.spiking else g)
        model.spiking = True

    def calm(model: Any, _: Any) -> None:
        model.spiking = False

    spiked = lived(work, callbacks=(At(6, inflate), At(7, calm)))
    whole = ended(*life(work, lambda: train(work / "whole")))
    return {"spiked": spiked, "same bits": spiked.get("sha256") == whole["sha256"]}


@scenario("29")
def _no_targets(work: Path) -> dict[str, Any]:
    return lived(work, rows=Rows(empty=0))


@scenario("36")
def _two_at_once(work: Path) -> dict[str, Any]:
    lives = [life(work, lambda: train(work / "out", save_total_limit=2)) for _ in range(2)]
    return {"exits": [ended(*one) for one in lives], "checkpoints": kept(work)}


@scenario("39")
def _out_of_memory(work: Path) -> dict[str, Any]:
    plain = lived(work, kind=SmallMemory)
    finding = ended(
        *life(work, lambda: train(work / "b", kind=SmallMemory, auto_find_batch_size=True))
    )
    whole = ended(*life(work, lambda: train(work / "whole")))
    same = finding.get("losses logged") == whole["losses logged"]
    return {"plain": plain, "auto_find_batch_size": finding, "same losses": same}


@scenario("40")
def _worker_killed(work: Path) -> dict[str, Any]:
    def kill(*_: Any) -> None:
        me = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        os.kill(int(me[-1]), signal.SIGKILL)

    return lived(work, callbacks=(At(3, kill),), rows=Rows(slow=0.02), dataloader_num_workers=1)


@scenario("41")
def _slow_loader(work: Path) -> dict[str, Any]:
    return lived(work, rows=Rows(slow=0.01))


@scenario("43")
def _slow_outside(work: Path) -> dict[str, Any]:
    began = time.monotonic()
    lived(work)
    plain, began = time.monotonic() - began, time.monotonic()
    ended(*life(work, lambda: train(work / "b", callbacks=(OnLog(),))))
    return {"seconds": round(plain, 2), "with a slow callback": round(time.monotonic() - began, 2)}


@scenario("45")
def _twice(work: Path) -> dict[str, Any]:
    lived(work, callbacks=(killed_at(7),))
    shutil.copytree(work / "out", work / "copy")
    again = [lived(work, resume=True)]
    again.append(ended(*life(work, lambda: train(work / "copy", resume=True))))
    return {"lives": again, "same bits": again[0].get("sha256") == again[1].get("sha256")}


@scenario("8")
def _full(work: Path) -> dict[str, Any]:
    found = lived(work, save_total_limit=None)
    newest = kept(work)[-1:]
    files = {p.name: p.stat().st_size for n in newest for p in (work / "out" / n).iterdir()}
    return {"life": found, "checkpoints": kept(work), "files of the newest": files}


@scenario("11")
def _read_only(work: Path) -> dict[str, Any]:
    subprocess.run(["mount", "-o", "remount,ro", work / "out"], check=True)  # noqa: S603, S607
    return lived(work)


_MOUNTS = {"8": "size=900k", "11": "size=900k"}


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """The faults, one after another."""
    return measured(a, SCENARIOS, _MOUNTS, __file__)


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(p, SCENARIOS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
