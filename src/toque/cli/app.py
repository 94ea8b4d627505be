"""Application of the command line: `toque VERB [CONFIG] [section.field=value ...]`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Final, Literal

from cyclopts import App, CycloptsError, Group, Parameter

from toque.cli import commands_data as data
from toque.cli import commands_look as look
from toque.cli import commands_run as run
from toque.cli import launch
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
from toque.training.signal_handlers import exiting_on_signal
from toque.version import __version__

HELP = """Train language models that write recipes, and any other text, on your own machine.

CONFIG is a YAML file or the name of a preset (`toque presets`). To change settings, add them to the
command: `toque train my.yaml train.stop_after="1 epoch" optim.peak_lr=1e-3`.

Start here: `toque demo`, then `toque init YOUR-RECIPES` and `toque train my.yaml`.

Exit codes: 0 success; 1 `check`, `drill` or `doctor` failed, `average` found no better model, a
process of a multi-process run was lost, a result could not be printed, or a file could not be
opened; 2 wrong usage or config; 3 data
error; 4 checkpoint error; 5 loss not finite; 75 interrupted, saved and resumable; 130 stopped by
Ctrl-C, with earlier checkpoints intact.
Add `--traceback` to any command to print the traceback of an error.
"""

OUTPUT_LOST = 1
REFUSED_FILE = 1
STOPPED_UNSAVED = 130  # a shell's exit code after SIGINT: 128 + 2
_WRITING_VERBS: Final = ("average", "export", "generate", "init", "pairs", "report")
"""Commands that write a result once. A signal removes their temporary files and folders."""

app = App(
    name="toque",
    help=HELP,
    version=__version__,
    # Flags are off by default, so the help omits that default.
    default_parameter=Parameter(
        negative=(),
        show_default=lambda value: (
            None if value is None or value is False else str(value)
        ),
    ),
    result_action="return_value",
    suppress_keyboard_interrupt=False,  # cyclopts would exit without a message
)


def completion(shell: Literal["bash", "zsh", "fish"], /) -> None:
    """Print a script with which your shell completes commands and flags.

    Args:
        shell: bash, zsh or fish.
    """
    print(app.generate_completion(prog_name="toque", shell=shell))


_GROUPS: Mapping[str, tuple[Callable[..., object], ...]] = {
    "Begin": (look.studio, run.demo, data.init),
    "From data to a model in use": (
        data.prepare, run.train, run.evaluate, run.generate, run.pairs, chat, run.serve,
        data.report, run.average, run.export,
    ),
    "Watch": (look.watch, look.compare, look.checkpoints),
    "Look up": (
        look.plan, data.show, data.show_batch, data.presets, data.schema, data.cookbook, completion,
    ),
    "Prove": (look.doctor, data.verify, run.check, run.drill, run.ablate),
}  # fmt: skip
for _group_index, (_title, _commands) in enumerate(_GROUPS.items()):
    _group = Group(_title, sort_key=_group_index)
    for _index, _command in enumerate(_commands):
        app.command(_command, group=_group, sort_key=_index)
_flags = Group("Flags", sort_key=len(_GROUPS))
for _flag in ("--help", "--version"):
    app[_flag].group = (_flags,)


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    if argv is None:  # called as a command, not by a test or a program
        quieten_libraries()
        argv = sys.argv[1:]
    words = list(argv)
    launch.COMMAND.set(words)
    follow_launcher()
    # Experiment trackers record sys.argv, and the address of a webhook is a secret.
    sys.argv[1:] = launch.without_secrets(sys.argv[1:])
    try:
        with standard_streams(working=launch.verb_of(words) in WORKING_VERBS):
            code = _run(words)
    except OutputLostError as error:
        code = OUTPUT_LOST
        if isinstance(error.__cause__, BrokenPipeError):
            code = 0  # the reader closed the pipe: `toque presets | head -1`
        else:
            _print_error(
                f"Cannot write to standard output: {error.__cause__}. The result is lost."
            )
    if launch.is_rank():
        launch.exit_immediately(code)
    return code


def _run(words: list[str]) -> int:
    """Run a command, print its error, and return its exit code."""
    show_traceback = "--traceback" in words
    try:
        launch.refuse_repeating(words)
        arguments = [word for word in words if word != "--traceback"]
        is_writing = launch.verb_of(words) in _WRITING_VERBS
        with exiting_on_signal() if is_writing else nullcontext():
            code = app(arguments, exit_on_error=False, print_error=False, verbose=False)
    except CycloptsError as error:
        command = f"toque {launch.verb_of(words)}" if error.command_chain else "toque"
        _print_error(f"{' '.join(str(error).split())} See `{command} --help`.")
        return ConfigError.exit_code
    except ToqueError as error:
        if show_traceback:
            raise
        if launch.prints_error(error):
            _print_error(error.message(flag))
        return error.exit_code
    except OSError as error:
        # No workflow has checked this file, which cannot be opened, e.g. without permission. Other
        # OSErrors are bugs and keep their traceback.
        if show_traceback or error.filename is None:
            raise
        _print_error(
            f"{error.filename}: {error.strerror}. Check that the path exists and that you may "
            "read and write it. Add --traceback to see which step needed it."
        )
        return REFUSED_FILE
    except KeyboardInterrupt:
        if launch.is_first_rank():
            _print_error(f"Stopped by Ctrl-C.{_hint_to_continue(words)}")
        return STOPPED_UNSAVED
    return code if isinstance(code, int) else 0


def _hint_to_continue(words: list[str]) -> str:
    """Explain how to continue after Ctrl-C, or return "" for a command that saves nothing."""
    if launch.verb_of(words) not in WORKING_VERBS:
        return ""
    command = " ".join(map(in_shell, launch.without_secrets(words)))
    return (
        " Prepared data and complete checkpoints are kept. To continue, run the same command "
        f"again: toque {command}"
    )


def _print_error(text: str) -> None:
    """Print an error on standard error."""
    print(f"toque: {text}", file=sys.stderr)
