"""Commands: `toque VERB [CONFIG] [section.field=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Literal

from cyclopts import App, CycloptsError, Group, Parameter

from toque.cli import commands_data as data
from toque.cli import commands_look as look
from toque.cli import commands_run as run
from toque.cli import launch as several
from toque.cli.commands_chat import chat
from toque.cli.console import (
    WORKING_VERBS,
    OutputLostError,
    flag,
    quieten_libraries,
    standard_streams,
)
from toque.errors import ConfigError, ToqueError, in_shell
from toque.training.distributed.launcher import follow_launcher
from toque.version import __version__

HELP = """Train language models that write recipes, and any other text, on the machine you have.

CONFIG is a YAML file or a preset's name (`toque presets`). Settings are changed at the end of the
line: `toque train my.yaml train.stop_after="1 epoch" optim.peak_lr=1e-3`.

Start here: `toque demo`, then `toque init YOUR-RECIPES` and `toque train my.yaml`.

Exit codes: 0 done; 1 `check`, `drill` or `doctor` failed, a process of a shared run was lost, a
result could not be printed, or the system refused a file; 2 wrong usage or config; 3 data;
4 checkpoint; 5 loss not finite; 75 interrupted, saved and resumable; 130 stopped by Ctrl-C, what
was saved before stays.
`--traceback` after any command shows where an error came from.
"""

OUTPUT_LOST = 1
REFUSED_FILE = 1
STOPPED_UNSAVED = 130  # exit code of the shell for it: 128 and the number of SIGINT

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
    suppress_keyboard_interrupt=False,  # it would leave without a word
)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print what makes your shell complete commands and flags on Tab.

    Args:
        shell: bash, zsh or fish.
    """
    print(app.generate_completion(prog_name="toque", shell=shell))


_GROUPS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "Begin": (run.demo, data.init),
    "From data to a model in use": (
        data.prepare, run.train, run.evaluate, run.generate, chat, run.serve, data.report,
        run.export,
    ),
    "Watch": (look.watch, look.compare, look.checkpoints),
    "Look up": (
        look.plan, data.show, data.show_batch, data.presets, data.schema, data.cookbook, completion,
    ),
    "Prove": (look.doctor, data.verify, run.check, run.drill, run.ablate),
}  # fmt: skip
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
    if argv is None:  # a process of its own, not a test or a program that calls a command
        quieten_libraries()
    several.COMMAND.set(words)
    follow_launcher()
    # Trackers note the command line they find; a webhook's address is a secret.
    sys.argv[1:] = several.without_secrets(sys.argv[1:])
    try:
        with standard_streams(working=several.verb_of(words) in WORKING_VERBS):
            code = _answered(words)
    except OutputLostError as error:
        code = 0  # `toque presets | head -1`: the reader has seen enough
        if not isinstance(error.__cause__, BrokenPipeError):
            _say(f"standard output cannot be written: {error.__cause__}. The result is lost.")
            code = OUTPUT_LOST
    if several.one_of_several():
        several.leave(code)
    return code


def _answered(words: list[str]) -> int:
    show_traceback = "--traceback" in words
    try:
        several.refuse_repeating(words)
        given = [word for word in words if word != "--traceback"]
        code = app(given, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        verb = several.verb_of(words)
        known = f"toque {verb} --help" if error.command_chain else "toque --help"
        _say(f"{' '.join(str(error).split())} `{known}` shows what can be given.")
        return ConfigError.exit_code
    except ToqueError as error:
        if show_traceback:
            raise
        if several.speaks(error):
            _say(error.message(flag))
        return error.exit_code
    except OSError as error:
        # The machine's refusal of a file that no workflow has words for: a right that is missing,
        # a path that leads through a file. Anything else is a mistake of ours, with its traceback.
        if show_traceback or error.filename is None:
            raise
        _say(
            f"{error.filename}: {error.strerror}. The system refuses this file: look at its place, "
            "its rights and its name, or name another. --traceback shows where it was needed."
        )
        return REFUSED_FILE
    except KeyboardInterrupt:
        if data.is_first():
            _say(f"Stopped by Ctrl-C. {_to_continue(words)}".rstrip())
        return STOPPED_UNSAVED
    return code if isinstance(code, int) else 0


def _to_continue(words: list[str]) -> str:
    """The command that continues what Ctrl-C stopped; "" for one that leaves nothing behind."""
    if several.verb_of(words) not in WORKING_VERBS:
        return ""
    again = " ".join(map(in_shell, several.without_secrets(words)))
    return (
        "Prepared data and checkpoints that were complete are kept. Continue with the same "
        f"command: toque {again}"
    )


def _say(text: str) -> None:
    print(f"toque: {text}", file=sys.stderr)
