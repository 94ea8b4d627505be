"""Attention by gathered sums: that of the products, for every kind of window."""

import itertools
from dataclasses import replace

import pytest
import torch

from toque.models.generation.gathered_attention import DTYPE, TILE, can_gather
from toque.models.generation.kv_cache import KVCache

pytestmark = pytest.mark.skipif(
    not can_gather(torch.device("cpu")), reason="gathered only with AVX-512"
)
CPU = torch.device("cpu")
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


def both(shape, rows, columns=0):
    """A cache that multiplies, and one that gathers."""
    return [
        KVCache(
            shape,
            rows=rows,
            columns=columns,
            dtype=dtype,
            device=CPU,
            gathers=dtype == DTYPE,
        )
        for dtype in (torch.float32, DTYPE)
    ]


def assert_agree(written, *, rows, layers=1, columns=0):
    """What `written(cache)` attends to is the same by products and by sums."""
    outputs = []
    for cache in both((layers, 2, 8), rows, columns):
        torch.manual_seed(0)
        outputs.append(list(written(cache)))
    for want, got in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)


def stepped(cache, *, group=1, scale=0.5, bias=None):
    """The attention of one step of drawn numbers, in every layer."""
    n, (_, heads, size) = len(cache.starts), cache._shape
    windows = cache.begin()
    if bias is not None:
        windows = [with_bias(part, bias) for part in windows]
    seen = []
    for layer in range(len(cache._layers)):
        cache.append(layer, *torch.randn(2, n, heads, size))
        query = torch.randn(n, heads * group, size)
        seen.append(cache.attend(layer, query, windows=windows, scale=scale))
    cache.end += 1
    return torch.stack(seen)


def with_bias(window, bias):
    """A window with a number for each head and each distance in its mask."""
    distance = (
        window.columns.stop
        - 1
        - torch.arange(window.mask_columns.start, window.mask_columns.stop)
    ).abs()
    own = bias[:, distance][None, :, None]
    return replace(window, mask=own if window.mask is None else window.mask + own)


def filled(cache, lengths):
    """Rows whose prompts are drawn numbers."""
    heads, size = cache._shape[1:]
    for length, place in zip(lengths, cache.admit(lengths), strict=True):
        for layer in range(len(cache._layers) if length else 0):
            cache.store(layer, [place], *torch.randn(2, 1, heads, length, size))


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("lengths", [[70, 61, 33, 32, 1], [5], [TILE] * 2])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_that_of_the_products(group, lengths, biased):
    """In two layers: what is read is found once a step, what stands there is each layer's own."""

    def written(cache):
        bias = torch.randn(2, 200) if biased else None
        filled(cache, lengths)
        for _ in range(40):
            yield stepped(cache, group=group, scale=0.3, bias=bias)

    assert_agree(written, rows=len(lengths), layers=2)


def test_sums_are_exact_before_they_are_rounded():
    """Whole numbers whose float16 running sum would stand still at 2048."""
    cache = both((1, 1, 64), 1)[1]
    places = cache.admit([2 * TILE - 1])
    cache.store(0, places, *torch.full((2, 1, 1, 2 * TILE - 1, 64), 6.0))
    (window,) = cache.begin()
    mask = torch.full(
        (1, 1, 1, window.mask_columns.stop - window.mask_columns.start),
        -64.0 * 6.0 * 6.0,
    )
    cache.append(0, torch.full((1, 1, 64), 6.0), torch.full((1, 1, 64), 1006.0))
    windows = [replace(window, mask=window.mask + mask)]
    seen = cache.attend(0, torch.full((1, 1, 64), 6.0), windows=windows, scale=1.0)
    torch.testing.assert_close(
        seen, torch.full((1, 64), (6.0 * (2 * TILE - 1) + 1006) / (2 * TILE))
    )


def test_what_is_read_is_found_once_a_tile():
    """As long as the same rows read the same tiles, and no longer."""
    cache = both((1, 1, 8), 3)[1]
    cache.admit([TILE - 3, 5, 4])
    found = []
    for _ in range(TILE + 3):
        (window,) = cache.begin()
        found.append(window.gather)
        cache.end += 1
    within, beyond = found[:TILE], found[TILE:]
    assert all(one is within[0] for one in within)
    assert all(one is beyond[0] for one in beyond)
    assert within[0] is not beyond[0]
    cache.drop(1)
    (window,) = cache.begin()
    assert window.gather is not beyond[0]


def test_rows_of_three_lengths_join_leave_and_outgrow_the_buffer():
    def written(cache):
        for lengths, steps in (([40, 39, 3], 70), ([5], 3), ([200], 9)):
            filled(cache, lengths)
            for _ in range(steps):
                yield stepped(cache)
            cache.drop(0)

    assert_agree(written, rows=4)


def test_rows_move_to_the_left_in_their_buffers_tile_by_tile():
    """Short texts that come and go for long, in a cache made for long ones."""

    def written(cache):
        ends, first = [], None
        for number in range(120):
            filled(cache, [1 + 7 * number % 12])
            places = [buffer.data.data_ptr() for buffer in cache._layers[0]]
            first = first or places
            for _ in range(5):
                yield stepped(cache)
                ends.append(cache.end)
            while len(cache.starts) == 4 or (number % 50 == 49 and cache.starts):
                cache.drop(cache.starts.index(cache.first))
        assert 2 * max(ends) < 120 * 5
        assert sum(later < end for end, later in itertools.pairwise(ends)) > 2
        assert places == first

    assert_agree(written, rows=4, columns=600)


def test_rows_without_a_prompt_begin_anywhere_in_a_tile():
    """A T5's answers, which begin where those that are being written stand."""

    def written(cache):
        for number in range(40):
            filled(cache, [0] * ((3 if number else 1) - len(cache.starts)))
            for _ in range(1 + 11 * number % 9):
                yield stepped(cache)
            if number:
                cache.drop(number % 3)

    assert_agree(written, rows=3, columns=80)
