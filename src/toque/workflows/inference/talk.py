"""Conversation with a model, in the model's chat template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from toque.data.tokenizer.chat import ChatTemplate
from toque.data.tokenizer.codec import TextStream
from toque.errors import ConfigError, DataError, argument
from toque.models.generation.options import GenerationOptions
from toque.reporter import SILENT, Reporter
from toque.storage.atomic import atomic_write
from toque.user_paths import named_path
from toque.workflows.results import Model
from toque.workflows.trained_model.folders import check_model
from toque.workflows.trained_model.model_codec import find_chat_template
from toque.workflows.trained_model.prompt_format import rewrite_prompt
from toque.workflows.trained_model.prompt_reader import check_utf8

if TYPE_CHECKING:
    from toque.workflows.inference.open_model import OpenedModel

NO_CONVERSATION: Final = (
    "this model was trained on single requests, so it ignores earlier questions"
)
FORGOTTEN: Final = (
    "the conversation is longer than the model's context, so its oldest question "
    "is left out"
)
ANSWER_SHARE: Final = 4
"""Older turns leave at least 1 / ANSWER_SHARE of the context length free for the answer."""


@dataclass
class Talk:
    """A conversation with one model; see `open_talk`."""

    name: str
    opened: OpenedModel
    template: ChatTemplate | None
    """Chat template; None if the model reads each question alone, in its training format."""
    turns: list[dict[str, str]] = field(default_factory=list)
    """The entire conversation, for `save`."""
    n_left_out: int = 0
    """Number of oldest turns that the model no longer reads."""

    def ask(
        self,
        question: str,
        options: GenerationOptions,
        *,
        on_text: Callable[[str], object],
        notice: Callable[[str], object] = lambda _: None,
    ) -> str:
        """Answer a question, and add both to the conversation.

        After a KeyboardInterrupt, the answer is the text so far.

        Args:
            question: Next question.
            options: Generation options.
            on_text: Receives each piece of the answer.
            notice: Receives a message if old turns are left out or the answer is cut.

        Raises:
            ConfigError: The question alone is longer than the model's context, or is not UTF-8.
            DataError: The chat template refuses the conversation.
        """
        from toque.models.generation.engine import generate

        check_utf8(question, "The question")
        codec = self.opened.codec
        options = self.opened.provenance.completed(options)
        turns = [*self.turns, {"role": "user", "content": question}]
        max_new_tokens = options.max_new_tokens or 1
        prompt = self.prompt_ids(turns, longest=max_new_tokens, notice=notice)
        stream = TextStream(codec)
        pieces: list[str] = []

        def add_piece(_: int, token: int | None) -> None:
            piece = stream.flush() if token is None else stream.feed(token)
            pieces.append(piece)
            on_text(piece)

        try:
            [ids] = generate(
                self.opened.model,
                [prompt],
                options,
                eos_id=codec.end_ids,
                pad_id=codec.pad_id,
                on_token=add_piece,
            )
            if message := self._explain_cut(len(prompt), len(ids), options):
                notice(message)
        except KeyboardInterrupt:
            add_piece(0, None)  # the rest of an incomplete character
        answer = "".join(pieces)
        self.turns = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def _explain_cut(
        self, n_prompt: int, n_answer: int, options: GenerationOptions
    ) -> str:
        """Explain why an answer was cut, or return "" for a complete answer."""
        context = self._context_length
        if n_answer == options.max_new_tokens:
            return (
                f"the answer was cut at {n_answer} tokens, the longest allowed answer"
            )
        if context is not None and n_prompt + n_answer > context:
            return (
                f"the answer was cut at {n_answer} tokens, because the model's context of "
                f"{context} tokens is full: the question and the earlier turns take {n_prompt}"
            )
        return ""

    @property
    def _context_length(self) -> int | None:
        """Maximum tokens of a conversation and its answer; None without a limit."""
        from toque.models.config_values import max_positions

        config = self.opened.model.config
        return None if config.is_encoder_decoder else max_positions(config)

    def prompt_ids(
        self,
        turns: list[dict[str, str]],
        *,
        longest: int = 1,
        notice: Callable[[str], object] = lambda _: None,
    ) -> list[int]:
        """Encode turns as a prompt for an answer to the last turn.

        If too little context is left for an answer, leave out the oldest turns, in this prompt and
        in all later ones. An answer needs `longest` tokens, but at most 1 / ANSWER_SHARE of the
        context.
        """
        if self.template is None:
            record = self.opened.provenance
            return self.opened.prompt_ids(rewrite_prompt(turns[-1]["content"], record))

        n_left_out = self.n_left_out
        visible = _drop_oldest(turns, n_left_out)
        if not visible:  # the conversation is new or was shortened
            visible = turns
            n_left_out = 0
        ids = self.template.ids(visible).result()
        max_prompt = math.inf
        if (context := self._context_length) is not None:
            # The model never reads the last token of an answer, so it needs no position.
            max_prompt = context - min(longest, context // ANSWER_SHARE) + 1
        while len(ids) > max_prompt and (later := _drop_oldest(visible, 2)):
            notice(FORGOTTEN)
            visible = later
            n_left_out += 2
            ids = self.template.ids(visible).result()
        if len(ids) <= max_prompt:  # otherwise the engine refuses the question
            self.n_left_out = n_left_out
        return ids

    def undo(self) -> None:
        """Remove the last question and its answer from the conversation."""
        n_retained = max(self._n_system, len(self.turns) - 2)
        self.turns = self.turns[:n_retained]

    def restart(self) -> None:
        """Remove all turns from the conversation, except the system text."""
        self.turns = self.turns[: self._n_system]

    @property
    def _n_system(self) -> int:
        """Number of system texts: 0 or 1."""
        return sum(turn["role"] == "system" for turn in self.turns)

    def save(self, file: str | Path) -> Path:
        """Write the conversation as a line of JSON, which `data.sources` can read.

        The file is written atomically, and an existing file is never replaced.

        Returns:
            The path of the file.

        Raises:
            ConfigError: The conversation has no answer, or the file exists or is not writable.
        """
        if not any(turn["role"] == "assistant" for turn in self.turns):
            raise ConfigError(
                "The conversation has no answer to save yet. Ask a question first."
            )
        line = json.dumps({"messages": self.turns}, ensure_ascii=False) + "\n"
        path = named_path(file)
        try:
            atomic_write(path, line.encode("utf-8", "replace"), new=True)
        except FileExistsError as error:
            raise ConfigError(f"{path} already exists. Name another file.") from error
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be written: {error.strerror}. Name another file."
            ) from error
        return path


def _drop_oldest(turns: list[dict[str, str]], n: int) -> list[dict[str, str]]:
    """Drop the `n` oldest turns after a system text. Return [] if no question remains."""
    n_system = 1 if turns[0]["role"] == "system" else 0
    remaining = turns[n_system + n :]
    return [*turns[:n_system], *remaining] if remaining else []


def open_talk(
    run_or_model: Model, *, system: str | None, device: str, reporter: Reporter = SILENT
) -> Talk:
    """Open a model, and begin a conversation with an optional system text.

    Raises:
        ConfigError: The model does not support a system text or questions, or the device does not
            exist.
        CheckpointError: The run has no checkpoint.
    """
    folder = check_model(run_or_model)
    check_utf8(system or "", argument("system"))
    with reporter.working(f"reading {folder}"):
        from toque.workflows.inference.open_model import open_model

        model = open_model(folder, device=device, reporter=reporter)
    record = model.provenance
    if record.form == "gaps":
        raise ConfigError(
            f"{folder} was trained to fill gaps in texts and cannot answer questions. Name a model "
            "that was trained on prompts and answers, or on conversations."
        )
    template = find_chat_template(model.codec, record)
    if template is None:
        if system is not None:
            raise ConfigError(
                f"{argument('system')} cannot be used: {NO_CONVERSATION}."
            )
        reporter.notice(f"note: {run_or_model}: {NO_CONVERSATION}")

    talk = Talk(str(run_or_model), model, template)
    if system is not None:
        talk.turns.append({"role": "system", "content": system})
        try:  # some templates refuse a system text
            talk.prompt_ids([*talk.turns, {"role": "user", "content": "?"}])
        except DataError as error:
            raise ConfigError(
                f"{argument('system')} cannot be used: {error}"
            ) from error
    return talk
