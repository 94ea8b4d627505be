"""Results of workflows that are used without torch: a trained run, a written text, an answer."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from toque.errors import CheckpointError, ConfigError, argument, in_shell
from toque.runs.places import is_in_a_bucket
from toque.storage.atomic import disk_faults
from toque.storage.bucket import BucketUse, RunBucketError, open_bucket
from toque.storage.download import CACHE_VARIABLE, cache_folder
from toque.storage.json_files import decode_json
from toque.storage.locks import file_lock
from toque.user_paths import named_path
from toque.workflows.saved_steps import KINDS, run_of, split_address, steps_in_words

if TYPE_CHECKING:
    from toque.evaluation.best_of import Chosen


_FETCHED: Final = BucketUse(
    "the address of the model", "list and read", "Nothing there was changed.", RunBucketError
)


@dataclass(frozen=True)
class TrainedRun:
    """A run folder after training."""

    folder: Path
    step: int
    reason: str
    """finished, early_stopping, interrupted, or what a callback asked for."""

    @property
    def interrupted(self) -> bool:
        """True if a signal ended the session before the run was done."""
        from toque.training.stopping import INTERRUPTED

        return self.reason == INTERRUPTED

    @property
    def model(self) -> Path:
        """The finished model: a Hugging Face folder, or an adapter's."""
        return self.folder / "model"

    @property
    def metrics(self) -> dict[str, float]:
        """The final scores by name, read anew; empty when the run was interrupted before them.

        Raises:
            CheckpointError: evaluation.json is damaged, or the folder is gone.
        """
        from toque.runs.run_record import EVALUATION, FinalScores

        path = self.folder / EVALUATION
        try:
            return decode_json(path.read_bytes(), FinalScores).metrics
        except FileNotFoundError:
            self._refuse_absent()
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read as a run's scores: {error}. Write it again with `toque "
                f"evaluate {in_shell(self.folder)}`."
            ) from error

    @property
    def history(self) -> list[dict[str, Any]]:
        """The events of metrics.jsonl that count, read anew: losses, evaluations, saves, warnings.

        Raises:
            CheckpointError: the folder is gone.
        """
        from toque.runs.history import METRICS, read_metrics

        self._refuse_absent()
        return read_metrics(self.folder / METRICS)

    def _refuse_absent(self) -> None:
        if not self.folder.is_dir():
            raise CheckpointError(
                f"There is no folder {self.folder.absolute()}: it was moved or removed, or this "
                "program works elsewhere since. Name its place: TrainedRun(folder, step, reason)."
            )

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss of every update; of older runs, of those that were logged."""
        return [
            (e["step"] - back, loss)
            for e in self.history
            if "loss" in e and e["event"] == "step"
            for back, loss in reversed([*enumerate(reversed(e.get("losses") or [e["loss"]]))])
        ]


Model = TrainedRun | str | Path
"""A result of `train`, a run folder, or a Hugging Face model folder."""


def folder_of(model: Model) -> Path:
    """The folder to open; a ConfigError for anything but a run or a path."""
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


def existing_folder(model: Model) -> Path:
    """The folder to open, or a name of the hub; refused where it can only be an absent folder.

    A checkpoint at gs:// or s3:// is fetched into the cache.
    """
    if isinstance(model, str) and is_in_a_bucket(model):
        return _fetched(model)
    folder = folder_of(model)
    run = run_of(folder)
    if run is not None and run.is_dir() and not folder.exists():
        raise CheckpointError(f"There is no {folder}. {steps_in_words(run)} Name one of these.")
    if folder.name in KINDS and any(folder.glob("step-*")):
        raise ConfigError(f"{folder} is not one model. {steps_in_words(folder.parent)} Name one.")
    is_local = str(model).startswith(("/", "~", ".")) or folder.parent != Path()
    if folder.exists() or not is_local or not folder.parent.is_dir():
        return folder
    beside = sorted(p.name for p in folder.parent.iterdir() if p.is_dir())
    near = difflib.get_close_matches(folder.name, beside, n=3) or beside[:3]
    hint = f" Beside it: {', '.join(str(folder.with_name(name)) for name in near)}." if near else ""
    raise ConfigError(f"There is no folder {folder}.{hint} Name a run or a model folder.")


def _fetched(address: str) -> Path:
    """The folder of a checkpoint that is fetched from a bucket, or not again if it is here."""
    of_run, at = split_address(address)
    parts = of_run.split("://")[1].split("/")
    if not at or any(part in ("", ".", "..") for part in parts):
        raise ConfigError(
            f"{address} is not the address of a checkpoint. Name one, such as {of_run}/best/"
            "step-00000200; `toque checkpoints` lists those of a run in a bucket."
        )
    from toque.training.checkpoint.fetch import fetch_model  # with torch

    bucket = open_bucket(of_run, _FETCHED)
    run = cache_folder("models").joinpath(bucket.scheme, *parts)
    with (
        disk_faults(run, "fetching a model", setting=CACHE_VARIABLE, error=CheckpointError),
        file_lock(run / ".lock", lambda _holder: None),
    ):
        fetch_model(bucket, at, run)
    return run / at


def refuse_absent_start(start: Model) -> None:
    """Raise a CheckpointError where neither a checkpoint nor a run with one can begin a run."""
    path = folder_of(start)
    own = path / "manifest.json"
    if not own.exists() and not any(path.glob("checkpoints/step-*/manifest.json")):
        raise CheckpointError(
            f"{argument(f'start={path}')}: no checkpoint there. Name a folder such as "
            "runs/cookbook/checkpoints/step-00000200, or a run."
        )


@dataclass(frozen=True)
class Written:
    """A text that a model wrote."""

    prompt: str
    """The prompt as the model read it."""
    text: str
    tokens: int
    adapter: str | None = None
    """Folder of the adapter it was written with, where several were asked for."""
    in_json: bool = False
    """True where it was held to a schema; the recipe scores read no JSON."""
    knows_recipes: bool = True
    """True where the model was trained on recipes: "How do I make ...?" then asks for one."""
    chosen: Chosen | None = None
    """How it was chosen, where several were written for its prompt (best_of)."""

    @property
    def is_cut(self) -> bool:
        """True for JSON that reached the longest length before it was whole."""
        if not self.in_json:
            return False
        try:
            json.loads(self.text)
        except ValueError:
            return True
        return False

    @cached_property
    def metrics(self) -> Mapping[str, float]:
        """The recipe scores of the text."""
        from toque.cooking.recipe_scores import text_metrics

        if self.in_json:
            return {}
        return text_metrics(self.prompt, self.text, knows_recipes=self.knows_recipes)

    def record(self) -> dict[str, Any]:
        """The content of one JSON line."""
        found: dict[str, Any] = {"prompt": self.prompt, "text": self.text, "tokens": self.tokens}
        found |= {"adapter": self.adapter} if self.adapter is not None else {}
        found |= {"best_of": self.chosen.record()} if self.chosen is not None else {}
        return found | {"metrics": self.metrics}

    @property
    def heading(self) -> str:
        """Heading of the text for people."""
        return f"[{self.adapter}] {self.prompt}" if self.adapter is not None else self.prompt

    def __str__(self) -> str:
        """The text under its heading, for people."""
        end = f"\n{self.chosen}\n" if self.chosen is not None else ""
        return f"{self.heading}\n\n{self.text}\n{end}"


def hint_of(texts: Sequence[Written | Answer]) -> str:
    """A sentence when the recipes among the texts are still poor, and what to do; else ""."""
    from toque.cooking.recipe_scores import hint

    scores = [
        score
        for text in texts
        if isinstance(text, Written) and (score := text.metrics.get("recipe_score")) is not None
    ]
    return hint(sum(scores) / len(scores)) if scores else ""


@dataclass(frozen=True)
class Answer:
    """The answer that a model chose."""

    prompt: str
    """The prompt as the model read it."""
    answer: str
    probabilities: Mapping[str, float]
    """Probability of every allowed answer; they sum to 1."""

    def record(self) -> dict[str, Any]:
        """The content of one JSON line."""
        shares = {name: round(share, 6) for name, share in self.probabilities.items()}
        return {"prompt": self.prompt, "answer": self.answer, "probabilities": shares}

    def __str__(self) -> str:
        """The answer with all probabilities, for people."""
        ranked = sorted(self.probabilities.items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {share:.3f}" for name, share in ranked)
        return f"{self.prompt}\n\n{self.answer}   ({shares})\n"
