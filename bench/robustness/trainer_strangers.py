"""Faults 48 to 69 upon `transformers.Trainer`: a column of docs/explanation/reliability.md.

    python bench/robustness/trainer_strangers.py [--only NUMBER ...]

What strangers' folders, neighbours and one bad record do. Numbers that are not here have no
counterpart there; the page says why. As in trainer_faults.py, `theirs` has what was done, the exit
status, the last line of output and the facts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import torch
from torch import Tensor
from trainer_lives import (
    ROWS,
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
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, TrainerCallback

SCENARIOS: Scenarios = {}
scenario = scenario_of(SCENARIOS)
_MOUNTS = {"56": "size=60k"}


def whole(work: Path, **options: Any) -> dict[str, Any]:
    """An undisturbed run."""
    return ended(*life(work, lambda: train(work / "whole", **options)))


@scenario("49")
def _data_replaced(work: Path) -> dict[str, Any]:
    """The Arrow file of the saved data set is overwritten while the run reads it."""
    import datasets

    for name, seed in (("data", 1), ("other", 9)):
        ids = Rows(seed=seed).ids.tolist()
        datasets.Dataset.from_list([{"input_ids": i, "labels": i} for i in ids]).save_to_disk(
            work / name
        )

    def act() -> None:
        rows = datasets.load_from_disk(work / "data").with_format("torch")

        def replace(*_: Any) -> None:
            file = next((work / "data").glob("*.arrow"))
            file.write_bytes(next((work / "other").glob("*.arrow")).read_bytes())

        train(work / "out", rows=rows, callbacks=(At(6, replace),))

    undisturbed = whole(work)
    replaced = ended(*life(work, act))
    return {"replaced": replaced, "same bits": replaced.get("sha256") == undisturbed["sha256"]}


@scenario("50")
def _two_new_runs(work: Path) -> dict[str, Any]:
    """Two runs of other settings begin in one new folder; the first is then resumed."""
    lives = [
        life(work, lambda rate=rate: train(work / "out", learning_rate=rate, max_steps=8))  # type: ignore[misc]
        for rate in (1e-3, 5e-2)
    ]
    exits = [ended(*one)["exit"] for one in lives]
    again = lived(work, resume=True)
    return {
        "exits": exits,
        "again": again,
        "same bits": again.get("sha256") == whole(work)["sha256"],
    }


class StopAt(TrainerCallback):
    """Early stopping, after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ask for the end."""
        control.should_training_stop = state.global_step >= self.step


@scenario("51")
def _stopped_and_continued(work: Path) -> dict[str, Any]:
    """Stopped early, continued without that, killed before the final model, started again."""
    stopped = lived(work, callbacks=(StopAt(6),), final=True)
    second = lived(work, resume=True, callbacks=(KillAtEnd(),), final=True)
    found = {"stopped": stopped, "continued": second, "again": lived(work, resume=True, final=True)}
    undisturbed = ended(*life(work, lambda: train(work / "whole", final=True)))
    models = [work / name / "final" / "model.safetensors" for name in ("out", "whole")]
    same = models[0].read_bytes() == models[1].read_bytes()
    return found | {"final model is the whole run's": same, "undisturbed": undisturbed}


class KillAtEnd(TrainerCallback):
    """SIGKILL between the last step and the final model."""

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Kill."""
        os.kill(os.getpid(), signal.SIGKILL)


@scenario("52")
def _batch_size_in_the_state(work: Path) -> dict[str, Any]:
    """With auto_find_batch_size: the batch size in trainer_state.json is another, or is missing."""

    def changed(value: int | None) -> dict[str, Any]:
        folder = work / str(value)
        folder.mkdir()
        lived(folder, callbacks=(killed_at(7),), auto_find_batch_size=True)
        state = folder / "out" / "checkpoint-6" / "trainer_state.json"
        held = json.loads(state.read_text())
        before = held["train_batch_size"]
        held |= {"train_batch_size": value}
        state.write_text(json.dumps(held))
        return {
            "before": before,
            "now": value,
            **lived(folder, resume=True, auto_find_batch_size=True),
        }

    sha = whole(work, auto_find_batch_size=True)["sha256"]
    found = {"other": changed(4), "missing": changed(None)}
    return found | {"same bits": [one.get("sha256") == sha for one in found.values()]}


@scenario("53")
def _documentation_beside_records(work: Path) -> dict[str, Any]:
    """`datasets.load_dataset` of a folder with records, a README, a licence and a picture."""

    def of(*extra: tuple[str, bytes]) -> dict[str, Any]:
        def act() -> None:
            import datasets

            datasets.config.HF_DATASETS_CACHE = str(work / "cache")
            folder = work / f"records-{len(list(work.iterdir()))}"
            folder.mkdir()
            (folder / "a.jsonl").write_text("".join(f'{{"title": "Pot {n}"}}\n' for n in range(5)))
            for name, content in extra:
                (folder / name).write_bytes(content)
            rows = datasets.load_dataset(str(folder), split="train")
            print("FACTS " + json.dumps({"rows": len(rows), "columns": rows.column_names}))

        return ended(*life(work, act))

    licence, photo = ("LICENSE.txt", b"Permission is granted\n" * 9), ("a.png", b"\x89PNG\r\n")
    return {
        "README.md": of(("README.md", b"# Recipes\n")), "licence and picture": of(licence, photo),
        "three texts": of(licence, ("NOTES.txt", b"x\n"), ("TODO.txt", b"y\n")),
    }  # fmt: skip


class OneRaises(Rows):
    """A data set of which one record cannot be made."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index == 40:
            raise ValueError("could not convert string to float: '1.000,000'")
        return super().__getitem__(index)


@scenario("54")
def _one_record_raises(work: Path) -> dict[str, Any]:
    return lived(work, rows=OneRaises()) | {"checkpoints": kept(work)}


@scenario("56")
def _never_room(work: Path) -> dict[str, Any]:
    """A disk of 60 kB for a checkpoint of 280 kB, which is due after the last step."""
    return lived(work, save_steps=12) | {"checkpoints": kept(work)}


@scenario("57")
def _strangers_code(work: Path) -> dict[str, Any]:
    """A model folder whose config names code in it; nobody answers the question, or `y` does."""
    folder = work / "model"
    folder.mkdir()
    auto = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": auto}))
    code = f"open({str(work / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (folder / "evil.py").write_text(code)

    def opened(text: str | None, **how: Any) -> dict[str, Any]:
        def act() -> None:
            reading, writing = os.pipe()
            os.dup2(reading, 0)
            if text is not None:
                os.write(writing, text.encode())
            os.close(writing)
            AutoModelForCausalLM.from_pretrained(folder, **how)

        (work / "ran").unlink(missing_ok=True)
        return ended(*life(work, act)) | {"executed": (work / "ran").exists()}

    return {
        "not answered": opened(None), "y typed": opened("y\n"),
        "trust_remote_code": opened(None, trust_remote_code=True),
    }  # fmt: skip


@scenario("58")
def _links(work: Path) -> dict[str, Any]:
    """The output folder came with a link where a checkpoint's file will be written."""
    victim = work / "letter.txt"
    victim.write_text("dear all")
    (work / "out" / "checkpoint-2").mkdir(parents=True)
    for name in ("trainer_state.json", "model.safetensors"):
        (work / "out" / "checkpoint-2" / name).symlink_to(victim)
    found = lived(work, max_steps=2)
    return found | {"file of the user overwritten": victim.read_bytes() != b"dear all"}


@scenario("61")
def _adapters(work: Path) -> dict[str, Any]:
    """The adapter files of four equal LoRA runs."""
    from peft import LoraConfig, get_peft_model

    def adapted(config: GPT2Config) -> Any:
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"])
        return get_peft_model(GPT2LMHeadModel(config), lora)

    hashes = []
    for n in range(4):
        ended(*life(work, lambda n=n: train(work / f"run-{n}", kind=adapted, max_steps=2)))  # type: ignore[misc]
        file = work / f"run-{n}" / "checkpoint-2" / "adapter_model.safetensors"
        hashes.append(hashlib.sha256(file.read_bytes()).hexdigest()[:12])
    return {"sha256": hashes, "all equal": len(set(hashes)) == 1}


@scenario("62")
def _console(work: Path) -> dict[str, Any]:
    """The reader of standard output goes away before step 5; SIGHUP before step 5."""

    def deaf(*_: Any) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        os.dup2(writing, 1)

    closed = lived(work, callbacks=(At(5, deaf),))
    found = {"closed pipe": closed | {"checkpoints": kept(work)}}
    shutil.rmtree(work / "out")
    hangup = lived(work, callbacks=(At(5, lambda *_: os.kill(os.getpid(), signal.SIGHUP)),))
    return found | {"SIGHUP": hangup | {"checkpoints": kept(work)}}


@scenario("63")
def _hostile_models(work: Path) -> dict[str, Any]:
    """Model folders with sizes that are none: what `from_pretrained` says."""
    good = work / "good"
    ended(
        *life(
            work,
            lambda: GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=2)).save_pretrained(
                good
            ),
        )
    )
    found = {}
    for name, change in (
        ("n_layer -3", {"n_layer": -3}), ("n_embd as a list", {"n_embd": [8]}),
        ("n_head 0", {"n_head": 0}), ("n_head 3", {"n_head": 3}),
        ("vocab_size -1", {"vocab_size": -1}), ("2,000 layers", {"n_layer": 2000}),
        ("quantized", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ):  # fmt: skip
        folder = work / name.replace(" ", "-")
        shutil.copytree(good, folder)
        held = json.loads((folder / "config.json").read_text()) | change
        (folder / "config.json").write_text(json.dumps(held))

        def act(folder: Path = folder) -> None:
            model = AutoModelForCausalLM.from_pretrained(folder)
            print("FACTS " + json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))

        one = ended(*life(work, act))
        found[name] = {key: one[key] for key in ("exit", "last line", "parameters") if key in one}
    return found


@scenario("64")
def _nonsense_state(work: Path) -> dict[str, Any]:
    """Nonsense steps in trainer_state.json, and weights that are all zero."""

    def stepped(value: Any) -> Callable[[Path], object]:
        def change(folder: Path) -> None:
            file = folder / "trainer_state.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"global_step": value}))

        return change

    def zeroed(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = {
            n: torch.zeros_like(t) for n, t in load_file(folder / "model.safetensors").items()
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    kinds = {str(v): stepped(v) for v in (-5, 1e30, "six", 2, 500)} | {"weights of zero": zeroed}
    found = {}
    for name, change in kinds.items():
        folder = work / name.replace(" ", "-")
        folder.mkdir()
        found[name] = damaged(folder, change)
    return found


@scenario("67")
def _high_bit(work: Path) -> dict[str, Any]:
    def flip(folder: Path) -> None:
        data = bytearray((folder / "trainer_state.json").read_bytes())
        data[len(data) // 2] ^= 0x80
        (folder / "trainer_state.json").write_bytes(data)

    return damaged(work, flip)


class Few(Rows):
    """One row, or one row many times."""

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
        lived(work, rows=Few(1)),
        ended(*life(work, lambda: train(work / "b", rows=Few(ROWS)))),
    )
    return {"one example": one, f"{ROWS} equal ones": same}


def measure(a: argparse.Namespace) -> harness.Result | dict[str, Any]:
    """The faults, one after another."""
    return measured(a, SCENARIOS, _MOUNTS, __file__)


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    add_options(p, SCENARIOS)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
