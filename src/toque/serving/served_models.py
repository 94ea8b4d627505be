"""Served model: weights, tokenizer and form under the name that requests ask for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from transformers import PreTrainedModel

from toque.data.tokenizer.chat import ChatTemplate
from toque.data.tokenizer.codec import Codec, FamilyKind, prompt_ids
from toque.models.families import family_of, max_positions
from toque.models.loading.provenance import Provenance, form_named
from toque.serving.server import RequestError

UNLIMITED_TOKENS: Final = 2048
"""Longest prompt, and longest answer, of a model whose positions have no end (T5)."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One name that can be asked: a model, or one adapter on a base that several share."""

    name: str
    model: PreTrainedModel
    codec: Codec
    record: Provenance
    asked: Callable[[str], str]
    """Function from what a person types to the prompt that the model was trained on."""
    adapter: str | None = None
    """Name of the adapter inside `model`; None for the model alone."""
    base: str | None = None
    """Served name of the model that the adapter lies on."""
    chat: ChatTemplate | None = None
    """Template of whole conversations, for a model that was trained to converse."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970 when it was loaded."""

    @property
    def description(self) -> dict[str, object]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "toque",
            "parent": self.base,
            "max_model_len": self.context_tokens,
        }

    @property
    def is_encoder_decoder(self) -> bool:
        """True where prompts are read on a side of their own."""
        return family_of(self.model.config).is_encoder_decoder

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest prompt; of prompt and answer together where one row holds both."""
        return max_positions(self.model.config) or UNLIMITED_TOKENS

    @property
    def columns(self) -> int:
        """Columns of the KV cache that the longest row takes."""
        return self.context_tokens + (0 if self.is_encoder_decoder else 1)

    def prompt_ids(self, prompt: str) -> list[int]:
        """A prompt as the model reads it."""
        kind: FamilyKind = "encoder-decoder" if self.is_encoder_decoder else "decoder"
        return prompt_ids(self.codec, prompt, kind, form_named(self.record.form))

    def most_tokens(self, prompt: Sequence[int], most: int | None, *, param: str) -> int:
        """Tokens of the longest answer to a prompt, as far as the positions go.

        Args:
            prompt: ids.
            most: the longest that was asked for; None for the length the model was trained on.
            param: the request's field that holds the prompt.

        Raises:
            RequestError: the prompt is empty, too long, or holds ids that are not the model's.
        """
        limit, vocabulary = self.context_tokens, self.model.config.vocab_size
        if not prompt:
            raise RequestError(
                400, f"{param} holds no tokens, and a model needs one to begin from.", param=param
            )
        if not all(0 <= token < vocabulary for token in prompt):
            raise RequestError(
                400,
                f"{param} holds ids that are none of the model's: allowed are 0 to "
                f"{vocabulary - 1:,}.",
                param=param,
            )
        if len(prompt) > limit:
            raise RequestError(
                400,
                f"This model's maximum context length is {limit:,} tokens, and the prompt has "
                f"{len(prompt):,}. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )
        wanted = most or self.record.max_new_tokens
        # The last new token is never read back, so it needs no position.
        return min(wanted, limit if self.is_encoder_decoder else limit - len(prompt) + 1)


class ServedModels(dict[str, ServedModel]):
    """The models of a server by name, in the order they were given.

    Args:
        models: with different names.
    """

    def __init__(self, models: Iterable[ServedModel]) -> None:
        super().__init__((model.name, model) for model in models)

    def named(self, name: str) -> ServedModel:
        """The model of a request.

        Raises:
            RequestError: 404, no model has this name.
        """
        if name not in self:
            raise RequestError(
                404,
                f"The model {name[:100]!r} does not exist here. There are: {', '.join(self)}.",
                param="model",
                code="model_not_found",
            )
        return self[name]
