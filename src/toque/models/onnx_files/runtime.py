"""Greedy generation with onnxruntime, from the files of an export."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toque.models.onnx.session import Arrays, DecoderSession, open_session

ENCODER: Final = "encoder_model.onnx"
T5_DECODER: Final = "decoder_model_merged.onnx"
DECODER: Final = Path("model").with_suffix(".onnx").name
"""Names of the files that transformers.js expects."""


class Token(NamedTuple):
    """A generated token."""

    id: int
    logits: NDArray[np.float32]
    """Logits of the position [vocabulary]."""


class OnnxModel:
    """A model in onnxruntime, on the CPU."""

    def __init__(self, folder: Path, *, start: int | None) -> None:
        """Open the files in `folder`. A T5 starts its texts with the token `start`."""
        self._start = start
        if start is None:
            self._encoder = None
            name = DECODER
        else:
            self._encoder = open_session((folder / ENCODER).read_bytes())
            name = T5_DECODER
        # Bytes, because onnxruntime does not open every name of a file.
        self._decoder = DecoderSession((folder / name).read_bytes())

    def generate(
        self, prompt: Sequence[int], ends: Collection[int], limit: int
    ) -> Iterator[Token]:
        """Yield the most likely tokens after a prompt, at most `limit`, without an end token."""
        constant: Arrays = {}
        ids = np.array([prompt], np.int64)
        if self._encoder is not None:
            mask = np.ones_like(ids)
            (states,) = self._encoder.run(
                None, {"input_ids": ids, "attention_mask": mask}
            )
            constant = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            ids = np.array([[self._start]], np.int64)
        past = self._decoder.empty_cache()
        length = 0
        for n in range(limit):
            if self._encoder is None:
                positions = np.arange(length, length + ids.shape[1])[None]
                length += ids.shape[1]
                constant = {
                    "position_ids": positions,
                    "attention_mask": np.ones((1, length), np.int64),
                }
            else:
                constant["use_cache_branch"] = np.array([n > 0])
            inputs = {"input_ids": ids} | constant | past
            all_logits, past = self._decoder.step(inputs)
            logits = all_logits[0, -1]
            token = int(logits.argmax())
            yield Token(token, logits)
            if token in ends:
                return
            ids = np.array([[token]], np.int64)
