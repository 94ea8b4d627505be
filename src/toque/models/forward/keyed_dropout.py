"""Dropout (Srivastava et al. 2014) with masks that do not depend on micro-batches or ranks.

The bits of an element are a hash of the update (seed and step), the token (example, side and
position in it), the site (a layer of the model) and the column. Rows can therefore be grouped,
packed and assigned to ranks in any way, and recomputed in backward, with the same masks. A hash
gives four columns sixteen bits each. On a CPU it takes as long as PyTorch's generator for the same
number of bits, and a third of the time of PyTorch's dropout (lab/performance.md).

Letters: R rows, T tokens of a row, H heads, C columns of a mask.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from toque.errors import ConfigError
from toque.models.families import CAUSAL, Family, family_of, unwrapped
from toque.models.forward.cpu_linear import kind_of

UPDATE: Final = ContextVar("UPDATE", default=0)
"""Key of the current update, 64 bits: a function of the seed and the step."""
_STEPS: Final = 1 << 16  # steps of the probability that an element is dropped
PAIR_STEPS: Final = 1 << 24  # steps of the probability that a pair of tokens is dropped
Pair = tuple[Tensor, Tensor]  # keys [R, T] of the queries and [R, S] of the keys, int64
_MAX_COLUMNS: Final = 1 << 16  # widest layer that can be compiled
_LANES: Final = 4  # columns that share a hash of 64 bits
# Odd numbers of 64 bits, as signed ones. The first is SplitMix64's increment, and the next two
# are its multipliers (Steele et al. 2014). The last three separate heads, calls and sites.
_COLUMN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_HEAD: Final = 0xD1B54A32D192ED03 - (1 << 64)
_CALL: Final = 0x2545F4914F6CDD
_SITE: Final = 0x5851F42D4C957F2D


def keep_mask(like: Tensor, p: float, keys: Tensor | None = None) -> Tensor:
    """Build factors with the shape and type of `like`: 0 with probability p, else 1 / (1 - p).

    With keys [...] of `like` [..., C], the mask is a function of the keys, and p is rounded to a
    multiple of 1/65,536. Without keys, PyTorch selects the elements.
    """
    if keys is None:
        return functional.dropout(torch.ones_like(like), p)
    mask, scale = kept_elements(keys, like.shape[-1], p)
    # torch converts bytes two to three times as fast as booleans.
    return mask.view(torch.uint8).to(like.dtype).mul_(scale)


def kept_elements(
    keys: Tensor, columns: int, p: float, table: Tensor | None = None
) -> tuple[Tensor, float]:
    """Compute a mask [..., C] of the kept elements from keys [...] int64, and their scale.

    Compiled code needs `column_table`: a compiler counts columns in 32 bits, and cannot read parts
    of a hash that is in registers.
    """
    dropped = round(p * _STEPS)
    if dropped == _STEPS or not keys.numel():
        return torch.zeros(
            *keys.shape, columns, dtype=torch.bool, device=keys.device
        ), 0.0
    scale = _STEPS / (_STEPS - dropped)
    if table is not None:
        added, shift = table[:, :columns]
        bits = (_hashed(keys[..., None] + added) >> shift) & (_STEPS - 1)
        return (bits ^ _STEPS // 2) >= dropped, scale
    lanes = torch.arange(-(-columns // _LANES), device=keys.device)
    bits = _hashed(keys[..., None] + lanes * _COLUMN).view(torch.int16)
    return bits[..., :columns] >= dropped - _STEPS // 2, scale


def column_table(columns: int, device: torch.device) -> Tensor:
    """Build [2, C] int64: the number that a column adds to its keys, and the shift of its bits."""
    column = torch.arange(columns, device=device)
    added = column.div(_LANES, rounding_mode="floor") * _COLUMN
    return torch.stack((added, column % _LANES * 16))


def _hashed(numbers: Tensor) -> Tensor:
    """Hash 64-bit numbers in place: two rounds of SplitMix64's finaliser."""
    numbers ^= numbers >> 32
    numbers *= _FIRST
    numbers ^= numbers >> 29
    numbers *= _SECOND
    return numbers


def keys_by_head(keys: Tensor, heads: int) -> Tensor:
    """Derive keys [H, ...] of each head from keys [...] of the queries."""
    numbers = torch.arange(heads, device=keys.device) * _HEAD
    return keys + numbers.view(-1, *[1] * keys.dim())


def pair_number(query: Tensor, key: Tensor) -> Tensor:
    """Hash pairs of int32 numbers to uniform numbers from 0 to 2^24 - 1."""
    return (_mixed(query + key) >> 8) & (PAIR_STEPS - 1)


def head_numbers(keys: Tensor, heads: int) -> Tensor:
    """Compute numbers [R, H, T] int32 of the queries from their keys [R, T].

    They are mixed here and not in the kernels of attention. The compiler inlines `_mixed` with its
    argument eight times, so two nested ones took half of the minute of a kernel's compilation.
    """
    numbers = torch.arange(heads, device=keys.device).int() * -1640531527
    return _mixed(keys.int()[:, None] + numbers[:, None])


def _mixed(number: Tensor) -> Tensor:
    """Apply Wellons' lowbias32 (2018), a bijection of 32 bits.

    The shifts copy the sign, and the masks remove the copies.
    """
    number = number ^ ((number >> 16) & 0xFFFF)
    number = number * 2146121005
    number = number ^ ((number >> 15) & 0x1FFFF)
    number = number * -2073254261
    return number ^ ((number >> 16) & 0xFFFF)


def drop_pairs(shares: Tensor, p: float, pair: Pair | None) -> Tensor:
    """Zero some attention weights [R, H, T, S] and scale the rest, by the keys of a pair."""
    if pair is None:
        return functional.dropout(shares, p)
    dropped = round(p * PAIR_STEPS)
    numbers = head_numbers(pair[0], shares.shape[1])
    mask = pair_number(numbers[..., None], pair[1].int()[:, None, None]) >= dropped
    return torch.where(mask, shares * (PAIR_STEPS / (PAIR_STEPS - dropped)), 0.0)


class Site:
    """Layer that drops elements. Every forward sets the keys of its masks."""

    def __init__(self, reads: str, others: str) -> None:
        self.sides = (reads, others)
        # [R, T] keys of the layer's tokens, or of the queries.
        self.tokens: Tensor | None = None
        # [R, S] keys of the tokens that are attended to.
        self.others: Tensor | None = None
        self.key: Any = None  # [] int64
        self.table: Any = None  # `column_table`
        self.calls = 0

    def next_keys(self) -> Tensor | None:
        """Return the keys [R, T] of the next mask; None outside of a training forward."""
        if self.tokens is None:
            return None
        keys: Tensor = self.tokens + (self.key + self.calls * _CALL)
        self.calls += 1
        return keys

    def drop(self, values: Tensor, p: float) -> Tensor:
        """Zero some of the tokens' `values` [..., C] and scale the rest."""
        keys = self.next_keys()
        if keys is None:
            return functional.dropout(values, p)
        if keys.numel() * values.shape[-1] != values.numel():
            raise ConfigError(
                f"The model applies dropout to {tuple(values.shape[:-1])} vectors, but the batch "
                f"has {keys.numel()} tokens. The masks would depend on train.micro_batch_rows and "
                "on the number of ranks. Set this dropout to 0 in the model's config.json, or "
                "accept the dependence with train.optimisations.dropout=false."
            )
        keys = keys.reshape(values.shape[:-1])
        if kind_of(values) == "cpu" and not torch.compiler.is_compiling():
            return values * keep_mask(values, p, keys)
        # Backward saves one byte per element.
        mask, scale = kept_elements(keys, values.shape[-1], p, self.table)
        return torch.where(mask, values * scale, 0.0)


class Dropout(nn.Dropout):
    """`nn.Dropout` with keyed masks."""

    def __init__(self, p: float, site: Site) -> None:
        super().__init__(p)
        self.site = site

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """Zero some elements and scale the rest. In evaluation mode return the input."""
        return (
            self.site.drop(input, self.p) if self.training and self.p > 0.0 else input
        )


class _Calls(TorchFunctionMode):
    """Replacement of `functional.dropout` in code that calls it without a module."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.dropout:
            return self._dropped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropped(
        self,
        input: Tensor,  # noqa: A002 - as functional.dropout is called
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        **_: Any,
    ) -> Tensor:
        return self.site.drop(input, p) if training and p > 0.0 else input


class Masks:
    """All sites of a model."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.table: Tensor | None = None  # `column_table` if blocks are compiled
        self.in_attention = False
        """True if attention weights may be dropped. PyTorch's fused attention cannot use keys."""

    def add(self, path: str, family: Family) -> Site:
        """Add a site for the layer at a path."""
        self.sites.append(Site(*_sides(path, encoder=family.is_encoder_decoder)))
        return self.sites[-1]

    def begin(self, **tokens: Tensor) -> None:
        """Set the keys of the masks for a forward, from the keys [R, T] of each side's tokens."""
        update = UPDATE.get() - (1 << 63)  # signed
        sides = {side: _hashed(keys + update) for side, keys in tokens.items()}
        device = next(iter(sides.values())).device
        numbers = _hashed(torch.arange(len(self.sites), device=device) * _SITE + update)
        if self.table is not None:
            self.table = self.table.to(device)
        for site, key in zip(self.sites, numbers.unbind(), strict=True):
            site.key, site.table = key, self.table
            site.calls = 0
            site.tokens, site.others = (sides[side] for side in site.sides)


def next_pair(attention: Any, p: float) -> Pair | None:
    """Return the keys of a layer's queries and keys if it drops with probability p > 0."""
    queries = next_keys(attention, p)
    if queries is None:
        return None
    return queries, attention._toque_site.others  # noqa: SLF001  # set by `use_keyed_dropout`


def masks_of(core: nn.Module) -> Masks | None:
    """Return the keyed masks of a model in training mode; None without keyed dropout."""
    masks: Masks | None = getattr(core, "_toque_masks", None)
    return masks if core.training else None


def next_keys(attention: Any, p: float) -> Tensor | None:
    """Return the keys [R, T] of an attention layer's queries if it drops with probability p > 0."""
    site: Site | None = getattr(attention, "_toque_site", None)
    return None if site is None or p == 0.0 else site.next_keys()


def draw_again(block: nn.Module) -> None:
    """Let the next forward of a block repeat its last masks, to recompute it."""
    for module in block.modules():
        for value in vars(module).values():
            if isinstance(value, Site):
                value.calls = 0


def use_keyed_dropout(core: PreTrainedModel) -> int:
    """Key every dropout of a model and its adapter. Return the number of exchanged layers.

    The order of the modules numbers the sites, so that equal models have equal masks.
    """
    if hasattr(core, "_toque_masks"):
        return 0
    masks, family = Masks(), family_of(core.config)
    exchanged = 0
    for path, module in list(core.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Dropout:
                site = masks.add(f"{path}.{name}", family)
                setattr(module, name, Dropout(child.p, site).train(child.training))
                exchanged += 1
        if hasattr(module, "is_causal") or "Attention" in type(module).__name__:
            vars(module)["_toque_site"] = masks.add(path, family)
            masks.in_attention |= _may_drop(module)
        if family == CAUSAL and _calls_dropout(type(module)):
            vars(module)["_toque_calls"] = masks.add(path, family)
            module.__class__ = _with_keyed_calls(type(module))  # type: ignore[arg-type]
    vars(core)["_toque_masks"] = masks
    return exchanged


def drop_rates(layer: nn.Module) -> dict[str, float]:
    """Return the positive dropout probabilities of a layer by the names of their attributes."""
    return {
        name: value
        for name, value in vars(layer).items()
        if "drop" in name or (name == "p" and isinstance(layer, nn.Dropout))
        if isinstance(value, float) and value > 0.0
    }


def dropout_settings(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """List layers that drop elements, each with the name and value of its probability."""
    return [
        (layer, name, rate)
        for layer in model.modules()
        for name, rate in drop_rates(layer).items()
    ]


def key_compiled_code(model: nn.Module) -> None:
    """Prepare keyed masks for compiled blocks. Uncompiled blocks have the same masks."""
    masks: Masks | None = getattr(unwrapped(model), "_toque_masks", None)
    if masks is not None:
        masks.table = column_table(_MAX_COLUMNS, torch.device("cpu"))


def _may_drop(attention: nn.Module) -> bool:
    """True if an attention layer has a positive dropout probability."""
    rates = [value for name, value in vars(attention).items() if "drop" in name]
    rates += [m.p for m in attention.children() if isinstance(m, nn.Dropout)]
    return any(isinstance(p, float) and p > 0.0 for p in rates)


def _calls_dropout(kind: type[nn.Module]) -> bool:
    """True if a layer's forward calls a dropout function, or may."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any("dropout" in name for name in code.co_names)


@cache
def _with_keyed_calls(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a layer's class with a forward that calls keyed dropout instead of PyTorch's."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Calls(vars(self)["_toque_calls"]):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def _sides(path: str, *, encoder: bool) -> tuple[str, str]:
    """Return the sides of the tokens that a layer reads and attends to, by its path."""
    parts = path.split(".")
    if not encoder:
        return "target", "target"
    if parts[0] == "encoder":
        return "source", "source"
    if "EncDecAttention" not in parts:
        return "target", "target"
    inner = parts[parts.index("EncDecAttention") + 1 :]
    return ("source", "source") if inner[:1] in (["k"], ["v"]) else ("target", "source")
