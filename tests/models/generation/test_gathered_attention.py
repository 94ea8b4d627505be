"""Attention by gathered reads: that of the products, for every kind of window."""

from __future__ import annotations

import pytest
import torch

from toque.models.generation.gathered_attention import Gather, can_gather
from toque.models.generation.kv_cache import KVCache, attend, zeroed

pytestmark = pytest.mark.skipif(
    not can_gather(torch.device("cpu")), reason="gathered only with AVX-512"
)


def buffers(rows=5, heads=2, width=13, size=8):
    torch.manual_seed(0)
    found = [zeroed((rows, heads, width, size), torch.float32, torch.device("cpu")) for _ in "kv"]
    return [buffer.copy_(torch.randn(buffer.shape)) for buffer in found]


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [slice(0, 5), slice(2, 4), slice(4, 5)])
@pytest.mark.parametrize("columns", [slice(0, 13), slice(5, 11), slice(12, 13)])
@pytest.mark.parametrize("masked", [None, "rows", "heads"])
def test_it_is_that_of_the_products(group, rows, columns, masked):
    keys, values = buffers()
    n, n_columns = rows.stop - rows.start, columns.stop - columns.start
    query = torch.randn(n, 2 * group, 8)
    mask = None
    if masked is not None:
        mask = torch.randn(n, 1 if masked == "rows" else 2, 1, n_columns)
        mask[..., : n_columns // 2] = -torch.inf
    got = Gather(rows, columns).attend(query, keys, values, mask, 0.3)
    parts = [part[rows, :, columns] for part in (keys, values)]
    want = attend(query.double(), *(part.double() for part in parts), mask, 0.3)
    torch.testing.assert_close(got.double(), want, atol=1e-6, rtol=1e-5)


def test_one_window_serves_layers_of_other_buffers():
    """The pattern is made once a step; what it finds is each layer's own."""
    window = Gather(slice(0, 5), slice(3, 9))
    query = torch.randn(5, 2, 8)
    first, (keys, values) = buffers(), buffers()
    keys, values = keys + 1.0, values - 2.0
    window.attend(query, *first, None, 1.0)
    got = window.attend(query, keys, values, None, 1.0)
    want = attend(query, keys[:, :, 3:9], values[:, :, 3:9], None, 1.0)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


def test_a_cache_gathers_what_it_would_multiply():
    """Rows of three lengths that join, leave and outgrow the buffer."""
    outputs = []
    for gathers in (False, True):
        torch.manual_seed(1)
        cache = KVCache(
            (1, 2, 8), rows=4, dtype=torch.float32, device=torch.device("cpu"), gathers=gathers
        )
        seen = []
        for lengths, steps in (([40, 39, 3], 70), ([5], 3)):
            for length, (row, columns) in zip(lengths, cache.admit(lengths), strict=True):
                cache.store(0, row, columns, *torch.randn(2, 2, length, 8))
            for _ in range(steps):
                windows = cache.begin()
                query, key, value = torch.randn(3, len(cache.starts), 2, 8)
                seen.append(cache.attend(0, query, key, value, windows=windows, scale=0.5))
                cache.advance()
            cache.drop(0)
        outputs.append(seen)
    for got, want in zip(*reversed(outputs), strict=True):
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
