"""Command `chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

from cyclopts import Parameter

from toque.cli.console import ConsoleReporter, flag, for_terminal
from toque.cli.text_flags import ChatFlags
from toque.errors import ConfigError, DataError

if TYPE_CHECKING:
    from toque.models.generation.options import GenerationOptions
    from toque.workflows.inference.talk import Talk

_DEFAULT_FLAGS: Final = ChatFlags()
_HELP: Final = """\
/compare QUESTION  ask both models, each after its own conversation
/save FILE         save the conversation in a new JSON file, which data.sources can read
/undo              remove the last question and its answer
/new               start a new conversation
/exit              exit, like Ctrl-D. Ctrl-C stops an answer"""


def chat(
    run_or_model: str,
    other: str | None = None,
    /,
    *,
    system: str | None = None,
    flags: Annotated[ChatFlags, Parameter(name="*")] = _DEFAULT_FLAGS,
    device: str = "auto",
) -> int:
    """Chat with a model in the terminal.

    The model receives the entire conversation. Type /help for a list of commands. In a pipe, each
    line is a question, and the exit code is the code of the last failed question.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        other: a second model for /compare.
        system: system message, for models that were trained with one.
        flags: flags for answers.
        device: cpu, cuda, cuda:N, or auto: a GPU if the machine has one.
    """
    from toque.workflows.inference.talk import open_talk
    from toque.workflows.trained_model.folders import check_model

    options = flags.to_options()
    reporter = ConsoleReporter()
    names = [run_or_model, other] if other else [run_or_model]
    for name in names:  # before the first model is loaded, which takes seconds
        check_model(name)
    talks = [
        open_talk(name, system=system, device=device, reporter=reporter)
        for name in names
    ]

    interactive = sys.stdin.isatty()
    if interactive:
        print("Type a question, or /help for a list of commands.")
    code = 0
    for line in _input_lines():
        try:
            if line == "/exit":
                break
            _run_line(line, talks, options)
        except (ConfigError, DataError) as error:
            print(error.message(flag), file=sys.stderr)
            # Only questions set the exit code, not commands such as /save.
            if not interactive and not line.startswith("/"):
                code = error.exit_code
    return code


def _input_lines() -> Iterator[str]:
    """Yield the lines of standard input that are not blank."""
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for `input`
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Invalid UTF-8 is an error in its line only.
        sys.stdin.reconfigure(errors="surrogateescape")
    prompt = "\n> " if sys.stdin.isatty() else ""
    while True:
        try:
            line = input(prompt).strip()
        except EOFError:
            return
        if line:
            yield line


def _run_line(line: str, talks: list[Talk], options: GenerationOptions) -> None:
    """Answer a question, or run a command such as /save.

    Raises:
        ConfigError: The command does not exist or cannot be run.
    """
    if not line.startswith("/"):
        _ask(talks[0], line, options)
        return
    word, _, argument = line.partition(" ")
    argument = argument.strip()
    if word == "/compare":
        _compare(talks, argument, options)
    elif word == "/save":
        if not argument:
            raise ConfigError("/save needs a file, e.g. /save talk.jsonl.")
        print(f"saved to {talks[0].save(argument)}")
    elif word == "/undo":
        for talk in talks:
            talk.undo()
    elif word == "/new":
        for talk in talks:
            talk.restart()
    elif word == "/help":
        print(_HELP)
    else:
        raise ConfigError(f"{word} is not a command. {_HELP}")


def _compare(talks: list[Talk], question: str, options: GenerationOptions) -> None:
    """Ask both models a question, each after its own conversation."""
    if len(talks) < 2 or not question:
        raise ConfigError(
            "/compare needs two models and a question. Start with `toque chat MODEL OTHER`, "
            "and type /compare QUESTION."
        )
    for talk in talks:
        print(f"[{talk.name}]")
        _ask(talk, question, options)


def _ask(talk: Talk, question: str, options: GenerationOptions) -> None:
    """Print the answer of a model, then its notes."""
    notes = list[str]()
    talk.ask(
        question,
        options,
        on_text=lambda piece: print(for_terminal(piece), end="", flush=True),
        notice=notes.append,
    )
    print(flush=True)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
