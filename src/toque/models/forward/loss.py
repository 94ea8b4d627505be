"""Training loss: a sum over target tokens, which the caller divides once by the update's tokens.

Fused linear cross-entropy in chunks: the logits of an entire batch never exist together. In
bfloat16 on a CPU, matmuls have 16 bits and the softmax is in float32, block by block.

Letters: N positions with a label, D hidden size, V vocabulary size, C rows of a chunk, R rows of a
padded chunk, P padded V.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from toque.batch import IGNORE, Batch
from toque.hardware.onednn import onednn_linear
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

    The loss of a batch equals the sum of its parts' losses, however it is divided. Labels with a
    weight count as often as their weight. The keyword arguments are passed to `cross_entropy_sum`.
    """
    weight, bias = output_head(model)
    n_labels = None if batch.labelled is None else sum(batch.labelled)
    return cross_entropy_sum(
        hidden_states(model, batch),
        weight,
        batch.labels,
        bias=bias,
        smoothing=smoothing,
        chunk_rows=chunk_rows,
        n_labels=n_labels,
        cap=logit_cap(model),
        label_weights=batch.label_weights,
    )


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """Replace logits by c * tanh(logits / c), in place. Without a cap c, return them unchanged."""
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


_CHUNK_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Number of logits in a default chunk: 64 MiB of float32 on a CPU, 512 MiB on a GPU. On a CPU,
matmuls of 320 rows with GPT-2's head reach 82 GFLOP/s per core, and matmuls of 167 rows 72."""
_BF16_CHUNK: Final = 4
"""Rows of a bfloat16 chunk, as a multiple of a default chunk's rows. Its logits take as many bytes
as a default chunk's float32 logits and their gradient. Matmuls of 1,344 rows with GPT-2's head
reach 770 GFLOP/s, and matmuls of 672 rows 720 (two cores)."""
# Number of elements per float32 block of the softmax. 8 MiB fit into the cache.
_BLOCK_ELEMENTS: Final = 1 << 21
# Vocabulary columns per matmul for the input's gradient. One matmul of all 32,128 is 14 % slower.
_COLUMNS: Final = 4096
# Smaller probabilities are computed from the logits again, because their logarithm is inexact.
_TINY: Final = 1e-30
_FLOAT32_BYTES: Final = 4


def usual_chunk_rows(vocab_size: int, device_type: str) -> int:
    """Return the number of positions in an efficient chunk."""
    elements = _CHUNK_ELEMENTS.get(device_type, _CHUNK_ELEMENTS["cuda"])
    return max(64, elements // vocab_size)


def logits_bytes(vocab_size: int, device_type: str, *, positions: int) -> int:
    """Return the peak memory of a chunk's float32 logits and their softmax, in bytes."""
    rows = min(positions, usual_chunk_rows(vocab_size, device_type))
    return 2 * _FLOAT32_BYTES * vocab_size * rows


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
    label_weights: Tensor | None = None,
) -> Tensor:
    """Sum the cross-entropy of `softmax(hidden @ weight.T + bias)` over labels, in nats.

    Gradients are computed together with the loss, chunk by chunk, for inputs that require one.
    Under autocast the matmuls use its precision. The softmax, the loss and the accumulated gradient
    of the weight are float32.

    Args:
        hidden: Hidden states [..., D].
        weight: Output head [V, D].
        labels: Token ids or IGNORE, [...] int64.
        bias: Bias of the output head, [V].
        smoothing: Label smoothing e with the targets (1 - e) * onehot + e / V (Szegedy et al. 2016,
            arXiv 1512.00567, section 7), as in `F.cross_entropy`.
        chunk_rows: Positions per chunk; `usual_chunk_rows` by default.
        n_labels: Number of labelled positions. Without it, the host waits for a GPU to count them.
        cap: c of logits c * tanh(logits / c) (Gemma Team 2024, arXiv 2408.00118, section 2).
        label_weights: Factors of the labels' cross-entropies, [...] float32. They may be negative.
            None means that all are 1.

    Returns:
        The loss, [] float32, or float64 if `hidden` is float64. Without any label, the loss and the
        gradients are zero.

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
    if label_weights is not None:
        if label_weights.shape != labels.shape:
            raise ValueError(
                f"label_weights {tuple(label_weights.shape)} must have the shape of the labels, "
                f"{tuple(labels.shape)}"
            )
        label_weights = label_weights.reshape(-1)
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
        label_weights,
    )
    return loss


@dataclass(frozen=True)
class _Precision:
    """Number formats of one call, and the implementation of its matmuls."""

    compute: torch.dtype  # format of the matmuls
    exact: torch.dtype  # format of the softmax, the loss and the weight's gradient
    on_cpu: bool
    uses_onednn: bool  # float32 matmuls use oneDNN
    # bfloat16 on a CPU: chunks and vocabulary are padded, and the softmax is computed in blocks.
    is_padded_bf16: bool

    @classmethod
    def of(cls, hidden: Tensor, *, smoothing: float, cap: float | None) -> _Precision:
        """Select the formats for hidden states by their device and autocast."""
        device_type = hidden.device.type
        compute = hidden.dtype
        if torch.is_autocast_enabled(device_type):
            compute = torch.get_autocast_dtype(device_type)
        exact = torch.promote_types(hidden.dtype, torch.float32)
        on_cpu = kind_of(hidden) == "cpu"
        is_float32 = compute == exact == torch.float32
        # The softmax in blocks has no cap, and no smoothing, which needs every log-probability.
        is_plain = smoothing == 0.0 and cap is None
        return cls(
            compute,
            exact,
            on_cpu,
            uses_onednn=on_cpu and is_float32 and by_onednn(hidden.device),
            is_padded_bf16=on_cpu and compute == torch.bfloat16 and is_plain,
        )

    def matmul_transposed(
        self, left: Tensor, right: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Compute `left @ right.T`. oneDNN allocates the result and ignores `out`."""
        if self.uses_onednn:
            return onednn_linear(left, right)
        return torch.mm(left, right.T, out=out)

    def chunk_rows(self, n_labels: int, requested: int) -> int:
        """Return the rows per chunk. Padded bfloat16 has equal chunks of a larger size.

        The chunks are at most a quarter larger than `_BF16_CHUNK` requires. A short last chunk
        would need another pass over the weight's entire gradient.
        """
        if not self.is_padded_bf16:
            return requested
        largest = _BF16_CHUNK * requested * 5 // 4
        n_chunks = max(1, -(-n_labels // largest))
        return max(1, -(-n_labels // n_chunks))

    def allocate_logits(self, matrix: Tensor, rows: int) -> Tensor:
        """Allocate memory for the logits that all chunks share, or no rows without sharing.

        On a GPU new memory costs nothing. oneDNN allocates its results.
        """
        if not self.on_cpu or self.uses_onednn:
            rows = 0
        elif self.is_padded_bf16:
            rows = padded_length(rows)
        return matrix.new_empty(rows, len(matrix))


@dataclass
class _Gradients:
    """Required gradients, summed over chunks."""

    precision: _Precision
    hidden: Tensor | None  # zero at positions without a label
    # Set by the first chunk, because zeroing V x D takes time on a CPU.
    weight: Tensor | None
    bias: Tensor | None
    _bf16_part: Tensor | None = None  # one chunk's gradient of the padded weight
    _is_first: bool = True

    @classmethod
    def allocate(
        cls,
        precision: _Precision,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        needs: Sequence[bool],
    ) -> _Gradients:
        """Allocate the gradients of those inputs that need one."""
        exact = precision.exact
        needs_hidden, needs_weight, needs_bias = needs
        return cls(
            precision,
            torch.zeros_like(hidden) if needs_hidden else None,
            torch.empty_like(weight, dtype=exact) if needs_weight else None,
            torch.zeros_like(bias, dtype=exact)
            if needs_bias and bias is not None
            else None,
        )

    def add(
        self, rows: Tensor, chunk: Tensor, grad_logits: Tensor, matrix: Tensor
    ) -> None:
        """Add a chunk's gradients of the inputs and the weight.

        Args:
            rows: Positions of the inputs.
            chunk: The inputs, [C, D], or [R, D] with rows of zeros in padded bfloat16.
            grad_logits: Gradient of the logits, [C, V] or [R, P].
            matrix: The weight, [V, D] or [P, D].
        """
        if self.hidden is not None:
            if self.precision.is_padded_bf16:
                grad_chunk = _input_gradient(grad_logits, matrix)[: len(rows)]
            else:
                grad_chunk = self.precision.matmul_transposed(grad_logits, matrix.T)
            self.hidden.index_copy_(0, rows, grad_chunk.to(self.hidden.dtype))
        if self.weight is not None:
            self._add_to_weight(self.weight, chunk, grad_logits)
            self._is_first = False

    def _add_to_weight(self, total: Tensor, chunk: Tensor, grad_logits: Tensor) -> None:
        if self.precision.is_padded_bf16:
            part = torch.mm(grad_logits.T, chunk, out=self._bf16_part)
            self._bf16_part = part
            _add_in_pieces(total, part[: len(total)], first=self._is_first)
        elif grad_logits.dtype == total.dtype and not self.precision.uses_onednn:
            # With beta = 0, BLAS ignores the previous content, even NaN.
            total.addmm_(grad_logits.T, chunk, beta=0.0 if self._is_first else 1.0)
        else:
            part = self.precision.matmul_transposed(grad_logits.T, chunk.T)
            _ = total.copy_(part) if self._is_first else total.add_(part)


class _CrossEntropySum(torch.autograd.Function):
    """Loss that computes its gradients in the forward pass, from each chunk's logits.

    The backward pass only scales them. Recomputing the logits there would need a third matmul with
    the output head.
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
        label_weights: Tensor | None,
    ) -> Tensor:
        needs = [grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        precision = _Precision.of(hidden, smoothing=smoothing, cap=cap)
        gradients = _Gradients.allocate(precision, hidden, weight, bias, needs)
        exact = precision.exact
        loss = torch.zeros((), dtype=exact, device=hidden.device)

        with torch.autocast(hidden.device.type, enabled=False):
            # Cast once per call and not per chunk. On a CPU the copy is cached for an update.
            is_padded = precision.is_padded_bf16
            matrix = padded_copy(weight) if is_padded else weight.to(precision.compute)
            labelled = _labelled_positions(labels, n_labels, on_cpu=precision.on_cpu)
            chunk_rows = precision.chunk_rows(len(labelled), chunk_rows)
            memory = precision.allocate_logits(matrix, min(chunk_rows, len(labelled)))

            for rows in torch.split(labelled, chunk_rows):
                chunk = hidden.index_select(0, rows).to(precision.compute)
                targets = labels.index_select(0, rows)
                factors = None
                if label_weights is not None:
                    factors = label_weights.index_select(0, rows)
                if is_padded:
                    part, chunk, rounded = _padded_loss_and_gradient(
                        chunk,
                        matrix,
                        targets,
                        memory,
                        bias=bias,
                        vocabulary=len(weight),
                        factors=factors,
                    )
                    grad_logits = rounded[:, : len(weight)]
                else:
                    out = memory[: len(rows)] if len(memory) else None
                    logits = precision.matmul_transposed(chunk, matrix, out).to(exact)
                    if bias is not None:
                        logits += bias
                    part, grad_logits = _loss_and_gradient(
                        logits, targets, smoothing, cap, factors
                    )
                    del logits
                    rounded = grad_logits.to(precision.compute)

                loss += part
                if gradients.bias is not None:
                    gradients.bias += grad_logits.sum(0, dtype=exact)
                gradients.add(rows, chunk, rounded, matrix)
                del grad_logits, rounded  # free the memory before the next chunk

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
        return (*scaled, None, None, None, None, None, None, None)


# Shapes depend on the data, so a compiled caller must not trace into this function.
_uncompiled_sum: Any = torch.compiler.disable(_CrossEntropySum.apply)  # type: ignore[no-untyped-call]


def _labelled_positions(
    labels: Tensor, n_labels: int | None, *, on_cpu: bool
) -> Tensor:
    """Return the positions with a label, in ascending order.

    With a known number of labels, the host does not wait for a GPU.
    """
    if on_cpu or n_labels is None:
        return (labels != IGNORE).nonzero().squeeze(1)
    is_ignored = (labels == IGNORE).to(torch.uint8)
    return is_ignored.argsort(stable=True)[:n_labels]


def _loss_and_gradient(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    cap: float | None,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Cap logits [C, V]. Compute their loss in nats, [], and its gradient by the uncapped logits.

    The gradient may replace `logits`. `factors` [C] multiply the loss of each row.
    """
    if cap is None:
        return _smoothed_loss_and_gradient(logits, targets, smoothing, factors)
    logits = capped(logits, cap)
    # The derivative of c * tanh(x / c) is 1 - tanh(x / c)^2.
    derivative = (logits / cap).square_().neg_().add_(1.0)
    loss, gradient = _smoothed_loss_and_gradient(logits, targets, smoothing, factors)
    return loss, gradient.mul_(derivative)


def _smoothed_loss_and_gradient(
    logits: Tensor, targets: Tensor, smoothing: float, factors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the sum in nats, and its gradient p - (1 - e) * onehot - e/V, [C, V].

    The loss is -(1 - e) * log p[y] - e * mean(log p). Few operations on the entire chunk are
    fastest: on a busy CPU, every synchronisation of all threads takes milliseconds. In blocks, 520
    rows take 1.2 s, and here 0.04 s.
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
    if factors is not None:
        losses *= factors[:, None]
        logits *= factors[:, None]
    return losses.sum(), logits


def _padded_loss_and_gradient(
    chunk: Tensor,
    matrix: Tensor,
    targets: Tensor,
    memory: Tensor,
    *,
    bias: Tensor | None,
    vocabulary: int,
    factors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the loss of a chunk [C, D] with a matrix [P, D], both in bfloat16.

    Args:
        chunk: Hidden states.
        matrix: Weight of the output head, padded with zero rows.
        targets: Token ids [C].
        memory: Memory for the gradient, [at least R, P].
        bias: Bias of the output head [V].
        vocabulary: V.
        factors: Factors of the loss of each row [C], or None.

    Returns:
        The loss in nats, [] float32; the chunk [R, D], padded with zero rows; the gradient of the
        logits [R, P] in `memory`, with zeros in padded rows and columns.
    """
    n = len(chunk)
    padded = F.pad(chunk, (0, 0, 0, padded_length(n) - n))
    logits = torch.mm(padded, matrix.T, out=memory[: len(padded)])
    logits[n:] = 0.0
    logits[:, vocabulary:] = 0.0
    loss = _replace_logits_by_gradient(logits[:n, :vocabulary], targets, bias, factors)
    gradient = logits  # in the same memory
    return loss, padded, gradient


def _replace_logits_by_gradient(
    bf16_logits: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    factors: Tensor | None,
) -> Tensor:
    """Replace logits [C, V] by the gradient of their loss. Return the loss in nats, [] float32.

    One block of rows at a time: logits in bfloat16, softmax in float32, gradient in bfloat16.

    Args:
        bf16_logits: Logits without the bias, and then the gradient.
        targets: Token ids [C].
        bias: Bias of the output head [V].
        factors: Factors of the loss of each row [C], or None.
    """
    n, vocabulary = bf16_logits.shape
    block_rows = max(1, _BLOCK_ELEMENTS // vocabulary)
    scratch = torch.empty(min(block_rows, n), vocabulary, dtype=torch.float32)
    logit_blocks = torch.split(bf16_logits, block_rows)
    target_blocks = torch.split(targets, block_rows)

    factor_blocks: Sequence[Tensor | None] = [None for _ in target_blocks]
    if factors is not None:
        factor_blocks = torch.split(factors, block_rows)

    loss = torch.zeros((), dtype=torch.float32)
    blocks = zip(logit_blocks, target_blocks, factor_blocks, strict=True)
    for block_logits, block_targets, block_factors in blocks:
        logits = scratch[: len(block_logits)].copy_(block_logits)
        if bias is not None:
            logits += bias
        column = block_targets[:, None]
        # In place: the kernel has read a row's logits before it writes the row.
        probabilities = torch.softmax(logits, 1, out=logits)
        of_targets = probabilities.gather(1, column)
        nats = _nats(of_targets.squeeze(1), block_logits, column, bias)
        gradient = probabilities.scatter_(1, column, of_targets - 1.0)
        if block_factors is not None:
            nats *= block_factors
            gradient *= block_factors[:, None]
        loss += nats.sum()
        block_logits.copy_(gradient)
    return loss


def _input_gradient(grad_logits: Tensor, matrix: Tensor) -> Tensor:
    """Compute `grad_logits @ matrix`, [R, P] and [P, D] to [R, D] float32."""
    shape = (len(grad_logits), matrix.shape[1])
    total = grad_logits.new_empty(shape, dtype=torch.float32)
    column_blocks = torch.split(grad_logits, _COLUMNS, 1)
    row_blocks = torch.split(matrix, _COLUMNS)
    for i, (columns, rows) in enumerate(zip(column_blocks, row_blocks, strict=True)):
        _add_in_pieces(total, torch.mm(columns, rows), first=i == 0)
    return total


def _add_in_pieces(total: Tensor, part: Tensor, *, first: bool) -> None:
    """Add a bfloat16 tensor to a float32 tensor of the same shape. The first part sets the tensor.

    The pieces fit into the cache. torch would copy all of `part` to float32 in new memory.
    """
    rows = max(1, _BLOCK_ELEMENTS // total.shape[1])
    sums = torch.split(total, rows)
    for block, piece in zip(sums, torch.split(part, rows), strict=True):
        if first:
            block.copy_(piece)
        else:
            block.add_(piece)


def _nats(
    probabilities: Tensor, bf16_logits: Tensor, column: Tensor, bias: Tensor | None
) -> Tensor:
    """Compute -log of the targets' probabilities [C].

    Tiny probabilities are computed again, as log-probabilities of the logits.
    """
    nats = -probabilities.log()
    tiny = (probabilities < _TINY).nonzero().squeeze(1)
    if len(tiny):
        logits = bf16_logits[tiny].float()
        if bias is not None:
            logits += bias
        log_probabilities = logits.log_softmax(1)
        nats[tiny] = -log_probabilities.gather(1, column[tiny]).squeeze(1)
    return nats
