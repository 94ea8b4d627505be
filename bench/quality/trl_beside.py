"""TRL's SFTTrainer beside Toque: the same pairs and base, batch, rate and steps.

    python bench/quality/trl_beside.py --base FOLDER [--pairs 200]

Toque trains first; TRL reads the same examples in the order of Toque's batches. Both write them by
one template, which ends with the end of the answer: of others TRL learns what stands behind it.
Quality passes when the losses of the first update are within 1e-3 and those of what was held out
within 0.02. Seconds are of whole processes on the same processor, one after the other; lines are
those that a user writes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from contextlib import chdir
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque import configure
from toque.data.store.token_store import TokenStore
from toque.units import Cursor
from toque.workflows.build import build_language_model, build_stream
from toque.workflows.prepared_store import open_store

BATCH, RATE = 8, 2e-5
CONFIG = """\
run_dir: run
model: {{family: auto, start_from: {base}}}
data:
  sources: [{{path: pairs.jsonl}}]
  store: store
  chat_template: template.jinja
optim: {{peak_lr: {rate}, schedule: constant, warmup: 0 %, weight_decay: 0}}
train: {{stop_after: {steps} steps, batch: {batch} examples, precision: float32}}
evaluation: {{generate: 0}}
"""
TRL = """\
from datasets import load_dataset
from trl import SFTConfig, SFTTrainer

data = load_dataset("json", data_files={{"train": "train.jsonl", "test": "test.jsonl"}})
settings = SFTConfig(
    output_dir="trl", max_steps={steps}, per_device_train_batch_size={batch},
    per_device_eval_batch_size=64, learning_rate={rate}, lr_scheduler_type="constant",
    logging_steps=1, eval_strategy="no", save_strategy="no", report_to=[], use_cpu=True,
    bf16=False, train_sampling_strategy="sequential", gradient_checkpointing=False,
    model_init_kwargs={{"dtype": "float32"}}, chat_template_path="template.jinja",
)
trainer = SFTTrainer(
    "{base}", args=settings, train_dataset=data["train"], eval_dataset=data["test"]
)
trainer.train()
print(trainer.evaluate())
trainer.save_model("trl/model")
"""
RECORD = """
import json
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(json.dumps({"losses": losses, "held_out": trainer.evaluate()["eval_loss"]}))
"""
TEMPLATE = """\
{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}
{{- '<|im_end|>' }}{% if message['role'] != 'assistant' %}{{ '\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
_NUMBER = re.compile(r"order (\d+)")


def pair(number: int) -> dict[str, list[dict[str, str]]]:
    """A question of one cook, and its answer, as prompt and completion of a conversation."""
    dish = ("soup", "bread", "salad", "stew", "cake")[number % 5]
    minutes, people = 5 + number * 7 % 55, 1 + number % 6
    asked = f"How long does {dish} for {people} take (order {number})?"
    answer = f"Plan {minutes} minutes for {dish}, and serve it to {people}."
    return {
        "prompt": [{"role": "user", "content": asked}],
        "completion": [{"role": "assistant", "content": answer}],
    }


def order_of(store: TokenStore, rows: list[int]) -> list[int]:
    """The numbers of the pairs that rows hold."""
    codec = store.codec()
    texts = (codec.decode(store.prompt(row).tolist()) for row in rows)
    return [int(found[1]) for text in texts if (found := _NUMBER.search(text))]


def batches(config: Path, steps: int) -> tuple[list[int], list[int]]:
    """The pairs of each update, one after the other, and those held out."""
    settings = configure(config)
    store = open_store(settings)
    stream = build_stream(settings, store, build_language_model(settings, store))
    cursor, rows = Cursor(), list[int]()
    for _ in range(steps):
        rows += [row for packed in stream.at(cursor).batch.example_ids for row in packed]
        cursor = stream.plan.at(cursor).cursor
    return order_of(store, rows), order_of(store, store.rows("validation").tolist())


def measure(a: argparse.Namespace) -> harness.Result:
    """Train both."""
    if not (a.base / "config.json").is_file():
        raise harness.Skipped(f"{a.base} holds no model")
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise harness.Skipped("TRL is not installed: pip install trl") from error
    pairs = [pair(n) for n in range(a.pairs)]
    given: dict[str, Any] = {"base": a.base.resolve(), "rate": RATE, "batch": BATCH}
    given["steps"] = a.pairs // BATCH - 2
    with TemporaryDirectory() as name, chdir(name):
        folder = Path(name)
        _write(folder / "pairs.jsonl", pairs)
        (folder / "template.jinja").write_text(TEMPLATE)
        (folder / "config.yaml").write_text(CONFIG.format(**given))
        begun = time.monotonic()
        peers.toque("train", folder / "config.yaml")
        ours = _of_run(folder / "run") | {"seconds": round(time.monotonic() - begun, 1)}
        ours["lines"] = len(CONFIG.splitlines()) + 1
        train, held = batches(folder / "config.yaml", given["steps"])
        _write(folder / "train.jsonl", [pairs[n] for n in train])
        _write(folder / "test.jsonl", [pairs[n] for n in held])
        program = TRL.format(**given)
        (folder / "program.py").write_text(program + RECORD)
        begun = time.monotonic()
        theirs = peers.last_json(peers.run([folder / "program.py"]).stdout)
        theirs |= {"seconds": round(time.monotonic() - begun, 1)}
        theirs["lines"] = len([line for line in program.splitlines() if line])
    first = abs(ours["losses"][0] - theirs["losses"][0])
    held_out = abs(ours["held_out"] - theirs["held_out"])
    worst = max(abs(x - y) for x, y in zip(ours["losses"], theirs["losses"], strict=True))
    quality = {"first_apart": first, "held_out_apart": held_out, "worst_apart": worst}
    return harness.Result(
        ours=ours,
        theirs=theirs,
        quality={"passes": first < 1e-3 and held_out < 0.02} | quality,
        details={"pairs": a.pairs, "held_out": len(held), **given, "base": a.base.name},
    )


def _write(path: Path, rows: list[dict[str, list[dict[str, str]]]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _of_run(run: Path) -> dict[str, Any]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    losses = [loss for record in steps for loss in record.get("losses", [record["loss"]])]
    held = [record["metrics"]["loss"] for record in records if record["event"] == "evaluation"]
    return {"losses": losses, "held_out": held[-1]}


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--base", type=Path, default=Path("base"))
    p.add_argument("--pairs", type=int, default=200)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
