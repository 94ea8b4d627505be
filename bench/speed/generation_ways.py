"""Ways of writing on a CPU, each switched off alone: what it brings to whole calls of `generate`.

    python bench/speed/generation_ways.py                      # T5 and GPT-2, 96 texts and one
    python bench/speed/generation_ways.py --ways int8 --families gpt2 --pairs 5

A way stays in the package if it brings 1.3 times to both families (lab/decisions.md). Each case is
a family, a number of texts, a precision and a way; its two sides, with the way and without, run in
turn in one process after a call of each that is not counted. Cases in which a way is not in use, by
the processor or the precision, are left out with the reason. For a quiet machine alone.

Quality: without a way the texts may part from those with it only where that is allowed, `exact`
ways nowhere. `equal` counts the texts that are the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import torch
import transformers
from generate import Answers, model_and_prompts
from transformers import PreTrainedModel

from toque.models.forward.packed import output_head
from toque.models.generation import kv_cache, live_rows, packed_products
from toque.models.generation.engine import generate, precision_here
from toque.models.generation.options import GenerationOptions, Precision
from toque.models.glibc_malloc import keep_freed_memory
from toque.models.onednn import PackedLinear


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True)
class Way:
    """One way of writing, and where its rule stands in the package."""

    rules: tuple[tuple[Any, str], ...]
    """Modules and names of the functions that choose it; they say no while it is off."""
    used: Callable[[PreTrainedModel, str], bool]
    """True where it is in use for a model and a precision."""
    exact: bool
    """True if no text may differ without it."""


def _packs(model: PreTrainedModel, precision: str) -> bool:
    twin = packed_products.with_packed_products(model, "bf16" if precision == "bf16" else "float32")
    return any(isinstance(m, PackedLinear) and m.is_packed for m in twin.modules())


def _gathers(model: PreTrainedModel, precision: str) -> bool:
    twin = packed_products.with_packed_products(model, "bf16" if precision == "bf16" else "float32")
    return kv_cache.gathers(twin)


def _bounds(model: PreTrainedModel, _precision: str) -> bool:
    return live_rows.supports_int8(*output_head(model))


WAYS = {
    "gathered": Way(((kv_cache, "can_gather"),), _gathers, exact=False),
    "int8": Way(((live_rows, "supports_int8"),), _bounds, exact=True),
    "packed": Way(
        ((packed_products, "onednn_is_faster"), (packed_products, "has_fast_bf16")),
        _packs,
        exact=False,
    ),
}
"""gathered: attention by sums of a table's rows, over a float16 cache in tiles, beside bf16
products. int8: the likeliest token by bounds of 8 bits. packed: weights laid out once for oneDNN,
and in float32 its products in place of torch's own."""


@contextmanager
def without(way: Way) -> Iterator[None]:
    """A context in which the package does not choose it."""
    patches = [patch.object(module, name, _never) for module, name in way.rules]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def case(
    a: argparse.Namespace, family: str, n_texts: int, precision: Precision, name: str
) -> dict[str, Any]:
    """One way on and off in turn."""
    way = WAYS[name]
    a.family, a.prompts = family, n_texts
    model, prompts, eos = model_and_prompts(a)
    here: dict[str, Any] = {
        "family": family, "texts": n_texts, "precision": precision, "way": name,
    }  # fmt: skip
    if precision_here(precision, model) != precision or not way.used(model, precision):
        return here | {"left_out": "this machine does not use it here"}
    pad = model.config.pad_token_id
    options = GenerationOptions(max_new_tokens=a.new, precision=precision)
    texts: dict[bool, Answers] = {}

    def written(*, on: bool) -> int:
        how = {"eos_id": eos, "pad_id": eos if pad is None else pad}
        if on:
            texts[on] = generate(model, prompts, options, **how)
        else:
            with without(way):
                texts[on] = generate(model, prompts, options, **how)
        return sum(map(len, texts[on]))

    for on in (True, False):
        written(on=on)
    sides: dict[bool, list[harness.Run]] = {True: [], False: []}
    for number in range(a.pairs):
        for on in (True, False) if number % 2 == 0 else (False, True):
            sides[on].append(harness.timed(partial(written, on=on)))
    equal = sum(x == y for x, y in zip(texts[True], texts[False], strict=True))
    found = here | {
        "with": [run.figures for run in sides[True]],
        "without": [run.figures for run in sides[False]],
        # Seconds without the way, in those with it.
        "times_by_wall": harness.ratio_of(sides[False], sides[True], lambda run: run.wall),
        "times_by_processor": harness.ratio_of(
            sides[False], sides[True], lambda run: run.processor
        ),
        "equal": equal,
        "passes": equal == n_texts or not way.exact,
    }
    harness.note(json.dumps(found))
    return found


def measure(a: argparse.Namespace) -> harness.Result:
    """Every case that was asked for."""
    torch.set_num_threads(a.threads)
    keep_freed_memory()  # as `toque generate` does
    transformers.logging.set_verbosity_error()
    cases = [
        case(a, family, n_texts, precision, name)
        for family in a.families
        for n_texts in a.texts
        for precision in a.precisions
        for name in a.ways
    ]
    measured = [each for each in cases if "left_out" not in each]
    wrong = [each for each in measured if not each["passes"]]
    quality: dict[str, Any] = {"passes": not wrong, "compared": "texts with a way and without"}
    if wrong:
        quality["reason"] = f"exact ways changed texts in {len(wrong)} cases"
    return harness.Result(quality=quality, details={"cases": cases})


def options(p: argparse.ArgumentParser) -> None:
    """What can be asked for."""
    p.add_argument("--families", nargs="+", choices=("t5", "gpt2"), default=["t5", "gpt2"])
    p.add_argument("--model", type=Path, help="a trained model's folder, for its family")
    p.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    p.add_argument("--texts", nargs="+", type=int, default=[96, 1])
    p.add_argument(
        "--precisions", nargs="+", choices=("float32", "bf16"), default=["float32", "bf16"]
    )
    p.add_argument("--new", type=int, default=200, help="tokens of a text")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--threads", type=int, default=torch.get_num_threads())


if __name__ == "__main__":
    harness.main(__file__, __doc__, options, measure)
