"""Rules about computing: threads, precision, attention, padding, sizes of batches, memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from toque.reports.verdict.facts import Facts, mapping, number
from toque.reports.verdict.finding import AMOUNT, NOTABLE, Case, Finding, gain_of
from toque.reports.verdict.shares import (
    CROWDED,
    HOST,
    OPTIMIZER,
    PAGING,
    PRODUCTS,
    STILL,
    computes_padding,
)
from toque.training.bottlenecks import GPU_BUSY, memory_ladder

_PAGES: Final = 10
"""Pages read back from disk in an update, from which memory is too small."""
_MUCH_PADDING: Final = 0.15
_FEW_TOKENS: Final = 1024
"""Of an update; below it a step is mostly what every step costs. A guess."""
_MANY_AT_ONCE, _FEW_AT_ONCE = 16_384, 256
"""Tokens of a micro-batch far from what a CPU is fast with (4096): a guess, as a trial tells."""


def _precision(case: Case) -> Iterator[Finding]:
    facts = case.facts
    fast = mapping(facts.start.get("hardware")).get("fast_bf16") is True
    if not fast or facts.start.get("precision") != "float32":
        return
    own, other = (facts.start_number(name) for name in ("peak_flops_per_second", "bf16_peak"))
    products = case.share(PRODUCTS)
    saved = products * (1.0 - own / other) if own and other and other > own else 0.0
    yield Finding(
        "float32",
        max(saved, 0.3 * case.computing),  # for its rank alone
        "the products are computed in float32, and this machine computes them faster in bfloat16",
        lever="let the machine choose the precision",
        settings=("train.precision=auto",),
        gain=gain_of(saved) if saved else None,
    )


def _attention(case: Case) -> Iterator[Finding]:
    facts = case.facts
    parts = [facts.start_number("arithmetic", name)
             for name in ("products", "attention", "attention_computed")]  # fmt: skip
    if not computes_padding(facts) or None in parts:
        return
    products, needed, computed = (part or 0.0 for part in parts)
    total = products + computed
    excess = (computed - needed) / total if total > 0.0 else 0.0
    saved = case.computing * (1.0 - facts.pad_fraction) * excess  # padding is told by itself
    on_cpu = facts.device == "cpu"
    yield Finding(
        "dense attention",
        saved,
        f"attention is computed over whole rows and masked: {computed / max(needed, 1.0):.0f} "
        f"times what the examples need, {excess:.0%} of the arithmetic",
        lever="leave the model uncompiled, so that each example's attention is computed alone"
        if on_cpu
        else "shorter rows",
        settings=("train.compile=false",) if on_cpu else _shorter_rows(facts),
        gain=gain_of(saved),
    )


def _shorter_rows(facts: Facts) -> tuple[str, ...]:
    length = facts.start_number("row", "target")
    return (f"train.row_tokens={max(16, int(length // 2))}",) if length else ()


def _compiling(case: Case) -> Iterator[Finding]:
    """Compiling that goes on; what the first half of the updates brought is done with."""
    facts = case.facts
    share = facts.compiling_late / max(1e-9, facts.late)
    yield Finding(
        "compiling",
        share,
        f"the model is compiled again and again, for shapes that are new: {share:.0%} of the time "
        "of the later updates",
        lever="leave the model uncompiled",
        settings=("train.compile=false",),
        gain=gain_of(share),
        at_most=True,
    )


def _padding(case: Case) -> Iterator[Finding]:
    facts, pad = case.facts, case.facts.pad_fraction
    if pad < _MUCH_PADDING:
        return
    computed = computes_padding(facts)
    per_update = case.share(OPTIMIZER, HOST)
    saved = pad * (case.computing if computed else per_update)
    packs = facts.setting("pack")
    where = "is computed like the rest" if computed else "is not computed, but fills the updates"
    yield Finding(
        "padding",
        max(saved, 0.0 if computed else NOTABLE * (0.5 + pad)),
        f"{pad:.0%} of every batch is padding, which {where}",
        lever="pack several examples into a row"
        if packs is False
        else "rows of a length that suits the data",
        settings=("train.pack=true",) if packs is False else ("train.row_tokens=auto",),
        gain=gain_of(saved),
    )


def _tiny_batches(case: Case) -> Iterator[Finding]:
    facts, each = case.facts, case.share(OPTIMIZER, HOST)
    tokens = facts.tokens / facts.n_updates
    found = AMOUNT.match(str(facts.setting("batch") or ""))
    if tokens >= _FEW_TOKENS or found is None:
        return
    factor = 2.0 ** math.ceil(math.log2(2 * _FEW_TOKENS / max(1.0, tokens)))
    idle = max(0.0, 1.0 - (facts.utilisation or 0.0)) if facts.utilisation is not None else 0.0
    saved = each * (1.0 - 1.0 / factor)
    yield Finding(
        "tiny batches",
        max(saved, 0.5 * case.computing * idle),
        f"an update holds only {tokens:,.0f} tokens, so that what every update costs weighs much "
        f"({each:.0%} of the time beside forward and backward)",
        lever="larger updates; they change the result, and want a higher optim.peak_lr",
        settings=(f"train.batch={float(found[1]) * factor:g} {found[2]}",),
        gain=gain_of(saved),
    )


def _micro_batch(case: Case) -> Iterator[Finding]:
    facts = case.facts
    rows, asked = number(facts.start.get("micro_batch_rows")), facts.setting("micro_batch_rows")
    lengths = [facts.start_number("row", side) or 0.0 for side in ("source", "target")]
    if rows is None or not isinstance(asked, int):
        return
    # Rows of an update, at most: a micro-batch is never larger than its update.
    each = sum(lengths)
    tokens = min(rows * each, facts.tokens / facts.n_updates / max(0.05, 1.0 - facts.pad_fraction))
    paged = facts.host is not None and facts.host.major_faults > _PAGES * facts.n_updates
    stalled = case.share(PAGING, *([STILL] if paged else []))
    if stalled >= NOTABLE or tokens > _MANY_AT_ONCE:
        cause, idle = "oversized micro-batch", 1.0 - (facts.utilisation or 0.5)
    elif tokens < _FEW_AT_ONCE and facts.device == "cpu":
        cause, idle = "tiny micro-batches", 1.0 - (facts.utilisation or 0.5)
    else:
        return
    memory = f", and {stalled:.0%} of the time went into waiting for memory" if stalled else ""
    yield Finding(
        cause,
        # For its rank alone: what stands still for want of memory is told here.
        max(1.01 * stalled, 0.5 * case.computing * idle),
        f"{rows:.0f} rows are computed at once (train.micro_batch_rows), about {tokens:,.0f} "
        f"tokens{memory}",
        lever="leave the number of rows to Toque; the result stays the same",
        settings=("train.micro_batch_rows=auto",),
        gain=gain_of(stalled) if stalled >= NOTABLE else None,
    )


def _paging(case: Case) -> Iterator[Finding]:
    share = case.share(PAGING)
    if isinstance(case.facts.setting("micro_batch_rows"), int):
        return  # said of the micro-batch
    recomputes = case.facts.start.get("gradient_checkpointing") is True
    ladder = memory_ladder(checkpointing=recomputes, optimizer="adamw")
    yield Finding(
        "memory",
        share,
        f"{share:.0%} of the time something waited for memory: there is too little of it",
        lever=f"what needs less memory: {'; '.join(ladder)}",
        settings=() if recomputes else ("train.gradient_checkpointing=true",),
        gain=gain_of(share),
        at_most=True,
    )


def _idle_gpu(case: Case) -> Iterator[Finding]:
    facts, busy = case.facts, case.facts.gpu_busy
    if busy is None or busy >= GPU_BUSY:
        return
    compiled = facts.start.get("compile") is True
    yield Finding(
        "host",
        (1.0 - busy) * case.computing,
        f"the GPU computes {busy:.0%} of the time and waits for the host otherwise",
        lever="larger micro-batches" if compiled else "compile the model",
        settings=("train.micro_batch_rows=auto",) if compiled else ("train.compile=true",),
        gain=gain_of((1.0 - busy) * case.computing),
        at_most=True,
    )


def _threads(case: Case) -> Iterator[Finding]:
    facts, host = case.facts, case.facts.host
    threads = facts.start_number("hardware", "threads")
    cores = facts.start_number("hardware", "cores")
    if facts.device != "cpu" or not threads or not cores or facts.start.get("ranks", 1) != 1:
        return
    everyone = {"OMP_NUM_THREADS": f"{cores:.0f}", "MKL_NUM_THREADS": f"{cores:.0f}"}
    if threads > cores:
        share = case.share(CROWDED)
        yield Finding(
            "threads",
            share,
            f"{threads:.0f} threads share {cores:.0f} cores, and {share:.0%} of the time one of "
            "them waited for another",
            lever=f"OMP_NUM_THREADS={cores:.0f}, a thread for each core",
            environment=everyone,
            gain=gain_of(share),
            at_most=True,
        )
    elif host is not None and threads < cores - host.others_cores - 0.5:
        saved = (case.computing + case.share(OPTIMIZER)) * (1.0 - threads / cores)
        yield Finding(
            "threads",
            saved,
            f"{threads:.0f} of {cores:.0f} cores compute, the others have nothing to do",
            lever="unset OMP_NUM_THREADS, so that every core computes",
            environment=everyone,
            gain=gain_of(saved),
            at_most=True,
        )


COMPUTING_RULES: Final = (
    _threads,
    _precision,
    _attention,
    _compiling,
    _padding,
    _tiny_batches,
    _micro_batch,
    _paging,
    _idle_gpu,
)
