"""User objects, named in the configuration as module:name, and imported where that is allowed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from toque.config.foreign_code import CODE_SETTINGS
from toque.errors import ConfigError, argument

ForeignCode = Mapping[str, Mapping[str, str]]
"""`RunConfig.foreign_code`: by setting, names that nobody vouches for and where they stand."""


def refuse_foreign_code(foreign: ForeignCode, settings: Sequence[str] = CODE_SETTINGS) -> None:
    """Refuse to run what a run's own file names, before anything of it is imported.

    Args:
        foreign: code of the configuration that nobody vouches for.
        settings: those whose code is about to be imported.

    Raises:
        ConfigError: it names code, and nobody has said that it may run.
    """
    found = [(s, name, at) for s in settings for name, at in foreign.get(s, {}).items()]
    if not found:
        return
    told = "; ".join(f"{name} ({setting}, {at}){_file_of(name)}" for setting, name, at in found)
    off = {
        "evaluation.metrics": "evaluation.metrics=auto",
        "observe.callbacks": "observe.callbacks=[]",
    }
    raise ConfigError(
        f"This would run code that a run's own configuration names: {told}. A run folder may come "
        f"from anyone, so nothing of it was imported. If you know this code, allow it with "
        f"{argument('trust_code=True')}, or name a configuration of your own; or leave it out: "
        f"{' '.join(off[s] for s in dict.fromkeys(s for s, _, _ in found))}."
    )


def imported(foreign: ForeignCode, path: str, *, setting: str, wanted: str) -> Any:
    """The object that `path` names, "module:name"; the working directory is looked in, too.

    Args:
        foreign: code of the configuration that nobody vouches for.
        path: as written in the configuration.
        setting: where it is written, for the message.
        wanted: what should be there, for the message.

    Raises:
        ConfigError: it cannot be imported, or must not be.
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
    """The file that importing a name would run first; found without running any."""
    outermost = name.partition(":")[0].partition(".")[0]
    spec = PathFinder.find_spec(outermost, [*sys.path, str(Path.cwd())])
    return f" of {spec.origin}" if spec is not None and spec.origin else ""
