"""Configuration from Python: a base, changed by sections."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

from toque.config import Resolved, RunConfig, load_config, resolve_values
from toque.config.field_types import ColumnPart, Config
from toque.config.resolve import DEFAULT, leaves
from toque.config.schema import ObserveConfig
from toque.config.user_code import names_of_code
from toque.config.yaml_reader import dotted
from toque.errors import ConfigError, argument, nearest_hint
from toque.storage.atomic import disk_faults, sha256_of
from toque.storage.download import cache_folder

Configured = RunConfig | str | Path | Mapping[str, Any]
"""A configuration, a YAML file, a preset's name, or nested values."""
Columns = Mapping[str, str | Sequence[str]]
"""Fields that hold the parts of a record, e.g. {"prompt": "question", "target": "answer"}."""


def configure(base: Configured | None = None, /, **sections: Any) -> RunConfig:
    """A checked configuration: what `base` says, changed by `sections`, the rest defaults.

    Args:
        base: what to begin with; None for the defaults.
        sections: settings by section, as in a file; mappings change what they name and no more:
            `optim={"peak_lr": 1e-4}` keeps the optimizer's other settings. Lists are replaced, and
            a section of another configuration, `optim=other.optim`, replaces the whole one. A model
            or tokenizer of transformers may stand where a folder may: it is saved to the cache,
            under the name of its content.

    Raises:
        ConfigError: an unknown name, a wrong value or an impossible combination.

    >>> configure("demo", train={"stop_after": "10 steps"}).model.family
    'llama'
    """
    values: Mapping[str, Any] = {}
    if isinstance(base, RunConfig):
        if not sections:
            return base
        values = _plain(base)
    elif isinstance(base, Mapping):
        values = _plain(base)
    elif isinstance(base, str | Path):
        return configure(load_config(base).config, **sections)
    elif base is not None:
        raise ConfigError(
            "A configuration must be a RunConfig, the path of a YAML file, a preset's name or a "
            f"mapping of settings, not a {type(base).__name__}. Rows to train on are an argument "
            "of their own: train(config, data=rows)."
        )
    made = resolve_values(_merged(values, sections), "configure").config
    if not isinstance(base, RunConfig):
        return made
    # A setting that this program gives is the program's; the others are from where they were.
    written = {n: _plain(s) if isinstance(s, Config) else s for n, s in sections.items()}
    given = names_of_code(written)
    old = {s: names for s, names in base.foreign_code.items() if s not in given}
    return made.with_foreign_code({s: old[s] for s in names_of_code(made.model_dump()) if s in old})


def source_columns(columns: Columns | None) -> dict[str, Any]:
    """Settings of a source whose fields are named so: none for None.

    Raises:
        ConfigError: a part that records do not have.

    >>> source_columns({"prompt": "question"})
    {'columns': {'prompt': 'question'}}
    """
    parts = get_args(ColumnPart)
    for part in columns or ():
        if part not in parts:
            raise ConfigError(
                f"{argument('columns')} names {part!r}, which is no part of a record."
                f"{nearest_hint(str(part), parts)} Parts are {', '.join(parts)}."
            )
    return {} if columns is None else {"columns": dict(columns)}


def with_origins(settings: RunConfig) -> Resolved:
    """The configuration with every value said to be a default: nothing is known of their origin."""
    values = leaves(settings.model_dump(mode="json"))
    return Resolved(settings, {dotted(path): DEFAULT for path, _ in values})


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
    """The value as YAML would hold it: paths as text, tuples as lists, objects as their folder."""
    if isinstance(value, Config):
        parts = {name: _plain(held) for name, held in value if isinstance(held, Config)}
        # What is written down leaves the secret out; here it stays in the program.
        secret = {"webhook": value.webhook} if isinstance(value, ObserveConfig) else {}
        return value.model_dump(mode="json") | parts | secret
    if hasattr(value, "save_pretrained") and not isinstance(value, type):
        return _saved(value)
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return value.tolist()
    if isinstance(value, Mapping):
        return {name: _plain(held) for name, held in value.items()}
    return [_plain(held) for held in value] if isinstance(value, list | tuple) else value


def _saved(model: Any) -> str:
    """The folder of a model or tokenizer of this program, the same for the same content."""
    above, content = cache_folder("objects"), hashlib.sha256()
    with disk_faults(above, "saving a model", setting="TOQUE_CACHE", error=ConfigError):
        above.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=above, ignore_cleanup_errors=True) as made:
            model.save_pretrained(made)
            if (Path(made) / "adapter_config.json").exists():
                raise ConfigError(
                    f"A {type(model).__name__} with an adapter stands where a model may, and saves "
                    "the adapter alone. Merge the two first (peft: model.merge_and_unload()), or "
                    "give the base alone, on which adapter={'kind': 'lora'} trains a new one."
                )
            for path in sorted(path for path in Path(made).rglob("*") if path.is_file()):
                name = path.relative_to(made).as_posix()
                content.update(f"{name} {sha256_of(path)}\n".encode())
            folder = above / content.hexdigest()[:16]
            if not folder.exists():
                Path(made).rename(folder)
    return str(folder)
