"""Toque from Python: `from toque import configure, prepare, train, evaluate, generate`.

The functions do what the commands of the same names do, with the same settings, files and errors
(`toque.errors.ToqueError`). Torch is loaded by the first that needs it, not by importing this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toque.config import RunConfig, load_config, resolve_values
from toque.config.resolve import DEFAULT, Resolved, dotted, leaves
from toque.errors import ConfigError

if TYPE_CHECKING:
    from toque.data.prepare.pipeline import PrepareResult
    from toque.workflows.evaluate import Evaluation

Configured = RunConfig | str | Path | Mapping[str, Any]
"""A configuration, a YAML file, a preset's name, or nested values."""


def configure(base: Configured | None = None, /, **sections: Any) -> RunConfig:
    """A checked configuration: what `base` says, changed by `sections`, the rest defaults.

    Args:
        base: what to begin with; None for the defaults.
        sections: settings by section, as in a file; mappings change what they name and no more:
            `optim={"peak_lr": 1e-4}` keeps the optimizer's other settings. Lists are replaced.

    Raises:
        ConfigError: an unknown name, a wrong value or an impossible combination.

    >>> configure("demo", train={"stop_after": "10 steps"}).model.family
    'llama'
    """
    values: Mapping[str, Any] = {}
    if isinstance(base, RunConfig):
        values = base.model_dump(mode="json")
        # What is written down leaves the secret out; here it stays in the program.
        values["observe"]["webhook"] = base.observe.webhook
    elif isinstance(base, Mapping):
        values = base
    elif base is not None:
        return configure(load_config(base).config, **sections)
    return resolve_values(_merged(values, sections), "configure").config


def prepare(config: Configured, *, replace: bool = False) -> PrepareResult:
    """Turn raw data into the configuration's token store, or reuse it: `toque prepare`.

    Args:
        config: what `configure` takes.
        replace: delete a store made from other data or settings instead of refusing.

    Returns:
        The open store, the data report, and whether the store was there already.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: sources that cannot be read, or a store of other data.
    """
    from toque.workflows.prepare import run_prepare

    return run_prepare(configure(config), replace=replace)


def train(
    config: Configured, *, start: str | None = None, callbacks: Sequence[object] = ()
) -> TrainedRun:
    """Train, or continue a run that was interrupted; prepare first where that was not done.

    Args:
        config: what `configure` takes.
        start: a checkpoint whose weights a new run begins with.
        callbacks: objects that watch the run, besides those of observe.callbacks.

    Raises:
        ConfigError: the configuration cannot be used.
        DataError: the data cannot.
        CheckpointError: the run folder belongs to another run, or is in use.
        NonFiniteError: the loss is not a number.
    """
    settings = configure(config)
    if settings.data.sources:
        prepare(settings)
    from toque.workflows.train import run_training

    origins = {dotted(path): DEFAULT for path, _ in leaves(settings.model_dump(mode="json"))}
    outcome = run_training(Resolved(settings, origins), start=start, own=callbacks)
    return TrainedRun(outcome.folder, outcome.step, outcome.reason)


def evaluate(run_or_model: str | Path | TrainedRun, config: Configured | None = None) -> Evaluation:
    """Score a run or a model folder on held-out data: `toque evaluate`.

    Args:
        run_or_model: what `train` gave, a run folder, or a Hugging Face model folder.
        config: whose data to evaluate on; a run's own when None.

    Returns:
        Its `metrics` are every score by name; `table()` is for reading.

    Raises:
        ConfigError: no run folder and no configuration.
        DataError: no prepared store, or one of another tokenizer.
    """
    folder = _folder(run_or_model)
    if config is None and not (folder / "config.yaml").exists():
        raise ConfigError(
            f"{folder} is not a run folder, so it does not say what to evaluate on. Give a "
            "configuration: evaluate(model, config)."
        )
    from toque.workflows.evaluate import evaluate_on

    return evaluate_on(str(folder), configure(folder / "config.yaml" if config is None else config))


def generate(
    run_or_model: str | Path | TrainedRun,
    prompts: str | Sequence[str],
    *,
    n: int = 1,
    temperature: float = 0.7,
    top_p: float = 0.95,
    max_new_tokens: int | None = None,
    seed: int = 0,
    raw: bool = False,
) -> list[Written]:
    """Write texts for prompts: `toque generate`.

    Args:
        run_or_model: what `train` gave, a run folder, or a Hugging Face model folder.
        prompts: "dish" or "dish: a, b, c", one or several.
        n: texts for each prompt; they follow each other.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        max_new_tokens: longest text; what the model was trained on when None.
        seed: the same seed writes the same texts.
        raw: send prompts as they are, not in the form the model was trained on.

    Raises:
        ConfigError: no prompt, or a number out of range.
        CheckpointError: a run without a checkpoint.
    """
    from toque.workflows.generate import SamplingParams, asked_for, write_texts

    asked = asked_for([prompts] if isinstance(prompts, str) else prompts, None, raw=raw)
    manner = SamplingParams(
        n=n, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    texts = write_texts(str(_folder(run_or_model)), asked, manner)
    return [Written(t.prompt, t.text, t.tokens, t.metrics) for t in texts]


@dataclass(frozen=True)
class Written:
    """A text a model wrote."""

    prompt: str
    """As the model read it."""
    text: str
    tokens: int
    metrics: Mapping[str, float]
    """The recipe scores of the text."""


@dataclass(frozen=True)
class TrainedRun:
    """A run folder after training."""

    folder: Path
    step: int
    reason: str
    """finished, early_stopping, interrupted, or what a callback asked for."""

    @property
    def model(self) -> Path:
        """The finished model: a Hugging Face folder, or an adapter's."""
        return self.folder / "model"

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The final scores by name; empty when the run was interrupted before them."""
        path = self.folder / "evaluation.json"
        if not path.exists():
            return {}
        record = json.loads(path.read_text(encoding="utf-8"))
        return {**record["heldout"], **record["generated"]}

    @cached_property
    def history(self) -> list[dict[str, Any]]:
        """The events of metrics.jsonl that count: losses, evaluations, saves, warnings."""
        from toque.training.observers.metrics_reader import METRICS, read_metrics

        return read_metrics(self.folder / METRICS)

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Step and training loss of every update that was logged."""
        return [(e["step"], e["loss"]) for e in self.history if e["event"] == "step"]


def _folder(run_or_model: str | Path | TrainedRun) -> Path:
    return run_or_model.folder if isinstance(run_or_model, TrainedRun) else Path(run_or_model)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for name, change in changes.items():
        known = merged.get(name)
        if isinstance(known, Mapping) and isinstance(change, Mapping):
            merged[name] = _merged(known, change)
        else:
            merged[name] = _plain(change)
    return merged


def _plain(value: Any) -> Any:
    """What YAML would hold: paths as text, tuples as lists."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value
