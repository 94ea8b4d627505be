"""The training loss: a sum over target tokens, to be divided once by the update's count.

Fused linear cross-entropy in chunks: the logits of a whole batch never exist at once. In bfloat16
on a CPU products are in 16 bits and the softmax in float32, block by block.

Letters: N positions with a label, D hidden size, V vocabulary, C rows of a chunk, P V padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.models.forward.cpu_linear import by_onednn, kind_of, padded_copy, padded_length
from toque.models.forward.packed import hidden_states, logit_cap, output_head
from toque.models.onednn import product


def loss_sum(
    model: nn.Module, batch: Batch, *, smoothing: float = 0.0, chunk_rows: int | None = None
) -> Tensor:
    """Cross-entropy of the batch's labels in nats, [] float32: summed, never averaged.

    The sum over a batch equals that over any split of it; the caller divides once by the update's
    target tokens. The arguments are those of `cross_entropy_sum`.
    """
    weight, bias = output_head(model)
    return cross_entropy_sum(
        hidden_states(model, batch),
        weight,
        batch.labels,
        bias=bias,
        smoothing=smoothing,
        chunk_rows=chunk_rows,
        n_labels=None if batch.labelled is None else sum(batch.labelled),
        cap=logit_cap(model),
    )


def log_probabilities(model: nn.Module, batch: Batch) -> Tensor:
    """Log-probability in nats of each label, [R, L] or [R, T], by chunks; 0 without a label."""
    weight, bias = output_head(model)
    hidden = hidden_states(model, batch)
    labelled = batch.labels != IGNORE
    kept, labels = hidden[labelled], batch.labels[labelled]
    at_once = usual_chunk_rows(weight.shape[0], labels.device.type)
    found = torch.zeros(batch.labels.shape, device=labels.device)
    nats = []
    for part, chosen in zip(torch.split(kept, at_once), torch.split(labels, at_once), strict=True):
        logits = capped(F.linear(part, weight.to(kept.dtype), bias).float(), logit_cap(model))
        nats.append(F.cross_entropy(logits, chosen, reduction="none"))
    found[labelled] = -torch.cat(nats)
    return found


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """C * tanh(logits / c), in place, as `logit_cap` says; as they are for None."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def nats_by_example(model: nn.Module, batch: Batch) -> list[list[float]]:
    """Loss of each example alone in nats, by row in the order of `batch.example_ids`."""
    segments = batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    nats = -log_probabilities(model, batch)
    n_segments = max(map(len, batch.example_ids), default=0)
    sums = nats.new_zeros(batch.n_rows, n_segments + 1).scatter_add_(1, segments.long(), nats)
    table = sums[:, 1:].tolist()
    return [row[: len(ids)] for row, ids in zip(table, batch.example_ids, strict=True)]


_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits of a chunk by default: 64 MiB of float32 on a CPU, 512 MiB on a GPU. On a CPU the products
of 320 rows with GPT-2's head reach 82 GFLOP/s a core, those of 167 (half of this) 72."""
_CHUNKS: Final = 4
"""A chunk of bfloat16 logits is so many times one of float32 logits and their gradient, in as many
bytes. The products of 1,344 rows with GPT-2's head reach 770 GFLOP/s, of 672 720 (two cores)."""
_BLOCK_ELEMENTS: Final = 1 << 21  # of the softmax's float32 block: 8 MiB, which a cache keeps
_COLUMNS: Final = 4096  # of slopes in a product with the matrix; 32,128 are a seventh slower
_TINY: Final = 1e-30


def usual_chunk_rows(vocab_size: int, device_type: str) -> int:
    """Positions of a chunk, as many as make it efficient."""
    return max(64, _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"]) // vocab_size)


def logits_bytes(vocab_size: int, device_type: str, *, positions: int) -> int:
    """The most bytes that logits of so many labels, and their softmax, take at once in float32."""
    return 8 * vocab_size * min(positions, usual_chunk_rows(vocab_size, device_type))


def cross_entropy_sum(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    chunk_rows: int | None = None,
    n_labels: int | None = None,
    cap: float | None = None,
) -> Tensor:
    """Cross-entropy of `softmax(hidden @ weight.T + bias)` in nats, summed over labelled positions.

    With a cap c, of c * tanh(logits / c) (Gemma Team 2024, arXiv 2408.00118, section 2).
    With smoothing e, the target distribution is (1 - e) * onehot + e / V (Szegedy et al. 2016,
    arXiv 1512.00567, section 7), as in `F.cross_entropy(..., label_smoothing=e, reduction="sum")`.
    Gradients are computed with the loss, chunk by chunk, and only for inputs that require one.
    Under autocast the products run in its dtype; softmax, loss and the weight's gradient sum are
    float32. On a GPU the host waits for the number of labels, unless `n_labels` says it.

    Hidden states are [..., D], the weight [V, D], the bias [V]; labels [...] int64 are token ids or
    IGNORE. Returns [] float32 (float64 when `hidden` is): zero, with zero gradients, without any
    label. Shapes that do not fit, or a smoothing outside [0, 1], raise ValueError.
    """
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing is {smoothing}; it must be in [0, 1]")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} do not fit: expected [..., D], [V, D] and [...]"
        )
    if chunk_rows is None:
        chunk_rows = usual_chunk_rows(weight.shape[0], kind_of(hidden))
    loss: Tensor = _uncompiled_sum(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        bias,
        labels.reshape(-1),
        smoothing,
        chunk_rows,
        n_labels,
        torch.is_grad_enabled(),
        cap,
    )
    return loss


@dataclass
class _Gradients:
    """The gradients that are wanted, summed over chunks."""

    hidden: Tensor | None  # zeros where no position has a label
    weight: Tensor | None  # set by the first chunk: zeros are a pass that a CPU feels (V x D)
    bias: Tensor | None
    _product: Tensor | None = None
    _is_first: bool = True

    def add(
        self,
        rows: Tensor,
        chunk: Tensor,
        slope: Tensor,
        matrix: Tensor,
        *,
        fast: bool,
        padded: bool,
    ) -> None:
        """Add those of inputs [C, D] with slopes [C, V]; `padded`: with rows of zeros besides."""
        if self.hidden is not None:
            if padded:
                back = _input_gradient(slope, matrix)[: len(rows)]
            else:
                back = _times(slope, matrix.T, fast=fast)
            self.hidden.index_copy_(0, rows, back.to(self.hidden.dtype))
        if self.weight is None:
            return
        if padded:
            self._product = torch.mm(slope.T, chunk, out=self._product)
            _add_in_pieces(self.weight, self._product[: len(self.weight)], first=self._is_first)
        elif slope.dtype == self.weight.dtype and not fast:
            # beta = 0 does not read what was there, not even a NaN (BLAS).
            self.weight.addmm_(slope.T, chunk, beta=0.0 if self._is_first else 1.0)
        else:
            part = _times(slope.T, chunk.T, fast=fast)
            _ = self.weight.copy_(part) if self._is_first else self.weight.add_(part)
        self._is_first = False


class _CrossEntropySum(torch.autograd.Function):
    """The gradients are computed in forward, each chunk's logits once, and scaled in backward.

    Recomputing the logits would cost a third product of the head's size.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        chunk_rows: int,
        n_labels: int | None,
        grad_enabled: bool,  # noqa: FBT001  # autograd functions take arguments by position
        cap: float | None,
    ) -> Tensor:
        wants = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        gradients = _Gradients(
            torch.zeros_like(hidden) if wants[0] else None,
            torch.empty_like(weight, dtype=exact) if wants[1] else None,
            torch.zeros_like(bias, dtype=exact) if wants[2] and bias is not None else None,
        )
        loss = torch.zeros((), dtype=exact, device=hidden.device)

        kind, on_cpu = hidden.device.type, kind_of(hidden) == "cpu"
        compute = (
            torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        )
        fast = on_cpu and compute == exact == torch.float32 and by_onednn(hidden.device)
        with torch.autocast(kind, enabled=False):
            # 16 bits on a CPU have a way of their own; smoothing needs every logarithm.
            rounded = on_cpu and compute == torch.bfloat16 and smoothing == 0.0 and cap is None
            # Once, not once a chunk; on a CPU once an update.
            matrix = padded_copy(weight) if rounded else weight.to(compute)
            # Ascending. With their count known, a GPU need not be waited for.
            if on_cpu or n_labels is None:
                labelled = (labels != IGNORE).nonzero().squeeze(1)
            else:
                labelled = (labels == IGNORE).to(torch.uint8).argsort(stable=True)[:n_labels]
            if rounded:
                # Even ones, at most a quarter larger than usual: a last chunk of few rows would
                # cost a pass over the weight's whole gradient for next to no products.
                chunks = max(1, -(-len(labelled) // (_CHUNKS * chunk_rows * 5 // 4)))
                chunk_rows = max(1, -(-len(labelled) // chunks))
            longest = min(chunk_rows, len(labelled))
            # Kept for all chunks; on a GPU, where new memory costs nothing, given back at once.
            kept = on_cpu and not fast
            room = padded_length(longest) if rounded else longest if kept else 0
            products = matrix.new_empty(room, len(matrix))
            for rows in torch.split(labelled, chunk_rows):
                chunk = hidden.index_select(0, rows).to(compute)
                targets = labels.index_select(0, rows)
                if rounded:
                    part, chunk, slope = _loss_and_slopes(
                        chunk, matrix, targets, products, bias=bias, vocabulary=len(weight)
                    )
                    grad_logits = slope[:, : len(weight)]
                else:
                    out = products[: len(rows)] if room else None
                    grad_logits = _times(chunk, matrix, fast=fast, out=out).to(exact)
                    if bias is not None:
                        grad_logits += bias  # the logits yet
                    slopes = None
                    if cap is not None:  # the derivative of c * tanh(x / c) is 1 - tanh(x / c)^2
                        grad_logits = capped(grad_logits, cap)
                        slopes = (grad_logits / cap).square_().neg_().add_(1.0)
                    part, grad_logits = _loss_and_gradient(grad_logits, targets, smoothing)
                    if slopes is not None:
                        grad_logits.mul_(slopes)
                    slope = grad_logits.to(compute)
                loss += part
                if gradients.bias is not None:
                    gradients.bias += grad_logits.sum(0, dtype=exact)
                gradients.add(rows, chunk, slope, matrix, fast=fast, padded=rounded)
                del grad_logits, slope  # before the next chunk's are made

        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grads
        # In place where no second backward can come: the weight's is a large tensor (V x D).
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
        scale = torch.mul if again else Tensor.mul_
        scaled = (
            None if gradient is None else scale(gradient, grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None, None)


# Shapes depend on data: a compiled caller breaks its graph instead of tracing into this.
_uncompiled_sum: Any = torch.compiler.disable(_CrossEntropySum.apply)  # type: ignore[no-untyped-call]


def _loss_and_gradient(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The sum in nats, and its gradient p - (1 - e) * onehot - e/V, [C, V], in place of `logits`.

    -(1 - e) * log p[y] - e * mean(log p). Few operations over the whole chunk: on a busy CPU each
    wait for all threads takes milliseconds (block by block, 1.2 s for 520 rows where this takes
    0.04).
    """
    column = targets[:, None]
    # On a CPU in place: the kernel is done with a row's logits when it writes the row.
    on_cpu = kind_of(logits) == "cpu"
    logits = torch.log_softmax(logits, 1, out=logits if on_cpu else None)
    losses = (smoothing - 1.0) * logits.gather(1, column)
    if smoothing > 0.0:
        losses -= smoothing * logits.mean(1, keepdim=True)
    logits.exp_()
    if smoothing > 0.0:
        logits -= smoothing / logits.shape[1]
    logits.scatter_(1, column, logits.gather(1, column) - (1.0 - smoothing))
    return losses.sum(), logits


def _times(left: Tensor, right: Tensor, *, fast: bool, out: Tensor | None = None) -> Tensor:
    """`left @ right.T`; `fast` by oneDNN, which takes memory of its own in place of `out`."""
    return product(left, right) if fast else torch.mm(left, right.T, out=out)


def _loss_and_slopes(
    chunk: Tensor,
    matrix: Tensor,
    targets: Tensor,
    products: Tensor,
    *,
    bias: Tensor | None,
    vocabulary: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The loss [] float32 in nats of a chunk [C, D] with a matrix [P, D], both in bfloat16.

    Beside it [R, D] the chunk with zeros below, and [R, P] the gradient by the logits, in
    `products` [at least R, P], zero below the chunk's own rows and beside the V tokens of the
    vocabulary.
    """
    n = len(chunk)
    padded = F.pad(chunk, (0, 0, 0, padded_length(n) - n))
    slopes = torch.mm(padded, matrix.T, out=products[: len(padded)])
    slopes[n:] = 0.0
    slopes[:, vocabulary:] = 0.0
    loss = torch.zeros((), dtype=torch.float32)
    rows = max(1, _BLOCK_ELEMENTS // vocabulary)
    block = torch.empty(min(rows, n), vocabulary, dtype=torch.float32)
    parts = (torch.split(tensor, rows) for tensor in (slopes[:n, :vocabulary], targets))
    for raw, chosen in zip(*parts, strict=True):
        logits = block[: len(raw)].copy_(raw)
        if bias is not None:
            logits += bias
        column = chosen[:, None]
        # In place: the kernel is done with a row's logits when it writes the row.
        shares = torch.softmax(logits, 1, out=logits)
        picked = shares.gather(1, column)
        loss += _nats(picked.squeeze(1), raw, column, bias).sum()
        raw.copy_(shares.scatter_(1, column, picked - 1.0))
    return loss, padded, slopes


def _input_gradient(slopes: Tensor, matrix: Tensor) -> Tensor:
    """`slopes @ matrix`, [R, P] and [P, D] to [R, D] float32."""
    parts = (torch.split(slopes, _COLUMNS, 1), torch.split(matrix, _COLUMNS))
    total = slopes.new_empty(len(slopes), matrix.shape[1], dtype=torch.float32)
    for i, (slope, rows) in enumerate(zip(*parts, strict=True)):
        _add_in_pieces(total, torch.mm(slope, rows), first=i == 0)
    return total


def _add_in_pieces(total: Tensor, part: Tensor, *, first: bool) -> None:
    """`total += part`, float32 and bfloat16 of one shape; the first part sets it.

    By pieces that a cache keeps: torch would first copy all of `part` to float32, fresh memory.
    """
    rows = max(1, _BLOCK_ELEMENTS // total.shape[1])
    for whole, piece in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        if first:
            whole.copy_(piece)
        else:
            whole.add_(piece)


def _nats(shares: Tensor, raw: Tensor, column: Tensor, bias: Tensor | None) -> Tensor:
    """-log of the targets' shares [C]; from the logits again where a share is next to nothing."""
    nats = -shares.log()
    lost = (shares < _TINY).nonzero().squeeze(1)
    if len(lost):
        logits = raw[lost].float()
        if bias is not None:
            logits += bias
        nats[lost] = -logits.log_softmax(1).gather(1, column[lost]).squeeze(1)
    return nats
