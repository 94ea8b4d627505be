"""Greedy generation with onnxruntime, from the files of an export."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import onnxruntime
from numpy.typing import NDArray

ENCODER: Final = "encoder_model.onnx"
T5_DECODER: Final = "decoder_model_merged.onnx"
DECODER: Final = Path("model").with_suffix(".onnx").name
"""Names of the files that transformers.js and Optimum expect."""
_Arrays = dict[str, NDArray[Any]]


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
            self._decoder = _open(folder / DECODER)
        else:
            self._encoder = _open(folder / ENCODER)
            self._decoder = _open(folder / T5_DECODER)
        self._outputs = [output.name for output in self._decoder.get_outputs()]

    def generate(
        self, prompt: Sequence[int], ends: Collection[int], limit: int
    ) -> Iterator[Token]:
        """Yield the most likely tokens after a prompt, at most `limit`, without an end token."""
        constant: _Arrays = {}
        ids = np.array([prompt], np.int64)
        if self._encoder is not None:
            mask = np.ones_like(ids)
            (states,) = self._encoder.run(
                None, {"input_ids": ids, "attention_mask": mask}
            )
            constant = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
            ids = np.array([[self._start]], np.int64)
        past = self._empty_cache()
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
            logits, past = self._step({"input_ids": ids} | constant | past)
            token = int(logits.argmax())
            yield Token(token, logits)
            if token in ends:
                return
            ids = np.array([[token]], np.int64)

    def _step(
        self, inputs: Mapping[str, NDArray[Any]]
    ) -> tuple[NDArray[np.float32], _Arrays]:
        """Return the logits of the last position, and the cache."""
        values = dict(zip(self._outputs, self._decoder.run(None, inputs), strict=True))
        logits = values.pop("logits")[0, -1]
        cache = {
            name.replace("present", "past_key_values"): v for name, v in values.items()
        }
        return logits, cache

    def _empty_cache(self) -> _Arrays:
        return {
            item.name: np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32)
            for item in self._decoder.get_inputs()
            if item.name.startswith("past_key_values")
        }


def _open(path: Path) -> Any:
    # Its bytes, because onnxruntime does not open every name of a file.
    content = path.read_bytes()
    return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
