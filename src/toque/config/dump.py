"""Serialisation of a configuration: YAML text, SHA-256, and differences from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from toque.config.resolve import DEFAULT, Resolved, leaves
from toque.config.schema import RunConfig
from toque.config.user_code import HEADER
from toque.config.yaml_reader import Path, dotted, read_yaml
from toque.errors import ConfigError

SAFE_TO_CHANGE = frozenset(
    {
        "run_dir",
        "data.engine",  # the store is the same
        "train.readers",  # never changes a batch, only how many are read at once
        "train.micro_batch_rows",  # never changes an update, only the memory it needs
        "train.gradient_checkpointing",  # the same bits
        "train.time_limit",
        "train.evaluate_every",
        "train.save_every",
        "train.keep_last",
        "train.keep_best",
        "train.best_by",
        "train.early_stopping",
        "train.strategy",  # the same updates, shared; the bits of sums aside
        "checkpoint",
        "evaluation",
        "observe",
    }
)  # settings, and whole sections, that may differ when a run continues


class ChangedSetting(NamedTuple):
    """One setting that two configurations give different values."""

    path: str
    old: Any
    new: Any

    @property
    def is_safe(self) -> bool:
        """True where a run may continue with the new value; metrics of a task change no example."""
        if self.path.startswith("data.tasks.") and self.path.endswith(".metrics"):
            return True
        return any(f"{self.path}.".startswith(f"{safe}.") for safe in SAFE_TO_CHANGE)


def differences(old: RunConfig, new: RunConfig) -> list[ChangedSetting]:
    """Every setting whose value differs, in the order of the tree; absent parts are None."""
    before = dict(leaves(old.model_dump(mode="json")))
    after = dict(leaves(new.model_dump(mode="json")))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        ChangedSetting(dotted(path), before.get(path), after.get(path))
        for path in paths
        if before.get(path) != after.get(path)
    ]


def config_sha256(config: RunConfig) -> str:
    """Hash of every value; equal for equal configurations, on every machine."""
    values = config.model_dump(mode="json")
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML that `load_config` reads back equal."""
    return "".join(_mapping(config.model_dump(mode="json"), (), {}))


def resolved_yaml(resolved: Resolved) -> str:
    """The same, with the origin of each value that is not a default as a comment."""
    notes = {path: origin for path, origin in resolved.origins.items() if origin != DEFAULT}
    return HEADER + "".join(_mapping(resolved.config.model_dump(mode="json"), (), notes))


def _mapping(values: Mapping[str, Any], path: Path, notes: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * sum(isinstance(part, str) for part in path)
    for name, value in values.items():
        here = (*path, name)
        head = f"{indent}{flow(name)}:"
        if isinstance(value, Mapping) and value:
            yield f"{head}\n"
            yield from _mapping(value, here, notes)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield f"{head}\n"
            for i, item in enumerate(value):
                first, *rest = _mapping(item, (*here, i), notes)
                yield f"{indent}- {first.lstrip()}"
                yield from rest
        else:
            said = notes.get(dotted(here), "")
            note = " ".join("".join(c if c.isprintable() else " " for c in said).split())
            yield f"{head} {flow(value)}  # {note}\n" if note else f"{head} {flow(value)}\n"


def flow(value: Any) -> str:
    """A plain value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{flow(name)}: {flow(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(flow, value)) + "]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _reads_back(value):
        return value
    # What is not printable, such as a mark that turns text round, is written as \u....
    shown = value.isprintable()
    written: str = yaml.dump(value, default_style='"', allow_unicode=shown, width=float("inf"))
    return written.strip()


def _reads_back(text: str) -> bool:
    """True for text that may stand bare, in a mapping, in a list, and before a comment."""
    if not text or text != text.strip() or not text.isprintable():
        return False
    forms = {
        f"k: {text}  # note": {"k": text},
        f"[{text}, {text}]": [text, text],
        f"{text}: 1": {text: 1},
    }
    try:
        return all(read_yaml(form, "").value == value for form, value in forms.items())
    except ConfigError:
        return False
