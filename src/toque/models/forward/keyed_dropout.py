"""Dropout (Srivastava et al. 2014) with masks that do not depend on micro-batches or ranks.

An element's bits are a hash of the update (seed and step), the token (its example, its side and its
position in that side), the site (a layer of the model) and the column. Rows can therefore be
grouped, packed and assigned to ranks in any way, and recomputed in the backward pass, with the same
masks. One hash gives four columns sixteen bits each. On a CPU, hashing takes as long as PyTorch's
generator for the same number of bits, and a third of the time of PyTorch's dropout
(lab/performance.md).

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
# The probabilities of a dropped element and of a dropped pair of tokens have this many steps.
_STEPS: Final = 1 << 16
PAIR_STEPS: Final = 1 << 24
Pair = tuple[Tensor, Tensor]
"""Hash keys [R, T] of the queries and [R, S] of the keys, int64."""
_MAX_COLUMNS: Final = 1 << 16  # widest layer that can be compiled
_LANES: Final = 4  # columns that share a hash of 64 bits
# Odd 64-bit numbers, as signed integers. The first is SplitMix64's increment, and the next two are
# its multipliers (Steele et al. 2014). The last three separate heads, calls and sites.
_COLUMN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST: Final = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND: Final = 0x94D049BB133111EB - (1 << 64)
_HEAD: Final = 0xD1B54A32D192ED03 - (1 << 64)
_CALL: Final = 0x2545F4914F6CDD
_SITE: Final = 0x5851F42D4C957F2D
_HEAD32: Final = 0x9E3779B9 - (1 << 32)  # separates heads in 32 bits


def keep_mask(like: Tensor, p: float, keys: Tensor | None = None) -> Tensor:
    """Build factors with the shape and type of `like`: 0 with probability p, else 1 / (1 - p).

    With keys [...] for `like` [..., C], the mask is a function of the keys, and p is rounded to a
    multiple of 1/65,536. Without keys, PyTorch's generator selects the elements.
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

    Compiled code must pass a `column_table`: a compiler counts columns in 32 bits, and cannot read
    parts of a hash that is in registers.
    """
    dropped = round(p * _STEPS)
    if dropped == _STEPS or not keys.numel():
        shape = (*keys.shape, columns)
        return torch.zeros(shape, dtype=torch.bool, device=keys.device), 0.0
    scale = _STEPS / (_STEPS - dropped)

    if table is not None:
        added, shift = table[:, :columns]
        bits = (_hash_in_place(keys[..., None] + added) >> shift) & (_STEPS - 1)
        # The other branch reads the bits as signed. Flipping the highest bit gives the same order.
        return (bits ^ _STEPS // 2) >= dropped, scale
    lanes = torch.arange(-(-columns // _LANES), device=keys.device)
    bits = _hash_in_place(keys[..., None] + lanes * _COLUMN).view(torch.int16)
    return bits[..., :columns] >= dropped - _STEPS // 2, scale


def column_table(columns: int, device: torch.device) -> Tensor:
    """Build [2, C] int64: the number that a column adds to its keys, and its shift in a hash."""
    column = torch.arange(columns, device=device)
    added = column.div(_LANES, rounding_mode="floor") * _COLUMN
    shift = column % _LANES * 16  # bits
    return torch.stack((added, shift))


def _hash_in_place(numbers: Tensor) -> Tensor:
    """Hash 64-bit numbers in place: two rounds of SplitMix64's finaliser."""
    numbers ^= numbers >> 32
    numbers *= _FIRST
    numbers ^= numbers >> 29
    numbers *= _SECOND
    return numbers


def keys_by_head(keys: Tensor, heads: int) -> Tensor:
    """Derive each head's keys [H, ...] from keys [...] of the queries."""
    offsets = torch.arange(heads, device=keys.device) * _HEAD
    return keys + offsets.view(-1, *(1 for _ in keys.shape))


def pair_number(query: Tensor, key: Tensor) -> Tensor:
    """Hash pairs of int32 numbers to uniform numbers from 0 to 2^24 - 1."""
    return (_mix32(query + key) >> 8) & (PAIR_STEPS - 1)


def head_numbers(keys: Tensor, heads: int) -> Tensor:
    """Compute numbers [R, H, T] int32 of the queries from their keys [R, T].

    They are mixed here and not in the attention kernels. The compiler inlines the argument of
    `_mix32` eight times, so two nested calls took half a minute of a kernel's compilation.
    """
    numbers = torch.arange(heads, device=keys.device).int() * _HEAD32
    return _mix32(keys.int()[:, None] + numbers[:, None])


def _mix32(number: Tensor) -> Tensor:
    """Apply Wellons' lowbias32 (2018), a bijection of 32 bits.

    The shifts copy the sign, and the masks remove the copies.
    """
    number = number ^ ((number >> 16) & 0xFFFF)
    number = number * 2146121005
    number = number ^ ((number >> 15) & 0x1FFFF)
    number = number * -2073254261
    return number ^ ((number >> 16) & 0xFFFF)


def drop_pairs(weights: Tensor, p: float, pair: Pair | None) -> Tensor:
    """Zero some attention weights [R, H, T, S] and scale the rest, by the keys of a pair."""
    if pair is None:
        return functional.dropout(weights, p)
    query_keys, key_keys = pair
    dropped = round(p * PAIR_STEPS)
    scale = PAIR_STEPS / (PAIR_STEPS - dropped)
    query_numbers = head_numbers(query_keys, weights.shape[1])[..., None]
    key_numbers = key_keys.int()[:, None, None]
    mask = pair_number(query_numbers, key_numbers) >= dropped
    return torch.where(mask, weights * scale, 0.0)


class Site:
    """Layer that drops elements. Every forward sets the keys of its masks."""

    def __init__(self, side: str, attended_side: str) -> None:
        self.sides = (side, attended_side)
        # [R, T] keys of the layer's tokens, or of the queries.
        self.tokens: Tensor | None = None
        # [R, S] keys of the tokens that are attended to.
        self.others: Tensor | None = None
        self.key: Any = None  # [] int64, the key of this site
        self.table: Any = None  # `column_table` if blocks are compiled
        self.calls = 0  # masks of this forward

    def next_keys(self) -> Tensor | None:
        """Return the keys [R, T] of the next mask, and count it; None outside of training."""
        if self.tokens is None:
            return None
        keys: Tensor = self.tokens + (self.key + self.calls * _CALL)
        self.calls += 1
        return keys

    def drop(self, values: Tensor, p: float) -> Tensor:
        """Zero some of the tokens' `values` [..., C] and scale the rest.

        Raises:
            ConfigError: `values` does not have one vector per token.
        """
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
        # The backward pass needs only the mask, one byte per element.
        mask, scale = kept_elements(keys, values.shape[-1], p, self.table)
        return torch.where(mask, values * scale, 0.0)


class Dropout(nn.Dropout):
    """`nn.Dropout` with keyed masks."""

    def __init__(self, p: float, site: Site) -> None:
        super().__init__(p)
        self.site = site

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  # as its base calls it
        """Zero some elements and scale the rest. In evaluation mode, return the input."""
        if not self.training or self.p == 0.0:
            return input
        return self.site.drop(input, self.p)


class _KeyedCalls(TorchFunctionMode):
    """Context that replaces calls of `functional.dropout` by keyed dropout."""

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is functional.dropout:
            return self._dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _dropout(
        self,
        input: Tensor,  # noqa: A002  # the signature of functional.dropout
        p: float = 0.5,
        training: bool = True,  # noqa: FBT001, FBT002
        **_: Any,
    ) -> Tensor:
        return self.site.drop(input, p) if training and p > 0.0 else input


class Masks:
    """Keyed masks of a model: all of its sites."""

    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.table: Tensor | None = None  # `column_table` if blocks are compiled
        self.in_attention = False
        """True if attention weights may be dropped. PyTorch's fused attention cannot use keys."""

    def add(self, path: str, family: Family) -> Site:
        """Add a site for the layer at a path, and return it."""
        side, attended_side = _sides(path, encoder_decoder=family.is_encoder_decoder)
        site = Site(side, attended_side)
        self.sites.append(site)
        return site

    def begin(self, **tokens: Tensor) -> None:
        """Set the keys of the masks for a forward, from the keys [R, T] of each side's tokens."""
        update = UPDATE.get() - (1 << 63)  # signed
        token_keys = {
            side: _hash_in_place(keys + update) for side, keys in tokens.items()
        }
        device = next(iter(token_keys.values())).device
        site_numbers = torch.arange(len(self.sites), device=device)
        site_keys = _hash_in_place(site_numbers * _SITE + update)
        if self.table is not None:
            self.table = self.table.to(device)

        for site, key in zip(self.sites, site_keys.unbind(), strict=True):
            side, attended_side = site.sides
            site.key = key
            site.table = self.table
            site.calls = 0
            site.tokens = token_keys[side]
            site.others = token_keys[attended_side]


def next_pair(attention: Any, p: float) -> Pair | None:
    """Return the hash keys of an attention layer's queries and keys if p > 0."""
    queries = next_keys(attention, p)
    if queries is None:
        return None
    return queries, attention._toque_site.others  # noqa: SLF001  # set by `use_keyed_dropout`


def masks_of(core: nn.Module) -> Masks | None:
    """Return the keyed masks of a model in training mode; None without keyed dropout."""
    masks: Masks | None = getattr(core, "_toque_masks", None)
    return masks if core.training else None


def next_keys(attention: Any, p: float) -> Tensor | None:
    """Return the hash keys [R, T] of an attention layer's queries if p > 0."""
    site: Site | None = getattr(attention, "_toque_site", None)
    return None if site is None or p == 0.0 else site.next_keys()


def reuse_masks(block: nn.Module) -> None:
    """Let a block's next forward use the masks of its last forward, which it recomputes."""
    for module in block.modules():
        for value in vars(module).values():
            if isinstance(value, Site):
                value.calls = 0


def use_keyed_dropout(core: PreTrainedModel) -> int:
    """Replace every dropout of a model and its adapter. Return the number of replaced layers.

    The order of the modules numbers the sites, so that equal models have equal masks.
    """
    if hasattr(core, "_toque_masks"):
        return 0
    masks, family = Masks(), family_of(core.config)
    n_replaced = 0
    for path, module in list(core.named_modules()):
        n_replaced += _replace_dropout_layers(path, module, masks, family)
        if hasattr(module, "is_causal") or "Attention" in type(module).__name__:
            vars(module)["_toque_site"] = masks.add(path, family)
            masks.in_attention |= _may_drop(module)
        # The other families call dropout functions only in attention, which Toque computes.
        if family == CAUSAL and _calls_dropout(type(module)):
            vars(module)["_toque_calls"] = masks.add(path, family)
            module.__class__ = _with_keyed_calls(type(module))  # type: ignore[arg-type]
    vars(core)["_toque_masks"] = masks
    return n_replaced


def _replace_dropout_layers(
    path: str, module: nn.Module, masks: Masks, family: Family
) -> int:
    """Replace a module's own dropout layers by keyed ones. Return their number."""
    layers = {
        name: child
        for name, child in module.named_children()
        if type(child) is nn.Dropout
    }
    for name, layer in layers.items():
        site = masks.add(f"{path}.{name}", family)
        setattr(module, name, Dropout(layer.p, site).train(layer.training))
    return len(layers)


def drop_rates(layer: nn.Module) -> dict[str, float]:
    """Return the positive dropout probabilities of a layer by the names of their attributes."""
    is_dropout = isinstance(layer, nn.Dropout)
    rates = {
        name: value
        for name, value in vars(layer).items()
        if "drop" in name or (name == "p" and is_dropout)
    }
    return {
        name: rate
        for name, rate in rates.items()
        if isinstance(rate, float) and rate > 0.0
    }


def dropout_settings(model: nn.Module) -> list[tuple[nn.Module, str, float]]:
    """List the layers that drop elements, each with the name and value of its probability."""
    return [
        (layer, name, rate)
        for layer in model.modules()
        for name, rate in drop_rates(layer).items()
    ]


def turn_off_dropout(model: nn.Module) -> None:
    """Set the dropout probabilities of all layers to 0. The model's configuration keeps them."""
    for layer, name, _ in dropout_settings(model):
        setattr(layer, name, 0.0)


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
    """True if a layer's forward uses a name with "dropout", so that it may call the function."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return code is not None and any("dropout" in name for name in code.co_names)


@cache
def _with_keyed_calls(kind: type[nn.Module]) -> type[nn.Module]:
    """Derive a layer's class with a forward that calls keyed dropout instead of PyTorch's."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _KeyedCalls(vars(self)["_toque_calls"]):
            return kind.forward(self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": forward})


def _sides(path: str, *, encoder_decoder: bool) -> tuple[str, str]:
    """Return the sides of the tokens that a layer reads and attends to, by its path."""
    parts = path.split(".")
    if not encoder_decoder:
        return "target", "target"
    if parts[0] == "encoder":
        return "source", "source"
    if "EncDecAttention" not in parts:
        return "target", "target"
    inner = parts[parts.index("EncDecAttention") + 1 :]
    # An adapter's dropout inside the k and v projections reads the encoder's output.
    if inner[:1] in (["k"], ["v"]):
        return "source", "source"
    return "target", "source"
