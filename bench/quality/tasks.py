"""Class answers of a run against the most frequent class and a bag of words.

    python bench/quality/tasks.py RUN [--task nutrition --task difficulty] [--max-examples N]

RUN is a finished run over several tasks (docs/guides/tasks-and-curriculum.md). Its held-out
questions are put to its model, held to the classes, and to a multinomial logistic regression over
counts of words: trained on the run's own training examples of that task, on the very text the model
reads, with the L2 penalty that does best on a tenth of them set apart (log(1 + count), words of two
letters or more and whole numbers, those in three examples or more). Beside accuracy and macro-F1
stand 95 % intervals by resampling held-out examples, and that of the difference, model minus bag of
words, example by example. A class label of ours may have been made from the text by rules
(`labels`).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import harness
import numpy as np
import torch
from numpy.typing import NDArray

from toque.config import RunConfig, load_config
from toque.cooking.prompts import RECIPE_TASKS, TASKS, Task
from toque.data.store.token_store import TokenStore
from toque.evaluation.bootstrap import RESAMPLES, SEED
from toque.evaluation.classification import class_scores
from toque.evaluation.heldout_loss import subset
from toque.evaluation.task_scores import choose_classes, classes_of
from toque.training.runtime import Runtime
from toque.workflows.build import build_heldout, build_stream
from toque.workflows.inference.open_model import OpenedModel, open_model
from toque.workflows.prepared_store import open_store

PENALTIES = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
_WORD = re.compile(r"[a-z][a-z']+|\d+")
_SEEN_IN = 3
NAMES = ("accuracy", "macro_f1")
"""Each with its 95 % interval: value, low, high."""
ORIGINS = {"nutrition": ("estimated from the ingredients", "the source's figures", "the source"),
           "difficulty": ("our rule", "the source")}  # fmt: skip


class Bag:
    """Counts of words as a sparse matrix, over the vocabulary of the training texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        seen = Counter(word for text in texts for word in set(_WORD.findall(text.lower())))
        kept = sorted(word for word, n in seen.items() if n >= _SEEN_IN)
        self.number = {word: i for i, word in enumerate(kept)}

    def __call__(self, texts: Sequence[str]) -> torch.Tensor:
        """[texts, words + 1] log(1 + count), rows of length 1 before the constant at the end."""
        rows, columns, values = [], [], []
        for row, text in enumerate(texts):
            counts = Counter(w for w in _WORD.findall(text.lower()) if w in self.number)
            weights = np.log1p(np.fromiter(counts.values(), float, len(counts)))
            weights /= max(float(np.linalg.norm(weights)), 1e-9)
            rows += [row] * (len(counts) + 1)
            columns += [*(self.number[word] for word in counts), len(self.number)]
            values += [*weights.tolist(), 1.0]
        place = torch.tensor([rows, columns])
        size = (len(texts), len(self.number) + 1)
        weights = torch.tensor(values)
        return torch.sparse_coo_tensor(place, weights, size, check_invariants=True).coalesce()


def fitted(bags: torch.Tensor, classes: torch.Tensor, n: int, penalty: float) -> torch.Tensor:
    """[words + 1, n] weights of the least mean cross-entropy + penalty / examples x |w|^2 / 2."""
    weights = torch.zeros(bags.shape[1], n, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        fit = torch.nn.functional.cross_entropy(bags @ weights, classes)
        total = fit + penalty / len(classes) * weights[:-1].square().sum() / 2
        total.backward()
        return total

    optimizer.step(loss)
    return weights.detach()


def bag_of_words(
    texts: Sequence[str], truths: NDArray[np.int64], asked: Sequence[str], n: int
) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """The classes of `asked`, and how the regression was chosen."""
    apart = np.arange(len(texts)) % 10 == 0
    some, rest = ([t for t, a in zip(texts, apart, strict=True) if a == w] for w in (True, False))
    labels = torch.from_numpy(truths)
    bag = Bag(rest)
    learnt, tried = bag(rest), bag(some)
    right = {}
    for penalty in PENALTIES:
        weights = fitted(learnt, labels[~apart], n, penalty)
        right[penalty] = float(((tried @ weights).argmax(1) == labels[apart]).float().mean())
    best = max(PENALTIES, key=lambda penalty: right[penalty])
    bag = Bag(texts)
    weights = fitted(bag(texts), labels, n, best)
    found = (bag(asked) @ weights).argmax(1).numpy()
    return found, {"words": len(bag.number), "penalty": best, "set_apart": right}


def scores(answers: NDArray[np.int64], truths: NDArray[np.int64], names: list[str]) -> list[float]:
    """Accuracy and macro-F1."""
    found = class_scores([names[i] for i in answers], [names[i] for i in truths], names)
    return [found.accuracy, found.macro_f1]


def compared(
    answers: dict[str, NDArray[np.int64]], truths: NDArray[np.int64], names: list[str]
) -> dict[str, Any]:
    """Scores with intervals of each, and of the model's lead over the bag of words."""
    draws = np.random.Generator(np.random.Philox(SEED)).integers(
        0, len(truths), (RESAMPLES, len(truths))
    )
    found: dict[str, Any] = {}
    resampled = {}
    for who, said in answers.items():
        resampled[who] = np.array([scores(said[d], truths[d], names) for d in draws])
        found[who] = _named(scores(said, truths, names), resampled[who])
    values = [found[who][name][0] for name in NAMES for who in ("model", "bag_of_words")]
    leads = [values[0] - values[1], values[2] - values[3]]
    lead = resampled["model"] - resampled["bag_of_words"]
    return found | {"model_minus_bag_of_words": _named(leads, lead)}


def _named(values: Sequence[float], resampled: NDArray[np.float64]) -> dict[str, list[float]]:
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    rows = zip(NAMES, values, low.tolist(), high.tolist(), strict=True)
    return {name: [round(x, 4) for x in row] for name, *row in rows}


def rows_of(store: TokenStore, split: str, task: Task) -> NDArray[np.int64]:
    """Store rows of one task in one split."""
    rows = store.rows(split)  # type: ignore[arg-type]
    return rows[np.asarray(store.column("task"))[rows] == TASKS.index(task)]


def compare(
    opened: OpenedModel, config: RunConfig, store: TokenStore, task: Task, most: int | None
) -> dict[str, Any]:
    """One task."""
    codec, names = store.codec(), classes_of(store, task, RECIPE_TASKS[task].classes)
    learnt, asked = rows_of(store, "train", task), rows_of(store, "validation", task)
    asked = subset(asked, most)
    runtime = Runtime.detect(precision=config.train.precision, fp16_is_safe=False)
    layout = build_stream(config, store, opened.model).layout
    heldout = build_heldout(config, store, layout, runtime)
    run = harness.timed(lambda: choose_classes(opened.model, heldout, store, names, asked))
    shares, true_names = run.value
    truths = np.array([names.index(truth) for truth in true_names])
    of_learnt = np.array([names.index(codec.decode(store.target(r))) for r in learnt.tolist()])
    texts, questions = (
        [codec.decode(store.prompt(r)) for r in rows.tolist()] for rows in (learnt, asked)
    )
    guessed, how = bag_of_words(texts, of_learnt, questions, len(names))
    answers = {
        "model": shares.argmax(axis=1),
        "bag_of_words": guessed,
        "most_frequent_class": np.full_like(truths, np.bincount(of_learnt).argmax()),
    }
    origins = np.asarray(store.column(f"{task}_from"))[asked].astype(int).tolist()
    cut = store.prompt_lengths[asked] >= config.data.max_prompt_tokens
    counts = np.bincount(truths, minlength=len(names)).tolist()
    return {
        "train": len(learnt),
        "held_out": len(asked),
        "classes": dict(zip(names, counts, strict=True)),
        "labels": dict(Counter(ORIGINS[task][o] for o in origins)),
        "prompts_that_fill_the_limit": int(cut.sum()),
        "seconds_of_the_model": round(run.wall, 1),
        "regression": how,
        **compared(answers, truths, names),
    }


def measure(a: argparse.Namespace) -> harness.Result:
    """Compare every task: what the model and the baselines score stands side by side in `ours`."""
    config = load_config(f"{a.run}/config.yaml", []).config
    opened, store = open_model(Path(a.run)), open_store(config)
    opened.check_tokenizer(store)
    tasks = a.task or [task for task in config.data.tasks if task in ORIGINS]
    return harness.Result(
        ours={task: compare(opened, config, store, task, a.max_examples) for task in tasks},
        details={"threads": torch.get_num_threads()},
    )


def options(p: argparse.ArgumentParser) -> None:
    """The command line."""
    p.add_argument("run")
    p.add_argument("--task", action="append", choices=sorted(ORIGINS))
    p.add_argument("--max-examples", type=int, default=None)


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
