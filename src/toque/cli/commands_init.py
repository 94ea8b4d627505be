"""Command `init`: asks at a terminal what its flags do not say, then writes a configuration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from toque.cli.commands_data import reporter
from toque.cli.console import flag
from toque.errors import ConfigError, ToqueError

_LENGTH = "30 minutes"
_FILE = "my.yaml"


def init(
    *sources: Annotated[str, Parameter(help="a file, a folder or a pattern, or several.")],
    to: Path | None = None,
    size: Literal["tiny", "small", "medium"] | None = None,
    start_from: str | None = None,
    stop_after: str | None = None,
    tokenizer: str = "auto",
    encoding: str = "utf-8",
    replace: bool = False,
    yes: bool = False,
) -> None:
    """Look at your files and write a commented configuration for them, ready to train.

    At a terminal it asks for what is not given. In a script it takes the defaults.

    Args:
        sources: a file, a folder or a pattern, or several.
        to: the file to write; my.yaml when left out. Run and store are named after it.
        size: of a new model; by the amount of text, tiny or small, when left out.
        start_from: a model to go on from, a folder or a hub name, instead of a new one.
        stop_after: how long to train, e.g. "30 minutes" or "3 epochs"; 30 minutes when left out.
        tokenizer: a folder or a hub name; learnt from the data, or the model's own, when left out.
        encoding: of files that are text; cp1252 or latin-1 for an old export.
        replace: overwrite the file if it is there.
        yes: ask nothing, take the defaults.
    """
    from toque.workflows.init import init as workflow

    if not yes and sys.stdin.isatty() and sys.stdout.isatty():
        sources = sources or (_asked(_SOURCES, _source),)
        start_from = start_from or _asked(_MODEL, str) or None
        stop_after = stop_after or _asked(_TIME, _duration) or None
        to, replace = _place(to, replace=replace)
    made = workflow(
        sources,
        to=to or _FILE,
        size=size,
        start_from=start_from or "scratch",
        stop_after=stop_after or _LENGTH,
        tokenizer=tokenizer,
        encoding=encoding,
        replace=replace,
        reporter=reporter(),
    )
    print(made)


_SOURCES = "Your recipes or texts (a file, a folder or a pattern): "
_MODEL = "A model to go on from (a folder or a hub name; Enter for a new model): "
_TIME = f"How long to train (e.g. 30 minutes, 3 epochs; Enter for {_LENGTH}): "
_TO = f"Write the configuration to (Enter for {_FILE}): "


def _place(to: Path | None, *, replace: bool) -> tuple[Path, bool]:
    """Where to write, and whether what is there may go."""
    while True:
        file = to or Path(_asked(_TO, str) or _FILE)
        if replace or not file.exists():
            return file, replace
        if _asked(f"{file} is there already. Overwrite it? (y/N): ", str).lower() in ("y", "yes"):
            return file, True
        to = None


def _asked(question: str, checked: Callable[[str], str]) -> str:
    """The answer, asked again until it passes.

    Raises:
        ConfigError: nobody answers.
    """
    while True:
        try:
            return checked(input(question).strip())
        except ToqueError as error:
            print(error.message(flag), file=sys.stderr)
        except EOFError as error:
            raise ConfigError(
                "Nobody answers. Name the files, and add --yes to be asked nothing: toque init "
                "recipes.jsonl --yes."
            ) from error


def _source(answer: str) -> str:
    from toque.sources.source_files import located
    from toque.storage.bucket import is_remote

    if not (is_remote(answer) or answer.startswith("hf:")):
        located(answer)
    return answer


def _duration(answer: str) -> str:
    from toque.units import Duration

    return str(Duration.parse(answer)) if answer else ""
