"""User code: metrics and callbacks that a configuration names, and where they may be imported.

Code that the user names, in a file of theirs, on the command line or in a program, is theirs to
run. A run folder may have been handed on, and its configuration names what somebody else chose.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from toque.errors import ConfigError, argument

ForeignCode = Mapping[str, Mapping[str, str]]
"""`RunConfig.foreign_code`: names that nobody vouches for and where they stand, by setting."""
CODE_SETTINGS: Final = {
    "evaluation.metrics": "evaluation.metrics=auto",
    "observe.callbacks": "observe.callbacks=[]",
    "optim.name": "optim.name=adamw",
}
"""Settings whose values may be imported and run, each with the override that leaves it out.

So may the metrics of a task in data.tasks.
"""
OWN_CONFIG: Final = "config.yaml"  # name of a run's configuration in its folder
HEADER: Final = (
    "# Every setting of this run; a comment says where a value that is no default is from.\n"
)
"""First line of such a file."""
_BESIDE: Final = ("checkpoints", "best", "model", "metrics.jsonl", "evaluation.json")
"""Names of which one makes a folder a run's."""


def is_of_a_run(file: Path) -> bool:
    """True for the configuration that a run keeps in its folder, and not for a user's file."""
    named = [path for path in (file, file.resolve()) if path.name == OWN_CONFIG]
    if any((path.parent / name).exists() for path in named for name in _BESIDE):
        return True
    with file.open("rb") as opened:
        return bool(named) and opened.read(len(HEADER)) == HEADER.encode()


def names_of_code(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """The names of code in a configuration's values, by setting.

    >>> names_of_code({"evaluation": {"metrics": ["auto", "pty:spawn"]}, "observe": {}})
    {'evaluation.metrics': ['pty:spawn']}
    """
    tasks = values.get("data", {}).get("tasks")
    asked = {
        f"data.tasks.{name}.metrics": task.get("metrics", ())
        for name, task in (tasks if isinstance(tasks, Mapping) else {}).items()
        if isinstance(task, Mapping)
    }
    for setting in CODE_SETTINGS:
        section, _, name = setting.partition(".")
        asked[setting] = values.get(section, {}).get(name, ())
    found = {}
    for setting, given in asked.items():
        value = [given] if isinstance(given, str) else given
        names = [item for item in value if ":" in item] if isinstance(value, list | tuple) else []
        if names:
            found[setting] = names
    return found


def refuse_foreign_code(foreign: ForeignCode, settings: Sequence[str] | None = None) -> None:
    """Raise a ConfigError where a run's own file names code that nobody has vouched for."""
    asked = foreign if settings is None else settings
    found = [(s, name, at) for s in asked for name, at in foreign.get(s, {}).items()]
    if not found:
        return
    told = "; ".join(f"{name} ({setting}, {at}){_file_of(name)}" for setting, name, at in found)
    raise ConfigError(
        f"This would run code that a run's own configuration names: {told}. A run folder may come "
        f"from anyone, so nothing of it was imported. If you know this code, allow it with "
        f"{argument('trust_code=True')}, or name a configuration of your own; or leave it out: "
        f"{' '.join(CODE_SETTINGS.get(s, f'{s}=[]') for s in {s: 0 for s, _, _ in found})}."
    )


def imported(foreign: ForeignCode, path: str, *, setting: str, wanted: str) -> Any:
    """The object that `path` names, "module:name", here or installed, or a ConfigError.

    `wanted` ends the message and says what should be there.
    """
    refuse_foreign_code(foreign, [setting])
    module, _, attribute = path.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # the command, unlike `python -m`, does not look where it runs
        sys.path.append(here)
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"{setting} names {path}, which cannot be imported: {error}. Give "
            "module:name, the module importable from here (a file beside the configuration "
            f"you run from, or an installed package), {wanted}."
        ) from error


def _file_of(name: str) -> str:
    """The file that importing a name would run first, which is found without running any."""
    outermost = name.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(outermost, [*sys.path, str(Path.cwd())])
    return f" of {spec.origin}" if spec is not None and spec.origin else ""
