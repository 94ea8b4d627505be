"""Faults brought upon `transformers.Trainer`: a column of docs/explanation/reliability.md.

    python bench/robustness/trainer_faults.py [--only NUMBER ...]

A tiny GPT-2 with dropout trains on made-up rows for 12 steps and saves every 2; each life of it is
a process forked from one that has imported torch and transformers and computed nothing. One
scenario per fault number; where a full or read-only disk is needed, a tmpfs is mounted in a
namespace of its own (`unshare -Urm`). `theirs` has for each fault what was done, the exit status,
the last line of output, and the facts that the page states.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS, ROWS, LENGTH, VOCABULARY = 12, 64, 16, 61
SCENARIOS: dict[str, Callable[[Path], dict[str, Any]]] = {}


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows; what goes wrong with the data is an option."""

    def __init__(self, *, seed: int = 1, slow: float = 0.0, empty: int | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        self.slow, self.empty = slow, empty

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.slow)
        ids = self.ids[index]
        nothing = torch.full_like(ids, -100)
        return {"input_ids": ids, "labels": nothing if self.empty is not None else ids}


class At(TrainerCallback):
    """Calls `act(model, optimizer)` before a step."""

    def __init__(self, step: int, act: Callable[..., object]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act when it is time."""
        if state.global_step == self.step:
            self.act(kwargs["model"], kwargs["optimizer"])


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


def train(
    out: Path,
    *,
    resume: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
    rows: Rows | None = None,
    kind: type[GPT2LMHeadModel] = GPT2LMHeadModel,
    **options: Any,
) -> None:
    """One life: 12 steps, or what is left of them."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = GPT2Config(
        n_embd=32, n_layer=1, n_head=2, vocab_size=VOCABULARY, n_positions=LENGTH,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    settings = {
        "max_steps": STEPS, "save_steps": 2, "logging_steps": 1, "save_total_limit": 3,
        "per_device_train_batch_size": 8, "learning_rate": 1e-3, "report_to": [], "use_cpu": True,
        "dataloader_pin_memory": False, "disable_tqdm": True, "seed": 3,
    } | options  # fmt: skip
    trainer = Trainer(
        model=kind(config),
        args=TrainingArguments(output_dir=str(out), **settings),
        train_dataset=rows or Rows(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    weights = b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters())
    finite = all(bool(torch.isfinite(p).all()) for p in trainer.model.parameters())
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    facts = {
        "sha256": hashlib.sha256(weights).hexdigest()[:12],
        "weights finite": finite,
        "losses logged": logged[-6:],
    }
    print("FACTS " + json.dumps(facts), flush=True)


def life(work: Path, act: Callable[[], object]) -> tuple[int, str]:
    """Pid and log of a process that does `act`."""
    log = work / f"life-{time.monotonic_ns()}.log"
    pid = os.fork()
    if pid:
        return pid, str(log)
    code = 1
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        act()
        code = 0
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is what the user meets
        print(f"{type(error).__name__}: {error}", flush=True)
    sys.stdout.flush()
    os._exit(code)


def ended(pid: int, log: str) -> dict[str, Any]:
    """Exit status, facts and last words of a life."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = Path(log).read_text(errors="replace")
    found: dict[str, Any] = {"exit": code}
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("FACTS "):
            found |= json.loads(line.removeprefix("FACTS "))
    if code:
        found["last line"] = lines[-1][:200] if lines else ""
    warned = [line[:160] for line in lines if "arning" in line and "learning" not in line]
    if warned:
        found["warnings"] = warned[:3]
    return found


def lived(work: Path, **options: Any) -> dict[str, Any]:
    """One life to its end."""
    return ended(*life(work, lambda: train(work / "out", **options)))


def scenario(number: str) -> Callable[..., Any]:
    """The function that brings about fault `number`."""

    def keep(function: Callable[[Path], dict[str, Any]]) -> Callable[[Path], dict[str, Any]]:
        SCENARIOS[number] = function
        return function

    return keep


def kept(work: Path) -> list[str]:
    """Checkpoints that are there."""
    return sorted(p.name for p in (work / "out").glob("checkpoint-*"))


def signalled(work: Path, number: int) -> dict[str, Any]:
    """Killed by a signal before step 5, then resumed."""
    act = At(5, lambda *_: os.kill(os.getpid(), number))
    first = lived(work, callbacks=(act,))
    found = {"first": first, "checkpoints": kept(work), "again": lived(work, resume=True)}
    whole = ended(*life(work, lambda: train(work / "whole")))
    return found | {"same bits": found["again"].get("sha256") == whole["sha256"]}


scenario("1")(lambda work: signalled(work, signal.SIGKILL))
scenario("5")(lambda work: signalled(work, signal.SIGTERM))


def killed_at(step: int) -> At:
    """SIGKILL from within."""
    return At(step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def damaged(work: Path, damage: Callable[[Path], object]) -> dict[str, Any]:
    """Six steps, damage to the newest checkpoint, and resumed."""
    lived(work, callbacks=(killed_at(7),))
    damage(work / "out" / "checkpoint-6")
    whole = ended(*life(work, lambda: train(work / "whole")))
    again = lived(work, resume=True)
    return {"again": again, "same bits": again.get("sha256") == whole["sha256"]}


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


def mounted(options: str, act: str) -> dict[str, Any]:
    """This program again, for one scenario that needs a mount, in a namespace of its own."""
    done = subprocess.run(  # noqa: S603
        ["unshare", "-Urm", sys.executable, __file__, "--mounted", options, "--only", act],  # noqa: S607
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        found: dict[str, Any] = peers.last_json(done.stdout)[act]
    except (IndexError, KeyError):
        return {"skipped": done.stderr[-300:]}
    return found


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


@contextlib.contextmanager
def _work(mount: str | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="trainer-faults-") as name:
        work = Path(name)
        if mount is not None:
            (work / "out").mkdir()
            tmpfs = ["mount", "-t", "tmpfs", "-o", mount, "tmpfs", work / "out"]
            subprocess.run(tmpfs, check=True)  # noqa: S603
        yield work
        if mount is not None:
            subprocess.run(["umount", work / "out"], check=True)  # noqa: S603, S607


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """The faults, one after another; with --mounted, the one that needed the mount."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = {}
    for number in a.only:
        if number in _MOUNTS and a.mounted is None:
            found[number] = mounted(_MOUNTS[number], number)
            continue
        with _work(a.mounted) as work:
            found[number] = SCENARIOS[number](work)
    return found if a.mounted else harness.Result(theirs=found)


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--only", nargs="*", default=sorted(SCENARIOS, key=int), metavar="NUMBER")
    p.add_argument("--mounted", default=None, help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
