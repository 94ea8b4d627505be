"""A conversation with a model: its history, asked by the model's own chat template."""

from __future__ import annotations

import json
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
from toque.workflows.asking import (
    in_trained_form,
    model_to_open,
    refuse_no_text,
    template_asked_by,
)
from toque.workflows.results import Model

if TYPE_CHECKING:
    from toque.workflows.inference.open_model import OpenedModel

SINGLE = "this model was trained on single requests: it reads each question without those before it"
FORGOTTEN = "the conversation is longer than the model reads; its oldest question is left out"
ANSWER_SHARE: Final = 4
"""One in so many positions is kept for an answer that may be longer: what was said goes first."""


@dataclass
class Talk:
    """A conversation with one model; `opened` makes one."""

    name: str
    opened: OpenedModel
    template: ChatTemplate | None  # None: each question alone, in the form of the training
    turns: list[dict[str, str]] = field(default_factory=list)
    """The whole conversation, for `save`."""
    n_left_out: int = 0
    """Oldest turns that the model reads no more."""

    def ask(
        self,
        question: str,
        options: GenerationOptions,
        *,
        on_text: Callable[[str], object],
        notice: Callable[[str], object] = lambda _: None,
    ) -> str:
        """The answer, which joins the history with its question; `on_text` hears each piece.

        `notice` hears what was left out of the history, and that an answer was cut by its length.
        Interrupted (KeyboardInterrupt), the answer is what was written until then.

        Raises:
            ConfigError: the question alone is longer than the model reads, or is no text.
            DataError: the chat template refuses the conversation.
        """
        from toque.models.generation.engine import generate

        refuse_no_text(question, "The question")
        model, codec = self.opened.model, self.opened.codec
        asked = [*self.turns, {"role": "user", "content": question}]
        options = self.opened.provenance.completed(options)
        prompt = self.prompt_ids(asked, longest=options.max_new_tokens or 1, notice=notice)
        stream, pieces = TextStream(codec), list[str]()

        def tell(_: int, token: int | None) -> None:
            piece = stream.rest() if token is None else stream.feed(token)
            pieces.append(piece)
            on_text(piece)

        try:
            [ids] = generate(
                model, [prompt], options, eos_id=codec.end_ids, pad_id=codec.pad_id, on_token=tell
            )
            if said := self._cut_in_words(len(prompt), len(ids), options):
                notice(said)
        except KeyboardInterrupt:
            tell(0, None)
        answer = "".join(pieces)
        self.turns = [*asked, {"role": "assistant", "content": answer}]
        return answer

    def _cut_in_words(self, n_prompt: int, n_answer: int, options: GenerationOptions) -> str:
        """A sentence about an answer that ended at its longest length; "" for one that is whole."""
        most = self._positions
        if n_answer == options.max_new_tokens:
            return f"the answer was cut at {n_answer} tokens, the longest that was asked for"
        if most is not None and n_prompt + n_answer > most:
            return (
                f"the answer was cut at {n_answer} tokens, where the {most} that the model reads "
                f"and writes end: {n_prompt} are the question and what was said before"
            )
        return ""

    @property
    def _positions(self) -> int | None:
        """Tokens of the longest conversation with its answer; None without a limit."""
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
        """Ids that ask to answer the last of `turns`.

        The oldest are left out, also from later prompts, where they leave no room for an answer of
        the `longest` length, or of a share of the positions where that is less.
        """
        if self.template is None:
            record = self.opened.provenance
            return self.opened.prompt_ids(in_trained_form(turns[-1]["content"], record))
        most = self._positions
        n_left_out = self.n_left_out
        read = _without_oldest(turns, n_left_out)
        if not read:  # a new conversation, or one of which more was taken back
            read, n_left_out = turns, 0
        ids = self.template.ids(read).result()

        # The last token of an answer is never read back, so it needs no position.
        answer = 0 if most is None else min(longest, most // ANSWER_SHARE) - 1
        while most is not None and len(ids) + answer > most and (later := _without_oldest(read, 2)):
            notice(FORGOTTEN)
            read = later
            n_left_out += 2
            ids = self.template.ids(read).result()
        if most is None or len(ids) + answer <= most:  # a question that is too long is refused
            self.n_left_out = n_left_out
        return ids

    def save(self, file: str | Path) -> Path:
        """Write the whole conversation as a line of JSON, which `data.sources` reads.

        The file that was written; it appears at once, and never in the place of another.

        Raises:
            ConfigError: there is nothing to save, or the file is there or cannot be written.
        """
        if not any(turn["role"] == "assistant" for turn in self.turns):
            raise ConfigError("There is no answer to save yet.")
        line = json.dumps({"messages": self.turns}, ensure_ascii=False) + "\n"
        path = named_path(file)
        try:
            atomic_write(path, line.encode("utf-8", "replace"), new=True)
        except FileExistsError as error:
            raise ConfigError(f"{path} is there already. Name another file.") from error
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from error
        return path


def _without_oldest(turns: list[dict[str, str]], n: int) -> list[dict[str, str]]:
    """The turns without the `n` oldest after a system text; [] where no question is left."""
    system = turns[:1] if turns[0]["role"] == "system" else []
    rest = turns[len(system) + n :]
    return [*system, *rest] if rest else []


def opened(
    run_or_model: Model, *, system: str | None, device: str, reporter: Reporter = SILENT
) -> Talk:
    """A conversation with a run's model, or any other, that begins with a `system` text.

    Raises:
        ConfigError: a system text for a model that reads none, or no such device.
        CheckpointError: a run without a checkpoint.
    """
    folder = model_to_open(run_or_model)
    refuse_no_text(system or "", argument("system"))
    with reporter.working(f"reading {folder}"):
        from toque.workflows.inference.open_model import open_model

        model = open_model(folder, device=device, reporter=reporter)
    record = model.provenance
    template = template_asked_by(model.codec, record)
    if record.form == "gaps":
        raise ConfigError(f"{folder} was trained to fill gaps in texts and answers nothing yet.")
    if template is None and system is not None:
        raise ConfigError(f"A system text cannot be given: {SINGLE}.")
    if template is None:
        reporter.notice(f"note: {run_or_model}: {SINGLE}")
    talk = Talk(str(run_or_model), model, template)
    if system is not None:
        talk.turns.append({"role": "system", "content": system})
        try:  # some templates know no system text
            talk.prompt_ids([*talk.turns, {"role": "user", "content": "?"}])
        except DataError as error:
            raise ConfigError(f"A system text cannot be given: {error}") from error
    return talk
