"""Lives of `transformers.Trainer`: processes that train, are disturbed, and are started again.

A tiny GPT-2 with dropout trains on made-up rows for 12 steps and saves every 2; each life of it is
a process forked from one that has imported torch and transformers and computed nothing. Where a
full or read-only disk is needed, a tmpfs is mounted in a namespace of its own (`unshare -Urm`).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import harness
import peers
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

STEPS, ROWS, LENGTH, VOCABULARY = 12, 64, 16, 61
Scenario = Callable[[Path], dict[str, Any]]
Scenarios = dict[str, Scenario]
"""By the fault's number."""


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


def train(
    out: Path,
    *,
    resume: bool = False,
    final: bool = False,
    callbacks: tuple[TrainerCallback, ...] = (),
    rows: Any = None,
    kind: Callable[[GPT2Config], Any] = GPT2LMHeadModel,
    **options: Any,
) -> None:
    """One life: 12 steps, or what is left of them; with `final`, the model saved at the end."""
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
    if final:
        trainer.save_model(str(out / "final"))
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
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a scenario may have closed it
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


def scenario_of(scenarios: Scenarios) -> Callable[[str], Callable[[Scenario], Scenario]]:
    """A decorator that puts a function among `scenarios`."""

    def scenario(number: str) -> Callable[[Scenario], Scenario]:
        def keep(function: Scenario) -> Scenario:
            scenarios[number] = function
            return function

        return keep

    return scenario


def kept(work: Path) -> list[str]:
    """Checkpoints that are there."""
    return sorted(p.name for p in (work / "out").glob("checkpoint-*"))


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


def mounted(script: str, options: str, number: str) -> dict[str, Any]:
    """The script again, for one scenario that needs a mount, in a namespace of its own."""
    done = subprocess.run(  # noqa: S603
        ["unshare", "-Urm", sys.executable, script, "--mounted", options, "--only", number],  # noqa: S607
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        found: dict[str, Any] = peers.last_json(done.stdout)[number]
    except (IndexError, KeyError):
        return {"skipped": done.stderr[-300:]}
    return found


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


def measured(
    a: argparse.Namespace, scenarios: Scenarios, mounts: Mapping[str, str], script: str
) -> harness.Result | dict[str, Any]:
    """The faults, one after another; with --mounted, the one that needed the mount."""
    os.environ["OMP_NUM_THREADS"] = "1"
    found: dict[str, Any] = {}
    for number in a.only:
        if number in mounts and a.mounted is None:
            found[number] = mounted(script, mounts[number], number)
            continue
        with _work(a.mounted) as work:
            found[number] = scenarios[number](work)
    return found if a.mounted else harness.Result(theirs=found)


def add_options(p: argparse.ArgumentParser, scenarios: Scenarios) -> None:
    """The command line of a script with scenarios."""
    p.add_argument("--only", nargs="*", default=sorted(scenarios, key=int), metavar="NUMBER")
    p.add_argument("--mounted", default=None, help=argparse.SUPPRESS)
