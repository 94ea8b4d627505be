"""Ledger: bytes that tensors take, now and at most, and the work done, of code run on shapes.

Under `FakeTensorMode` a forward and a backward take no memory and no time worth naming, and still
create and free every tensor in the order of a real one. The ledger watches that.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

_ATEN: Final = torch.ops.aten


class Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation between entering and leaving it.

    Attributes:
        now: bytes of the tensors that live.
        peak: the most there were.
        products: FLOPs of matrix products, by whether they are batched.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.products: dict[str, float] = defaultdict(float)
        self._live: dict[int, tuple[Any, int]] = {}
        self._labels_found = False

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor that was there before."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001  # it has no public name
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda _: self._freed(key)), size)
        self.now += size
        self.peak = max(self.peak, self.now)

    def _freed(self, key: int) -> None:
        self.now -= self._live.pop(key)[1]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run `func` and note what it made."""
        if func is _ATEN.nonzero.default:
            return self._found(args[0])
        result = func(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor):
                self.hold(tensor)
        self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        packet = func._overloadpacket  # noqa: SLF001  # it has no public name
        counted = flop_registry.get(_ATEN.addmm if packet is _ATEN.addmm_ else packet)
        if counted is not None:
            kind = "batched" if packet in (_ATEN.bmm, _ATEN.baddbmm) else "plain"
            self.products[kind] += float(counted(*args, **kwargs, out_val=result))

    def _found(self, wanted: Tensor) -> Tensor:
        """Indices, which no shape tells: the first are those of the labels, and all have one.

        What is looked for afterwards are exceptions, such as a share of next to nothing.
        """
        n = 0 if self._labels_found else wanted.numel()
        self._labels_found = True
        found = wanted.new_empty((n, wanted.dim()), dtype=torch.int64)
        self.hold(found)
        return found
