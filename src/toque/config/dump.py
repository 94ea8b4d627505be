"""Serialisation of a configuration: YAML text, SHA-256, and differences from another."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml

from toque.config.resolve import DEFAULT, Resolved, dotted, leaves
from toque.config.schema import RunConfig
from toque.config.suggestions import Path
from toque.config.yaml_reader import read_yaml
from toque.errors import ConfigError

SAFE_TO_CHANGE = frozenset(
    {
        "run_dir",
        "data.engine",  # the store is the same
        "train.micro_batch_rows",  # never changes an update, only the memory it needs
        "train.gradient_checkpointing",  # the same bits
        "train.evaluate_every",
        "train.save_every",
        "train.keep_last",
        "train.keep_best",
        "train.early_stopping",
        "train.strategy",  # the same updates, shared; the bits of sums aside
        "checkpoint",
        "evaluation",
        "observe",
    }
)
"""Settings, and whole sections, that may differ when a run continues."""


class Difference(NamedTuple):
    """One setting that two configurations give different values."""

    path: str
    old: Any
    new: Any

    @property
    def is_safe(self) -> bool:
        """Whether a run may continue with the new value."""
        parts = self.path.split(".")
        return any(".".join(parts[:n]) in SAFE_TO_CHANGE for n in range(1, len(parts) + 1))


def differences(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Every setting whose value differs, in the order of the tree; absent parts are None."""
    before = dict(leaves(old.model_dump(mode="json")))
    after = dict(leaves(new.model_dump(mode="json")))
    paths = [*before, *(path for path in after if path not in before)]
    return [
        Difference(dotted(path), before.get(path), after.get(path))
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
    return _write(config.model_dump(mode="json"), {})


def resolved_yaml(resolved: Resolved) -> str:
    """The same, with the origin of each value that is not a default as a comment."""
    notes = {path: origin for path, origin in resolved.origins.items() if origin != DEFAULT}
    header = (
        "# Every setting of this run; a comment says where a value that is no default is from.\n"
    )
    return header + _write(resolved.config.model_dump(mode="json"), notes)


def _write(values: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    return "".join(f"{line}\n" for line in _mapping(values, (), notes))


def _mapping(values: Mapping[str, Any], path: Path, notes: Mapping[str, str]) -> Iterator[str]:
    indent = "  " * len([part for part in path if isinstance(part, str)])
    for name, value in values.items():
        here = (*path, name)
        if isinstance(value, Mapping) and value:
            yield f"{indent}{_scalar(name)}:"
            yield from _mapping(value, here, notes)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield f"{indent}{_scalar(name)}:"
            for i, item in enumerate(value):
                lines = list(_mapping(item, (*here, i), notes))
                yield f"{indent}- {lines[0].strip()}"
                yield from lines[1:]
        else:
            note = notes.get(dotted(here))
            written = f"{indent}{_scalar(name)}: {_flow(value)}"
            yield f"{written}  # {_one_line(note)}" if note else written


def _one_line(note: str) -> str:
    return " ".join(note.split())


def _flow(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_scalar(k)}: {_flow(v)}" for k, v in value.items())
        return "{" + inner + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return value if _reads_back(value) else _quoted(value)


def _reads_back(text: str) -> bool:
    """Whether `text` may stand bare, in a mapping, in a list, and before a comment."""
    if not text or text != text.strip() or "\n" in text:
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


def _quoted(text: str) -> str:
    written: str = yaml.dump(text, default_style='"', allow_unicode=True, width=float("inf"))
    return written.strip()
