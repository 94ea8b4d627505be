"""Commands: `toque VERB [CONFIG] [section.field=value ...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from cyclopts import App, CycloptsError, Group, Parameter

from toque.cli import launch as several
from toque.cli.commands_data import cookbook, prepare, presets, report, show, show_batch, verify
from toque.cli.commands_init import init
from toque.cli.commands_run import ablate, check, demo, drill, evaluate, export, generate, train
from toque.errors import ConfigError, ToqueError
from toque.version import __version__

HELP = """Train language models that write recipes, and any other text, on the machine you have.

CONFIG is a YAML file or a preset's name (`toque presets`). Settings are changed at the end of the
line: `toque train my.yaml train.stop_after="1 epoch" optim.peak_lr=1e-3`.

Start here: `toque demo`, then `toque init YOUR-RECIPES` and `toque train my.yaml`.

Exit codes: 0 done; 1 `check` or `drill` failed, or a process of a shared run was lost; 2 wrong
usage or config; 3 data; 4 checkpoint; 5 loss not finite; 75 interrupted, saved and resumable.
`--traceback` after any command shows where an error came from.
"""

app = App(
    name="toque",
    help=HELP,
    version=__version__,
    # A flag is off unless it is given: that need not be said of each.
    default_parameter=Parameter(
        negative=(),
        show_default=lambda value: None if value is None or value is False else str(value),
    ),
    result_action="return_value",
)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what makes your shell complete commands and flags on Tab.

    Args:
        shell: bash, zsh or fish.
    """
    print(app.generate_completion(prog_name="toque", shell=shell))


_GROUPS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "Begin": (demo, init),
    "From data to a model in use": (prepare, train, evaluate, generate, report, export),
    "Look up": (show, show_batch, presets, cookbook, completion),
    "Prove": (verify, check, drill, ablate),
}
for _place, (_title, _commands) in enumerate(_GROUPS.items()):
    _group = Group(_title, sort_key=_place)
    for _at, _command in enumerate(_commands):
        app.command(_command, group=_group, sort_key=_at)
_flags = Group("Flags", sort_key=len(_GROUPS))
for _flag in ("--help", "--version"):
    app[_flag].group = (_flags,)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    # Trackers note the command line they find; a webhook's address is a secret.
    sys.argv[1:] = several.without_secrets(sys.argv[1:])
    code = _ended(words)
    if several.one_of_several():
        several.leave(code)
    return code


def _ended(words: list[str]) -> int:
    show_traceback = "--traceback" in words
    try:
        several.refuse_repeating(words)
        app([word for word in words if word != "--traceback"], exit_on_error=False)
    except CycloptsError:
        return ConfigError.exit_code  # already printed, with the nearest command or option
    except ToqueError as error:
        if show_traceback:
            raise
        if several.speaks(error):
            from toque.cli.console import flag

            print(f"toque: {error.message(flag)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("toque: stopped by the keyboard before anything needed saving.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `toque presets | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
