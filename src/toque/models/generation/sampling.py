"""Choice of the next token: the likeliest, or one drawn with temperature, top-k and top-p.

A greedy step needs only the index of the largest logit. On a CPU `Int8Argmax` finds it by an int8
product, which is three to four times faster and bounds every logit: with x = x' + e and w = w' + f,
where x' and w' are quantized, |x.w - x'.w'| <= |x| |f| + |e| |w'| (Cauchy-Schwarz). Of tokens whose
upper bound is not below another's lower bound (some dozens of 50,257) the logits are computed in
float32. The result is always the argmax of the float32 logits; nothing is approximated.

Letters: n rows, D hidden size, V vocabulary, B blocks of BLOCK tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from toque.keyed_random import mix

_MASK = (1 << 64) - 1
BLOCK: Final = 64  # neighbouring tokens that share a scale and a bound
WORTHWHILE_STEPS: Final = 32  # greedy steps that pay for quantizing the head's weights
_INT8_MAX: Final = 127
_ZERO: Final = 128  # the unsigned number that stands for zero
_AT_ONCE: Final = 64  # blocks quantized together: some 8 MB of weights
MOST_BLOCKS: Final = 1 / 8  # of the blocks in doubt; for a row with more, all logits are computed
_ROUNDING: Final = 1.001  # widens the bounds, because they were computed in float32 themselves
_COLDEST: Final = 1e-20
"""Lower temperatures are taken for this one, which already draws the larger of any two logits. By
1e-38 logits are divided to infinity, and their softmax is NaN."""


def sampled(
    logits: Tensor,
    draws: Sequence[float],
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> Tensor:
    """One token id a row of logits [n, V], the cumulative distribution inverted at its draw; CPU.

    A row's token depends on its logits and its draw in [0, 1) (`uniform`) alone, so neither
    neighbours nor batch size change it. The other arguments are those of `GenerationOptions`.
    """
    logits = logits.float() / max(temperature, _COLDEST)
    numbers = torch.tensor(draws, dtype=torch.float64)
    if not top_k and top_p < 1.0:
        return _from_nucleus(logits, numbers, top_p)
    ids: Tensor | None = None
    if top_k:
        logits, ids = logits.topk(min(top_k, logits.shape[-1]), dim=-1)
    index = _drawn(logits.softmax(-1).cpu().double(), numbers, top_p)
    return (index if ids is None else ids.cpu().gather(-1, index)).squeeze(-1)


def _from_nucleus(logits: Tensor, draws: Tensor, top_p: float, likeliest: int = 64) -> Tensor:
    """Tokens [n] of the fewest that reach `top_p`, looked for among so many of the likeliest.

    To sort 8,192 of them for each token takes three times as long as all else that a small model
    does to write it. Rows whose nucleus may be larger are looked through again.
    """
    some, ids = logits.topk(min(likeliest, logits.shape[-1]), sorted=False)
    ids, order = ids.sort(-1)  # of equal logits the smallest id is the first
    some, order = some.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, order)
    probabilities = logits.softmax(-1).gather(-1, ids).cpu().double()
    tokens = ids.cpu().gather(-1, _drawn(probabilities, draws, top_p)).squeeze(-1)
    if likeliest >= logits.shape[-1]:
        return tokens
    n_inside = _is_inside(probabilities, top_p).sum(-1, keepdim=True)
    some, last = some.cpu(), (n_inside - 1).clamp(min=0)  # none is inside of NaN
    # No token that was left out is as likely as the nucleus's last.
    is_whole = (n_inside < likeliest) & (some.gather(-1, last) > some[:, -1:])
    if rest := (~is_whole[:, 0]).nonzero()[:, 0].tolist():
        tokens[rest] = _from_nucleus(logits[rest], draws[rest], top_p, 16 * likeliest)
    return tokens


def _drawn(probabilities: Tensor, draws: Tensor, top_p: float) -> Tensor:
    """Places [n, 1] among probabilities [n, k] that their draws [n] fall on; sorted for a top_p.

    They are on the CPU, for running sums have no deterministic CUDA kernel, and in float64: with a
    large vocabulary, a float32 sum of small terms loses the tail.
    """
    if top_p < 1.0:
        probabilities = probabilities.masked_fill(~_is_inside(probabilities, top_p), 0.0)
    cumulative = probabilities.cumsum(-1)
    goal = draws[:, None] * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, goal, right=True)
    # Rounding may put the goal at the very end: the last token that has a probability.
    last = (probabilities > 0.0).int().cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(index, last)


def _is_inside(probabilities: Tensor, top_p: float) -> Tensor:
    """True [n, k] for the fewest of sorted probabilities that reach `top_p` together."""
    return probabilities.cumsum(-1) - probabilities < top_p


def uniform(seed: int, prompt: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments: SplitMix64 (Steele et al. 2014)."""
    state = mix(seed & _MASK)
    state = mix(state ^ (prompt & _MASK))
    state = mix(state ^ (position & _MASK))
    return (state >> 11) / (1 << 53)


def supports_int8(weight: Tensor, bias: Tensor | None) -> bool:
    """True if int8 bounds are exact and faster: in float32, on a CPU with AVX512-VNNI."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and bias is None
        and not torch.is_autocast_enabled("cpu")
        and len(weight) >= 64 * BLOCK
        and bool(torch.cpu._is_vnni_supported())  # noqa: SLF001  # it has no public name
    )


class Int8Argmax:
    """`argmax(hidden @ weight.T)` over the vocabulary, of at most `rows`; the first of equals.

    The weight [V, D] is float32 on the CPU and stays as it is beside a copy a quarter its size.
    """

    def __init__(self, weight: Tensor, *, rows: int) -> None:
        self.weight = weight
        size = weight.shape[1]
        blocks = -(-len(weight) // BLOCK)
        # Copies of the last token fill the last block; they change no maximum.
        int8 = torch.empty(blocks * BLOCK, size, dtype=torch.int8)
        self._scales = torch.empty(blocks)
        self._errors = torch.empty(blocks)
        self._lengths = torch.empty(blocks)
        for first in range(0, blocks, _AT_ONCE):
            some = slice(first, min(first + _AT_ONCE, blocks))
            tokens = slice(some.start * BLOCK, some.stop * BLOCK)
            part = weight[tokens]
            if missing := tokens.stop - tokens.start - len(part):
                part = torch.cat([part, weight[-1:].expand(missing, -1)])
            part = part.view(-1, BLOCK, size)
            scale = _scale(part, (1, 2))
            whole = (part / scale).round_()
            int8[tokens] = whole.flatten(0, 1).to(torch.int8)
            whole = whole.mul_(scale)
            self._scales[some] = scale.flatten()
            self._errors[some] = (part - whole).norm(dim=2).amax(1)
            self._lengths[some] = whole.norm(dim=2).amax(1)
        # In the order in which oneDNN reads it.
        self._packed = torch.ops.onednn.qlinear_prepack(int8, [rows, size])
        self._ones = torch.ones(len(int8))
        self._zeros = torch.zeros(len(int8), dtype=torch.int32)
        self._is_finite = bool(self._lengths.isfinite().all())

    def __call__(self, hidden: Tensor) -> Tensor:
        """[n, D] float32 -> [n] tokens."""
        if not self._is_finite or not bool(hidden.isfinite().all()):
            return torch.mm(hidden, self.weight.T).argmax(1)
        doubtful, tokens = self._bounded(hidden)
        if len(doubtful):
            tokens[doubtful] = torch.mm(hidden[doubtful], self.weight.T).argmax(1)
        return tokens

    def _bounded(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Rows with too many tokens in doubt, and the tokens [n] of the others."""
        n = len(hidden)
        products, unit, doubt = self._bounds(hidden)
        tops = products.amax(-1).to(hidden.dtype).mul_(unit)
        floor = (tops - doubt).amax(1, keepdim=True)
        near = tops + doubt >= floor  # [n, B]
        is_doubtful = near.sum(1) > MOST_BLOCKS * near.shape[1]
        row, block = near.logical_and_(~is_doubtful[:, None]).nonzero(as_tuple=True)
        # The int8 product from which on an upper bound reaches the floor; one less for rounding.
        least = (floor - doubt)[row, block] / unit[row, block] - 1.0
        place, within = (products[row, block] >= least[:, None]).nonzero(as_tuple=True)
        row, token = row[place], block[place] * BLOCK + within
        token = token.clamp_(max=len(self.weight) - 1)
        logits = (hidden[row] * self.weight[token]).sum(1)
        # The largest of each row, and the smallest token of equals.
        largest = logits.new_full((n,), -torch.inf).scatter_reduce_(0, row, logits, "amax")
        is_largest = logits == largest[row]
        tokens = token.new_full((n,), torch.iinfo(token.dtype).max)
        tokens.scatter_reduce_(0, row[is_largest], token[is_largest], "amin")
        return is_doubtful.nonzero()[:, 0], tokens

    def _bounds(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Int8 products [n, B, BLOCK], their unit [n, B] and the logits' error bound [n, B]."""
        scale = _scale(hidden, 1)
        whole = (hidden / scale).round_()
        # Signed numbers take oneDNN's slow path. A sum above 2**24 is rounded, by far less than is
        # allowed for sums below. `torch._int_mm` lays the weights anew each time, which takes a
        # quarter longer and empties the caches: steps of 96 texts take 4 to 6 % longer (T5 mini).
        shifted = (whole + _ZERO).to(torch.uint8)
        inputs = (shifted, 1.0, _ZERO, self._packed, self._ones, self._zeros)
        plain: tuple[object, ...] = (None, 1.0, 0, torch.float32, "none", [], "")
        products: Tensor = torch.ops.onednn.qlinear_pointwise(*inputs, *plain)
        error = (hidden - whole.mul_(scale)).norm(dim=1, keepdim=True)
        length = hidden.norm(dim=1, keepdim=True)
        # The last term is what summing D products in float32 may round away.
        slack = 2.0 * hidden.shape[1] * torch.finfo(torch.float32).eps
        doubt = length * (self._errors + slack * self._lengths) + error * self._lengths
        return products.view(len(hidden), -1, BLOCK), scale * self._scales, doubt.mul_(_ROUNDING)


def _scale(values: Tensor, axis: int | tuple[int, ...]) -> Tensor:
    """Quantization step: the largest absolute value along the axis or axes becomes 127."""
    scale = values.abs().amax(axis, keepdim=True) / _INT8_MAX
    return torch.where(scale > 0, scale, 1.0)
