"""lm-eval against `toque serve`, beside lm-eval over the same folder in transformers.

    python bench/quality/lm_eval_beside.py --model FOLDER [--items 40]

FOLDER is a model that converses, as `toque export` writes it. Two tasks of items made here: one
chooses among answers by their log-likelihoods (local-completions: `echo`, `logprobs`, prompts of
ids), one is answered and compared (local-chat-completions). Quality passes when both ends agree in
every accuracy, in every log-likelihood to 1e-3, and in every text.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

CHOICE = """task: made_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""
ANSWER = """task: made_answer
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "Answer with one word: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["\\n"], max_gen_toks: 12, do_sample: false}}
metric_list:
  - {{metric: exact_match, ignore_case: true, ignore_punctuation: true}}
"""
FACTS = (
    ("What colour is a ripe tomato", "red", ("green", "blue", "black")),
    ("What is butter made of", "milk", ("sand", "wood", "water")),
    ("Which animal lays eggs for breakfast", "chicken", ("cow", "horse", "dog")),
    ("What does sugar taste like", "sweet", ("salty", "sour", "bitter")),
    ("What is bread baked in", "oven", ("fridge", "bowl", "lake")),
    ("Which drink is made of grapes", "wine", ("tea", "beer", "coffee")),
    ("What is frozen water called", "ice", ("steam", "oil", "salt")),
    ("Which tool cuts meat", "knife", ("spoon", "cup", "plate")),
)


def items(n: int) -> list[dict[str, Any]]:
    """Questions with an answer and three others, the right one in every place."""
    found = []
    for number in range(n):
        question, answer, wrong = FACTS[number % len(FACTS)]
        place = number * 7 % 4
        choices = [*wrong[:place], answer, *wrong[place:]]
        where = ("", " in a kitchen", " at home", " in a restaurant", " for a cook")
        asked = f"{question}{where[number // len(FACTS) % 5]}?"
        found.append({"question": asked, "answer": answer, "choices": choices, "label": place})
    return found


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of `toque serve` over a folder."""
    port = harness.free_port()
    words = [sys.executable, "-m", "toque", "serve", str(model), "--port", str(port)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as server:  # noqa: S603
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(240):
                time.sleep(0.5)
                try:
                    with urllib.request.urlopen(f"{address}/health"):  # noqa: S310 - our own
                        break
                except OSError:
                    continue
            yield address
        finally:
            server.terminate()


def evaluated(folder: Path, task: str, kind: str, given: str, *words: str) -> dict[str, Any]:
    """What lm-eval measured: its scores, and each item's answers."""
    out = folder / f"{kind}-{task}"
    begun = time.monotonic()
    peers.run(
        ["-m", "lm_eval", "run", "--model", kind, "--model_args", given, "--tasks", task,
         "--include_path", folder, "--output_path", out, "--log_samples", *words]
    )  # fmt: skip
    seconds = time.monotonic() - begun
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"][task]
    lines = next(out.rglob("samples_*.jsonl")).read_text().splitlines()
    samples = sorted((json.loads(line) for line in lines), key=lambda one: int(one["doc_id"]))
    scores = {name: value for name, value in results.items() if isinstance(value, float)}
    answers = [one["filtered_resps"] for one in samples]
    return {"scores": scores, "answers": answers, "seconds": round(seconds, 1)}


def measure(a: argparse.Namespace) -> harness.Result:
    """Evaluate both ways."""
    if not (a.model / "config.json").is_file():
        raise harness.Skipped(f"{a.model} holds no model")
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise harness.Skipped("lm-eval is not installed: pip install lm-eval[api]") from error
    os.environ["HF_DATASETS_OFFLINE"] = "1"
    with TemporaryDirectory() as name:
        folder = Path(name)
        data = folder / "items.json"
        data.write_text("".join(json.dumps(item) + "\n" for item in items(a.items)))
        for task, text in (("choice", CHOICE), ("answer", ANSWER)):
            (folder / f"{task}.yaml").write_text(text.format(data=data))
        here = f"pretrained={a.model},dtype=float32"
        chat = ("--apply_chat_template",)
        theirs = {
            "made_choice": evaluated(folder, "made_choice", "hf", here, "--device", "cpu"),
            "made_answer": evaluated(folder, "made_answer", "hf", here, "--device", "cpu", *chat),
        }
        with served(a.model) as address:
            there = f"model={a.model.name},num_concurrent=4,base_url={address}/v1"
            ours = {
                "made_choice": evaluated(
                    folder, "made_choice", "local-completions",
                    f"{there}/completions,tokenizer={a.model}", "--batch_size", "8",
                ),
                "made_answer": evaluated(
                    folder, "made_answer", "local-chat-completions",
                    f"{there}/chat/completions", *chat,
                ),
            }  # fmt: skip
    apart = max(
        abs(float(x[0]) - float(y[0]))
        for one, two in zip(
            ours["made_choice"]["answers"], theirs["made_choice"]["answers"], strict=True
        )
        for x, y in zip(one, two, strict=True)
    )
    texts = zip(ours["made_answer"]["answers"], theirs["made_answer"]["answers"], strict=True)
    same = sum(one == two for one, two in texts)
    accuracies = all(
        ours[task]["scores"][name] == value
        for task in ours
        for name, value in theirs[task]["scores"].items()
        if "stderr" not in name
    )
    passes = accuracies and apart < 1e-3 and same == a.items
    quality = {"passes": passes, "accuracies_equal": accuracies, "nats_apart": apart}
    return harness.Result(
        ours={task: {k: v for k, v in one.items() if k != "answers"} for task, one in ours.items()},
        theirs={t: {k: v for k, v in one.items() if k != "answers"} for t, one in theirs.items()},
        quality=quality | {"texts_equal": f"{same} of {a.items}"},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--model", type=Path, default=Path("model"))
    p.add_argument("--items", type=int, default=40)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
