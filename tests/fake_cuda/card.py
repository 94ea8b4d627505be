"""A CUDA card without a GPU: the project's own code on FakeTensors whose device is "cuda".

    hooks.install()                     # before torch is imported
    with fake_card("NVIDIA GeForce RTX 4090", memory=24 << 30) as card:
        ...                             # models, batches and updates, all on the device "cuda"
    card.waits                          # where the host waited for the device
    card.peak                           # bytes that tensors took at most

Tensors on the card have no content; those in the machine's memory have none, or are real ones
(`content=True`), and what is read or copied from the card is ones (`card.read`). It finds tensors
on the wrong device, branches for a CPU alone, wrong shapes and dtypes, waits of the host that
Python can see, memory that is read before a copy is whole, or given away while another stream reads
it, and bytes: `card.limit` makes it run out. It cannot find wrong values, kernels that fail, or
waits inside of an operator (of `torch.multinomial`, say, or of an allocation): nothing is computed,
and FlexAttention is replaced by its shapes.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    FakeTensor,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fake_cuda.streams import Order, StreamError, Uses
from toque.models.forward import flex_attention as ours
from toque.models.forward.outline import sdpa_shapes
from toque.models.lora.quantised import silence_bitsandbytes

silence_bitsandbytes()
with contextlib.suppress(ImportError):
    import bitsandbytes  # noqa: F401  # before there is a card, or it would call its own kernels

ATEN = torch.ops.aten
BLOCK = 512  # bytes to which CUDA's caching allocator rounds a tensor
MASK_BLOCK = 128  # positions of a block of FlexAttention's masks
_COPIES = (ATEN._to_copy.default, ATEN.copy_.default)
_TORCH_EMPTY = torch.empty
_TORCH_SDPA = nn.functional.scaled_dot_product_attention
_THREAD_RUN = threading.Thread.run
_STORAGE_PTR = torch.UntypedStorage.data_ptr


class HostWaitError(RuntimeError):
    """The host would wait for the device."""


class _Held:
    """One piece of the card's memory, until it is freed."""

    def __init__(self, storage: Any, size: int, uses: Uses, freed: Any) -> None:
        self.size, self.uses = size, uses
        self.storage = weakref.ref(storage, freed)


class FakeCard(TorchDispatchMode):
    """One fake card: the bytes that tensors on it take, and the host's waits for it."""

    def __init__(
        self,
        name: str,
        memory: int,
        capability: tuple[int, int],
        on_wait: Literal["note", "raise"],
        *,
        content: bool,
    ) -> None:
        super().__init__()
        self.name, self.memory, self.capability = name, memory, capability
        self.on_wait, self.content = on_wait, content
        self.waits: Counter[str] = Counter()
        self.pageable: Counter[int] = Counter()
        """Copies to the card from memory that is not page-locked, by the stream's number."""
        self.faults: list[str] = []  # memory that may be given away while it is read
        self.now = self.peak = 0
        self.limit: int | None = (
            None  # bytes above which an allocation is out of memory
        )
        self.read = some_number
        self.order = Order(self.wait)
        self._live: dict[int, _Held] = {}
        self._pinned: dict[int, Any] = {}
        self._in_flight: set[int] = (
            set()
        )  # page-locked memory that copies are on their way to

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor on the card, until it is freed."""
        if tensor.device.type != "cuda":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            size = -(-storage.nbytes() // BLOCK) * BLOCK
            if self.limit is not None and self.now + size > self.limit:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size} bytes beside {self.now}."
                )
            stream = self.order.current
            uses = Uses(stream, (stream, stream.seen[stream.number]))
            self._live[key] = _Held(storage, size, uses, lambda _: self._freed(key))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        held = self._live.pop(key)
        self.now -= held.size
        self.faults += held.uses.lost()

    def pinned(self, tensor: Tensor) -> Tensor:
        """In place of `Tensor.pin_memory`."""
        self.order.log.append("page-locked")
        return self.pin(tensor.clone()) if self.content else tensor

    def listed(self, tensor: Tensor) -> Any:
        """In place of `FakeTensor.tolist`: all numbers by one copy."""
        if tensor.device.type == "cuda":
            self.wait("numbers are read")
        with torch._C._DisableTorchDispatch():
            return torch.full(tensor.shape, self.read(tensor)).tolist()

    def pin(self, tensor: Tensor) -> Tensor:
        """Count the memory of a tensor of the machine as page-locked."""
        storage = tensor.untyped_storage()
        key = storage._cdata

        def gone(_: Any) -> None:
            self._pinned.pop(key, None)
            self._in_flight.discard(key)

        self._pinned[key] = weakref.ref(storage, gone)
        return tensor

    def address(self, storage: Any) -> int:
        """In place of `UntypedStorage.data_ptr`: another number for each piece of memory."""
        key: int = storage._cdata
        return key if key in self._live else _STORAGE_PTR(storage)

    def wait(self, why: str) -> None:
        """Note that the host waits here; raise `HostWaitError` where it must not."""
        self._in_flight.clear()
        where = f"{why} at {line_of_ours()}"
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
        given = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor)]
        first = args[0] if args else None
        if func is ATEN.is_pinned.default:
            return not self.content or first.untyped_storage()._cdata in self._pinned
        if self.content and _is_of_the_machine(given, kwargs):
            return self._in_memory(func, given, args, kwargs)
        if (
            func.__name__.startswith("_fused_")
            and len({t.device.type for t in given}) > 1
        ):
            raise RuntimeError(f"{func} of tensors that are not all on the same device")
        self._use(given)
        if isinstance(first, Tensor):
            answered, answer = self._without_content(func, first, args)
            if answered:
                return answer
        result = func(*args, **kwargs)
        if func in _COPIES:
            source = args[1] if func is ATEN.copy_.default else first
            if isinstance(source, Tensor) and source.device.type != result.device.type:
                blocks = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
                result = self._copied(source, result, blocks=blocks)
        self._make(result)
        return result

    def _in_memory(self, func: Any, given: list[Tensor], args: Any, kwargs: Any) -> Any:
        """What an operation on tensors of the machine gives; a StreamError where it is too soon."""
        with unset_fake_temporarily():
            if self._in_flight and func is not ATEN.copy_.default:
                self.refuse_in_flight(*given)
            return func(*args, **kwargs)

    def refuse_in_flight(self, *tensors: Tensor) -> None:
        """Refuse to read what copies from the card may not have reached: a StreamError."""
        if any(t.untyped_storage()._cdata in self._in_flight for t in tensors):
            raise StreamError(
                f"a copy from the card is read before it is whole, {line_of_ours()}"
            )

    def _copied(self, source: Tensor, result: Tensor, *, blocks: bool) -> Tensor:
        """The result of a copy to or from the card, which may be a wait."""
        if blocks:
            self.wait(
                f"a copy from {source.device.type} to {result.device.type} blocks"
            )
        if not self.content:
            return result
        if result.device.type == "cuda":
            is_pinned = source.untyped_storage()._cdata in self._pinned
            kind = "page-locked" if is_pinned else "other"
            number = self.order.current.number
            if not blocks and not is_pinned:
                self.pageable[number] += 1
            self.order.log.append(f"copy from {kind} memory on stream {number}")
            return result
        with (
            unset_fake_temporarily()
        ):  # torch takes page-locked memory for a copy by `to`
            made = self.pin(
                torch.full(result.shape, self.read(source), dtype=result.dtype)
            )
        if not blocks:
            self._in_flight.add(made.untyped_storage()._cdata)
        return made

    def _into_memory(self, into: Tensor, source: Tensor, *, blocks: bool) -> Tensor:
        """A copy from the card into a tensor of the machine."""
        key = into.untyped_storage()._cdata
        if blocks or key not in self._pinned:
            self.wait("a copy from cuda to cpu blocks")
        else:
            self._in_flight.add(key)
        self.order.log.append(
            f"copy from the card on stream {self.order.current.number}"
        )
        with unset_fake_temporarily():
            return into.fill_(self.read(source))

    def _use(self, given: list[Tensor]) -> None:
        """Note what the current stream reads of the card's memory."""
        stream = self.order.current
        stream.work()
        for tensor in given:
            held = self._live.get(tensor.untyped_storage()._cdata)
            if held is not None:
                held.uses.read(stream, line_of_ours)

    def _make(self, result: Any) -> None:
        """Note what the current stream wrote."""
        stream = self.order.current
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self.hold(tensor)
                written = (stream, stream.seen[stream.number])
                self._live[tensor.untyped_storage()._cdata].uses.written = written

    def record_stream(self, tensor: Tensor, stream: Any) -> None:
        """In place of `Tensor.record_stream`."""
        self.order.log.append(f"record_stream {stream.number}")
        self._live[tensor.untyped_storage()._cdata].uses.record(stream)

    def _without_content(self, func: Any, first: Tensor, args: Any) -> tuple[bool, Any]:
        """Whether an operation needs the content of its first argument, and an answer for it."""
        if func is ATEN._pin_memory.default:
            return True, first.clone()
        if first.device.type != "cuda":
            if func is ATEN.copy_.default and self.content:
                blocks = not (len(args) > 2 and args[2])
                return True, self._into_memory(first, args[1], blocks=blocks)
            unknown = isinstance(first, FakeTensor) and first.constant is None
            wanted = func is ATEN._local_scalar_dense.default and unknown
            return wanted, self.read(first) if wanted else None
        if func is ATEN._local_scalar_dense.default:
            self.wait("a number is read")
            return True, self.read(first)
        if func in (ATEN.nonzero.default, ATEN.masked_select.default):
            self.wait(f"the size of {func.__name__}'s result is read")
            return True, self._held(
                first.new_empty((first.numel(), first.dim()), dtype=torch.int64)
            )
        if func is ATEN.index.Tensor:
            self._wait_for_indices(args[1])
            if any(map(_is_mask, args[1])):
                return True, self._held(func(first, _all_indices(args[1])))
        if func is ATEN.index_put_.default and not (
            args[2].numel() == 1 and _is_mask(args[1][0])
        ):
            self._wait_for_indices(args[1])
        if func is ATEN.equal.default:
            self.wait("two tensors are compared")
            return True, True
        return False, None

    def _wait_for_indices(self, indices: Sequence[Tensor | None]) -> None:
        if any(map(_is_mask, indices)):
            self.wait("the number of indices of a mask is read")
        if any(index is not None and index.device.type == "cpu" for index in indices):
            self.wait("indices are copied to the card")

    def _held(self, tensor: Tensor) -> Tensor:
        self._make(tensor)
        return tensor

    def settle(self) -> None:
        """Judge what was freed, and what is in use; a StreamError for what was read too long.

        Not for FSDP2, which lets a stream wait before it uses again what it had freed.
        """
        found = self.faults + [
            fault for held in self._live.values() for fault in held.uses.lost()
        ]
        if found:
            raise StreamError("; ".join(dict.fromkeys(found)))


def some_number(tensor: Tensor) -> bool | float | int:
    """One."""
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.dtype.is_floating_point else 1


def _is_of_the_machine(given: list[Tensor], kwargs: Any) -> bool:
    """True if an operation has tensors of the machine's memory alone, and makes no others."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "cuda":
        return False
    return not any(isinstance(tensor, FakeTensor) for tensor in given)


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


def line_of_ours() -> str:
    """The innermost line of the package in the stack, or of the tests."""
    frame, other = sys._getframe(1), "an unknown place"
    while frame is not None:
        file = frame.f_code.co_filename
        if "/src/toque/" in file:
            return (
                f"{file.rpartition('/src/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
            )
        is_test = "/fake_cuda/" in file and not file.endswith(("card.py", "streams.py"))
        if is_test and other == "an unknown place":
            other = f"{file.rpartition('/')[2]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return other


class _Mode(FakeTensorMode):
    """A mode that several threads are in."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        super().__init__(allow_non_fake_inputs=True)

    def __deepcopy__(self, _: Any) -> _Mode:
        """A copied tensor, of a model's buffer say, is on the same card."""
        return self

    @property
    def avoid_device_init(self) -> bool:
        """True: `torch.tensor(..., device="cuda")` makes a tensor on the CPU and moves it."""
        return True

    @property
    def enter_stack(self) -> list[Any]:
        """What this thread is to restore."""
        found: list[Any] = self._of_thread.__dict__.setdefault("stack", [])
        return found

    @enter_stack.setter
    def enter_stack(self, _: list[Any]) -> None: ...

    @property
    def in_kernel_invocation(self) -> bool:
        """Whether this thread is computing the shapes of an operation."""
        return getattr(self._of_thread, "in_kernel", False)

    @in_kernel_invocation.setter
    def in_kernel_invocation(self, value: bool) -> None:
        self._of_thread.in_kernel = value


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
    assert query.dtype == key.dtype == value.dtype, (
        query.dtype,
        key.dtype,
        value.dtype,
    )
    biases = [t for t in _tensors_in(score_mod) if t.dim() == 4]
    bias = biases[0] if biases else None
    return ours.kernel_shapes(query, key, value, bias=bias, return_aux=return_aux)


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """PyTorch's own attention: without a card it would choose to hold the scores of all pairs."""
    devices = {
        t.device for t in (query, key, value, *args, *kwargs.values()) if _is_tensor(t)
    }
    assert len(devices) == 1, f"attention over {devices}"
    if devices == {torch.device("cpu")}:
        return _TORCH_SDPA(query, key, value, *args, **kwargs)
    return sdpa_shapes(query, key, value, *args, **kwargs)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _tensors_in(function: Any) -> list[Tensor]:
    """Tensors that a function captures, also in functions that it calls."""
    found = []
    for cell in getattr(function, "__closure__", None) or ():
        content = cell.cell_contents
        found += [content] if isinstance(content, Tensor) else _tensors_in(content)
    return found


def _block_mask(
    mask_mod: Any, rows: int, _heads: int | None, queries: int, keys: int, **_: Any
) -> BlockMask:
    """A mask's blocks by their sizes; the real one is made without a tensor of all pairs."""
    (segments, *_others) = _tensors_in(mask_mod)
    across, down = (-(-n // MASK_BLOCK) for n in (queries, keys))
    counts = [
        segments.new_zeros((rows, 1, across), dtype=torch.int32) for _ in range(2)
    ]
    listed = [
        segments.new_zeros((rows, 1, across, down), dtype=torch.int32) for _ in range(2)
    ]
    # For backward the same by keys, which `from_kv_blocks` computes by looking at each block.
    by_keys = [segments.new_zeros((rows, 1, down), dtype=torch.int32) for _ in range(2)]
    listed_by_keys = [
        segments.new_zeros((rows, 1, down, across), dtype=torch.int32) for _ in "ab"
    ]
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


def _kernels_on(
    _device: torch.device, _dtype: torch.dtype, _size: int, *, biased: bool
) -> ours.KernelChoice:
    """Torch's own blocks; by the signature of the real one, so that no wrong call passes here."""
    _ = biased
    return ours.KernelChoice(ours._TORCH_BLOCKS)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return _flex if function is flex_attention else _block_mask


@contextlib.contextmanager
def fake_card(
    name: str = "NVIDIA GeForce RTX 4090",
    *,
    memory: int = 24 << 30,
    capability: tuple[int, int] = (8, 9),
    on_wait: Literal["note", "raise"] = "note",
    content: bool = False,
) -> Iterator[FakeCard]:
    """A context in which torch has one card, whose tensors have no content.

    With `content` those of the machine's memory have one; without, they may be as large as any.
    """
    card = FakeCard(name, memory, capability, on_wait, content=content)
    mode = _Mode()

    def run(thread: threading.Thread) -> None:
        with mode, card:
            _THREAD_RUN(thread)

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        made = _TORCH_EMPTY(*args, **kwargs)
        return card.pin(made) if pin_memory and content else made

    # Methods: functions, which become bound to a tensor.
    def listed(tensor: Tensor) -> Any:
        return card.listed(tensor)

    def record_stream(tensor: Tensor, stream: Any) -> None:
        card.record_stream(tensor, stream)

    def data_ptr(storage: Any) -> int:
        return card.address(storage)

    with contextlib.ExitStack() as stack:
        for attribute, value in _of_torch_cuda(card).items():
            stack.enter_context(patch.object(torch.cuda, attribute, value))
        for owner, attribute, value in (
            (fake_tensor, "init_gpu_context", lambda _: None),
            (torch.accelerator, "current_stream", lambda *_: card.order.current),
            (FakeTensor, "tolist", listed),
            (torch.Tensor, "record_stream", record_stream),
            (torch.Tensor, "pin_memory", lambda tensor, *_: card.pinned(tensor)),
            (torch.UntypedStorage, "data_ptr", data_ptr),
            (torch, "empty", empty),
            (nn.functional, "scaled_dot_product_attention", _sdpa),
            # It skips the step by which torch.tensor(..., device="cuda") becomes fake.
            (torch._C, "_InferenceMode", _no_grad),
            (threading.Thread, "run", run),
            (ours, "_compiled", _compiled),
            (ours, "kernels_on", _kernels_on),
        ):
            stack.enter_context(patch.object(owner, attribute, value))
        stack.enter_context(mode)
        stack.enter_context(card)
        yield card


def _of_torch_cuda(card: FakeCard) -> dict[str, Any]:
    """What stands in for `torch.cuda`'s functions and classes."""
    order, memory, capability = card.order, card.memory, card.capability
    properties = types.SimpleNamespace(
        name=card.name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=128,
        L2_cache_size=72 << 20,
        warp_size=32,
    )

    def is_visible() -> bool:
        return os.environ.get("CUDA_VISIBLE_DEVICES") != ""

    return {
        "is_available": is_visible,
        "device_count": lambda: int(is_visible()),
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "get_device_name": lambda *_: card.name,
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
        "Stream": order.Stream,
        "Event": order.Event,
        "stream": order.on,
        "current_stream": lambda *_: order.current,
        "default_stream": lambda *_: order.default,
        "manual_seed": lambda *_: None,
        "manual_seed_all": lambda *_: None,
        "get_rng_state": lambda *_: torch.empty(16, dtype=torch.uint8, device="cpu"),
        "set_rng_state": lambda *_, **__: None,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
    }


def _no_grad(on: bool) -> contextlib.AbstractContextManager[None]:
    return torch.no_grad() if on else contextlib.nullcontext()


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
