"""Sessions of onnxruntime on the CPU, and steps of a decoder with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""Arrays by the name of an input or output."""


def open_session(graph: bytes, *, threads: int | None = None) -> Any:
    """Open a serialised graph.

    Args:
        graph: The graph.
        threads: Number of threads, which wait without computing in a loop. None means a thread per
            core, which do.
    """
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(
        graph, options, providers=["CPUExecutionProvider"]
    )


class DecoderSession:
    """Session of a decoder with a cache of keys and values."""

    def __init__(self, graph: bytes, *, threads: int | None = None) -> None:
        """Open a serialised graph; see `open_session`."""
        self._session = open_session(graph, threads=threads)
        self._outputs = [output.name for output in self._session.get_outputs()]

    def empty_cache(self) -> Arrays:
        """Return the inputs of the first step of one text."""
        return {
            item.name: np.zeros((1, item.shape[1], 0, item.shape[3]), np.float32)
            for item in self._session.get_inputs()
            if item.name.startswith("past_key_values")
        }

    def step(self, inputs: Mapping[str, NDArray[Any]]) -> tuple[NDArray[Any], Arrays]:
        """Compute a step.

        Returns:
            Logits [batch, tokens, vocabulary], and the cache as inputs of the next step.
        """
        values = dict(zip(self._outputs, self._session.run(None, inputs), strict=True))
        logits = values.pop("logits")
        cache = {
            name.replace("present", "past_key_values"): value
            for name, value in values.items()
        }
        return logits, cache
