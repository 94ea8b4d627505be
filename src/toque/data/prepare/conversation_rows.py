"""Rows of conversations in the text of a chat template.

The prompt of a row is the text before the first answer. The target is the text from the first
answer to the last, but only answers have a loss. The sum of the prompt and target limits applies to
the entire row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from toque.data.prepare.store_plan import PrepareSettings
from toque.data.prepare.token_rows import Ids
from toque.data.tokenizer.chat import (
    CLOCK,
    Conversation,
    chat_template_of,
    find_template,
    fix_date,
)
from toque.data.tokenizer.codec import Codec
from toque.errors import ConfigError, DataError
from toque.sources.conversations import UNWRITTEN
from toque.sources.records import Turn, count_field_note

TOKENS = "tokens of conversations"
LEARNT = "tokens of conversations in answers, which are learnt"
UNENDED = "answers that the chat template does not end"
MOVED = "answers with a prompt that has other tokens when the model is asked"
DATED = "conversations with {} as the date of the chat template (data.chat_date)"
CUT_ANSWERS = "answers cut at the limit of conversations"
CUT_TURNS = "turns of conversations left out at the limit of conversations"


@dataclass(frozen=True)
class ConversationRow:
    """Row of a conversation."""

    prompt: Ids
    target: Ids
    spans: list[int]
    """Lengths of the target's spans, alternately with and without loss. [] if all has a loss.
    """
    lost: int
    """Number of tokens cut from the end by the limits."""


class ConversationRows:
    """Encoder of conversations by the chat template of a codec."""

    def __init__(self, codec: Codec, settings: PrepareSettings) -> None:
        template = chat_template_of(codec)
        assert template is not None, "`set_chat_template` comes first"
        self._template = template
        self._codec = codec
        self._settings = settings
        self._reads_clock = CLOCK in codec.settings["chat_template"]

    def encode(
        self, turns: Sequence[Turn], notes: Counter[str], *, cut: bool = True
    ) -> ConversationRow | str:
        """Encode a conversation, and return its row or the reason for dropping it.

        Args:
            turns: Turns of the conversation.
            notes: Counts for the report, which this call increases.
            cut: Whether to apply the limits.

        Raises:
            DataError: The conversation is too long and `on_overlong` is error, or its last answer
                has no end.
        """
        last = self._settings.loss_on == "last_answer"
        conversation = self._template.conversation(turns, last=last)
        if isinstance(conversation, str):
            return conversation
        self._refuse_unended(conversation)
        self._note_template(conversation, notes)

        answers = conversation.answers
        if cut:
            limited = self._limit_answers(conversation, notes)
            if isinstance(limited, str):
                return limited
            answers = limited
        start = answers[0][0]
        end = answers[-1][1]
        notes[TOKENS] += end
        notes[LEARNT] += sum(stop - first for first, stop in answers)
        return ConversationRow(
            prompt=conversation.ids[:start],
            target=conversation.ids[start:end],
            spans=_spans(answers),
            lost=conversation.answers[-1][1] - end,
        )

    def _refuse_unended(self, conversation: Conversation) -> None:
        """Refuse a conversation if its last answer has no end."""
        codec = self._codec
        last_id = conversation.ids[conversation.answers[-1][1] - 1]
        if conversation.unended and last_id != codec.eos_id:
            raise DataError(
                f"The chat template of {codec.name} does not end an answer with the tokenizer's "
                f"end token ({codec.piece(codec.eos_id)!r}), so a model would never stop. Set "
                "data.chat_template to plain, chatml, or a file that writes {{ eos_token }} after "
                "each answer."
            )

    def _note_template(self, conversation: Conversation, notes: Counter[str]) -> None:
        """Count answers without an end, changed prompts, fixed dates and omitted fields."""
        notes[UNENDED] += conversation.unended
        notes[MOVED] += conversation.moved
        if self._reads_clock:
            notes[DATED.format(self._settings.chat_date)] += 1
        for name in conversation.unwritten:
            count_field_note(notes, UNWRITTEN, name)

    def _limit_answers(
        self, conversation: Conversation, notes: Counter[str]
    ) -> list[tuple[int, int]] | str:
        """Select the answers within the limits, or return the reason for dropping all."""
        limit = sum(self._settings.limits)
        answers = conversation.answers
        if answers[-1][1] <= limit:
            return answers
        on_overlong = self._settings.on_overlong
        if on_overlong == "error":
            raise DataError(
                f"A conversation has more than {limit} tokens, the sum of data.max_prompt_tokens "
                "and data.max_target_tokens, and data.on_overlong is error. Raise one of the "
                "limits, or set data.on_overlong to truncate or drop."
            )
        if on_overlong == "drop":
            return f"conversation over {limit} tokens"
        complete = [answer for answer in answers if answer[1] <= limit]
        if complete:
            # Each answer is dropped together with the question before it.
            notes[CUT_TURNS] += 2 * (len(answers) - len(complete))
            return complete
        start = answers[0][0]
        if start >= limit:
            return f"conversation without an answer in its first {limit} tokens"
        notes[CUT_ANSWERS] += 1
        return [(start, limit)]


def _spans(answers: Sequence[tuple[int, int]]) -> list[int]:
    """Compute the lengths of the answers and of the texts between them, alternating."""
    if len(answers) == 1:
        return []
    return [stop - start for start, stop in pairwise(chain.from_iterable(answers))]


def set_chat_template(codec: Codec, settings: PrepareSettings) -> None:
    """Set the configured chat template in a codec, and its end of an answer.

    Raises:
        ConfigError: The model has an encoder, or the vocabulary has no line breaks.
    """
    if settings.family_kind != "decoder" or codec.newline_id is not None:
        raise ConfigError(
            "A source of data.sources has conversations. They need a decoder-only model and a "
            f"tokenizer with line breaks, unlike {codec.name}. Use a GPT-2, NeoX or Llama model, "
            "or map the source's text fields in its columns: {prompt: ..., target: ...}."
        )
    template = find_template(settings.chat_template, codec.settings)
    template = fix_date(template, settings.chat_date)
    codec.settings = {**codec.settings, "chat_template": template}
    if (chat_template := chat_template_of(codec)) is not None:
        chat_template.set_end_of_codec()
