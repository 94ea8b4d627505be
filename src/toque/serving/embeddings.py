"""Requests for embeddings, and their answers."""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence
from typing import Final, Literal

from starlette.concurrency import run_in_threadpool
from torch import Tensor

from toque.models.generation.kv_cache import prefill_groups
from toque.models.generation.live_rows import Order
from toque.models.generation.options import GenerationOptions
from toque.serving.answer import Answer
from toque.serving.batcher import Batcher, ServedModel
from toque.serving.gate import Limits
from toque.serving.protocol import (
    Prompts,
    RequestPart,
    Unused,
    Usage,
    tokenize_prompts,
)
from toque.serving.request_errors import RequestError, internal_error

_log = logging.getLogger("toque.serving")
_MAX_TEXTS: Final = 2048
"""Maximum number of texts per request, as in OpenAI's API."""

_SEND_TEXTS: Final = (
    " Without the model's tokenizer, send texts. LangChain sends texts with "
    "check_embedding_ctx_length=False; its default is ids of OpenAI's tokenizer."
)


class EmbeddingRequest(RequestPart):
    """POST /v1/embeddings: texts without a template."""

    model: str
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None  # None means float
    dimensions: Unused = None
    user: str | None = None

    async def texts(self, served: ServedModel) -> list[list[int]]:
        """Tokenize the texts.

        Raises:
            RequestError: There are too many texts, a text is empty or too long, or an id is not
                in the vocabulary.
        """
        if self._is_empty:
            raise RequestError(
                400,
                "input has an empty text. Leave it out.",
                param="input",
            )
        texts = await tokenize_prompts(served, self.input)
        if len(texts) > _MAX_TEXTS:
            raise RequestError(
                400,
                f"input has {len(texts):,} texts. The limit is {_MAX_TEXTS:,}. Send several "
                "requests.",
                param="input",
            )
        for number, text in enumerate(texts):
            param = "input" if len(texts) == 1 else f"input[{number}]"
            served.check_prompt(text, param, advice=_SEND_TEXTS)
        return texts

    @property
    def _is_empty(self) -> bool:
        """True if a text is empty. Its tokens would only be special tokens."""
        texts = [self.input] if isinstance(self.input, str) else self.input
        return "" in texts


class EmbeddingReply(Answer):
    """Answer with the embeddings of texts.

    The batch reads a group of texts at a time. Other requests continue between groups, and the
    reading ends when the client disconnects.
    """

    def __init__(
        self,
        batcher: Batcher,
        served: ServedModel,
        texts: Sequence[Sequence[int]],
        request: EmbeddingRequest,
        limits: Limits,
    ) -> None:
        super().__init__(batcher, served, limits)
        self._texts = texts
        self._request = request

    async def generate(self) -> None:
        """Compute and send the embeddings."""
        n_tokens = sum(map(len, self._texts))
        # The request takes one place in the queue.
        order = Order(self._texts[0], 0, GenerationOptions())
        with self._batcher.ticket(self._served, [order]):
            metrics = self._batcher.metrics
            metrics.prompt_tokens.labels(self._served.name).inc(n_tokens)
            vectors = await self._embed()
        usage = Usage(n_tokens, 0)
        await self.send_json(
            {
                "object": "list",
                "model": self._served.name,
                "data": [
                    {
                        "object": "embedding",
                        "index": index,
                        "embedding": self._encode(vector),
                    }
                    for index, vector in enumerate(vectors)
                ],
                "usage": {
                    "prompt_tokens": usage.prompt_tokens,
                    "total_tokens": usage.total_tokens,
                },
            }
        )

    async def _embed(self) -> list[Tensor]:
        """Compute the embeddings in the order of the texts."""
        texts = self._texts
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))  # less padding
        by_length = [texts[i] for i in order]
        vectors: list[Tensor] = []
        for group in prefill_groups(by_length, self._served.model.device):
            try:
                vectors += await run_in_threadpool(
                    self._batcher.embed, self._served, by_length[group]
                )
            except (RuntimeError, MemoryError) as error:
                _log.exception("embedding with %s failed", self._served.name)
                raise internal_error() from error
        by_index = dict(zip(order, vectors, strict=True))
        return [by_index[i] for i in range(len(texts))]

    def _encode(self, vector: Tensor) -> list[float] | str:
        """Encode a vector as numbers, or as little-endian float32 in base64."""
        if self._request.encoding_format != "base64":
            return vector.tolist()
        return base64.b64encode(vector.cpu().numpy().astype("<f4").tobytes()).decode()
