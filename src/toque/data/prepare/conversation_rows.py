"""Rows of conversations: the text of a chat template, of which the answers alone are learnt.

prompt    all that stands before the first answer
target    the first answer to the last; what stands between them is read and not learnt

A row is one text: the longest prompt and the longest target bound it together, however it divides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from toque.data.prepare.store_plan import PrepareSettings
from toque.data.tokenizer.chat import CLOCK, Conversation, chat_template_of, dated, template_named
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, DataError
from toque.sources.conversations import UNWRITTEN
from toque.sources.records import Turn, count_named

Ids = NDArray[np.uint32]
TOKENS: Final = "tokens of conversations"
LEARNT: Final = "tokens of conversations that are answers, and learnt"
UNENDED: Final = "answers that the chat template does not end"
MOVED: Final = "answers whose prompt has other tokens than when the model is asked"
DATED: Final = "conversations whose chat template reads the clock, which is {} (data.chat_date)"
CUT_ANSWERS: Final = "answers cut at the longest conversation"
CUT_TURNS: Final = "turns of conversations left out behind the longest conversation"


@dataclass(frozen=True)
class ConversationRow:
    """Both sides of a row."""

    prompt: Ids
    target: Ids
    spans: list[int]
    """Lengths of what is learnt of the target and of what is not, in turns; [] where it is all."""
    lost: int
    """Tokens behind it that the limits took."""


class ConversationRows:
    """Makes the rows of conversations by the template of a codec."""

    def __init__(self, codec: Codec, settings: PrepareSettings) -> None:
        template = chat_template_of(codec)
        assert template is not None, "`with_template` comes first"
        self._template, self._codec, self._settings = template, codec, settings
        self._reads_clock = CLOCK in codec.settings["chat_template"]

    def row(
        self, turns: Sequence[Turn], notes: Counter[str], *, cut: bool = True
    ) -> ConversationRow | str:
        """The row of a conversation, `cut` to the limits, or the reason for having none.

        Raises:
            DataError: it is too long and must not be cut, or its last answer has no end.
        """
        last = self._settings.loss_on == "last_answer"
        found = self._template.conversation(turns, last=last)
        if isinstance(found, str):
            return found
        if found.unended and found.ids[found.answers[-1][1] - 1] != self._codec.eos_id:
            raise DataError(
                f"The chat template of {self._codec.name} does not end an answer with the "
                f"tokenizer's end token ({self._codec.piece(self._codec.eos_id)!r}), so that a "
                "model would never stop. Name another data.chat_template: plain, chatml, or a file "
                "that writes {{ eos_token }} behind each answer."
            )
        notes[UNENDED] += found.unended
        notes[MOVED] += found.moved
        if self._reads_clock:
            notes[DATED.format(self._settings.chat_date)] += 1
        for name in found.unwritten:
            count_named(notes, UNWRITTEN, name)
        answers = self._within(found, notes) if cut else found.answers
        if isinstance(answers, str):
            return answers
        first, end = answers[0][0], answers[-1][1]
        lost = found.answers[-1][1] - end
        row = ConversationRow(found.ids[:first], found.ids[first:end], _spans(answers), lost)
        notes[TOKENS] += end
        notes[LEARNT] += sum(b - a for a, b in answers)
        return row

    def _within(self, found: Conversation, notes: Counter[str]) -> list[tuple[int, int]] | str:
        """The answers that the limits leave, or the reason for leaving the conversation out."""
        most, answers = sum(self._settings.limits), found.answers
        if answers[-1][1] <= most:
            return answers
        how = self._settings.on_overlong
        if how == "error":
            raise DataError(
                f"A conversation has more than {most} tokens, which data.max_prompt_tokens and "
                "data.max_target_tokens are together, and data.on_overlong is error. Raise one of "
                "them, or let data.on_overlong be truncate or drop."
            )
        if how == "drop":
            return f"conversation over {most} tokens"
        whole = [answer for answer in answers if answer[1] <= most]
        if whole:
            notes[CUT_TURNS] += 2 * (len(answers) - len(whole))
            return whole
        start = answers[0][0]
        if start >= most:
            return f"conversation without an answer in its first {most} tokens"
        notes[CUT_ANSWERS] += 1
        return [(start, most)]


def _spans(answers: Sequence[tuple[int, int]]) -> list[int]:
    if len(answers) == 1:
        return []
    places = [place for answer in answers for place in answer]
    return [b - a for a, b in pairwise(places)]


def with_template(codec: Codec, settings: PrepareSettings) -> None:
    """Let a codec write conversations by the template that the settings name.

    Raises:
        ConfigError: an encoder-decoder, or a vocabulary without line breaks.
    """
    if settings.family_kind != "decoder" or codec.newline_id is not None:
        raise ConfigError(
            "A source of data.sources holds conversations, which only a decoder-only model with a "
            f"tokenizer of whole texts is trained on; {codec.name} cuts them at line breaks, or "
            "the model has an encoder. Give this source columns: {prompt: ..., target: ...} of "
            "texts instead, or take a GPT-2, NeoX or Llama."
        )
    template = dated(template_named(settings.chat_template, codec.settings), settings.chat_date)
    codec.settings = {**codec.settings, "chat_template": template}
    if (made := chat_template_of(codec)) is not None:
        made.end_as_written()
