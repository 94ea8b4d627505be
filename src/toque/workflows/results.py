"""Results of workflows: a trained run, a generated text, an answer. This module needs no torch."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from toque.errors import CheckpointError, ConfigError, argument, in_shell
from toque.runs.places import is_in_a_bucket
from toque.storage.atomic import disk_faults
from toque.storage.bucket import BucketUse, RunBucketError, open_bucket
from toque.storage.download import CACHE_VARIABLE, cache_folder
from toque.storage.json_files import decode_json
from toque.storage.locks import file_lock
from toque.user_paths import named_path
from toque.workflows.saved_steps import KINDS, list_steps, run_of, split_address

if TYPE_CHECKING:
    from toque.evaluation.best_of import Chosen
    from toque.runs.run_record import FinalScores


_DOWNLOADED = BucketUse(
    "the address of the model",
    "list and read",
    "Nothing there was changed.",
    RunBucketError,
)


@dataclass(frozen=True)
class TrainedRun:
    """A run folder after training."""

    folder: Path
    step: int
    reason: str
    """Reason why training ended: finished, early_stopping, interrupted, or a callback's reason."""

    @property
    def interrupted(self) -> bool:
        """True if a signal ended training before the run was complete."""
        from toque.training.stopping import INTERRUPTED

        return self.reason == INTERRUPTED

    @property
    def model(self) -> Path:
        """Folder of the finished model or adapter, in the format of Hugging Face."""
        return self.folder / "model"

    @property
    def metrics(self) -> dict[str, float]:
        """Final scores by name, read from disk at each access. Empty before the run is scored.

        Raises:
            CheckpointError: evaluation.json is damaged, or the folder does not exist.
        """
        scores = self._read_scores()
        return {} if scores is None else scores.metrics

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % confidence intervals of the scores of texts and of `rewards/accuracies`, by name.

        They are read from disk at each access. Empty before the run is scored.

        Raises:
            CheckpointError: evaluation.json is damaged, or the folder does not exist.
        """
        scores = self._read_scores()
        bounds = {} if scores is None else scores.intervals
        return {
            name: (low, high)
            for name, (low, high) in bounds.items()
            if low is not None and high is not None
        }

    def _read_scores(self) -> FinalScores | None:
        """Read evaluation.json. Return None before the run is scored."""
        from toque.runs.run_record import EVALUATION, FinalScores

        path = self.folder / EVALUATION
        try:
            return decode_json(path.read_bytes(), FinalScores)
        except FileNotFoundError:
            self._refuse_absent()
            return None
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a run's scores: {error}. Write it again with `toque "
                f"evaluate {in_shell(self.folder)}`."
            ) from error

    @property
    def history(self) -> list[dict[str, Any]]:
        """Events of metrics.jsonl, read at each access: losses, evaluations, saves, warnings.

        If a restart repeated updates, only the events of the last repetition are included.

        Raises:
            CheckpointError: The folder does not exist.
        """
        from toque.runs.history import METRICS, read_metrics

        self._refuse_absent()
        return read_metrics(self.folder / METRICS)

    def _refuse_absent(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"The folder {self.folder.absolute()} does not exist. It was moved or removed, or "
                "this program changed its working directory. Give the run's new folder: "
                "TrainedRun(folder, step, reason)."
            )

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss of every update."""
        losses: list[tuple[int, float]] = []
        for event in self.history:
            if event["event"] == "step" and "loss" in event:
                # An event may cover several updates. `losses` has the loss of each.
                values = event.get("losses") or [event["loss"]]
                first_step = event["step"] - len(values) + 1
                losses += enumerate(values, start=first_step)
        return losses


Model = TrainedRun | str | Path
"""A result of `train`, a run folder, or a Hugging Face model folder."""


def model_folder(model: Model) -> Path:
    """Return the folder of a model, or raise a ConfigError for an object that is not a path."""
    if isinstance(model, TrainedRun):
        return model.folder
    if isinstance(model, str | PathLike):
        return named_path(os.fspath(model))
    raise ConfigError(
        "A model must be a result of train(), or the path of a run, a checkpoint or a model "
        f"folder, not a {type(model).__name__}. To train a model and a tokenizer of this program, "
        "pass them as settings: configure(config, model={'family': 'auto', 'shape': {}, "
        "'start_from': model, 'tokenizer': tokenizer}). To use them elsewhere, save both into one "
        "folder (save_pretrained) and pass the folder."
    )


def resolve_model(model: Model) -> Path:
    """Return a model's existing folder, or its hub name. Download a checkpoint from gs:// or s3://.

    A hub name is returned unchanged, as a path that does not exist.

    Raises:
        ConfigError: The folder does not exist, and its name cannot be a hub name.
        CheckpointError: The run has no such checkpoint.
    """
    if isinstance(model, str) and is_in_a_bucket(model):
        return _download(model)
    folder = model_folder(model)
    _refuse_missing_checkpoint(folder)
    if not folder.exists() and _is_mistyped_folder(model, folder):
        raise ConfigError(
            f"The folder {folder} does not exist.{_similar_folders(folder)} Name a run or a model "
            "folder."
        )
    return folder


def _refuse_missing_checkpoint(folder: Path) -> None:
    """Raise an error for a checkpoint that its run does not have, or a folder of checkpoints."""
    run = run_of(folder)
    if run is not None and run.is_dir() and not folder.exists():
        raise CheckpointError(
            f"{folder} does not exist. {list_steps(run)} Name one of these."
        )
    if folder.name in KINDS and any(folder.glob("step-*")):
        raise ConfigError(
            f"{folder} is a folder of checkpoints, not a checkpoint. "
            f"{list_steps(folder.parent)} Name one of these."
        )


def _is_mistyped_folder(model: Model, folder: Path) -> bool:
    """Check if a missing folder is mistyped, and not a name on the hub such as "owner/model".

    A hub name is also a relative path. It is a mistyped folder only if its parent exists.
    """
    starts_as_path = str(model).startswith(("/", "~", "."))
    has_parent = folder.parent != Path()
    return (starts_as_path or has_parent) and folder.parent.is_dir()


def _similar_folders(folder: Path) -> str:
    """Name up to three folders next to a missing folder, the most similar names if there are any.

    The text follows a sentence. It is empty if the parent has no folders.
    """
    siblings = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
    similar = difflib.get_close_matches(folder.name, siblings, n=3) or siblings[:3]
    if not similar:
        return ""
    return f" Next to it: {', '.join(str(folder.with_name(name)) for name in similar)}."


def _download(address: str) -> Path:
    """Download a checkpoint from a bucket, unless the cache has it. Return its folder."""
    run_address, step_path = split_address(address)
    parts = run_address.split("://")[1].split("/")
    if not step_path or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"{address} is not the address of a checkpoint. Name a checkpoint such as "
            f"{run_address}/best/step-00000200. `toque checkpoints RUN` lists them."
        )
    from toque.training.checkpoint.fetch import fetch_model  # loads torch

    bucket = open_bucket(run_address, _DOWNLOADED)
    run = cache_folder("models").joinpath(bucket.scheme, *parts)
    with (
        disk_faults(
            run, "fetching a model", setting=CACHE_VARIABLE, error=CheckpointError
        ),
        file_lock(run / ".lock", lambda _holder: None),
    ):
        fetch_model(bucket, step_path, run)
    return run / step_path


def refuse_absent_start(start: Model) -> None:
    """Raise a CheckpointError if `start` is neither a checkpoint nor a run with a checkpoint."""
    path = model_folder(start)
    is_checkpoint = (path / "manifest.json").exists()
    if not is_checkpoint and not any(path.glob("checkpoints/step-*/manifest.json")):
        raise CheckpointError(
            f"{argument(f'start={path}')}: the folder has no checkpoint. Name a checkpoint such as "
            "runs/cookbook/checkpoints/step-00000200, or a run that has one."
        )


@dataclass(frozen=True)
class Written:
    """A text that a model generated."""

    prompt: str
    """Prompt in the format that the model was trained on."""
    text: str
    tokens: int
    adapter: str | None = None
    """Folder of the adapter that generated the text; None if the call named no adapters."""
    in_json: bool = False
    """True if a schema constrained the text. JSON has no recipe scores."""
    knows_recipes: bool = True
    """True if the model was trained on recipes, so that "How do I make ...?" requests a recipe."""
    chosen: Chosen | None = None
    """Score by which the text was chosen from several (best_of); None for a single text."""

    @property
    def is_cut(self) -> bool:
        """True for JSON that reached the maximum length before it was complete."""
        if not self.in_json:
            return False
        try:
            json.loads(self.text)
        except ValueError:
            return True
        return False

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """Recipe scores of the text."""
        from toque.cooking.recipe_scores import text_metrics

        if self.in_json:
            return {}
        return text_metrics(self.prompt, self.text, knows_recipes=self.knows_recipes)

    def record(self) -> dict[str, Any]:
        """Return the text, its prompt and its scores as JSON."""
        content: dict[str, Any] = {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
        }
        if self.adapter is not None:
            content["adapter"] = self.adapter
        if self.chosen is not None:
            content["best_of"] = self.chosen.record()
        return content | {"metrics": self.metrics}

    @property
    def heading(self) -> str:
        """Heading of the text on the console."""
        if self.adapter is None:
            return self.prompt
        return f"[{self.adapter}] {self.prompt}"

    def __str__(self) -> str:
        """Return the text below its heading."""
        end = f"\n{self.chosen}\n" if self.chosen is not None else ""
        return f"{self.heading}\n\n{self.text}\n{end}"


def advise_on_texts(texts: Sequence[Written | Answer]) -> str:
    """Return advice if the recipes among the texts are poor, otherwise ""."""
    from toque.cooking.recipe_scores import advice_on_score

    generated = [text for text in texts if isinstance(text, Written)]
    scores = [text.metrics.get("recipe_score") for text in generated]
    recipe_scores = [score for score in scores if score is not None]
    if not recipe_scores:
        return ""
    return advice_on_score(sum(recipe_scores) / len(recipe_scores))


@dataclass(frozen=True)
class Answer:
    """The answer that a model chose."""

    prompt: str
    """Prompt in the format that the model was trained on."""
    answer: str
    probabilities: Mapping[str, float]
    """Probability of each allowed answer; their sum is 1."""

    def record(self) -> dict[str, Any]:
        """Return the answer, its prompt and the probabilities as JSON."""
        shares = {name: round(share, 6) for name, share in self.probabilities.items()}
        return {"prompt": self.prompt, "answer": self.answer, "probabilities": shares}

    def __str__(self) -> str:
        """Return the prompt and the answer with all probabilities."""
        ranked = sorted(self.probabilities.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {share:.3f}" for name, share in ranked)
        return f"{self.prompt}\n\n{self.answer}   ({shares})\n"
