"""Messages of an encoded prompt: the inverse of a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from toque.data.tokenizer.chat import ChatTemplate
from toque.data.tokenizer.template_process import Message
from toque.errors import DataError

_SYSTEM: Message = {"role": "system", "content": "Weigh 17 turnips."}
_TURNS: tuple[Message, ...] = (
    {"role": "user", "content": "Is rice rinsed?"},
    {"role": "assistant", "content": "Yes, 3 times."},
    {"role": "user", "content": "And barley?"},
)
"""Messages with texts that do not occur in templates."""


@dataclass(frozen=True)
class _Marks:
    """Texts that a template writes around the messages of a conversation."""

    beginning: str
    after_system: str
    """Text between the system message and the first question. "" without a system message."""
    before_answer: str
    after_answer: str
    end: str

    @classmethod
    def of_template(cls, template: ChatTemplate, *, has_system: bool) -> Self | None:
        """Find the marks of a template. None if it changes or refuses messages."""
        turns = [_SYSTEM, *_TURNS] if has_system else [*_TURNS]
        try:
            text = template.prompt_text(turns)
        except DataError:
            return None
        marks: list[str] = []
        for turn in turns:
            mark, _, text = text.partition(turn["content"])
            marks.append(mark)
        if not has_system:
            marks.insert(1, "")
        beginning, after_system, before_answer, after_answer = marks
        if not before_answer or not after_answer or has_system > bool(after_system):
            return None
        return cls(beginning, after_system, before_answer, after_answer, end=text)

    def split(self, text: str) -> list[Message] | None:
        """Split the text of a prompt into messages. None if it does not have these marks."""
        has_ends = text.startswith(self.beginning) and text.endswith(self.end)
        if not has_ends or len(text) < len(self.beginning) + len(self.end):
            return None
        rest = text[len(self.beginning) : len(text) - len(self.end)]
        messages: list[Message] = []
        if self.after_system:
            system, mark, rest = rest.partition(self.after_system)
            if not mark:
                return None
            messages.append({"role": "system", "content": system})

        mark = self.after_answer
        while mark:
            question, mark, rest = rest.partition(self.before_answer)
            messages.append({"role": "user", "content": question})
            if mark:
                answer, mark, rest = rest.partition(self.after_answer)
                messages.append({"role": "assistant", "content": answer})
        return messages if messages[-1]["role"] == "user" else None


class MessageReader:
    """Reader of the messages in the prompts of a chat template."""

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        candidates = [
            _Marks.of_template(template, has_system=has_system)
            for has_system in (True, False)
        ]
        self._marks = [marks for marks in candidates if marks is not None]

    def read(self, ids: Sequence[int]) -> list[Message] | None:
        """Find messages for which the template writes exactly these ids. None without such ones."""
        text = self._template.decode(ids)
        for marks in self._marks:
            messages = marks.split(text)
            if messages is None:
                continue
            try:
                encoded = self._template.ids(messages).result()
            except DataError:
                continue
            if encoded == [*ids]:
                return messages
        return None
