"""User code: metrics, callbacks and optimizers that a configuration names.

Code that the user names in a file, on the command line or in a program is trusted. The
configuration in a run folder is not trusted, because the folder may come from someone else.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from toque.errors import ConfigError, argument

ForeignCode = Mapping[str, Mapping[str, str]]
"""Untrusted code: setting -> name of the code -> its file and line."""
CODE_SETTINGS = {
    "evaluation.metrics": "evaluation.metrics=auto",
    "objective.rewards": "objective.kind=sft objective.rewards={}",
    "observe.callbacks": "observe.callbacks=[]",
    "optim.name": "optim.name=adamw",
}
"""Settings that can name code, and for each setting an override that removes the code. The metrics
of a task in data.tasks can also name code.
"""
_RUN_CONFIG = "config.yaml"
"""Name of the configuration in a run folder."""
HEADER = (
    "# All settings of this run. Comments show the origin of values except defaults.\n"
)
"""First line of the configuration in a run folder."""
_RUN_FILES = ("checkpoints", "best", "model", "metrics.jsonl", "evaluation.json")
"""Files and folders that only a run folder contains."""


def is_run_config(file: Path) -> bool:
    """Return whether a file is the configuration in a run folder, or a link to one."""
    paths = [path for path in (file, file.resolve()) if path.name == _RUN_CONFIG]
    if any((path.parent / name).exists() for path in paths for name in _RUN_FILES):
        return True
    # A copy of the file outside its run folder also begins with the header.
    with file.open("rb") as stream:
        return bool(paths) and stream.read(len(HEADER)) == HEADER.encode()


def names_of_code(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the names of code in the values of a configuration, by setting.

    >>> names_of_code({"evaluation": {"metrics": ["auto", "pty:spawn"]}, "observe": {}})
    {'evaluation.metrics': ['pty:spawn']}
    """
    candidates: dict[str, Any] = {}
    tasks = values.get("data", {}).get("tasks")
    if isinstance(tasks, Mapping):
        for name, task in tasks.items():
            if isinstance(task, Mapping):
                candidates[f"data.tasks.{name}.metrics"] = task.get("metrics", ())
    for setting in CODE_SETTINGS:
        section, _, name = setting.partition(".")
        candidates[setting] = values.get(section, {}).get(name, ())

    names_by_setting = {}
    for setting, value in candidates.items():
        items = [value] if isinstance(value, str) else value
        if isinstance(items, Mapping):
            items = [*items]
        if not isinstance(items, list | tuple):
            continue
        names = [item for item in items if ":" in item]
        if names:
            names_by_setting[setting] = names
    return names_by_setting


def refuse_foreign_code(
    foreign: ForeignCode, settings: Sequence[str] | None = None
) -> None:
    """Check that `settings` do not name untrusted code. None means all settings.

    Raises:
        ConfigError: A setting names untrusted code.
    """
    names: list[str] = []
    overrides: list[str] = []
    for setting in foreign if settings is None else settings:
        origins = foreign.get(setting, {})
        for name, origin in origins.items():
            names.append(f"{name} ({setting}, {origin}){_describe_file(name)}")
        if origins:
            overrides.append(CODE_SETTINGS.get(setting, f"{setting}=[]"))
    if names:
        raise ConfigError(
            f"The configuration of this run refers to user code: {'; '.join(names)}. The code was "
            "not imported, because a run folder may be untrusted. If you trust this code, add "
            f"{argument('trust_code=True')}, or use your own configuration. To continue without "
            f"the code, set {' '.join(overrides)}."
        )


def import_user_code(
    foreign: ForeignCode, path: str, *, setting: str, kind: str
) -> Any:
    """Import the object "module:name" that a setting names, from the current folder or a package.

    Args:
        foreign: Untrusted code.
        path: The object, as "module:name".
        setting: The setting with this value.
        kind: Kind of object that the setting needs, for the error message.

    Raises:
        ConfigError: The code is untrusted, or cannot be imported.
    """
    refuse_foreign_code(foreign, [setting])
    module, _, attribute = path.partition(":")
    # Python adds the current folder for `python -m toque`, but not for `toque`.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"{setting} names {path}, which cannot be imported: {error}. Give {kind} as "
            "module:name. The module must be in the current folder or in an installed package."
        ) from error


def _describe_file(name: str) -> str:
    """Return " of FILE" for the file that importing a name would run first. Do not run it."""
    package = name.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(package, [*sys.path, str(Path.cwd())])
    return f" of {spec.origin}" if spec is not None and spec.origin else ""
