"""Token selection: the most likely token, or a sample with temperature, top-k and top-p.

Greedy decoding needs only the index of the largest logit. On a CPU, `Int8Argmax` finds it with an
int8 matmul, which is three to four times as fast as the float32 matmul. The int8 product bounds
every logit: with x = x' + e and w = w' + f, where x' and w' are quantized, |x.w - x'.w'| <=
|x| |f| + |e| |w'| (Cauchy-Schwarz). A token is a candidate if its upper bound reaches the largest
lower bound. Of 50,257 tokens, a few dozen are candidates. Their logits are computed in float32, so
the result is exactly the float32 argmax.

Shapes: n rows, D hidden size, V vocabulary size, B blocks of BLOCK tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from toque.hardware.onednn import has_vnni
from toque.keyed_random import mix

_MASK = (1 << 64) - 1
BLOCK: Final = 64
"""Number of consecutive tokens that share a quantization step and an error bound."""
WORTHWHILE_STEPS: Final = 32
"""Number of greedy steps after which `Int8Argmax` has saved the time of its quantization."""
_INT8_MAX: Final = 127
_ZERO_POINT: Final = 128  # unsigned number for zero
_BLOCKS_PER_STEP: Final = 64
"""Number of blocks that are quantized at a time: about 8 MB of weights."""
MAX_CANDIDATE_BLOCKS: Final = 1 / 8
"""Fraction of blocks with candidates above which the float32 matmul is faster."""
_ROUNDING: Final = 1.001
"""Factor on the error bounds, which covers their own rounding in float32."""
_MIN_TEMPERATURE: Final = 1e-20
"""A lower temperature has the same effect, because this one already selects the larger of any two
logits. Logits divided by 1e-38 are infinite, and their softmax is NaN."""


def sample_tokens(
    logits: Tensor,
    draws: Sequence[float],
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Sample a token id per row of logits [n, V] by inverting the cumulative distribution.

    A row's token depends only on its logits and its random number, not on other rows.

    Args:
        logits: [n, V].
        draws: Random number in [0, 1) of each row (`uniform`).
        temperature: See `GenerationOptions`.
        top_k: See `GenerationOptions`.
        top_p: See `GenerationOptions`.
        min_p: See `GenerationOptions`.

    Returns:
        Token ids [n] on the CPU.
    """
    logits = logits.float() / max(temperature, _MIN_TEMPERATURE)
    if min_p > 0.0:
        smallest = logits.amax(-1, keepdim=True) + math.log(min_p)
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    numbers = torch.tensor(draws, dtype=torch.float64)
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
        probabilities = logits.softmax(-1).cpu().double()
        indices = _sample_indices(probabilities, numbers, top_p)
        return ids.cpu().gather(-1, indices).squeeze(-1)
    if top_p < 1.0:
        return _sample_from_nucleus(logits, numbers, top_p)
    probabilities = logits.softmax(-1).cpu().double()
    return _sample_indices(probabilities, numbers, top_p).squeeze(-1)


def _sample_from_nucleus(
    logits: Tensor, draws: Tensor, top_p: float, n_searched: int = 64
) -> Tensor:
    """Sample tokens [n] from the nucleus. Search only the `n_searched` most likely tokens.

    Sorting a vocabulary of 8,192 tokens takes three times as long as the rest of a small model's
    step. If the nucleus of a row may be larger, sample the row again from 16 times as many tokens.
    """
    vocabulary_size = logits.shape[-1]
    top_logits, ids = _sort_largest(logits, min(n_searched, vocabulary_size))
    probabilities = logits.softmax(-1).gather(-1, ids).cpu().double()
    indices = _sample_indices(probabilities, draws, top_p)
    tokens = ids.cpu().gather(-1, indices).squeeze(-1)
    if n_searched >= vocabulary_size:
        return tokens

    # The nucleus is complete if its last token is more likely than the last searched token, since
    # no other token is more likely than that one.
    sizes = _nucleus_mask(probabilities, top_p).sum(-1, keepdim=True)
    last = (sizes - 1).clamp(min=0)  # the nucleus of a row with NaN is empty
    top_logits = top_logits.cpu()
    is_larger = top_logits.gather(-1, last) > top_logits[:, -1:]
    is_complete = (sizes < n_searched) & is_larger
    rows = (~is_complete[:, 0]).nonzero()[:, 0].tolist()
    if rows:
        tokens[rows] = _sample_from_nucleus(
            logits[rows], draws[rows], top_p, 16 * n_searched
        )
    return tokens


def _sort_largest(logits: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the `n` largest logits in descending order, and their ids.

    Equal logits are in the order of their ids, as in a stable sort of all logits.
    """
    largest, ids = logits.topk(n, sorted=False)
    ids, order = ids.sort(-1)
    largest, order = largest.gather(-1, order).sort(
        dim=-1, descending=True, stable=True
    )
    return largest, ids.gather(-1, order)


def _sample_indices(probabilities: Tensor, draws: Tensor, top_p: float) -> Tensor:
    """Select indices [n, 1] of probabilities [n, k] by random numbers [n].

    If top_p is below 1, the probabilities must be in descending order. They are on the CPU, because
    CUDA has no deterministic cumulative sum, and in float64, because a float32 sum of small terms
    loses the tail of a large vocabulary.
    """
    if top_p < 1.0:
        is_outside = ~_nucleus_mask(probabilities, top_p)
        probabilities = probabilities.masked_fill(is_outside, 0.0)
    cumulative = probabilities.cumsum(-1)
    goal = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, goal, right=True)
    # Rounding may move the goal to the end. Then select the last token with a probability.
    last = (probabilities > 0.0).int().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(index, last)


def _nucleus_mask(probabilities: Tensor, top_p: float) -> Tensor:
    """Mark [n, k] the fewest of sorted probabilities with a sum of at least `top_p`."""
    return probabilities.cumsum(-1) - probabilities < top_p


def uniform(seed: int, prompt: int, position: int) -> float:
    """Return a number in [0, 1), a hash of the arguments: SplitMix64 (Steele et al. 2014)."""
    state = mix(seed & _MASK)
    state = mix(state ^ (prompt & _MASK))
    state = mix(state ^ (position & _MASK))
    return (state >> 11) / (1 << 53)


def supports_int8(weight: Tensor, bias: Tensor | None) -> bool:
    """Check whether `Int8Argmax` is exact and faster: for float32 on a CPU with AVX512-VNNI."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bias is None
        and not torch.is_autocast_enabled("cpu")
        and len(weight) >= 64 * BLOCK
        and has_vnni()
    )


class Int8Argmax:
    """`argmax(hidden @ weight.T)` for at most `rows` rows; the first of equal logits.

    The weight [V, D] is float32 on the CPU. The quantized copy needs a quarter of its memory.
    """

    def __init__(self, weight: Tensor, *, rows: int) -> None:
        self.weight = weight
        hidden_size = weight.shape[1]
        n_blocks = -(-len(weight) // BLOCK)
        int8 = torch.empty(n_blocks * BLOCK, hidden_size, dtype=torch.int8)
        self._steps = torch.empty(n_blocks)
        self._errors = torch.empty(n_blocks)  # |f|, the largest of a block
        self._lengths = torch.empty(n_blocks)  # |w'|, the largest of a block
        for first in range(0, n_blocks, _BLOCKS_PER_STEP):
            blocks = slice(first, min(first + _BLOCKS_PER_STEP, n_blocks))
            self._quantize(blocks, int8)

        # In the order in which oneDNN reads it.
        self._packed = torch.ops.onednn.qlinear_prepack(int8, [rows, hidden_size])
        self._ones = torch.ones(len(int8))
        self._zeros = torch.zeros(len(int8), dtype=torch.int32)
        self._is_finite = bool(self._lengths.isfinite().all())

    def _quantize(self, blocks: slice, int8: Tensor) -> None:
        """Quantize the weights of some blocks into `int8`, and store their error bounds."""
        tokens = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
        weight = self.weight[tokens]
        n_missing = tokens.stop - tokens.start - len(weight)
        if n_missing:
            # Copies of the last token fill the last block. They do not change a maximum.
            last = self.weight[-1:].expand(n_missing, -1)
            weight = torch.cat([weight, last])

        weight = weight.view(-1, BLOCK, weight.shape[1])
        step = _quantization_step(weight, (1, 2))
        quantized = (weight / step).round_()
        int8[tokens] = quantized.flatten(0, 1).to(torch.int8)
        quantized = quantized.mul_(step)
        self._steps[blocks] = step.flatten()
        self._errors[blocks] = (weight - quantized).norm(dim=2).amax(1)
        self._lengths[blocks] = quantized.norm(dim=2).amax(1)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Select tokens [n] for float32 hidden states [n, D]."""
        if not self._is_finite or not bool(hidden.isfinite().all()):
            return torch.mm(hidden, self.weight.T).argmax(1)
        row, token, has_too_many = self._find_candidates(hidden)
        logits = (hidden[row] * self.weight[token]).sum(1)
        selected = _argmax_per_row(len(hidden), row, token, logits)
        rest = has_too_many.nonzero()[:, 0]
        if len(rest):
            selected[rest] = torch.mm(hidden[rest], self.weight.T).argmax(1)
        return selected

    def _find_candidates(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Find the tokens that may have the largest logit of their row.

        Returns:
            The row and token [c] of every candidate, and a mask [n] of the rows with too many
            candidate blocks. Candidates of these rows are not returned.
        """
        products, steps, errors = self._bound_logits(hidden)
        block_tops = products.amax(-1).to(hidden.dtype).mul_(steps)  # [n, B]
        # Largest lower bound of each row, [n, 1].
        floor = (block_tops - errors).amax(1, keepdim=True)
        is_candidate = block_tops + errors >= floor
        max_blocks = MAX_CANDIDATE_BLOCKS * is_candidate.shape[1]
        has_too_many = is_candidate.sum(1) > max_blocks
        is_candidate &= ~has_too_many[:, None]
        row, block = is_candidate.nonzero(as_tuple=True)

        # Int8 products of at least this value have an upper bound that reaches the floor. One is
        # subtracted for rounding.
        least = (floor - errors)[row, block] / steps[row, block] - 1.0
        reaches_floor = products[row, block] >= least[:, None]  # [blocks, BLOCK]
        candidate, offset = reaches_floor.nonzero(as_tuple=True)
        token = block[candidate] * BLOCK + offset
        # The copies in the last block stand for the last token.
        token = token.clamp_(max=len(self.weight) - 1)
        return row[candidate], token, has_too_many

    def _bound_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Bound all logits.

        Returns:
            Int8 products [n, B, BLOCK], the steps [n, B] that convert them to logits, and the
            error bounds [n, B] of these logits.
        """
        step = _quantization_step(hidden, 1)
        quantized = (hidden / step).round_()
        # Signed numbers are slow in oneDNN. A sum above 2**24 is rounded by far less than `slack`.
        # `torch._int_mm` reorders the weights in each call, which takes a quarter longer and
        # empties the caches: steps of 96 texts take 4 to 6 % longer (T5 mini).
        shifted = (quantized + _ZERO_POINT).to(torch.uint8)
        inputs = (shifted, 1.0, _ZERO_POINT, self._packed, self._ones, self._zeros)
        # No bias, output scale 1, zero point 0, float32 output, and no operation after the matmul.
        outputs: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        products: Tensor = torch.ops.onednn.qlinear_pointwise(*inputs, *outputs)

        error = (hidden - quantized.mul_(step)).norm(dim=1, keepdim=True)  # |e|
        length = hidden.norm(dim=1, keepdim=True)  # |x|
        # The sum of D products in float32 may lose this much.
        slack = 2.0 * hidden.shape[1] * torch.finfo(torch.float32).eps
        weight_errors = self._errors + slack * self._lengths
        errors = length * weight_errors + error * self._lengths
        return (
            products.view(len(hidden), -1, BLOCK),
            step * self._steps,
            errors.mul_(_ROUNDING),
        )


def _argmax_per_row(n: int, row: Tensor, token: Tensor, logits: Tensor) -> Tensor:
    """Return the token with the largest logit per row; the smallest token of equal logits.

    Args:
        n: Number of rows.
        row: Row of each candidate, [c].
        token: Token of each candidate, [c].
        logits: Logit of each candidate, [c].

    Returns:
        Tokens [n]. A row without candidates has an invalid token.
    """
    largest = logits.new_full((n,), -torch.inf)
    largest.scatter_reduce_(0, row, logits, "amax")
    is_largest = logits == largest[row]
    tokens = token.new_full((n,), torch.iinfo(token.dtype).max)
    return tokens.scatter_reduce_(0, row[is_largest], token[is_largest], "amin")


def _quantization_step(values: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """Return the step that maps the largest absolute value along the axes to 127."""
    step = values.abs().amax(axis, keepdim=True) / _INT8_MAX
    return torch.where(step > 0, step, 1.0)
