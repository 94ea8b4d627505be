"""Bottleneck rules: what limits a run, by the shares of its time, each with the lever to try.

A gain is of the loop's speed in useful tokens per second: 0.25 is a quarter faster. It is computed
from what was measured; where nothing measured says it, it is None and only a trial tells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from toque.hardware.thread_waits import PASSIVE, chosen_by_user
from toque.reports import run_shares as shares
from toque.reports.run_shares import Facts, mapping
from toque.runs.history import number
from toque.training.bottlenecks import DATA_ADVICE, GPU_BUSY, memory_ladder

NOTABLE: Final = 0.05  # share from which something is worth a word
AMOUNT: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?([a-z%]{1,12})\Z")  # a length in settings
_AIM: Final = 0.02  # share that evaluating or saving may keep
_SMALL_EVALUATION: Final = {"max_examples": 64, "texts": 4}  # guesses
_MANY_FAULTS: Final = 10  # pages read back from disk in an update, from which memory is too small
_MUCH_PADDING: Final = 0.15
_FEW_TOKENS: Final = 1024  # of an update, below which it is mostly fixed cost; a guess
_MANY_AT_ONCE, _FEW_AT_ONCE = 16_384, 256  # tokens far from the 4096 that suit a CPU; guesses


@dataclass(frozen=True)
class Finding:
    """Something that limits the run, ranked by the share of the loop's time it could give back.

    Its lever stands in words, as overrides (`train.pack=true`) and as variables of the environment,
    both empty where it is neither; `at_most` says that the gain is a bound.
    """

    cause: str
    weight: float
    sentence: str
    lever: str | None = None
    settings: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    gain: float | None = None
    at_most: bool = False


def findings(facts: Facts) -> list[Finding]:
    """Everything that limits the run, what could give back most first."""
    found = [finding for rule in RULES for finding in rule(facts) if finding.weight >= NOTABLE]
    return sorted(found, key=lambda finding: -finding.weight)


def gain_of(saved: float) -> float:
    """The gain in speed when a share of the time is saved.

    >>> gain_of(0.2)
    0.25
    """
    return 1.0 / (1.0 - min(saved, 0.99)) - 1.0


def _lost(
    cause: str,
    facts: Facts,
    name: str,
    sentence: str,
    lever: str,
    *settings: str,
    environment: Mapping[str, str] | None = None,
    of_all: bool = False,
) -> Finding:
    """A finding whose entire share could be given back at most, of the loop's time or `of_all`."""
    share = facts.share(name, of_all=of_all)
    return Finding(
        cause, share, f"{_of_time(facts, name)} of the time {sentence}", lever, settings,
        environment or {}, gain_of(share), at_most=True,
    )  # fmt: skip


def _of_time(facts: Facts, *names: str) -> str:
    """Share of the run's wall time, as the table of shares has it."""
    return f"{facts.share(*names, of_all=True):.0%}"


def _waits(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    several = (number(facts.setting("readers")) or 1) > 1
    yield _lost(
        "waiting for data",
        facts,
        shares.DATA,
        "the loop waited for batches",
        DATA_ADVICE if several else "make batches in several threads",
        *(() if several else ("train.readers=4",)),
    )
    yield _lost(
        "uploads",
        facts,
        shares.UPLOADS,
        "the end waited for uploads to the bucket",
        "a nearer bucket or a faster connection; one kept model less to upload",
        *(("train.keep_best=0",) if facts.setting("keep_best") != 0 else ()),
        of_all=True,
    )
    yield _lost(
        "throttling",
        facts,
        shares.THROTTLED,
        "a limit on processor time (of a container or a job) held everything back",
        "raise the limit, or use as many threads as it allows",
    )
    # What the first half of the updates compiled is done with.
    late = facts.compiling_late / max(1e-9, facts.late)
    yield Finding(
        "compiling",
        late,
        f"{late:.0%} of the time of the later updates went into compiling the model again and "
        "again, for shapes that are new",
        "leave the model uncompiled",
        ("train.compile=false",),
        gain=gain_of(late),
        at_most=True,
    )
    if not host:
        return
    cores = facts.start_number("hardware", "cores")
    of = f" of {cores:.0f}" if cores else ""
    spins = _threads_spin(facts)
    yield _lost(
        "other programs",
        facts,
        shares.OTHERS,
        "a thread of the run waited for a core, while other programs kept "
        f"{host['others_cores']:.1f}{of} cores busy",
        "end the other programs"
        + ("; or have threads sleep while they wait for each other" if spins else ""),
        environment=PASSIVE if spins else None,
    )
    n = host["major_faults"]
    read = f"; {n:,.0f} pages of memory were read back from disk meanwhile" if n else ""
    yield _lost(
        "standing still",
        facts,
        shares.STILL,
        "the process neither computed nor wanted to: it was stopped, or waited for something "
        f"outside it{read}",
        "look at what stops it: a scheduler, a debugger, a disk that does not answer",
    )


def _threads_spin(facts: Facts) -> bool:
    """True if several threads of a CPU wait for each other, and the user did not set how."""
    hardware = mapping(facts.start.get("hardware"))
    several = (number(hardware.get("threads")) or 2) > 1
    return facts.device == "cpu" and several and not chosen_by_user(mapping(hardware.get("waits")))


def _evaluation(facts: Facts) -> Iterator[Finding]:
    share, n = facts.share(shares.EVALUATION), facts.n_evaluations
    interval, saved = _interval(facts, share, n, setting="evaluate_every")
    enough = bool(interval) and share - saved < NOTABLE
    # What a run did not record: null is all examples, and texts there are none.
    had = {"max_examples": None, "texts": 0} | dict(mapping(facts.start.get("evaluation")))
    few = [name for name, most in _SMALL_EVALUATION.items()
           if had[name] is None or (number(had[name]) or 0) > most]  # fmt: skip
    fewer = () if enough else tuple(f"evaluation.{name}={_SMALL_EVALUATION[name]}" for name in few)
    levers = ["less often"] * bool(interval) + ["fewer examples and texts"] * bool(fewer)
    yield Finding(
        "evaluation",
        saved if enough else share,
        f"{_of_time(facts, shares.EVALUATION)} of the time went into {n:,} "
        f"evaluation{'' if n == 1 else 's'}",
        lever=f"evaluate {' and '.join(levers)}" if levers else None,
        settings=(*interval, *fewer),
        gain=gain_of(saved) if enough else None,
    )


def _saving(facts: Facts) -> Iterator[Finding]:
    share, n, skipped = facts.share(shares.SAVING), facts.n_saves, facts.skipped_saves
    if n + skipped == 0:  # the search for where a loss stopped being finite counts to the end, too
        return
    settings, saved = _interval(facts, share, n + skipped, setting="save_every")
    also = f"; {skipped} more that were due were skipped, as the disk was too slow for them"
    yield Finding(
        "saving",
        saved if settings else share,
        f"{_of_time(facts, shares.SAVING)} of the time went into {n:,} "
        f"checkpoint{'' if n == 1 else 's'}"
        f"{also if skipped else ''}",
        lever="save less often" if settings else "save to a faster disk",
        settings=settings,
        gain=gain_of(saved) if settings else None,
    )


def _interval(
    facts: Facts, share: float, n_times: int, *, setting: str
) -> tuple[tuple[str, ...], float]:
    """An interval of at most half the run as an override, and the share it saves; or nothing."""
    found = AMOUNT.match(str(facts.setting(setting) or ""))
    if found is None or n_times < 2:
        return (), 0.0
    now, unit = float(found[1]), found[2]
    planned = AMOUNT.match(str(facts.start.get("stop_after") or ""))
    seen = float(facts.n_updates) if unit == "steps" else now * (n_times - 1)
    whole = float(planned[1]) if planned is not None and planned[2] == unit else seen
    half = 50.0 if unit == "%" else whole / 2
    amount = now * max(1.0, math.ceil(share / (1.0 - min(share, 0.99)) / _AIM))
    amount = min(_round_up(amount), half // 1) if unit == "steps" and now else min(amount, half)
    if not 0 < 2 * now <= amount:
        return (), 0.0
    return (f"train.{setting}={amount:g} {unit}",), share * (1.0 - now / amount)


def _round_up(amount: float) -> float:
    """An amount rounded up to one digit, so that it reads like a choice.

    >>> _round_up(34.0), _round_up(50.0), _round_up(117.0)
    (40.0, 50.0, 200.0)
    """
    unit = 10.0 ** math.floor(math.log10(amount))
    return math.ceil(amount / unit) * unit


def _arithmetic(facts: Facts) -> Iterator[Finding]:
    fast = mapping(facts.start.get("hardware")).get("fast_bf16") is True
    if fast and facts.start.get("precision") == "float32":
        own, other = (facts.start_number(name) for name in ("peak_flops_per_second", "bf16_peak"))
        faster = bool(own and other and other > own)
        saved = facts.share(shares.PRODUCTS) * (1.0 - own / other) if faster else 0.0  # type: ignore[operator]
        yield Finding(
            "float32",
            max(saved, 0.3 * facts.computing),  # for its rank alone
            "the products are computed in float32, and this machine computes them faster in "
            "bfloat16",
            lever="let the machine choose the precision",
            settings=("train.precision=auto",),
            gain=gain_of(saved) if saved else None,
        )
    products, needed, computed = (
        facts.start_number("arithmetic", name) or 0.0
        for name in ("products", "attention", "attention_computed")
    )
    if facts.computes_padding and products + computed > 0.0:
        excess = (computed - needed) / (products + computed)
        saved = facts.computing * (1.0 - facts.pad_fraction) * excess  # padding is another finding
        on_cpu, length = facts.device == "cpu", facts.start_number("row", "target")
        shorter = (f"train.row_tokens={max(16, int(length // 2))}",) if length else ()
        yield Finding(
            "dense attention",
            saved,
            f"attention is computed over whole rows and masked: {computed / max(needed, 1.0):.0f} "
            f"times what the examples need, {excess:.0%} of the arithmetic",
            lever="leave the model uncompiled, so that each example's attention is computed alone"
            if on_cpu
            else "shorter rows",
            settings=("train.compile=false",) if on_cpu else shorter,
            gain=gain_of(saved),
        )


def _padding(facts: Facts) -> Iterator[Finding]:
    pad = facts.pad_fraction
    if pad < _MUCH_PADDING:
        return
    computed, packs = facts.computes_padding, facts.setting("pack")
    saved = pad * (facts.computing if computed else facts.share(shares.OPTIMIZER, shares.HOST))
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


def _tiny_batches(facts: Facts) -> Iterator[Finding]:
    each = facts.share(shares.OPTIMIZER, shares.HOST)
    tokens = facts.tokens / facts.n_updates
    found = AMOUNT.match(str(facts.setting("batch") or ""))
    if tokens >= _FEW_TOKENS or found is None:
        return
    factor = 2.0 ** math.ceil(math.log2(2 * _FEW_TOKENS / max(1.0, tokens)))
    idle = 0.0 if facts.utilisation is None else max(0.0, 1.0 - facts.utilisation)
    saved = each * (1.0 - 1.0 / factor)
    yield Finding(
        "tiny batches",
        max(saved, 0.5 * facts.computing * idle),
        f"an update holds only {tokens:,.0f} tokens, so that what every update costs weighs much "
        f"({_of_time(facts, shares.OPTIMIZER, shares.HOST)} of the time is not in forward and "
        "backward)",
        lever="larger updates; they change the result, and want a higher optim.peak_lr",
        settings=(f"train.batch={float(found[1]) * factor:g} {found[2]}",),
        gain=gain_of(saved),
    )


def _memory(facts: Facts) -> Iterator[Finding]:
    """A micro-batch of a size set by hand that does not suit the machine; or too little memory."""
    asked = facts.setting("micro_batch_rows")
    rows = number(facts.start.get("micro_batch_rows"))
    if not isinstance(asked, int):
        recomputes = facts.start.get("gradient_checkpointing") is True
        ladder = memory_ladder(checkpointing=recomputes, optimizer="adamw")
        yield _lost(
            "memory",
            facts,
            shares.PAGING,
            "something waited for memory: there is too little of it",
            f"what needs less memory: {'; '.join(ladder)}",
            *(() if recomputes else ("train.gradient_checkpointing=true",)),
        )
    if rows is None or not isinstance(asked, int):
        return
    each = sum(facts.start_number("row", side) or 0.0 for side in ("source", "target"))
    # A micro-batch is never larger than its update.
    tokens = min(rows * each, facts.tokens / facts.n_updates / max(0.05, 1.0 - facts.pad_fraction))
    paged = facts.host.get("major_faults", 0.0) > _MANY_FAULTS * facts.n_updates
    waits = (shares.PAGING, *([shares.STILL] if paged else []))
    stalled = facts.share(*waits)
    if stalled >= NOTABLE or tokens > _MANY_AT_ONCE:
        cause = "oversized micro-batch"
    elif tokens < _FEW_AT_ONCE and facts.device == "cpu":
        cause = "tiny micro-batches"
    else:
        return
    memory = (
        f", and {_of_time(facts, *waits)} of the time went into waiting for memory"
        if stalled
        else ""
    )
    yield Finding(
        cause,
        # For its rank alone: what stands still for want of memory is a part of it.
        max(1.01 * stalled, 0.5 * facts.computing * (1.0 - (facts.utilisation or 0.5))),
        f"{rows:.0f} rows are computed at once (train.micro_batch_rows), about {tokens:,.0f} "
        f"tokens{memory}",
        lever="leave the number of rows to Toque; the result stays the same",
        settings=("train.micro_batch_rows=auto",),
        gain=gain_of(stalled) if stalled >= NOTABLE else None,
    )


def _gpu(facts: Facts) -> Iterator[Finding]:
    """A GPU that waits for the host, or whose clock is held down."""
    busy, hot = facts.gpu_busy, facts.gpu_throttled
    if busy is not None and busy < GPU_BUSY:
        compiled, idle = facts.start.get("compile") is True, (1.0 - busy) * facts.computing
        yield Finding(
            "host",
            idle,
            f"the GPU computes {busy:.0%} of the time and waits for the host otherwise",
            lever="larger micro-batches" if compiled else "compile the model",
            settings=("train.micro_batch_rows=auto",) if compiled else ("train.compile=true",),
            gain=gain_of(idle),
            at_most=True,
        )
    if hot:
        reason, often = max(hot.items(), key=lambda each: each[1])
        yield Finding(
            "throttling",
            often * 0.5,
            f"the GPU's clock was held down for {reason} in {often:.0%} of the looks",
            lever="more cooling or a higher power limit",
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    threads = facts.start_number("hardware", "threads")
    cores = facts.start_number("hardware", "cores")
    if facts.device != "cpu" or not threads or not cores or facts.start.get("ranks", 1) != 1:
        return
    everyone = {"OMP_NUM_THREADS": f"{cores:.0f}", "MKL_NUM_THREADS": f"{cores:.0f}"}
    if threads > cores:
        yield _lost(
            "threads",
            facts,
            shares.CROWDED,
            f"one of {threads:.0f} threads, which share {cores:.0f} cores, waited for another",
            f"OMP_NUM_THREADS={cores:.0f}, a thread for each core",
            environment=everyone,
        )
    elif host and threads < cores - host["others_cores"] - 0.5:
        saved = (facts.computing + facts.share(shares.OPTIMIZER)) * (1.0 - threads / cores)
        yield Finding(
            "threads",
            saved,
            f"{threads:.0f} of {cores:.0f} cores compute, the others have nothing to do",
            lever="unset OMP_NUM_THREADS, so that every core computes",
            environment=everyone,
            gain=gain_of(saved),
            at_most=True,
        )


RULES: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    _waits,
    _evaluation,
    _saving,
    _threads,
    _arithmetic,
    _padding,
    _tiny_batches,
    _memory,
    _gpu,
)
