"""User objects, named in the configuration as module:name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from toque.errors import ConfigError


def imported(path: str, *, setting: str, wanted: str) -> Any:
    """What `path` names, "module:name"; the working directory is looked in, too.

    Args:
        path: as written in the configuration.
        setting: where it is written, for the message.
        wanted: what should be there, for the message.

    Raises:
        ConfigError: it cannot be imported.
    """
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
