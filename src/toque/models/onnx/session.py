"""Sessions of onnxruntime on the CPU, and steps of a decoder with a cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
"""Arrays by the name of an input or output."""


def open_session(
    graph: bytes,
    *,
    threads: int | None = None,
    weights: Mapping[str, NDArray[Any]] | None = None,
) -> Any:
    """Open a serialised graph.

    Args:
        graph: The graph.
        threads: Number of threads. They wait in a loop during a run only. None means a thread per
            core, which also wait in a loop after a run.
        weights: Weights that are not in the graph, by name. The session copies them.
    """
    options = onnxruntime.SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
        # After a run, waiting in a loop would take time from torch's threads.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if weights:
        values = [onnxruntime.OrtValue.ortvalue_from_numpy(w) for w in weights.values()]
        options.add_external_initializers(list(weights), values)
    return onnxruntime.InferenceSession(
        graph, options, providers=["CPUExecutionProvider"]
    )


class DecoderSession:
    """Session of a decoder with a cache of keys and values."""

    def __init__(self, graph: bytes) -> None:
        """Open a serialised graph; see `open_session`."""
        self._session = open_session(graph)
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
