"""Foreign code: what a run's own config.yaml names, which may come from anyone.

Code that the user names, in a file of theirs, on the command line or in a program, is theirs to
run. A run folder may have been handed on, and its configuration names what somebody else chose.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

CODE_SETTINGS: Final = ("evaluation.metrics", "observe.callbacks")
"""Settings whose values may be imported and run."""
OWN_CONFIG: Final = "config.yaml"
"""Name of a run's configuration in its folder."""
HEADER: Final = (
    "# Every setting of this run; a comment says where a value that is no default is from.\n"
)
"""First line of such a file."""
_BESIDE: Final = ("checkpoints", "best", "model", "metrics.jsonl", "evaluation.json")
"""Any of which makes a folder a run's."""


def is_of_a_run(file: Path) -> bool:
    """Whether a configuration is the one that a run keeps in its folder, and not a user's file."""
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
    found = {}
    for setting in CODE_SETTINGS:
        section, _, name = setting.partition(".")
        value = values.get(section, {}).get(name, ())
        names = [item for item in value if ":" in item] if isinstance(value, list | tuple) else []
        if names:
            found[setting] = names
    return found


def foreign_names(
    values: Mapping[str, Any], origin: Callable[[str], str | None]
) -> dict[str, dict[str, str]]:
    """Names of code that nobody vouches for: by setting, each with where it is written.

    Args:
        values: a configuration's, as nested mappings.
        origin: where a setting is written in a run's own file; None for one that the user wrote.
    """
    found = {}
    for setting, names in names_of_code(values).items():
        where = origin(setting)
        if where is not None:
            found[setting] = dict.fromkeys(names, where)
    return found
