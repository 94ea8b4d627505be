"""Configurations as YAML and as a SHA-256, and the differences between two configurations."""

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
        "data.engine",  # every engine writes the same store
        "train.readers",  # the same batches
        "train.micro_batch_rows",  # the same updates, with less or more memory
        "train.gradient_checkpointing",  # bitwise identical results
        "train.time_limit",
        "train.evaluate_every",
        "train.save_every",
        "train.keep_last",
        "train.keep_best",
        "train.best_by",
        "train.early_stopping",
        "train.strategy",  # the same updates, except for rounding of sums
        "checkpoint",
        "evaluation",
        "observe",
    }
)
"""Settings and sections that may change when a run continues. Comments give the reason."""


class ChangedSetting(NamedTuple):
    """A setting with different values in two configurations."""

    path: str
    old: Any
    new: Any

    @property
    def is_safe(self) -> bool:
        """True if a run may continue with the new value."""
        if self.path.startswith("data.tasks.") and self.path.endswith(".metrics"):
            return True  # metrics of a task do not change the examples
        return any(f"{self.path}.".startswith(f"{safe}.") for safe in SAFE_TO_CHANGE)


def differences(old: RunConfig, new: RunConfig) -> list[ChangedSetting]:
    """List the settings with different values, in the order of the schema.

    A setting that one configuration does not have is None there.
    """
    before = dict(leaves(old.model_dump(mode="json")))
    after = dict(leaves(new.model_dump(mode="json")))
    return [
        ChangedSetting(dotted(path), before.get(path), after.get(path))
        for path in before | after
        if before.get(path) != after.get(path)
    ]


def config_sha256(config: RunConfig) -> str:
    """Hash all values of a configuration. The hash is the same on every machine."""
    values = config.model_dump(mode="json")
    canonical = json.dumps(
        values, sort_keys=True, separators=(",", ":"), ensure_ascii=True
    )
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def to_yaml(config: RunConfig) -> str:
    """Convert a configuration to YAML, which `load_config` can read."""
    return "".join(_yaml_lines(config.model_dump(mode="json"), (), {}))


def resolved_yaml(resolved: Resolved) -> str:
    """Convert a configuration to YAML, with comments about the origins of its values."""
    origins = {
        path: origin for path, origin in resolved.origins.items() if origin != DEFAULT
    }
    return HEADER + "".join(
        _yaml_lines(resolved.config.model_dump(mode="json"), (), origins)
    )


def _yaml_lines(
    values: Mapping[str, Any], path: Path, origins: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of the section at `path`, with comments about the origins."""
    # An index needs no indentation of its own, because "- " has the same width.
    n_names = sum(isinstance(part, str) for part in path)
    indent = "  " * n_names
    for name, value in values.items():
        value_path = (*path, name)
        head = f"{indent}{flow(name)}:"
        if isinstance(value, Mapping) and value:
            yield f"{head}\n"
            yield from _yaml_lines(value, value_path, origins)
        elif isinstance(value, list) and any(
            isinstance(item, Mapping) for item in value
        ):
            yield f"{head}\n"
            for index, item in enumerate(value):
                first, *rest = _yaml_lines(item, (*value_path, index), origins)
                yield f"{indent}- {first.lstrip()}"
                yield from rest
        else:
            comment = _comment(origins.get(dotted(value_path), ""))
            yield f"{head} {flow(value)}{comment}\n"


def _comment(text: str) -> str:
    """Return a comment of one line without control characters, or "" for a blank text."""
    printable = "".join(char if char.isprintable() else " " for char in text)
    words = printable.split()
    return f"  # {' '.join(words)}" if words else ""


def flow(value: Any) -> str:
    """Convert a plain value to YAML's flow style, on one line."""
    if isinstance(value, Mapping):
        pairs = [f"{flow(name)}: {flow(item)}" for name, item in value.items()]
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(flow, value))}]"
    if not isinstance(value, str):
        return json.dumps(value)
    if _needs_no_quotes(value):
        return value
    # Characters that are not printable, such as a right-to-left mark, are written as \u....
    quoted: str = yaml.dump(
        value, default_style='"', allow_unicode=value.isprintable(), width=float("inf")
    )
    return quoted.strip()


def _needs_no_quotes(text: str) -> bool:
    """Return whether YAML reads a text without quotes unchanged: as a value, item or key."""
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
