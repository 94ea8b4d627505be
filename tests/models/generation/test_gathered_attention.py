"""Attention by gathered sums: that of the products, for every kind of window."""

from __future__ import annotations

import itertools

import pytest
import torch

from toque.models.generation.cache_buffers import TILE, buffer_pair
from toque.models.generation.gathered_attention import DTYPE, can_gather
from toque.models.generation.kv_cache import KVCache, attend, gathered_window

pytestmark = pytest.mark.skipif(
    not can_gather(torch.device("cpu")), reason="gathered only with AVX-512"
)
CPU = torch.device("cpu")
WIDTH = 3 * TILE
CLOSE = {"atol": 3e-3, "rtol": 3e-3}
"""Three roundings to 11 bits: of the query, the scores and the shares."""


@pytest.fixture(autouse=True)
def fresh_memory_holds_nans():
    """What a cache has not written must not be read, were it only to be masked."""
    found = torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(found)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def stored(rows=5, heads=2, size=8):
    """Numbers that float16 holds, as they are and in a cache's buffers."""
    torch.manual_seed(0)
    pair = buffer_pair((rows, heads, WIDTH, size), DTYPE, CPU, gathers=True)
    whole = torch.randn(2, rows, heads, WIDTH, size).to(DTYPE)
    for buffer, many in zip(pair, whole, strict=True):
        buffer.store(slice(0, rows), slice(0, WIDTH), many)
    return pair, whole.double()


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("rows", [slice(0, 5), slice(2, 4), slice(4, 5)])
@pytest.mark.parametrize("columns", [slice(0, WIDTH), slice(5, 40), slice(TILE, TILE + 1)])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_that_of_the_products(group, rows, columns, biased):
    (keys, values), whole = stored()
    n = rows.stop - rows.start
    # Every row ends where the window does, and begins somewhere in it.
    starts = [min(columns.start + 9 * row, columns.stop - 1) for row in range(n)]
    blocked = torch.zeros(5, WIDTH)
    for row, start in enumerate(starts, start=rows.start):
        blocked[row, :start] = -torch.inf
    used = [slice(start, columns.stop) for start in starts]
    window = gathered_window(rows, columns, used, blocked)
    mask, query = window.mask, torch.randn(n, 2 * group, 8)
    if biased:
        mask = mask + torch.randn(1, 2, 1, mask.shape[-1])
    got = window.gather.attend(query, keys.data, values.data, mask, 0.3)
    parts = [part[rows, :, window.masked] for part in whole]
    want = attend(query.double(), *parts, mask, 0.3)
    torch.testing.assert_close(got.double(), want, **CLOSE)


def test_sums_are_exact_before_they_are_rounded():
    """Whole numbers whose float16 running sum would stand still at 2048."""
    keys, values = buffer_pair((1, 1, 2 * TILE, 64), DTYPE, CPU, gathers=True)
    for buffer in (keys, values):
        buffer.store(slice(0, 1), slice(0, 2 * TILE), torch.full((1, 1, 2 * TILE, 64), 6.0))
    values.append(2 * TILE - 1, torch.full((1, 1, 64), 1006.0))
    blocked = torch.zeros(1, 2 * TILE)
    window = gathered_window(slice(0, 1), slice(0, 2 * TILE), [slice(0, 2 * TILE)], blocked)
    mask = torch.full((1, 1, 1, 2 * TILE), -64.0 * 6.0 * 6.0)
    seen = window.gather.attend(torch.full((1, 1, 64), 6.0), keys.data, values.data, mask, 1.0)
    assert seen.tolist() == [[(6.0 * (2 * TILE - 1) + 1006.0) / (2 * TILE)] * 64]


def test_one_window_serves_layers_of_other_buffers():
    """What is read is found once a step; what stands there is each layer's own."""
    (keys, values), whole = stored()
    used = [slice(3, 40)] * 5
    blocked = torch.zeros(5, WIDTH)
    blocked[:, :3] = -torch.inf
    window = gathered_window(slice(0, 5), slice(3, 40), used, blocked)
    query = torch.randn(5, 2, 8)
    window.gather.attend(query, keys.data, values.data, window.mask, 1.0)
    got = window.gather.attend(query, keys.data + 1.0, values.data - 2.0, window.mask, 1.0)
    parts = [(part + shift)[:, :, 3:40] for part, shift in zip(whole, (1.0, -2.0), strict=True)]
    want = attend(query.double(), *parts, None, 1.0)
    torch.testing.assert_close(got.double(), want, **CLOSE)


def test_what_is_read_is_found_once_a_tile():
    """As long as the same rows read the same tiles, and no longer."""
    cache = KVCache((1, 1, 8), rows=3, dtype=DTYPE, device=CPU, gathers=True)
    cache.admit([TILE - 3, 5, 4])
    found = []
    for _ in range(6):
        (window,) = cache.begin()
        found.append(window.gather)
        cache.advance()
    within, beyond = found[:3], found[3:]
    assert all(one is within[0] for one in within)
    assert all(one is beyond[0] for one in beyond)
    assert within[0] is not beyond[0]
    cache.drop(1)
    (window,) = cache.begin()
    assert window.gather is not beyond[0]


def test_a_cache_gathers_what_it_would_multiply():
    """Rows of three lengths that join, leave and outgrow the buffer."""
    outputs = []
    for gathers in (False, True):
        torch.manual_seed(1)
        dtype = DTYPE if gathers else torch.float32
        cache = KVCache((1, 2, 8), rows=4, dtype=dtype, device=CPU, gathers=gathers)
        seen = []
        for lengths, steps in (([40, 39, 3], 70), ([5], 3), ([200], 9)):
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
        torch.testing.assert_close(got, want, **CLOSE)


def test_rows_move_to_the_left_in_their_buffers_tile_by_tile():
    """Short texts that come and go for long, in a cache made for long ones."""
    outputs = []
    for gathers in (False, True):
        torch.manual_seed(2)
        dtype = DTYPE if gathers else torch.float32
        cache = KVCache((1, 2, 8), rows=4, columns=600, dtype=dtype, device=CPU, gathers=gathers)
        seen, ends = [], []
        for number in range(120):
            lengths = [1 + 7 * number % 12]
            ((row, columns),) = cache.admit(lengths)
            cache.store(0, row, columns, *torch.randn(2, 2, lengths[0], 8))
            if number == 0:
                first = [buffer.data.data_ptr() for buffer in cache._layers[0]]
            for _ in range(5):
                windows = cache.begin()
                query, key, value = torch.randn(3, len(cache.starts), 2, 8)
                seen.append(cache.attend(0, query, key, value, windows=windows, scale=0.5))
                cache.advance()
                ends.append(cache.end)
            while len(cache.starts) == 4 or (number % 50 == 49 and cache.starts):
                cache.drop(cache.starts.index(cache.first))
        assert 2 * max(ends) < 120 * 5
        assert sum(later < end for end, later in itertools.pairwise(ends)) > 2
        assert [buffer.data.data_ptr() for buffer in cache._layers[0]] == first
        outputs.append(seen)
    for got, want in zip(*reversed(outputs), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def test_rows_without_a_prompt_begin_anywhere_in_a_tile():
    """A T5's answers, which begin where those that are being written stand."""
    outputs = []
    for gathers in (False, True):
        torch.manual_seed(3)
        dtype = DTYPE if gathers else torch.float32
        cache = KVCache((1, 2, 8), rows=3, columns=80, dtype=dtype, device=CPU, gathers=gathers)
        seen = []
        for number in range(40):
            cache.admit([0] * ((3 if number else 1) - len(cache.starts)))
            for _ in range(1 + 11 * number % 9):
                windows = cache.begin()
                query, key, value = torch.randn(3, len(cache.starts), 2, 8)
                seen.append(cache.attend(0, query, key, value, windows=windows, scale=0.5))
                cache.advance()
            if number:
                cache.drop(number % 3)
        outputs.append(seen)
    for got, want in zip(*reversed(outputs), strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
