"""A CUDA card without a GPU: the project's own code on FakeTensors whose device is "cuda".

    hooks.install()                     # before torch is imported
    with fake_card("NVIDIA GeForce RTX 4090", memory=24 << 30) as card:
        ...                             # models, batches and updates, all on the device "cuda"
    card.waits                          # where the host waited for the device
    card.peak                           # bytes that tensors took at most

It finds tensors on the wrong device, branches for a CPU alone, wrong shapes and dtypes, waits of
the host that Python can see, and bytes. It cannot find wrong values, kernels that fail, or waits
inside of an operator: tensors have no content, and FlexAttention is replaced by its shapes.
"""

from __future__ import annotations

import contextlib
import traceback
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from toque.models.forward import flex_attention as ours
from toque.models.forward.outline import sdpa_shapes

ATEN = torch.ops.aten
BLOCK = 512  # bytes to which CUDA's caching allocator rounds a tensor
MASK_BLOCK = 128  # positions of a block of FlexAttention's masks
_TORCH_EMPTY = torch.empty
_TORCH_SDPA = nn.functional.scaled_dot_product_attention


class HostWaitError(RuntimeError):
    """The host would wait for the device."""


class FakeCard(TorchDispatchMode):
    """One fake card: the bytes that tensors on it take, and the host's waits for it."""

    def __init__(
        self,
        name: str,
        memory: int,
        capability: tuple[int, int],
        on_wait: Literal["note", "raise"],
    ) -> None:
        super().__init__()
        self.name, self.memory, self.capability = name, memory, capability
        self.on_wait = on_wait
        self.waits: Counter[str] = Counter()
        self.now = self.peak = 0
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor on the card, until it is freed."""
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size)
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]

    def wait(self, why: str) -> None:
        """Note that the host waits here; raise `HostWaitError` where it must not."""
        where = f"{why} at {_line_of_ours()}"
        self.waits[where] += 1
        if self.on_wait == "raise":
            raise HostWaitError(where)

    @contextlib.contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        """Inside, a wait of the host raises `HostWaitError`."""
        before, self.on_wait = self.on_wait, "raise"
        try:
            yield
        finally:
            self.on_wait = before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, FakeTensor):
            answered, answer = self._without_content(func, first, args)
            if answered:
                return answer
        result = func(*args, **kwargs)
        if func in (ATEN._to_copy.default, ATEN.copy_.default):
            source = args[1] if func is ATEN.copy_.default else first
            blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
            if isinstance(source, Tensor) and source.device.type != result.device.type and blocking:
                self.wait(f"a copy from {source.device.type} to {result.device.type} blocks")
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        return result

    def _without_content(self, func: Any, first: FakeTensor, args: Any) -> tuple[bool, Any]:
        """Whether an operation needs the content of its first argument, and an answer for it."""
        if func is ATEN.is_pinned.default:
            return True, True
        if func is ATEN._pin_memory.default:
            return True, first.clone()
        if first.device.type != "cuda":
            wanted = func is ATEN._local_scalar_dense.default and first.constant is None
            return wanted, _some_number(first) if wanted else None
        if func is ATEN._local_scalar_dense.default:
            self.wait("a number is read")
            return True, _some_number(first)
        if func in (ATEN.nonzero.default, ATEN.masked_select.default):
            self.wait(f"the size of {func.__name__}'s result is read")
            return True, self._held(
                first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
            )
        if func is ATEN.index.Tensor and any(map(_is_mask, args[1])):
            self.wait("the number of indices of a mask is read")
            return True, self._held(func(first, _all_indices(args[1])))
        if func is ATEN.equal.default:
            self.wait("two tensors are compared")
            return True, True
        return False, None

    def _held(self, tensor: Tensor) -> Tensor:
        self.hold(tensor)
        return tensor


def _some_number(tensor: Tensor) -> bool | float | int:
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype == torch.bool


def _all_indices(indices: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Indices in place of masks: as many as if all of a mask were true."""
    found: list[Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool:
            one = index.new_zeros(index.numel(), dtype=torch.int64)
            found += [one] * index.dim()
        else:
            found.append(index)
    return found


def _line_of_ours() -> str:
    for frame in reversed(traceback.extract_stack()):
        if "/src/toque/" in frame.filename:
            return f"{frame.filename.rpartition('/src/')[2]}:{frame.lineno} {frame.name}"
    for frame in reversed(traceback.extract_stack()):
        if "site-packages" not in frame.filename and frame.filename != __file__:
            return f"{frame.filename.rpartition('/')[2]}:{frame.lineno} {frame.name}"
    return "an unknown place"


class _Mode(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        """True: `torch.tensor(..., device="cuda")` makes a tensor on the CPU and moves it."""
        return True


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, _other: Any) -> float:
        return 1.0


class _Stream:
    cuda_stream = stream_id = device = device_index = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_event(self, _event: Any) -> None: ...
    def wait_stream(self, _stream: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, event: Any = None) -> Any:
        return event or _Event()


def _flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score_mod: Any,
    block_mask: BlockMask,
    return_aux: Any = None,
    **_: Any,
) -> Any:
    captured = [*_tensors_in(score_mod), *_tensors_in(block_mask.mask_mod)]
    blocks = [t for t in block_mask.as_tuple(flatten=False) if isinstance(t, Tensor)]
    devices = {t.device for t in (query, key, value, *captured, *blocks)}
    assert len(devices) == 1, f"FlexAttention over {devices}"
    assert query.dtype == key.dtype == value.dtype, (query.dtype, key.dtype, value.dtype)
    biases = [t for t in _tensors_in(score_mod) if t.dim() == 4]
    bias = biases[0] if biases else None
    return ours.kernel_shapes(query, key, value, bias=bias, return_aux=return_aux)


def _sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """PyTorch's own attention: without a card it would choose to hold the scores of all pairs."""
    devices = {t.device for t in (query, key, value, *args, *kwargs.values()) if _is_tensor(t)}
    assert len(devices) == 1, f"attention over {devices}"
    if devices == {torch.device("cpu")}:
        return _TORCH_SDPA(query, key, value, *args, **kwargs)
    return sdpa_shapes(query, key, value, *args, **kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _tensors_in(function: Any) -> list[Tensor]:
    cells = (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return [content for content in cells if isinstance(content, Tensor)]


def _block_mask(
    mask_mod: Any, rows: int, _heads: int | None, queries: int, keys: int, **_: Any
) -> BlockMask:
    """A mask's blocks by their sizes; the real one is made without a tensor of all pairs."""
    (segments, *_others) = _tensors_in(mask_mod)
    across, down = (-(-n // MASK_BLOCK) for n in (queries, keys))
    counts = [segments.new_zeros((rows, 1, across), dtype=torch.int32) for _ in range(2)]
    listed = [segments.new_zeros((rows, 1, across, down), dtype=torch.int32) for _ in range(2)]
    # For backward the same by keys, which `from_kv_blocks` computes by looking at each block.
    by_keys = [segments.new_zeros((rows, 1, down), dtype=torch.int32) for _ in range(2)]
    listed_by_keys = [segments.new_zeros((rows, 1, down, across), dtype=torch.int32) for _ in "ab"]
    return BlockMask(
        seq_lengths=(queries, keys),
        kv_num_blocks=counts[0],
        kv_indices=listed[0],
        full_kv_num_blocks=counts[1],
        full_kv_indices=listed[1],
        q_num_blocks=by_keys[0],
        q_indices=listed_by_keys[0],
        full_q_num_blocks=by_keys[1],
        full_q_indices=listed_by_keys[1],
        BLOCK_SIZE=(MASK_BLOCK, MASK_BLOCK),
        mask_mod=mask_mod,
    )


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return _flex if function is flex_attention else _block_mask


@contextlib.contextmanager
def fake_card(
    name: str = "NVIDIA GeForce RTX 4090",
    *,
    memory: int = 24 << 30,
    capability: tuple[int, int] = (8, 9),
    on_wait: Literal["note", "raise"] = "note",
) -> Iterator[FakeCard]:
    """A context in which torch has one card, and tensors have no content."""
    card = FakeCard(name, memory, capability, on_wait)
    properties = types.SimpleNamespace(
        name=name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=128,
        L2_cache_size=72 << 20,
        warp_size=32,
    )
    values: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "get_device_name": lambda *_: name,
        "get_device_properties": lambda *_: properties,
        "get_device_capability": lambda *_: capability,
        "set_device": lambda *_: None,
        "is_bf16_supported": lambda *_, **__: capability >= (8, 0),
        "mem_get_info": lambda *_: (memory - card.now, memory),
        "memory_allocated": lambda *_: card.now,
        "memory_reserved": lambda *_: card.now,
        "max_memory_allocated": lambda *_: card.peak,
        "reset_peak_memory_stats": lambda *_: setattr(card, "peak", card.now),
        "empty_cache": lambda: None,
        "synchronize": lambda *_: card.wait("synchronize"),
        "set_sync_debug_mode": lambda *_: None,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": lambda *_: _Stream(),
        "default_stream": lambda *_: _Stream(),
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_, **__: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }
    with contextlib.ExitStack() as stack:
        for attribute, value in values.items():
            stack.enter_context(patch.object(torch.cuda, attribute, value))
        for owner, attribute, value in (
            (fake_tensor, "init_gpu_context", lambda _: None),
            (torch.Tensor, "record_stream", lambda _self, _stream: None),
            (torch.Tensor, "pin_memory", lambda self, *_: self),
            (torch, "empty", _empty),
            (nn.functional, "scaled_dot_product_attention", _sdpa),
            # It skips the step by which torch.tensor(..., device="cuda") becomes fake.
            (torch, "inference_mode", _no_grad),
            (ours, "_compiled", _compiled),
            (ours, "kernels_on", lambda *_, **__: ours.KernelChoice(ours._TORCHS)),
        ):
            stack.enter_context(patch.object(owner, attribute, value))
        stack.enter_context(_Mode(allow_non_fake_inputs=True))
        stack.enter_context(card)
        yield card


def _no_grad(*mode: Any) -> Any:
    if mode and callable(mode[0]):
        return torch.no_grad()(mode[0])
    return torch.no_grad() if all(mode) else contextlib.nullcontext()


def _empty(*args: Any, **kwargs: Any) -> Tensor:
    kwargs.pop("pin_memory", None)
    return _TORCH_EMPTY(*args, **kwargs)


def to_card(model: nn.Module) -> nn.Module:
    """Exchange every parameter and buffer for one on the card; shared ones stay shared."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new = torch.empty(old.shape, dtype=old.dtype, device="cuda")
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new
                held[name] = made[id(old)]
    return model
