"""Faults applied to `transformers.Trainer`: the last column of docs/reference/faults.md.

    python bench/robustness/trainer_faults.py [--only NUMBER ...]

Each scenario has the number of a fault in that page. A tiny GPT-2 with dropout trains on random
rows for 12 steps and saves every 2 steps, in a process forked from this one. A full or read-only
disk is a tmpfs in its own namespace (`unshare -Urm`). `theirs` has the exit code, the last line of
output and the facts of each scenario. Faults without a scenario have no counterpart in the Trainer.
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
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS, ROWS, LENGTH, VOCABULARY = 12, 64, 16, 61
Scenario = Callable[[Path], dict[str, Any]]
SCENARIOS: dict[str, Scenario] = {}
"""Scenarios by fault number."""
MOUNTS = {"8": "size=900k", "11": "size=900k", "56": "size=60k"}
"""Options of the tmpfs that a scenario needs, by fault number."""


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random rows, optionally slow or without labels."""

    def __init__(
        self, *, seed: int = 1, slow: float = 0.0, empty: bool = False
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        self.slow, self.empty = slow, empty

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        time.sleep(self.slow)
        ids = self.ids[index]
        nothing = torch.full_like(ids, -100)
        return {"input_ids": ids, "labels": nothing if self.empty else ids}


class At(TrainerCallback):
    """Call `act(model, optimizer)` before a step."""

    def __init__(self, step: int, act: Callable[..., object]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Act before the chosen step."""
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
    """Train for the remaining steps of 12. With `final`, save the model at the end."""
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


def fork_life(work: Path, act: Callable[[], object]) -> tuple[int, str]:
    """Fork a process that calls `act`. Return its PID and its log."""
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
    except BaseException as error:  # noqa: BLE001 - the user would see it
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # a scenario may have closed it
        sys.stdout.flush()
    os._exit(code)


def wait_for(pid: int, log: str) -> dict[str, Any]:
    """Wait for a process. Return its exit code, facts and last line."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    text = Path(log).read_text(errors="replace")
    outcome: dict[str, Any] = {"exit": code}
    lines = [line for line in text.splitlines() if line.strip()]
    for line in lines:
        if line.startswith("FACTS "):
            outcome |= json.loads(line.removeprefix("FACTS "))
    if code:
        outcome["last line"] = lines[-1][:200] if lines else ""
    warned = [
        line[:160] for line in lines if "arning" in line and "learning" not in line
    ]
    if warned:
        outcome["warnings"] = warned[:3]
    return outcome


def run_life(work: Path, **options: Any) -> dict[str, Any]:
    """Train in a forked process and wait for it."""
    return wait_for(*fork_life(work, lambda: train(work / "out", **options)))


def scenario(number: str) -> Callable[[Scenario], Scenario]:
    """Register a function as the scenario of a fault number."""

    def register(function: Scenario) -> Scenario:
        SCENARIOS[number] = function
        return function

    return register


def undisturbed_run(work: Path, **options: Any) -> dict[str, Any]:
    """Train without a fault."""
    return wait_for(*fork_life(work, lambda: train(work / "undisturbed", **options)))


def checkpoints_of(work: Path) -> list[str]:
    """Names of the existing checkpoints."""
    return sorted(p.name for p in (work / "out").glob("checkpoint-*"))


def kill_at(step: int) -> At:
    """A callback that kills its own process with SIGKILL before a step."""
    return At(step, lambda *_: os.kill(os.getpid(), signal.SIGKILL))


def resume_damaged(work: Path, damage: Callable[[Path], object]) -> dict[str, Any]:
    """Train six steps, damage the newest checkpoint, and resume."""
    run_life(work, callbacks=(kill_at(7),))
    damage(work / "out" / "checkpoint-6")
    undisturbed = undisturbed_run(work)
    again = run_life(work, resume=True)
    return {"again": again, "same bits": again.get("sha256") == undisturbed["sha256"]}


def run_mounted(number: str) -> dict[str, Any]:
    """Run one scenario in its own namespace, in which a tmpfs can be mounted."""
    command = ["unshare", "-Urm", sys.executable, __file__]
    command += ["--mounted", MOUNTS[number], "--only", number]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    try:
        outcome: dict[str, Any] = peers.last_json(done.stdout)[number]
    except (IndexError, KeyError):
        return {"skipped": done.stderr[-300:]}
    return outcome


class OnLog(TrainerCallback):
    """A slow report to another service."""

    def on_log(self, *_: Any, **__: Any) -> None:
        """Sleep for half a second."""
        time.sleep(0.5)


class SmallMemory(GPT2LMHeadModel):
    """A model that runs out of memory with more than four rows."""

    def forward(
        self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> Any:
        """Compute up to four rows; raise OutOfMemoryError for more."""
        if len(input_ids) > 4:
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 2.00 GiB"
            )
        return super().forward(input_ids=input_ids, labels=labels, **kwargs)


def resume_after_signal(work: Path, number: int) -> dict[str, Any]:
    """Send a signal before step 5, then resume."""
    act = At(5, lambda *_: os.kill(os.getpid(), number))
    first = run_life(work, callbacks=(act,))
    outcome = {
        "first": first,
        "checkpoints": checkpoints_of(work),
        "again": run_life(work, resume=True),
    }
    undisturbed = undisturbed_run(work)
    return outcome | {
        "same bits": outcome["again"].get("sha256") == undisturbed["sha256"]
    }


scenario("1")(lambda work: resume_after_signal(work, signal.SIGKILL))
scenario("5")(lambda work: resume_after_signal(work, signal.SIGTERM))


@scenario("13")
def _flipped(work: Path) -> dict[str, Any]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / "model.safetensors").read_bytes())
        data[-3] ^= 4
        (folder / "model.safetensors").write_bytes(data)

    return resume_damaged(work, flip)


def cut(name: str, size: int) -> Callable[[Path], dict[str, Any]]:
    """Truncate a file of the newest checkpoint."""
    return lambda work: resume_damaged(
        work, lambda folder: os.truncate(folder / name, size)
    )


scenario("14")(cut("model.safetensors", 1000))
scenario("15")(cut("trainer_state.json", 100))


class Payload:
    """Code that a hostile pickle runs."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.place, "w"))


@scenario("42")
def _pickled(work: Path) -> dict[str, Any]:
    def poison(folder: Path) -> None:
        (folder / "optimizer.pt").write_bytes(pickle.dumps(Payload(str(work / "ran"))))

    return resume_damaged(work, poison) | {"executed": (work / "ran").exists()}


@scenario("17")
def _other_data(work: Path) -> dict[str, Any]:
    run_life(work, callbacks=(kill_at(7),))
    return {"again": run_life(work, resume=True, rows=Rows(seed=9))}


@scenario("19")
def _other_settings(work: Path) -> dict[str, Any]:
    run_life(work, callbacks=(kill_at(7),))
    return {"again": run_life(work, resume=True, learning_rate=5e-2, weight_decay=0.5)}


@scenario("26")
def _not_a_number(work: Path) -> dict[str, Any]:
    def spoil(model: Any, _: Any) -> None:
        model.transformer.wte.weight.data[3, 3] = float("nan")

    return run_life(work, callbacks=(At(5, spoil),)) | {
        "checkpoints": checkpoints_of(work)
    }


@scenario("27")
def _spike(work: Path) -> dict[str, Any]:
    def inflate(model: Any, _: Any) -> None:
        for parameter in model.parameters():
            parameter.register_hook(lambda g: g * 1e4 if model.spiking else g)
        model.spiking = True

    def calm(model: Any, _: Any) -> None:
        model.spiking = False

    spiked = run_life(work, callbacks=(At(6, inflate), At(7, calm)))
    undisturbed = undisturbed_run(work)
    return {
        "spiked": spiked,
        "same bits": spiked.get("sha256") == undisturbed["sha256"],
    }


@scenario("29")
def _no_targets(work: Path) -> dict[str, Any]:
    return run_life(work, rows=Rows(empty=True))


@scenario("36")
def _two_at_once(work: Path) -> dict[str, Any]:
    lives = [
        fork_life(work, lambda: train(work / "out", save_total_limit=2))
        for _ in range(2)
    ]
    return {
        "exits": [wait_for(*one) for one in lives],
        "checkpoints": checkpoints_of(work),
    }


@scenario("39")
def _out_of_memory(work: Path) -> dict[str, Any]:
    plain = run_life(work, kind=SmallMemory)
    finding = wait_for(
        *fork_life(
            work, lambda: train(work / "b", kind=SmallMemory, auto_find_batch_size=True)
        )
    )
    undisturbed = undisturbed_run(work)
    same = finding.get("losses logged") == undisturbed["losses logged"]
    return {"plain": plain, "auto_find_batch_size": finding, "same losses": same}


@scenario("40")
def _worker_killed(work: Path) -> dict[str, Any]:
    def kill(*_: Any) -> None:
        me = (
            Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        )
        os.kill(int(me[-1]), signal.SIGKILL)

    return run_life(
        work, callbacks=(At(3, kill),), rows=Rows(slow=0.02), dataloader_num_workers=1
    )


@scenario("41")
def _slow_loader(work: Path) -> dict[str, Any]:
    return run_life(work, rows=Rows(slow=0.01))


@scenario("43")
def _slow_outside(work: Path) -> dict[str, Any]:
    began = time.monotonic()
    run_life(work)
    plain, began = time.monotonic() - began, time.monotonic()
    wait_for(*fork_life(work, lambda: train(work / "b", callbacks=(OnLog(),))))
    return {
        "seconds": round(plain, 2),
        "with a slow callback": round(time.monotonic() - began, 2),
    }


@scenario("45")
def _twice(work: Path) -> dict[str, Any]:
    run_life(work, callbacks=(kill_at(7),))
    shutil.copytree(work / "out", work / "copy")
    again = [run_life(work, resume=True)]
    again.append(wait_for(*fork_life(work, lambda: train(work / "copy", resume=True))))
    return {
        "lives": again,
        "same bits": again[0].get("sha256") == again[1].get("sha256"),
    }


@scenario("8")
def _full(work: Path) -> dict[str, Any]:
    outcome = run_life(work, save_total_limit=None)
    newest = checkpoints_of(work)[-1:]
    files = {
        p.name: p.stat().st_size for n in newest for p in (work / "out" / n).iterdir()
    }
    return {
        "life": outcome,
        "checkpoints": checkpoints_of(work),
        "files of the newest": files,
    }


@scenario("11")
def _read_only(work: Path) -> dict[str, Any]:
    subprocess.run(["mount", "-o", "remount,ro", work / "out"], check=True)  # noqa: S603, S607
    return run_life(work)


@scenario("49")
def _data_replaced(work: Path) -> dict[str, Any]:
    """Overwrite the Arrow file of the data set while the run reads it."""
    import datasets

    for name, seed in (("data", 1), ("other", 9)):
        ids = Rows(seed=seed).ids.tolist()
        datasets.Dataset.from_list(
            [{"input_ids": i, "labels": i} for i in ids]
        ).save_to_disk(work / name)

    def act() -> None:
        rows = datasets.load_from_disk(work / "data").with_format("torch")

        def replace(*_: Any) -> None:
            file = next((work / "data").glob("*.arrow"))
            file.write_bytes(next((work / "other").glob("*.arrow")).read_bytes())

        train(work / "out", rows=rows, callbacks=(At(6, replace),))

    undisturbed = undisturbed_run(work)
    replaced = wait_for(*fork_life(work, act))
    return {
        "replaced": replaced,
        "same bits": replaced.get("sha256") == undisturbed["sha256"],
    }


@scenario("50")
def _two_new_runs(work: Path) -> dict[str, Any]:
    """Start two runs with different settings in one new folder, then resume the first."""
    lives = [
        fork_life(
            work, lambda rate=rate: train(work / "out", learning_rate=rate, max_steps=8)
        )  # type: ignore[misc]
        for rate in (1e-3, 5e-2)
    ]
    exits = [wait_for(*one)["exit"] for one in lives]
    again = run_life(work, resume=True)
    return {
        "exits": exits,
        "again": again,
        "same bits": again.get("sha256") == undisturbed_run(work)["sha256"],
    }


class StopAt(TrainerCallback):
    """Stop training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Request the stop."""
        control.should_training_stop = state.global_step >= self.step


@scenario("51")
def _stopped_and_continued(work: Path) -> dict[str, Any]:
    """Stop early, continue, kill before the final model, start again."""
    stopped = run_life(work, callbacks=(StopAt(6),), final=True)
    second = run_life(work, resume=True, callbacks=(KillAtEnd(),), final=True)
    outcome = {
        "stopped": stopped,
        "continued": second,
        "again": run_life(work, resume=True, final=True),
    }
    undisturbed = wait_for(
        *fork_life(work, lambda: train(work / "undisturbed", final=True))
    )
    models = [
        work / name / "final" / "model.safetensors" for name in ("out", "undisturbed")
    ]
    same = models[0].read_bytes() == models[1].read_bytes()
    return outcome | {"same final model": same, "undisturbed": undisturbed}


class KillAtEnd(TrainerCallback):
    """SIGKILL between the last step and the final model."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Kill this process."""
        os.kill(os.getpid(), signal.SIGKILL)


@scenario("52")
def _batch_size_in_the_state(work: Path) -> dict[str, Any]:
    """Change or remove the batch size in trainer_state.json (auto_find_batch_size)."""

    def changed(value: int | None) -> dict[str, Any]:
        folder = work / str(value)
        folder.mkdir()
        run_life(folder, callbacks=(kill_at(7),), auto_find_batch_size=True)
        state = folder / "out" / "checkpoint-6" / "trainer_state.json"
        state_values = json.loads(state.read_text())
        before = state_values["train_batch_size"]
        state_values |= {"train_batch_size": value}
        state.write_text(json.dumps(state_values))
        return {
            "before": before,
            "now": value,
            **run_life(folder, resume=True, auto_find_batch_size=True),
        }

    sha = undisturbed_run(work, auto_find_batch_size=True)["sha256"]
    outcome = {"other": changed(4), "missing": changed(None)}
    return outcome | {
        "same bits": [one.get("sha256") == sha for one in outcome.values()]
    }


@scenario("53")
def _documentation_beside_records(work: Path) -> dict[str, Any]:
    """Load a folder with records, a README, a licence and a picture by `datasets`."""

    def of(*extra: tuple[str, bytes]) -> dict[str, Any]:
        def act() -> None:
            import datasets

            datasets.config.HF_DATASETS_CACHE = str(work / "cache")
            folder = work / f"records-{len(list(work.iterdir()))}"
            folder.mkdir()
            (folder / "a.jsonl").write_text(
                "".join(f'{{"title": "Pot {n}"}}\n' for n in range(5))
            )
            for name, content in extra:
                (folder / name).write_bytes(content)
            rows = datasets.load_dataset(str(folder), split="train")
            print(
                "FACTS " + json.dumps({"rows": len(rows), "columns": rows.column_names})
            )

        return wait_for(*fork_life(work, act))

    licence, photo = (
        ("LICENSE.txt", b"Permission is granted\n" * 9),
        ("a.png", b"\x89PNG\r\n"),
    )
    return {
        "README.md": of(("README.md", b"# Recipes\n")), "licence and picture": of(licence, photo),
        "three texts": of(licence, ("NOTES.txt", b"x\n"), ("TODO.txt", b"y\n")),
    }  # fmt: skip


class OneRaises(Rows):
    """A data set with one record that raises."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 40:
            raise ValueError("could not convert string to float: '1.000,000'")
        return super().__getitem__(index)


@scenario("54")
def _one_record_raises(work: Path) -> dict[str, Any]:
    return run_life(work, rows=OneRaises()) | {"checkpoints": checkpoints_of(work)}


@scenario("56")
def _never_room(work: Path) -> dict[str, Any]:
    """Save a checkpoint of 280 kB on a disk of 60 kB after the last step."""
    return run_life(work, save_steps=12) | {"checkpoints": checkpoints_of(work)}


@scenario("57")
def _untrusted_code(work: Path) -> dict[str, Any]:
    """Open a model folder with its own code, without an answer and with `y`."""
    folder = work / "model"
    folder.mkdir()
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "evil", "auto_map": auto})
    )
    code = f"open({str(work / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (folder / "evil.py").write_text(code)

    def opened(text: str | None, **options: Any) -> dict[str, Any]:
        def act() -> None:
            reading, writing = os.pipe()
            os.dup2(reading, 0)
            if text is not None:
                os.write(writing, text.encode())
            os.close(writing)
            AutoModelForCausalLM.from_pretrained(folder, **options)

        (work / "ran").unlink(missing_ok=True)
        return wait_for(*fork_life(work, act)) | {"executed": (work / "ran").exists()}

    return {
        "not answered": opened(None), "y typed": opened("y\n"),
        "trust_remote_code": opened(None, trust_remote_code=True),
    }  # fmt: skip


@scenario("58")
def _links(work: Path) -> dict[str, Any]:
    """Place a link in the output folder at the path of a checkpoint file."""
    victim = work / "letter.txt"
    victim.write_text("dear all")
    (work / "out" / "checkpoint-2").mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors"):
        (work / "out" / "checkpoint-2" / name).symlink_to(victim)
    outcome = run_life(work, max_steps=2)
    return outcome | {
        "file of the user overwritten": victim.read_bytes() != b"dear all"
    }


@scenario("61")
def _adapters(work: Path) -> dict[str, Any]:
    """Compare the adapter files of four equal LoRA runs."""
    from peft import LoraConfig, get_peft_model

    def adapted(config: GPT2Config) -> Any:
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
        return get_peft_model(GPT2LMHeadModel(config), lora)

    hashes = []
    for n in range(4):
        wait_for(
            *fork_life(
                work, lambda n=n: train(work / f"run-{n}", kind=adapted, max_steps=2)
            )
        )  # type: ignore[misc]
        file = work / f"run-{n}" / "checkpoint-2" / "adapter_model.safetensors"
        hashes.append(hashlib.sha256(file.read_bytes()).hexdigest()[:12])
    return {"sha256": hashes, "all equal": len(set(hashes)) == 1}


@scenario("62")
def _console(work: Path) -> dict[str, Any]:
    """Close the reader of standard output before step 5; send SIGHUP before step 5."""

    def deaf(*_: Any) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)

    closed = run_life(work, callbacks=(At(5, deaf),))
    outcome = {"closed pipe": closed | {"checkpoints": checkpoints_of(work)}}
    shutil.rmtree(work / "out")
    hangup = run_life(
        work, callbacks=(At(5, lambda *_: os.kill(os.getpid(), signal.SIGHUP)),)
    )
    return outcome | {"SIGHUP": hangup | {"checkpoints": checkpoints_of(work)}}


@scenario("63")
def _hostile_models(work: Path) -> dict[str, Any]:
    """Open model folders with impossible sizes by `from_pretrained`."""
    good = work / "good"
    wait_for(
        *fork_life(
            work,
            lambda: GPT2LMHeadModel(
                GPT2Config(n_embd=8, n_layer=1, n_head=2)
            ).save_pretrained(good),
        )
    )
    outcome = {}
    for name, change in (
        ("n_layer -3", {"n_layer": -3}), ("n_embd as a list", {"n_embd": [8]}),
        ("n_head 0", {"n_head": 0}), ("n_head 3", {"n_head": 3}),
        ("vocab_size -1", {"vocab_size": -1}), ("2,000 layers", {"n_layer": 2000}),
        ("quantized", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ):  # fmt: skip
        folder = work / name.replace(" ", "-")
        shutil.copytree(good, folder)
        config = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(config))

        def act(folder: Path = folder) -> None:
            model = AutoModelForCausalLM.from_pretrained(folder)
            print(
                "FACTS "
                + json.dumps({"parameters": sum(p.numel() for p in model.parameters())})
            )

        one = wait_for(*fork_life(work, act))
        outcome[name] = {
            key: one[key] for key in ("exit", "last line", "parameters") if key in one
        }
    return outcome


@scenario("64")
def _nonsense_state(work: Path) -> dict[str, Any]:
    """Resume with nonsense steps in trainer_state.json, and with weights of zero."""

    def stepped(value: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            file = folder / "trainer_state.json"
            file.write_text(
                json.dumps(json.loads(file.read_text()) | {"global_step": value})
            )

        return change

    def zeroed(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {
            n: torch.zeros_like(t)
            for n, t in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    kinds = {str(v): stepped(v) for v in (-5, 1e30, "six", 2, 500)} | {
        "weights of zero": zeroed
    }
    outcome = {}
    for name, change in kinds.items():
        folder = work / name.replace(" ", "-")
        folder.mkdir()
        outcome[name] = resume_damaged(folder, change)
    return outcome


@scenario("67")
def _high_bit(work: Path) -> dict[str, Any]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / "trainer_state.json").read_bytes())
        data[len(data) // 2] ^= 0x80
        (folder / "trainer_state.json").write_bytes(data)

    return resume_damaged(work, flip)


class Few(Rows):
    """One row, repeated `n` times."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(0)


@scenario("68")
def _one_example(work: Path) -> dict[str, Any]:
    one, same = (
        run_life(work, rows=Few(1)),
        wait_for(*fork_life(work, lambda: train(work / "b", rows=Few(ROWS)))),
    )
    return {"one example": one, f"{ROWS} equal ones": same}


@contextlib.contextmanager
def work_folder(mount: str | None) -> Iterator[Path]:
    """A temporary folder. With `mount`, its folder `out` is a tmpfs with these options."""
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
    """Run the scenarios in order. With --mounted, run one inside its namespace."""
    os.environ["OMP_NUM_THREADS"] = "1"
    outcomes: dict[str, Any] = {}
    for number in a.only:
        if number in MOUNTS and a.mounted is None:
            outcomes[number] = run_mounted(number)
            continue
        with work_folder(a.mounted) as work:
            outcomes[number] = SCENARIOS[number](work)
    return outcomes if a.mounted else harness.Result(theirs=outcomes)


def options(p: argparse.ArgumentParser) -> None:
    """Add the arguments of the command line."""
    p.add_argument(
        "--only", nargs="*", default=sorted(SCENARIOS, key=int), metavar="NUMBER"
    )
    p.add_argument("--mounted", default=None, help=argparse.SUPPRESS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
