"""Training loss: a sum over target tokens, which the caller divides once by the update's tokens.

Fused linear cross-entropy in chunks: the logits of an entire batch never exist together. In
bfloat16 on a CPU, products have 16 bits and the softmax is in float32, block by block.

Letters: N positions with a label, D hidden size, V vocabulary, C rows of a chunk, P padded V.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toque.batch import IGNORE, Batch, DecoderBatch
from toque.hardware.onednn import product
from toque.models.forward.cpu_linear import (
    by_onednn,
    kind_of,
    padded_copy,
    padded_length,
)
from toque.models.forward.packed import hidden_states, logit_cap, output_head


def loss_sum(
    model: nn.Module,
    batch: Batch,
    *,
    smoothing: float = 0.0,
    chunk_rows: int | None = None,
) -> Tensor:
    """Compute the cross-entropy of the batch's labels in nats, [] float32: a sum, not an average.

    The sum over a batch equals the sum over its parts, in any division. The keyword arguments are
    passed to `cross_entropy_sum`.
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
    """Compute the log-probability in nats of each label, [R, L] or [R, T]; 0 without a label."""
    weight, bias = output_head(model)
    hidden = hidden_states(model, batch)
    is_labelled = batch.labels != IGNORE
    inputs, labels = hidden[is_labelled], batch.labels[is_labelled]
    chunk_rows = usual_chunk_rows(weight.shape[0], labels.device.type)
    chunks = zip(
        torch.split(inputs, chunk_rows), torch.split(labels, chunk_rows), strict=True
    )
    nats = []
    for chunk, targets in chunks:
        logits = capped(
            F.linear(chunk, weight.to(chunk.dtype), bias).float(), logit_cap(model)
        )
        nats.append(F.cross_entropy(logits, targets, reduction="none"))
    result = torch.zeros(batch.labels.shape, device=labels.device)
    result[is_labelled] = -torch.cat(nats)
    return result


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Replace logits by c * tanh(logits / c), in place. Without a cap c, return them unchanged."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def nats_by_example(model: nn.Module, batch: Batch) -> list[list[float]]:
    """Compute the loss of each example in nats, by row, in the order of `batch.example_ids`."""
    segments = (
        batch.segments if isinstance(batch, DecoderBatch) else batch.target_segments
    )
    nats = -log_probabilities(model, batch)
    n_segments = max(map(len, batch.example_ids), default=0)
    sums = nats.new_zeros(batch.n_rows, n_segments + 1).scatter_add_(
        1, segments.long(), nats
    )
    table = sums[:, 1:].tolist()
    return [row[: len(ids)] for row, ids in zip(table, batch.example_ids, strict=True)]


_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Logits of a default chunk: 64 MiB of float32 on a CPU, 512 MiB on a GPU. On a CPU the products
of 320 rows with GPT-2's head reach 82 GFLOP/s per core, and the products of 167 rows 72."""
_BF16_CHUNK: Final = 4
"""Size of a chunk of bfloat16 logits, in default chunks. It uses as many bytes as float32 logits
and their gradient. The products of 1,344 rows with GPT-2's head reach 770 GFLOP/s, and of 672 rows
720 (two cores)."""
# Elements of a float32 block of the softmax: 8 MiB fit the cache.
_BLOCK_ELEMENTS: Final = 1 << 21
# Columns per product of slopes and matrix; with 32,128 it is 14 % slower.
_COLUMNS: Final = 4096
_TINY: Final = 1e-30  # smaller shares are computed from the logits again


def usual_chunk_rows(vocab_size: int, device_type: str) -> int:
    """Return the number of positions in an efficient chunk."""
    return max(
        64, _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"]) // vocab_size
    )


def logits_bytes(vocab_size: int, device_type: str, *, positions: int) -> int:
    """Return the largest memory of float32 logits and their softmax, in bytes."""
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
    """Sum the cross-entropy of `softmax(hidden @ weight.T + bias)` over labels, in nats.

    Gradients are computed together with the loss, chunk by chunk, for inputs that require one.
    Under autocast the products use its precision. Softmax, loss and the sum of the weight's
    gradient are float32.

    Args:
        hidden: Hidden states [..., D].
        weight: Output head [V, D].
        labels: Token ids or IGNORE, [...] int64.
        bias: Bias of the output head, [V].
        smoothing: Label smoothing e with the targets (1 - e) * onehot + e / V (Szegedy et al. 2016,
            arXiv 1512.00567, section 7), as in `F.cross_entropy`.
        chunk_rows: Positions per chunk; an efficient number by default.
        n_labels: Number of labelled positions. Without it, the host waits for a GPU to count them.
        cap: c of logits c * tanh(logits / c) (Gemma Team 2024, arXiv 2408.00118, section 2).

    Returns:
        [] float32, or float64 if `hidden` is. Without any label it is zero, with zero gradients.

    Raises:
        ValueError: Shapes do not match, or the smoothing is not in [0, 1].
    """
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must be in [0, 1], not {smoothing}")
    if hidden.shape[:-1] != labels.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels "
            f"{tuple(labels.shape)} must have the shapes [..., D], [V, D] and [...]"
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
    """Gradients that are needed, summed over chunks."""

    hidden: Tensor | None  # zero at positions without a label
    # Set by the first chunk, because zeroing V x D takes time on a CPU.
    weight: Tensor | None
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
        """Add the gradients of inputs [C, D] with slopes [C, V].

        Args:
            rows: Positions of the inputs.
            chunk: The inputs, with rows of zeros at the end if `padded`.
            slope: Gradient by the logits.
            matrix: The weight.
            fast: Use oneDNN's float32 products.
            padded: Slopes and weight are padded bfloat16.
        """
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
            _add_in_pieces(
                self.weight, self._product[: len(self.weight)], first=self._is_first
            )
        elif slope.dtype == self.weight.dtype and not fast:
            # With beta = 0, BLAS ignores the previous content, even NaN.
            self.weight.addmm_(slope.T, chunk, beta=0.0 if self._is_first else 1.0)
        else:
            part = _times(slope.T, chunk.T, fast=fast)
            _ = self.weight.copy_(part) if self._is_first else self.weight.add_(part)
        self._is_first = False


class _CrossEntropySum(torch.autograd.Function):
    """Loss with gradients that forward computes from each chunk's logits, and backward scales.

    To compute the logits again would need a third product with the output head.
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
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        exact = torch.promote_types(hidden.dtype, torch.float32)
        gradients = _Gradients(
            torch.zeros_like(hidden) if needs[0] else None,
            torch.empty_like(weight, dtype=exact) if needs[1] else None,
            torch.zeros_like(bias, dtype=exact)
            if needs[2] and bias is not None
            else None,
        )
        loss = torch.zeros((), dtype=exact, device=hidden.device)

        kind, on_cpu = hidden.device.type, kind_of(hidden) == "cpu"
        compute = (
            torch.get_autocast_dtype(kind)
            if torch.is_autocast_enabled(kind)
            else hidden.dtype
        )
        fast = on_cpu and compute == exact == torch.float32 and by_onednn(hidden.device)
        with torch.autocast(kind, enabled=False):
            # Smoothing needs the logarithm of every share, and has no special path.
            rounded = (
                on_cpu
                and compute == torch.bfloat16
                and smoothing == 0.0
                and cap is None
            )
            # Once per call and not per chunk; on a CPU once per update.
            matrix = padded_copy(weight) if rounded else weight.to(compute)
            # In ascending order. With a known count, the host does not wait for a GPU.
            if on_cpu or n_labels is None:
                labelled = (labels != IGNORE).nonzero().squeeze(1)
            else:
                labelled = (
                    (labels == IGNORE).to(torch.uint8).argsort(stable=True)[:n_labels]
                )
            if rounded:
                # Equal chunks, at most a quarter larger than usual. A short last chunk would need
                # another pass over the weight's entire gradient.
                chunks = max(
                    1, -(-len(labelled) // (_BF16_CHUNK * chunk_rows * 5 // 4))
                )
                chunk_rows = max(1, -(-len(labelled) // chunks))
            longest = min(chunk_rows, len(labelled))
            # All chunks share this memory. On a GPU new memory costs nothing.
            is_shared = on_cpu and not fast
            if rounded:
                longest = padded_length(longest)
            products = matrix.new_empty(longest if is_shared else 0, len(matrix))

            for rows in torch.split(labelled, chunk_rows):
                chunk = hidden.index_select(0, rows).to(compute)
                targets = labels.index_select(0, rows)
                if rounded:
                    part, chunk, slope = _loss_and_slopes(
                        chunk,
                        matrix,
                        targets,
                        products,
                        bias=bias,
                        vocabulary=len(weight),
                    )
                    grad_logits = slope[:, : len(weight)]
                else:
                    out = products[: len(rows)] if len(products) else None
                    logits = _times(chunk, matrix, fast=fast, out=out).to(exact)
                    if bias is not None:
                        logits += bias
                    slopes = None
                    if (
                        cap is not None
                    ):  # the derivative of c * tanh(x / c) is 1 - tanh(x / c)^2
                        logits = capped(logits, cap)
                        slopes = (logits / cap).square_().neg_().add_(1.0)
                    part, grad_logits = _loss_and_gradient(logits, targets, smoothing)
                    del logits
                    if slopes is not None:
                        grad_logits.mul_(slopes)
                    slope = grad_logits.to(compute)
                loss += part
                if gradients.bias is not None:
                    gradients.bias += grad_logits.sum(0, dtype=exact)
                gradients.add(rows, chunk, slope, matrix, fast=fast, padded=rounded)
                del grad_logits, slope  # free the memory before the next chunk

        ctx.save_for_backward(gradients.hidden, gradients.weight, gradients.bias)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_loss,) = grads
        # In place if no second backward can follow, because the weight's gradient is large (V x D).
        again = torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001
        scale = torch.mul if again else Tensor.mul_
        scaled = (
            None if gradient is None else scale(gradient, grad_loss).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None, None, None)


# Shapes depend on the data, so a compiled caller must not trace into this function.
_uncompiled_sum: Any = torch.compiler.disable(_CrossEntropySum.apply)  # type: ignore[no-untyped-call]


def _loss_and_gradient(
    logits: Tensor, targets: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Compute the sum in nats, and its gradient p - (1 - e) * onehot - e/V, [C, V].

    The loss is -(1 - e) * log p[y] - e * mean(log p). The gradient replaces `logits`. Few
    operations on the entire chunk are best: on a busy CPU, every synchronisation of all threads
    takes milliseconds. In blocks it takes 1.2 s for 520 rows, and here 0.04 s.
    """
    column = targets[:, None]
    # In place on a CPU: the kernel has read a row's logits before it writes the row.
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


def _times(
    left: Tensor, right: Tensor, *, fast: bool, out: Tensor | None = None
) -> Tensor:
    """Compute `left @ right.T`. With `fast`, oneDNN computes it in new memory, not in `out`."""
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
    """Compute the loss of a chunk [C, D] with a matrix [P, D], both in bfloat16.

    Args:
        chunk: Hidden states.
        matrix: Weight of the output head, padded with zero rows.
        targets: Token ids [C].
        products: Memory for the gradient, [at least R, P].
        bias: Bias of the output head [V].
        vocabulary: V.

    Returns:
        The loss in nats, [] float32; the chunk [R, D], padded with zero rows; the gradient by the
        logits [R, P] in `products`, zero where rows or columns are padded.
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
        # In place: the kernel has read a row's logits before it writes the row.
        shares = torch.softmax(logits, 1, out=logits)
        picked = shares.gather(1, column)
        loss += _nats(picked.squeeze(1), raw, column, bias).sum()
        raw.copy_(shares.scatter_(1, column, picked - 1.0))
    return loss, padded, slopes


def _input_gradient(slopes: Tensor, matrix: Tensor) -> Tensor:
    """Compute `slopes @ matrix`, [R, P] and [P, D] to [R, D] float32."""
    parts = (torch.split(slopes, _COLUMNS, 1), torch.split(matrix, _COLUMNS))
    total = slopes.new_empty(len(slopes), matrix.shape[1], dtype=torch.float32)
    for i, (slope, rows) in enumerate(zip(*parts, strict=True)):
        _add_in_pieces(total, torch.mm(slope, rows), first=i == 0)
    return total


def _add_in_pieces(total: Tensor, part: Tensor, *, first: bool) -> None:
    """Add a bfloat16 tensor to a float32 tensor of the same shape. The first part sets it.

    The pieces fit into the cache. torch would copy all of `part` to float32 in new memory.
    """
    rows = max(1, _BLOCK_ELEMENTS // total.shape[1])
    for sums, piece in zip(
        torch.split(total, rows), torch.split(part, rows), strict=True
    ):
        if first:
            sums.copy_(piece)
        else:
            sums.add_(piece)


def _nats(shares: Tensor, raw: Tensor, column: Tensor, bias: Tensor | None) -> Tensor:
    """Compute -log of the targets' shares [C]. Tiny shares are computed from the logits again."""
    nats = -shares.log()
    lost = (shares < _TINY).nonzero().squeeze(1)
    if len(lost):
        logits = raw[lost].float()
        if bias is not None:
            logits += bias
        nats[lost] = -logits.log_softmax(1).gather(1, column[lost]).squeeze(1)
    return nats
