"""Selection of the next token: the most likely one, or a sample with temperature, top-k and top-p.

A greedy step needs only the index of the largest logit. On a CPU, `Int8Argmax` finds it by an int8
product, which is three to four times faster. The product bounds every logit: with x = x' + e and
w = w' + f, and x' and w' quantized, |x.w - x'.w'| <= |x| |f| + |e| |w'| (Cauchy-Schwarz). A token
can be the largest if its upper bound is above the lower bounds of all tokens, as for some dozens of
50,257. Their logits are computed in float32. The result is exactly the argmax in float32.

Letters: n rows, D hidden size, V vocabulary, B blocks of BLOCK tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from toque.keyed_random import mix

_MASK = (1 << 64) - 1
BLOCK: Final = 64  # consecutive tokens that share a scale and a bound
# Greedy steps that pay for the quantization of the head's weights.
WORTHWHILE_STEPS: Final = 32
_INT8_MAX: Final = 127
_ZERO: Final = 128  # unsigned number for zero
# Blocks that are quantized together: about 8 MB of weights.
_BLOCKS_PER_STEP: Final = 64
# Share of blocks that may have the largest logit; above it, compute all.
MAX_BLOCKS: Final = 1 / 8
_ROUNDING: Final = 1.001  # factor of the bounds, because they are computed in float32
_MIN_TEMPERATURE: Final = 1e-20
"""A lower temperature has the same effect, because this one already selects the larger of any two
logits. Logits divided by 1e-38 are infinite, and their softmax is NaN."""


def sampled(
    logits: Tensor,
    draws: Sequence[float],
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """Sample a token id per row of logits [n, V] by inverting the cumulative distribution.

    A row's token depends only on its logits and its random number, not on other rows.

    Args:
        logits: [n, V].
        draws: Random number in [0, 1) of each row (`uniform`).
        temperature: See `GenerationOptions`.
        top_k: See `GenerationOptions`.
        top_p: See `GenerationOptions`.

    Returns:
        Token ids [n] on the CPU.
    """
    logits = logits.float() / max(temperature, _MIN_TEMPERATURE)
    numbers = torch.tensor(draws, dtype=torch.float64)
    if not top_k and top_p < 1.0:
        return _from_nucleus(logits, numbers, top_p)
    ids: Tensor | None = None
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    index = _sampled_index(logits.softmax(-1).cpu().double(), numbers, top_p)
    return (index if ids is None else ids.cpu().gather(-1, index)).squeeze(-1)


def _from_nucleus(
    logits: Tensor, draws: Tensor, top_p: float, n_likely: int = 64
) -> Tensor:
    """Sample tokens [n] from the nucleus, searched among the `n_likely` most likely tokens.

    To sort a vocabulary of 8,192 tokens takes three times as long as the rest of a small model's
    step. Rows that may have a larger nucleus are searched again.
    """
    top, ids = logits.topk(min(n_likely, logits.shape[-1]), sorted=False)
    ids, order = ids.sort(-1)  # the smallest id is first among equal logits
    top, order = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    probabilities = logits.softmax(-1).gather(-1, ids).cpu().double()
    tokens = (
        ids.cpu().gather(-1, _sampled_index(probabilities, draws, top_p)).squeeze(-1)
    )
    if n_likely >= logits.shape[-1]:
        return tokens

    n_inside = _is_inside(probabilities, top_p).sum(-1, keepdim=True)
    top, last = top.cpu(), (n_inside - 1).clamp(min=0)  # NaN has no token inside
    # All other tokens are less likely than the last one of the nucleus.
    is_complete = (n_inside < n_likely) & (top.gather(-1, last) > top[:, -1:])
    if rest := (~is_complete[:, 0]).nonzero()[:, 0].tolist():
        tokens[rest] = _from_nucleus(logits[rest], draws[rest], top_p, 16 * n_likely)
    return tokens


def _sampled_index(probabilities: Tensor, draws: Tensor, top_p: float) -> Tensor:
    """Select indices [n, 1] of probabilities [n, k] by random numbers [n].

    For a top_p, the probabilities must be sorted. They are on the CPU, because CUDA has no
    deterministic kernel for running sums, and in float64, because a float32 sum of small terms
    loses the tail of a large vocabulary.
    """
    if top_p < 1.0:
        probabilities = probabilities.masked_fill(
            ~_is_inside(probabilities, top_p), 0.0
        )
    cumulative = probabilities.cumsum(-1)
    goal = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, goal, right=True)
    # By rounding, the goal may be at the end. Then select the last token with a probability.
    last = (probabilities > 0.0).int().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(index, last)


def _is_inside(probabilities: Tensor, top_p: float) -> Tensor:
    """Mark [n, k] the fewest of sorted probabilities with a sum of at least `top_p`."""
    return probabilities.cumsum(-1) - probabilities < top_p


def uniform(seed: int, prompt: int, position: int) -> float:
    """Return a number in [0, 1), a hash of the arguments: SplitMix64 (Steele et al. 2014)."""
    state = mix(seed & _MASK)
    state = mix(state ^ (prompt & _MASK))
    state = mix(state ^ (position & _MASK))
    return (state >> 11) / (1 << 53)


def supports_int8(weight: Tensor, bias: Tensor | None) -> bool:
    """True if int8 bounds are exact and faster: for float32 on a CPU with AVX512-VNNI."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bias is None
        and not torch.is_autocast_enabled("cpu")
        and len(weight) >= 64 * BLOCK
        and bool(torch.cpu._is_vnni_supported())  # noqa: SLF001  # it has no public name
    )


class Int8Argmax:
    """`argmax(hidden @ weight.T)` for at most `rows` rows; the first of equal logits.

    The weight [V, D] is float32 on the CPU. A quantized copy of a quarter of its size is added.
    """

    def __init__(self, weight: Tensor, *, rows: int) -> None:
        self.weight = weight
        size = weight.shape[1]
        n_blocks = -(-len(weight) // BLOCK)
        # Copies of the last token fill the last block; they change no maximum.
        int8 = torch.empty(n_blocks * BLOCK, size, dtype=torch.int8)
        self._scales = torch.empty(n_blocks)
        self._errors = torch.empty(n_blocks)
        self._lengths = torch.empty(n_blocks)
        for first in range(0, n_blocks, _BLOCKS_PER_STEP):
            blocks = slice(first, min(first + _BLOCKS_PER_STEP, n_blocks))
            tokens = slice(blocks.start * BLOCK, blocks.stop * BLOCK)
            part = weight[tokens]
            if missing := tokens.stop - tokens.start - len(part):
                part = torch.cat([part, weight[-1:].expand(missing, -1)])
            part = part.view(-1, BLOCK, size)
            scale = _scale(part, (1, 2))
            quantized = (part / scale).round_()
            int8[tokens] = quantized.flatten(0, 1).to(torch.int8)
            quantized = quantized.mul_(scale)
            self._scales[blocks] = scale.flatten()
            self._errors[blocks] = (part - quantized).norm(dim=2).amax(1)
            self._lengths[blocks] = quantized.norm(dim=2).amax(1)

        # In the order in which oneDNN reads it.
        self._packed = torch.ops.onednn.qlinear_prepack(int8, [rows, size])
        self._ones = torch.ones(len(int8))
        self._zeros = torch.zeros(len(int8), dtype=torch.int32)
        self._is_finite = bool(self._lengths.isfinite().all())

    def __call__(self, hidden: Tensor) -> Tensor:
        """Select tokens [n] for float32 hidden states [n, D]."""
        if not self._is_finite or not bool(hidden.isfinite().all()):
            return torch.mm(hidden, self.weight.T).argmax(1)
        doubtful, tokens = self._bounded(hidden)
        if len(doubtful):
            tokens[doubtful] = torch.mm(hidden[doubtful], self.weight.T).argmax(1)
        return tokens

    def _bounded(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Select tokens [n]. Also return the rows with too many candidates, which are not valid."""
        n = len(hidden)
        products, unit, doubt = self._bounds(hidden)
        tops = products.amax(-1).to(hidden.dtype).mul_(unit)
        floor = (tops - doubt).amax(1, keepdim=True)
        is_candidate = tops + doubt >= floor  # [n, B]
        is_doubtful = is_candidate.sum(1) > MAX_BLOCKS * is_candidate.shape[1]
        row, block = is_candidate.logical_and_(~is_doubtful[:, None]).nonzero(
            as_tuple=True
        )
        # The smallest int8 product with an upper bound at the floor, minus one for rounding.
        least = (floor - doubt)[row, block] / unit[row, block] - 1.0
        candidate, within = (products[row, block] >= least[:, None]).nonzero(
            as_tuple=True
        )
        row, token = row[candidate], block[candidate] * BLOCK + within
        token = token.clamp_(max=len(self.weight) - 1)
        logits = (hidden[row] * self.weight[token]).sum(1)

        # Select the largest logit of each row, and the smallest token among equal logits.
        largest = logits.new_full((n,), -torch.inf).scatter_reduce_(
            0, row, logits, "amax"
        )
        is_largest = logits == largest[row]
        tokens = token.new_full((n,), torch.iinfo(token.dtype).max)
        tokens.scatter_reduce_(0, row[is_largest], token[is_largest], "amin")
        return is_doubtful.nonzero()[:, 0], tokens

    def _bounds(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute int8 products [n, B, BLOCK], their scale [n, B] and logit error bounds [n, B]."""
        scale = _scale(hidden, 1)
        quantized = (hidden / scale).round_()
        # Signed numbers are slow in oneDNN. A sum above 2**24 is rounded by far less than `slack`.
        # `torch._int_mm` reorders the weights in each call, which takes a quarter longer and
        # empties the caches: steps of 96 texts take 4 to 6 % longer (T5 mini).
        shifted = (quantized + _ZERO).to(torch.uint8)
        inputs = (shifted, 1.0, _ZERO, self._packed, self._ones, self._zeros)
        plain: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        products: Tensor = torch.ops.onednn.qlinear_pointwise(*inputs, *plain)
        error = (hidden - quantized.mul_(scale)).norm(dim=1, keepdim=True)
        length = hidden.norm(dim=1, keepdim=True)
        # The sum of D products in float32 may lose this much.
        slack = 2.0 * hidden.shape[1] * torch.finfo(torch.float32).eps
        doubt = length * (self._errors + slack * self._lengths) + error * self._lengths
        return (
            products.view(len(hidden), -1, BLOCK),
            scale * self._scales,
            doubt.mul_(_ROUNDING),
        )


def _scale(values: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """Quantization step: the largest absolute value along the axis or axes becomes 127."""
    scale = values.abs().amax(axis, keepdim=True) / _INT8_MAX
    return torch.where(scale > 0, scale, 1.0)
