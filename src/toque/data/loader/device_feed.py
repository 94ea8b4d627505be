"""Copies of batches to a GPU, ahead of the loop and beside its computing."""

from __future__ import annotations

from collections.abc import Callable

import torch

from toque.batch import Batch

Sent = tuple[Batch, torch.cuda.Event]
"""A batch on the device, and when it will be whole."""


class DeviceFeed:
    """Sends whole updates to a GPU from page-locked memory, on a stream of its own.

    A reader's thread sends, the loop receives; neither waits for the device.

    Args:
        device: the GPU.
        prepare: what is added to a batch on the host first, as attention's plan.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Batch], Batch]) -> None:
        self._device, self._prepare = device, prepare
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def send(self, batch: Batch) -> Sent:
        """Begin the copy of `batch`."""
        pinned = self._prepare(batch.counted()).pin()
        with torch.cuda.stream(self._stream):
            return pinned.to(self._device), self._stream.record_event()

    def receive(self, sent: Sent) -> Batch:
        """The batch, for work that the loop's stream is given from now on."""
        batch, whole = sent
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(whole)
        for tensor in batch.tensors():
            tensor.record_stream(stream)  # its memory is the copying stream's to give away again
        return batch
