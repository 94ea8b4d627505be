"""A model that converses, fine-tuned on conversations made here: the same ids and texts everywhere.

    python bench/quality/conversation_round_trip.py --base FOLDER [--conversations 200]

LoRA by the configuration that `toque init --start-from` writes, exported as a folder and as GGUF.
For conversations of the training data the ids of Toque's template, of `apply_chat_template` of the
folder and of the tokenizer read back from the GGUF must be equal, and lie in the store. For the
same questions `pipeline("text-generation")` with messages must write what `toque chat` writes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import peers

from toque.data.store.token_store import TokenStore
from toque.data.tokenizer.chat import chat_template_of

TEMPERATURES = {"rye bread": 230, "focaccia": 220, "brioche": 190, "sourdough": 245, "scones": 200}
KEPT = {"stock": 4, "pesto": 7, "custard": 2, "hummus": 5, "ragout": 3, "coleslaw": 3}
SWAPS = {"butter": "oil", "milk": "oat milk", "eggs": "ground linseed", "cream": "coconut milk"}
PLACES = ("at home", "in a small oven", "for six people", "for two", "in a hurry", "on a Sunday")


def conversation(number: int) -> list[dict[str, str]]:
    """One of many different conversations, of one question or two."""
    place = f"{PLACES[number % len(PLACES)]} (order {number})"
    bread = list(TEMPERATURES)[number % 5]
    dish = list(KEPT)[number % 6]
    given = list(SWAPS)[number % 4]
    turns = [
        (f"How hot must the oven be for {bread} {place}?", f"{TEMPERATURES[bread]} degrees."),
        (f"How long does {dish} keep?", f"{KEPT[dish]} days in the fridge."),
        (f"What replaces {given} in {bread} {place}?", f"Take {SWAPS[given]} instead."),
    ]
    first = number % 3
    chosen = [turns[first], turns[(first + 1) % 3]][: 1 + number % 2]
    told = {"role": "system", "content": "You answer cooks in one sentence."}
    messages = [told] if number % 4 == 0 else []
    for question, answer in chosen:
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def ids_of(folder: Path, talks: list[list[dict[str, str]]], **known: str) -> list[list[int]]:
    """Ids by the tokenizer that transformers reads."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, **known)
    return [list(tokenizer.apply_chat_template(turns)["input_ids"]) for turns in talks]


def measure(a: argparse.Namespace) -> harness.Result:
    """Train, export, compare."""
    if not (a.base / "config.json").is_file():
        raise harness.Skipped(f"{a.base} holds no model")
    kept = TemporaryDirectory()
    work = a.work or Path(kept.name)
    talks = [conversation(n) for n in range(a.conversations)]
    (work / "chats.jsonl").write_text(
        "".join(json.dumps({"messages": turns}) + "\n" for turns in talks)
    )
    config, run = work / "chats.yaml", work / "runs/chats"
    os.chdir(work)
    begun = time.monotonic()
    printed = []
    if not config.exists():
        printed.append(
            peers.toque("init", "chats.jsonl", "--start-from", a.base, "--to", config).stdout
        )
    lora = {"train.stop_after": f"{a.epochs:g} epochs", "adapter.kind": "lora", "adapter.r": 8}
    lora |= {"optim.peak_lr": "1e-3", "train.batch": "8 examples"}
    printed.append(peers.toque("train", config, *(f"{k}={v}" for k, v in lora.items())).stdout)
    seconds = time.monotonic() - begun
    new = [form for form in ("hf", "gguf") if not Path(form).exists()]
    printed += [peers.toque("export", run, "--to", f, "--format", f).stdout for f in new]
    store = TokenStore.open(work / "stores/chats", verify=True)
    template = chat_template_of(store.codec())
    assert template is not None
    some = talks[: a.compared]
    ours = [
        template.conversation([(t["role"], t["content"]) for t in turns], last=False)
        for turns in some
    ]
    rows = range(len(store.split))
    stored = {(*store.prompt(row).tolist(), *store.target(row).tolist()) for row in rows}
    gguf = next((work / "gguf").glob("*.gguf"))
    sides = {
        "Toque": [list(map(int, one.ids)) for one in ours],  # type: ignore[union-attr]
        "folder": ids_of(work / "hf", some),
        "GGUF": ids_of(gguf.parent, some, gguf_file=gguf.name),
    }
    ends = [max(b for _, b in one.answers) for one in ours]  # type: ignore[union-attr]
    in_store = sum(
        tuple(ids[:end]) in stored for ids, end in zip(sides["Toque"], ends, strict=True)
    )
    same = {
        name: sum(x == y for x, y in zip(sides["Toque"], ids, strict=True))
        for name, ids in sides.items()
    }
    questions = [next(t["content"] for t in turns if t["role"] == "user") for turns in some]
    texts = written_alike(run, work / "hf", questions)
    equal = sum(one == two for one, two, _ in texts)
    answers = [next(t["content"] for t in turns if t["role"] == "assistant") for turns in some]
    learnt = sum(answer == two.strip() for answer, (_, two, _) in zip(answers, texts, strict=True))
    figures = {
        "training_s": round(seconds, 1), "ids_equal": same, "in_store": in_store,
        "texts_equal": equal, "answers_learnt": learnt, "compared": a.compared,
    }  # fmt: skip
    passes = {*same.values(), in_store, equal} == {a.compared}
    return harness.Result(
        ours=figures,
        quality={"passes": passes},
        details={"texts": texts, "printed": [text[-1500:] for text in printed]},
    )


def written_alike(run: Path, folder: Path, questions: list[str]) -> list[tuple[str, str, str]]:
    """Each question's answer by the pipeline over the exported folder, and by `toque chat`."""
    from transformers import pipeline

    write = pipeline("text-generation", model=str(folder), device="cpu", dtype="float32")
    settings: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "return_full_text": False}
    found = []
    for question in questions:
        messages = [{"role": "user", "content": question}]
        theirs = write(messages, **settings)[0]["generated_text"]
        theirs = theirs if isinstance(theirs, str) else theirs[-1]["content"]
        options = ("--temperature", 0, "--max-new-tokens", 40)
        ours = peers.toque("chat", run, *options, typed=f"{question}\n").stdout
        found.append((theirs.strip(), ours.strip(), question))
    return found


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("--base", type=Path, default=Path("base"), help="SmolLM2-135M-Instruct, say")
    p.add_argument("--conversations", type=int, default=200)
    p.add_argument("--compared", type=int, default=20)
    p.add_argument("--epochs", type=float, default=4)
    p.add_argument("--work", type=Path, help="a folder to keep, and to go on from")


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
