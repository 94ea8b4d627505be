"""Task scores: held-out loss per task, and accuracy and calibration of tasks with classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from toque.config.schema import DataConfig
from toque.cooking.examples import UNKNOWN
from toque.cooking.prompts import RECIPE_TASKS, task_table
from toque.data.store.token_store import TokenStore
from toque.evaluation.classification import ClassScores, calibration_error, class_scores
from toque.evaluation.constrained_choice import choose
from toque.evaluation.heldout_loss import HeldOut, pack_rows, subset
from toque.reporter import SILENT, Reporter, counting
from toque.runs.run_record import TASK_SCORES


@dataclass(frozen=True)
class TaskScores:
    """Scores of a task on held-out examples."""

    task: str
    n: int
    """Number of held-out examples."""
    loss: float
    """Mean loss in nats per target token."""
    perplexity: float
    classes: ClassScores | None = None
    """Scores of the chosen classes, if the task has classes."""
    ece: float = 0.0
    """Expected calibration error of the classes."""
    truncated: int = 0
    """Number of prompts with data.max_prompt_tokens tokens, which were probably truncated."""

    def metrics(self) -> dict[str, float]:
        """Return the scores by metric name."""
        scores = self._scores_by_field()
        return {
            name: scores[field]
            for name, field in TASK_SCORES.items()
            if field in scores
        }

    def _scores_by_field(self) -> dict[str, float]:
        """Return the scores by their field in evaluation.json."""
        fields = {"loss": self.loss, "perplexity": self.perplexity}
        if (scores := self.classes) is not None:
            fields |= {"accuracy": scores.accuracy, "majority": scores.majority}
            fields |= {"macro_f1": scores.macro_f1, "ece": self.ece}
        return fields

    def record(self) -> dict[str, Any]:
        """Return the task's fields in evaluation.json."""
        class_fields: dict[str, Any] = {}
        if (scores := self.classes) is not None:
            class_fields = {
                "f1": {name: round(value, 6) for name, value in scores.f1.items()},
                "classes": list(scores.classes),
                "confusion": scores.confusion.tolist(),
                "full_prompts": self.truncated,
            }
        scores_by_field = self._scores_by_field()
        rounded = {name: round(value, 6) for name, value in scores_by_field.items()}
        return {"examples": self.n, **rounded, **class_fields}

    def lines(self) -> list[str]:
        """Format the scores for the terminal."""
        lines = [f"task {self.task}: loss {self.loss:.4f} over {self.n} examples"]
        if (scores := self.classes) is not None:
            lines[0] += (
                f"; most likely class: accuracy {scores.accuracy:.3f} "
                f"(baseline, always the most frequent class: {scores.majority:.3f}), "
                f"macro-F1 {scores.macro_f1:.3f}, ECE {self.ece:.3f}"
            )
            lines += [f"  {line}" for line in scores.lines()]
        return lines


def score_tasks(
    model: PreTrainedModel,
    heldout: HeldOut,
    store: TokenStore,
    data: DataConfig,
    *,
    at_most: int | None,
    reporter: Reporter = SILENT,
) -> list[TaskScores]:
    """Score every configured task that has held-out examples, in this process.

    If recipes are the only task, the list is empty: the model's scores already describe this task.
    """
    if tuple(data.tasks) == ("write",):
        return []
    held_out = store.wanted_rows("validation")
    codes = np.asarray(store.column("task"))[held_out]
    scores = []
    for code, (name, task) in enumerate(task_table(data).items()):
        rows = subset(held_out[codes == code], at_most)
        if name in data.tasks and len(rows):
            classes = used_classes(store, name, task.classes)
            scores.append(
                _score_task(model, heldout, store, name, classes, rows, reporter)
            )
    return scores


def _score_task(
    model: PreTrainedModel,
    heldout: HeldOut,
    store: TokenStore,
    task: str,
    classes: Sequence[str],
    rows: NDArray[np.int64],
    reporter: Reporter,
) -> TaskScores:
    """Score a task on some store rows: its loss, and its choices if the task has classes."""
    packed = pack_rows(store, rows, heldout.layout.shape)
    task_heldout = replace(heldout, rows=packed, weights=None)
    with counting(reporter, "evaluating", f"examples of the task {task}") as count:
        losses = task_heldout(model, count)
    scores = TaskScores(task, len(rows), losses["loss"], losses["perplexity"])
    if not classes:
        return scores

    codec = store.codec()
    prompts = [store.prompt(row) for row in rows.tolist()]
    truths = [codec.decode(store.target(row)) for row in rows.tolist()]
    with counting(reporter, "choosing for", f"prompts of the task {task}") as count:
        probabilities = choose(
            model, codec, prompts, classes, count, autocast=heldout.autocast
        )
    answers = [classes[i] for i in probabilities.argmax(axis=1).tolist()]
    is_right = [a == truth for a, truth in zip(answers, truths, strict=True)]
    max_tokens = store.manifest.settings["max_prompt_tokens"]
    is_truncated = store.prompt_lengths[rows] >= max_tokens
    return replace(
        scores,
        classes=class_scores(answers, truths, classes),
        ece=calibration_error(probabilities.max(axis=1).tolist(), is_right),
        truncated=int(is_truncated.sum()),
    )


def used_classes(store: TokenStore, task: str, classes: Sequence[str]) -> list[str]:
    """List the classes of a task that occur in the store, in the order of their codes."""
    # In a user's task, every class occurs.
    if task not in RECIPE_TASKS or not classes:
        return list(classes)
    codes = np.asarray(store.column(task)).astype(np.float64)
    used = np.unique(codes[(codes >= 0) & (codes < UNKNOWN)]).astype(int)
    return [classes[code] for code in used.tolist()]
