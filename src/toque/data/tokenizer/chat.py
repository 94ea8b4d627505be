"""Chat template: the turns of a conversation as the ids that a chat model was trained on.

The template comes with the model and may be anyone's: transformers renders it in jinja2's sandbox,
where it reaches nothing but the turns and the special tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer

from toque.data.tokenizer.codec import Codec
from toque.data.tokenizer.folder import tokenizer_faults
from toque.errors import DataError


class ChatTemplate:
    """Conversations of one model.

    Args:
        template: Jinja, as transformers takes it.
        codec: of the model.
    """

    def __init__(self, template: str, codec: Codec) -> None:
        self._template, self._codec = template, codec
        # The codec takes "<|im_end|>" in a text for text; what a template writes is the token.
        self._tokenizer = Tokenizer.from_str(codec.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def ids(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        """The prompt after which the model answers the last turn.

        Args:
            turns: each with its `role` and `content`.

        Raises:
            DataError: the template refuses them, or fails.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        specials: dict[str, Any] = dict(self._codec.special_tokens)
        try:
            rendered: Any = render_jinja_template(
                [[dict(turn) for turn in turns]],
                chat_template=self._template,
                add_generation_prompt=True,
                **specials,
            )
        except Exception as error:  # whatever a stranger's template does
            raise DataError(
                f"The chat template of {self._codec.name} does not take these messages: "
                f"{' '.join(str(error).split())[:300]}."
            ) from error
        with tokenizer_faults(self._codec.name):
            return list(self._tokenizer.encode(rendered[0][0], add_special_tokens=False).ids)


def chat_template_of(codec: Codec) -> ChatTemplate | None:
    """The template that came with a tokenizer; of several, the one named default."""
    found = codec.settings.get("chat_template")
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        found = named.get("default")
    return ChatTemplate(found, codec) if isinstance(found, str) else None
