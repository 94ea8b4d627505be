"""Attention of one token a row on a CPU, as gathered dot products and gathered sums.

A decoding step reads every key and every value once, so its attention can be as fast as memory is.
Batched products are not: with one query a head, torch's libraries take three times as long as the
reading, and oneDNN makes new code for every length of the window. Two operations that torch has for
other purposes do just the reading: `sampled_addmm` computes chosen elements of a product (which
query, which key) one dot product each, and `embedding_bag` sums chosen rows, weighted (which value,
which share). Keys and values of 96 rows, 6 heads, 112 columns of 64: 1.5 ms, as products 4.0 ms
(two Zen 5 cores, float32, 33 MB: 22 GB/s).

Letters as in `kv_cache.py`: R rows, n of them, H key-value heads, G query heads of each, W columns
of the buffer, K of the window, d head size.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

_MOST_INT32 = (1 << 31) - 1


def can_gather(device: torch.device) -> bool:
    """Whether attention is gathered here: where torch's gathered sums are AVX-512 code."""
    return device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"


class Gather:
    """The columns that some rows of a cache read at a step; one serves all layers.

    Args:
        rows: Of the buffer.
        columns: Of each of those rows.
    """

    def __init__(self, rows: slice, columns: slice) -> None:
        self.rows, self.columns = rows, columns
        self._pattern: Tensor | None = None

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float
    ) -> Tensor:
        """softmax(scale * q @ k.T + mask) @ v, [n, H * G * d].

        Args:
            query: [n, H * G, d] float32; the query heads of one key-value head are neighbours.
            keys: The buffer [R, H, W, d], contiguous; its dtype is float32.
            values: The same.
            mask: Added to the scores, [n or 1, H or 1, 1, K]; None for nothing.
            scale: Of the products.
        """
        heads, size = keys.shape[1], keys.shape[-1]
        if self._pattern is None:
            self._pattern = self._places(query.shape[1] // heads, keys)
        products = torch.sparse.sampled_addmm(
            self._pattern,
            query.reshape(-1, size),
            keys.view(-1, size).T,
            beta=0.0,
            alpha=scale,
        )
        scores = products.values().view(
            len(query), heads, -1, self.columns.stop - self.columns.start
        )
        if mask is not None:
            scores = scores + mask
        seen = functional.embedding_bag(
            products.col_indices(),
            values.view(-1, size),
            products.crow_indices()[:-1],
            mode="sum",
            per_sample_weights=scores.softmax(-1).view(-1),
        )
        return seen.view(len(query), -1)

    def _places(self, group: int, keys: Tensor) -> Tensor:
        """Which query reads which key of the flat buffer: sparse [n * H * G, R * H * W], zeros."""
        _, heads, width, _ = keys.shape
        n_queries = (self.rows.stop - self.rows.start) * heads * group
        n_columns = self.columns.stop - self.columns.start
        whole = keys.numel() // keys.shape[-1]
        short = max(whole, n_queries * n_columns) <= _MOST_INT32
        kind = torch.int32 if short else torch.int64
        first = torch.arange(self.rows.start * heads, self.rows.stop * heads, dtype=kind)
        first = (first * width + self.columns.start).repeat_interleave(group)
        column = (first[:, None] + torch.arange(n_columns, dtype=kind)).view(-1)
        begin = torch.arange(n_queries + 1, dtype=kind) * n_columns
        _accept_beta()
        return torch.sparse_csr_tensor(
            begin,
            column,
            torch.zeros(len(column)),
            size=(n_queries, whole),
            check_invariants=False,
        )


@cache
def _accept_beta() -> None:
    """Take torch's one notice that its sparse tensors are in beta; the tests hold what is used."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.sparse_csr_tensor(
            torch.tensor([0, 1]), torch.tensor([0]), torch.zeros(1), check_invariants=False
        )
