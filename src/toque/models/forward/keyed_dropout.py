"""Dropout (Srivastava et al. 2014) with masks that depend on neither micro-batches nor ranks.

An element's bits are a hash of the update (seed and step), of the token (example, side, place in
it), of the site (the place in the model) and of the column. So rows may be grouped, packed and
dealt to ranks in any way, and recomputed in backward, without changing a mask. A hash gives sixteen
bits to each of four columns; on a CPU this takes as long as PyTorch's generator takes for as many
bits, and a third of what PyTorch's dropout takes (lab/performance.md).

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
"""Key of the update that is computed, 64 bits: a function of the seed and the step."""
_STEPS: Final = 1 << 16
PAIR_STEPS: Final = 1 << 24  # of the probability that a pair of tokens is dropped
Pair = tuple[Tensor, Tensor]  # keys [R, T] of the queries and [R, S] of the keys, int64
_MOST_COLUMNS: Final = 1 << 16  # of a layer that is compiled
_LANES: Final = 4  # columns that share a hash of 64 bits
# Odd numbers of 64 bits, as signed ones. The first is SplitMix64's increment, and the next two
# are its multipliers (Steele et al. 2014); the others set heads and calls apart.
_COLUMN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_HEAD: Final = 0xD1B54A32D192ED03 - (1 << 64)
_CALL: Final = 0x2545F4914F6CDD
_SITE: Final = 0x5851F42D4C957F2D


def keep_mask(like: Tensor, p: float, keys: Tensor | None = None) -> Tensor:
    """Factors of `like`'s shape, type and device: 0 with probability p, else 1 / (1 - p).

    With keys [...] of `like` [..., C] a function of them, p rounded to 1/65,536 and the scale that
    of the rounded p; without keys PyTorch's own.
    """
    if keys is None:
        return functional.dropout(torch.ones_like(like), p)
    mask, scale = kept(keys, like.shape[-1], p)
    # Torch converts bytes two to three times as fast as truth values.
    return mask.view(torch.uint8).to(like.dtype).mul_(scale)


def kept(keys: Tensor, columns: int, p: float, table: Tensor | None = None) -> tuple[Tensor, float]:
    """True for elements [..., C] that stay, by keys [...] int64, and the scale of what stays.

    Compiled code needs `column_table`: a compiler counts columns in 32 bits, and keeps the hash in
    registers, where it cannot be read in parts.
    """
    dropped = round(p * _STEPS)
    if dropped == _STEPS or not keys.numel():
        return torch.zeros(*keys.shape, columns, dtype=torch.bool, device=keys.device), 0.0
    scale = _STEPS / (_STEPS - dropped)
    if table is not None:
        added, shift = table[:, :columns]
        bits = (_hashed(keys[..., None] + added) >> shift) & (_STEPS - 1)
        return (bits ^ _STEPS // 2) >= dropped, scale
    lanes = torch.arange(-(-columns // _LANES), device=keys.device)
    bits = _hashed(keys[..., None] + lanes * _COLUMN).view(torch.int16)
    return bits[..., :columns] >= dropped - _STEPS // 2, scale


def column_table(columns: int, device: torch.device) -> Tensor:
    """[2, C] int64: what a column adds to its keys, and where its bits are in the hash."""
    column = torch.arange(columns, device=device)
    added = column.div(_LANES, rounding_mode="floor") * _COLUMN
    return torch.stack((added, column % _LANES * 16))


def _hashed(numbers: Tensor) -> Tensor:
    """A hash of 64-bit numbers, in their place: two rounds of SplitMix64's finaliser."""
    numbers ^= numbers >> 32
    numbers *= _FIRST
    numbers ^= numbers >> 29
    numbers *= _SECOND
    return numbers


def by_head(keys: Tensor, heads: int) -> Tensor:
    """Keys [H, ...] of each head, of keys [...] of the queries."""
    numbers = torch.arange(heads, device=keys.device) * _HEAD
    return keys + numbers.view(-1, *[1] * keys.dim())


def drawn(query: Tensor, key: Tensor) -> Tensor:
    """A number from 0 to 2^24 - 1 of pairs of numbers, all int32: even, and the same every time."""
    return (_mixed(query + key) >> 8) & (PAIR_STEPS - 1)


def of_heads(keys: Tensor, heads: int) -> Tensor:
    """Numbers [R, H, T] int32 of the queries, of their keys [R, T].

    Mixed here and not in attention's kernels: the compiler writes `_mixed` out with whatever it is
    given, eight times over, so a second one within the first took half of a kernel's minute.
    """
    numbers = torch.arange(heads, device=keys.device).int() * -1640531527
    return _mixed(keys.int()[:, None] + numbers[:, None])


def _mixed(number: Tensor) -> Tensor:
    """Wellons' lowbias32 (2018), a bijection of 32 bits; copies of the sign are masked away."""
    number = number ^ ((number >> 16) & 0xFFFF)
    number = number * 2146121005
    number = number ^ ((number >> 15) & 0x1FFFF)
    number = number * -2073254261
    return number ^ ((number >> 16) & 0xFFFF)


def drop_pairs(shares: Tensor, p: float, pair: Pair | None) -> Tensor:
    """Attention weights [R, H, T, S], some zero and the others scaled, by the keys of a pair."""
    if pair is None:
        return functional.dropout(shares, p)
    dropped = round(p * PAIR_STEPS)
    numbers = of_heads(pair[0], shares.shape[1])
    mask = drawn(numbers[..., None], pair[1].int()[:, None, None]) >= dropped
    return torch.where(mask, shares * (PAIR_STEPS / (PAIR_STEPS - dropped)), 0.0)


class Site:
    """A place of the model that drops; what its masks are keyed by is set for every forward."""

    def __init__(self, reads: str, others: str) -> None:
        self.sides = (reads, others)
        self.tokens: Tensor | None = None  # [R, T] keys of the tokens that come by, or attend
        self.others: Tensor | None = None  # [R, S] keys of the tokens that are attended to
        self.key: Any = None  # [] int64
        self.table: Any = None  # `column_table`
        self.calls = 0

    def next_keys(self) -> Tensor | None:
        """Keys [R, T] of the next mask; None outside of a training forward of a batch."""
        if self.tokens is None:
            return None
        keys: Tensor = self.tokens + (self.key + self.calls * _CALL)
        self.calls += 1
        return keys

    def drop(self, values: Tensor, p: float) -> Tensor:
        """`values` [..., C] of the tokens, some zero and the others scaled."""
        keys = self.next_keys()
        if keys is None:
            return functional.dropout(values, p)
        if keys.numel() * values.shape[-1] != values.numel():
            raise ConfigError(
                f"Dropout of {tuple(values.shape[:-1])} vectors, where the batch has "
                f"{keys.numel()} tokens: its masks would depend on train.micro_batch_rows and on "
                "the number of ranks. Set this dropout of the model to 0, or accept that with "
                "train.optimisations.dropout=false."
            )
        keys = keys.reshape(values.shape[:-1])
        if kind_of(values) == "cpu" and not torch.compiler.is_compiling():
            return values * keep_mask(values, p, keys)
        # Backward keeps a byte for each element.
        mask, scale = kept(keys, values.shape[-1], p, self.table)
        return torch.where(mask, values * scale, 0.0)


class Dropout(nn.Dropout):
    """`nn.Dropout` with keyed masks."""

    def __init__(self, p: float, site: Site) -> None:
        super().__init__(p)
        self.site = site

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """Zero some elements and scale the others; the identity in evaluation mode."""
        return self.site.drop(input, self.p) if self.training and self.p > 0.0 else input


class _Calls(TorchFunctionMode):
    """Calls of `functional.dropout`, by code that has no module for it."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.dropout:
            return self._dropped(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropped(self, input: Tensor, p: float = 0.5, training: bool = True, **_: Any) -> Tensor:  # noqa: A002, FBT001, FBT002  # as functional.dropout is called
        return self.site.drop(input, p) if training and p > 0.0 else input


class Masks:
    """The sites of a model."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.table: Tensor | None = None  # `column_table`, where blocks are compiled
        self.in_attention = False
        """True if attention weights may be dropped, which PyTorch's fused attention cannot key."""

    def add(self, path: str, family: Family) -> Site:
        """A new site, of the layer at a path."""
        self.sites.append(Site(*_sides(path, encoder=family.is_encoder_decoder)))
        return self.sites[-1]

    def begin(self, **tokens: Tensor) -> None:
        """Key the masks of the forward that begins, by the keys [R, T] of each side's tokens."""
        update = UPDATE.get() - (1 << 63)  # signed
        sides = {side: _hashed(keys + update) for side, keys in tokens.items()}
        device = next(iter(sides.values())).device
        numbers = _hashed(torch.arange(len(self.sites), device=device) * _SITE + update)
        if self.table is not None:
            self.table = self.table.to(device)
        for site, key in zip(self.sites, numbers.unbind(), strict=True):
            site.key, site.table, site.calls = key, self.table, 0
            site.tokens, site.others = (sides[side] for side in site.sides)


def next_pair(attention: Any, p: float) -> Pair | None:
    """Keys of the queries of a layer that drops with probability p, and those of its keys."""
    queries = next_keys(attention, p)
    if queries is None:
        return None
    return queries, attention._toque_site.others  # noqa: SLF001  # set below


def masks_of(core: nn.Module) -> Masks | None:
    """The keyed masks of a model that trains; None without them."""
    masks: Masks | None = getattr(core, "_toque_masks", None)
    return masks if core.training else None


def next_keys(attention: Any, p: float) -> Tensor | None:
    """Keys [R, T] of the queries of an attention layer that drops with probability p."""
    site: Site | None = getattr(attention, "_toque_site", None)
    return None if site is None or p == 0.0 else site.next_keys()


def draw_again(block: nn.Module) -> None:
    """Let the next forward of a block draw the masks of its last one, as recomputing it does."""
    for module in block.modules():
        for value in vars(module).values():
            if isinstance(value, Site):
                value.calls = 0


def use_keyed_dropout(core: PreTrainedModel) -> int:
    """Key every dropout of a model, its adapter's too; returns how many layers are exchanged.

    Sites are numbered in the order of the modules, so that equal models have equal masks.
    """
    if hasattr(core, "_toque_masks"):
        return 0
    masks, exchanged, family = Masks(), 0, family_of(core.config)
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
    """Probabilities with which a layer drops something, by the name of the setting."""
    return {
        name: value
        for name, value in vars(layer).items()
        if "drop" in name or (name == "p" and isinstance(layer, nn.Dropout))
        if isinstance(value, float) and value > 0.0
    }


def dropout_settings(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """Layers that drop something, each with the name and value of its probability."""
    return [
        (layer, name, rate) for layer in model.modules() for name, rate in drop_rates(layer).items()
    ]


def key_compiled_code(model: nn.Module) -> None:
    """Let blocks that are compiled draw the masks that they draw as written."""
    masks: Masks | None = getattr(unwrapped(model), "_toque_masks", None)
    if masks is not None:
        masks.table = column_table(_MOST_COLUMNS, torch.device("cpu"))


def _may_drop(attention: nn.Module) -> bool:
    """True if a layer has a probability of dropout that is not zero."""
    named = {name: value for name, value in vars(attention).items() if "drop" in name}
    inner = [m.p for m in attention.children() if isinstance(m, nn.Dropout)]
    return any(isinstance(p, float) and p > 0.0 for p in (*named.values(), *inner))


def _calls_dropout(kind: type[nn.Module]) -> bool:
    """True if a layer's forward calls a function of dropout, or may."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any("dropout" in name for name in code.co_names)


@cache
def _with_keyed_calls(kind: type[nn.Module]) -> type[nn.Module]:
    """A layer's class whose forward calls keyed dropout instead of PyTorch's."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _Calls(vars(self)["_toque_calls"]):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def _sides(path: str, *, encoder: bool) -> tuple[str, str]:
    """Sides of the tokens that a layer reads and attends to, by its path in the model."""
    parts = path.split(".")
    if not encoder:
        return "target", "target"
    if parts[0] == "encoder":
        return "source", "source"
    if "EncDecAttention" not in parts:
        return "target", "target"
    inner = parts[parts.index("EncDecAttention") + 1 :]
    return ("source", "source") if inner[:1] in (["k"], ["v"]) else ("target", "source")
