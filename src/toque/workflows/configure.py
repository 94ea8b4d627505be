"""Configuration from Python values."""

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
"""Field of each part of a record, e.g. {"prompt": "question", "target": "answer"}."""


def configure(base: Configured | None = None, /, **sections: Any) -> RunConfig:
    """Build and check a configuration from a base and changes.

    Args:
        base: The base. None means the defaults.
        sections: Changed settings by section, as in a file. A mapping changes only the settings
            that it names: `optim={"peak_lr": 1e-4}` keeps the optimizer's other settings. A list
            replaces the list, and a section of another configuration, `optim=other.optim`, replaces
            the section. A transformers model or tokenizer may replace a folder. It is saved to
            the cache, in a folder named after its content.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or settings cannot be combined.

    >>> configure("demo", train={"stop_after": "10 steps"}).model.family
    'llama'
    """
    if isinstance(base, RunConfig) and not sections:
        return base
    if isinstance(base, str | Path):
        return configure(load_config(base).config, **sections)
    values: Mapping[str, Any] = {}
    if isinstance(base, RunConfig | Mapping):
        values = _convert_or_save(base)
    elif base is not None:
        raise ConfigError(
            "A configuration must be a RunConfig, the path of a YAML file, a preset's name or a "
            f"mapping of settings, not a {type(base).__name__}. Pass rows to train on as data: "
            "train(config, data=rows)."
        )

    config = resolve_values(_merge(values, sections), "configure").config
    if isinstance(base, RunConfig):
        return _mark_foreign_code(config, base, sections)
    return config


def _mark_foreign_code(
    config: RunConfig, base: RunConfig, sections: Mapping[str, Any]
) -> RunConfig:
    """Mark code that a changed configuration has from its base, unless a change names it too.

    Code in `sections` is trusted, because the program itself names it.
    """
    changes = {
        name: _dump(section) if isinstance(section, Config) else section
        for name, section in sections.items()
    }
    trusted = names_of_code(changes)
    foreign_code = {
        setting: base.foreign_code[setting]
        for setting in names_of_code(config.model_dump())
        if setting in base.foreign_code and setting not in trusted
    }
    return config.with_foreign_code(foreign_code)


def source_columns(columns: Columns | None) -> dict[str, Any]:
    """Convert `columns` to source settings; None gives no settings.

    Raises:
        ConfigError: `columns` names an unknown part.

    >>> source_columns({"prompt": "question"})
    {'columns': {'prompt': 'question'}}
    """
    parts = get_args(ColumnPart)
    for part in columns or ():
        if part not in parts:
            raise ConfigError(
                f"{argument('columns')} names {part!r}, which is not a part of a record."
                f"{nearest_hint(str(part), parts)} The parts are {', '.join(parts)}."
            )
    return {} if columns is None else {"columns": dict(columns)}


def with_origins(settings: RunConfig) -> Resolved:
    """Mark every value as a default, because the origins of values in Python are unknown."""
    values = leaves(settings.model_dump(mode="json"))
    return Resolved(settings, {dotted(path): DEFAULT for path, _ in values})


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the values that `changes` contains, recursively in mappings."""
    merged = dict(values)
    for name, change in changes.items():
        value = merged.get(name)
        if isinstance(value, Mapping) and isinstance(change, Mapping):
            merged[name] = _merge(value, change)
        else:
            merged[name] = _convert_or_save(change)
    return merged


def _convert_or_save(value: Any) -> Any:
    """Convert a value to types of YAML, or save a model or tokenizer and return its folder."""
    if isinstance(value, Config):
        return _dump(value)
    if isinstance(value, Mapping):
        return {name: _convert_or_save(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_convert_or_save(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # a number or an array of numpy
        return value.tolist()
    # A class has the method too, but only an object has weights.
    if hasattr(value, "save_pretrained") and not isinstance(value, type):
        return _save(value)
    return value


def _dump(section: Config) -> dict[str, Any]:
    """Return a section with its secret, which `model_dump` leaves out."""
    values = section.model_dump(mode="json")
    for name, item in section:
        if isinstance(item, Config):
            values[name] = _dump(item)
    if isinstance(section, ObserveConfig):
        values["webhook"] = section.webhook
    return values


def _save(model: Any) -> str:
    """Save a model or tokenizer to a cache folder that is named after the content."""
    cache = cache_folder("objects")
    with disk_faults(cache, "saving a model", setting="TOQUE_CACHE", error=ConfigError):
        cache.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=cache, ignore_cleanup_errors=True) as temporary:
            model.save_pretrained(temporary)
            if (Path(temporary) / "adapter_config.json").exists():
                raise ConfigError(
                    f"A {type(model).__name__} with an adapter cannot be used as a model, because "
                    "it saves only the adapter. Merge it first (peft: model.merge_and_unload()), "
                    "or pass its base with adapter={'kind': 'lora'} to train a new adapter."
                )
            folder = cache / _hash_files(Path(temporary))[:16]
            if not folder.exists():
                Path(temporary).rename(folder)
    return str(folder)


def _hash_files(folder: Path) -> str:
    """Hash the names and contents of all files in a folder."""
    content = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        content.update(f"{name} {sha256_of(path)}\n".encode())
    return content.hexdigest()
