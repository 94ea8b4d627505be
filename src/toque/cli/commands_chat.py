"""The command `chat`: a conversation in the terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

from toque.cli.console import ConsoleReporter, flag, for_reader
from toque.errors import ConfigError, DataError

if TYPE_CHECKING:
    from toque.models.generation.options import GenerationOptions
    from toque.workflows.inference.talk import Talk

_HELP: Final = """\
/compare QUESTION  ask both models, whatever was said before to one alone
/save FILE         write the conversation, as a line that data.sources reads
/undo              take the last question and its answer back
/new               begin again
/exit              end; so does Ctrl-D. Ctrl-C ends an answer"""


def chat(
    run_or_model: str,
    other: str | None = None,
    /,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = 0.95,
    seed: int = 0,
    device: str = "auto",
    precision: Literal["auto", "bf16", "float32"] = "float32",
) -> int:
    """Talk to a model in the terminal; it reads all that was said before.

    An answer appears as it is written. /help lists what else can be typed. From a pipe each line is
    a question, and one that could not be asked gives the exit code.

    Args:
        run_or_model: run folder, checkpoint (RUN/best/step-00000200) or Hugging Face model folder.
        other: a second one, which /compare asks the same.
        system: text that a conversation begins with, for models that were trained with one.
        max_new_tokens: longest answer.
        temperature: 0 takes the likeliest token every time.
        top_p: sample from the likeliest tokens that together have this probability.
        seed: the same seed and questions write the same answers.
        device: auto takes the GPU where there is one; or cpu, cuda, cuda:N.
        precision: of the products that write; auto is bf16 where the processor has it.
    """
    from toque.models.generation.options import GenerationOptions
    from toque.workflows.inference.talk import open_talk
    from toque.workflows.model_record import check_model

    options = GenerationOptions(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        precision=precision,
    )
    prints = ConsoleReporter()
    names = [run_or_model, *([other] if other else [])]
    for name in names:  # before the first is read
        check_model(name)
    talks = [open_talk(name, system=system, device=device, reporter=prints) for name in names]
    if sys.stdin.isatty():
        print("/help lists what can be typed besides questions.")
    code = 0
    for line in _lines():
        try:
            if line == "/exit":
                break
            _answered(line, talks, options)
        except (ConfigError, DataError) as error:
            print(error.message(flag), file=sys.stderr)
            if not sys.stdin.isatty() and not line.startswith("/"):
                code = error.exit_code
    return code


def _lines() -> Iterator[str]:
    """The lines that are typed, or come from a pipe, without blank ones."""
    with suppress(ImportError):
        import readline  # noqa: F401  # lets `input` edit and recall lines
    if isinstance(sys.stdin, io.TextIOWrapper):  # one line of other bytes is one mistake
        sys.stdin.reconfigure(errors="surrogateescape")
    while True:
        try:
            line = input("\n> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line:
            yield line


def _answered(line: str, talks: list[Talk], options: GenerationOptions) -> None:
    word, _, rest = line.partition(" ")
    if not line.startswith("/"):
        _ask(talks[0], line, options)
    elif word == "/compare":
        if len(talks) < 2 or not rest.strip():
            raise ConfigError(
                "/compare asks two models one question: begin with `toque chat ONE OTHER`, and "
                "type /compare QUESTION."
            )
        for talk in talks:
            print(f"[{talk.name}]")
            _ask(talk, rest.strip(), options)
    elif word == "/save":
        if not rest.strip():
            raise ConfigError("Name the file: /save talk.jsonl.")
        print(f"saved to {talks[0].save(rest.strip())}")
    elif word in ("/undo", "/new"):
        for talk in talks:
            said = sum(turn["role"] != "system" for turn in talk.turns)
            gone = min(2, said) if word == "/undo" else said
            talk.turns = talk.turns[: len(talk.turns) - gone]
    elif word == "/help":
        print(_HELP)
    else:
        raise ConfigError(f"{word} is not known. {_HELP}")


def _ask(talk: Talk, question: str, options: GenerationOptions) -> None:
    notes = list[str]()  # which stand below the answer
    talk.ask(
        question,
        options,
        on_text=lambda piece: print(for_reader(piece), end="", flush=True),
        notice=notes.append,
    )
    print(flush=True)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
