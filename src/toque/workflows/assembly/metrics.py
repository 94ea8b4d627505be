"""Metrics of written texts, assembled; the user's own among them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from toque.config import RunConfig
from toque.config.user_code import imported
from toque.cooking.prompts import TASKS
from toque.cooking.recipe import DIFFICULTIES
from toque.data.store.token_store import TokenStore
from toque.errors import ConfigError
from toque.evaluation.text_scores import GROUPS, TextScores, UserMetric

LENGTHS = (("short", 100), ("medium", 200))
"""Slices by the words of the reference: up to so many; above all, long."""


def build_text_scores(config: RunConfig) -> TextScores:
    """What `evaluation.metrics` asks for, nothing added up yet.

    Raises:
        ConfigError: a function of the user's cannot be imported, or must not be.
    """
    asked = config.evaluation.metrics
    names = ("auto",) if asked == "auto" else asked
    groups = [name for name in GROUPS if name in names or "auto" in names]
    return TextScores(groups, {name: _imported(config, name) for name in names if ":" in name})


def _imported(config: RunConfig, path: str) -> UserMetric:
    wanted = "a function of the predictions and the references that returns {name: score}"
    found = imported(config.foreign_code, path, setting="evaluation.metrics", wanted=wanted)
    if not callable(found):
        raise ConfigError(
            f"evaluation.metrics names {path}, which is a {type(found).__name__} and no function "
            "of predictions and references."
        )
    metric: UserMetric = found
    return metric


def slices_of(
    store: TokenStore, rows: Sequence[int], references: Sequence[str]
) -> list[dict[str, str]]:
    """What kind of example each store row is: by length, difficulty, task and source."""
    slices = [{"length": _length(reference)} for reference in references]
    columns = store.manifest.columns
    if "difficulty" in columns:
        levels = store.column("difficulty")[list(rows)].astype(float).tolist()
        for labels, level in zip(slices, levels, strict=True):
            # Comparing keeps NaN out, too.
            labels["difficulty"] = DIFFICULTIES[int(level)] if 0 <= level <= 2 else "unknown"
    tasks = store.column("task")[list(rows)].astype(int).tolist()
    if len(set(tasks)) > 1:
        for labels, task in zip(slices, tasks, strict=True):
            labels["task"] = TASKS[task]
    files: dict[int, str] = {}
    for entry in store.manifest.sources:
        files.setdefault(entry.source, Path(entry.path).name)
    if len(files) > 1:
        sources = store.column("source")[list(rows)].astype(int).tolist()
        for labels, source in zip(slices, sources, strict=True):
            labels["source"] = f"{source + 1} {files.get(source, '')}".strip()
    return slices


def _length(reference: str) -> str:
    words = len(reference.split())
    return next((name for name, most in LENGTHS if words <= most), "long")


def text_bytes(store: TokenStore, rows: Iterable[Sequence[int]]) -> int:
    """Bytes, as UTF-8, of the targets that packed `rows` of store rows hold.

    Tokens of byte-level vocabularies are counted one by one: decoded, a character that two pieces
    of a document share would come out as two that cannot be read.
    """
    codec, each = store.codec(), store.codec().token_bytes
    targets = (store.target(row) for packed in rows for row in packed)
    if each is not None:
        return sum(int(each[target].sum()) for target in targets)
    return sum(len(codec.decode(target).encode()) for target in targets)
