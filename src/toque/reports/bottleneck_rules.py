"""Bottleneck rules: causes that slow a run down, by their share of its time, and their remedies.

A gain is the increase in speed of the training loop in tokens per second: 0.25 is 25 % faster. It
is None if the measurements do not allow an estimate.
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

NOTABLE: Final = 0.05
"""Share of the time below which a cause is not reported."""
AMOUNT: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?([a-z%]{1,12})\Z")
"""A number and a unit in a setting, such as "10 steps"."""
_TARGET_SHARE: Final = 0.02
"""Share of the time that evaluating or saving should take."""
_SMALL_EVALUATION: Final = {"max_examples": 64, "texts": 4}
"""Estimated numbers of examples and texts that suffice for an evaluation."""
_MUCH_PADDING: Final = 0.15
_FEW_TOKENS: Final = 1024
"""Estimate of the tokens per update below which fixed costs dominate."""
_MANY_TOKENS_PER_STEP: Final = 16_384
"""Estimate of the tokens per micro-batch above which memory becomes the limit. 4096 suffice on a
CPU."""


@dataclass(frozen=True)
class Finding:
    """A cause that slows a run down, with a remedy if there is one."""

    cause: str
    weight: float
    """Share of the loop's time that the remedy could save. The largest finding comes first."""
    sentence: str
    lever: str | None = None
    """Remedy as text."""
    settings: tuple[str, ...] = ()
    """Remedy as overrides, such as `train.pack=true`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Remedy as environment variables."""
    gain: float | None = None
    at_most: bool = False
    """True if the gain is an upper limit."""


def findings(facts: Facts) -> list[Finding]:
    """List everything that notably slows the run down, the most important cause first."""
    notable = [
        finding
        for rule in RULES
        for finding in rule(facts)
        if finding.weight >= NOTABLE
    ]
    return sorted(notable, key=lambda finding: -finding.weight)


def gain_of(saved: float) -> float:
    """Convert a saved share of the time into a gain in speed.

    >>> gain_of(0.2)
    0.25
    """
    return 1.0 / (1.0 - min(saved, 0.99)) - 1.0


def _lost_time(
    cause: str,
    facts: Facts,
    name: str,
    sentence: str,
    lever: str,
    *settings: str,
    environment: Mapping[str, str] | None = None,
) -> Finding:
    """Make a finding about lost time. `sentence` continues "5 % of the time"."""
    share = facts.share(name)
    return Finding(
        cause,
        share,
        f"{_of_time(facts, name)} of the time {sentence}",
        lever,
        settings,
        environment or {},
        gain_of(share),
        at_most=True,
    )


def _of_time(facts: Facts, *names: str) -> str:
    """Format a share of the wall time, as in the table of shares."""
    return f"{facts.wall_share(*names):.0%}"


def _data(facts: Facts) -> Iterator[Finding]:
    has_several_readers = (number(facts.setting("readers")) or 1) > 1
    yield _lost_time(
        "waiting for data",
        facts,
        shares.DATA,
        "was spent waiting for batches",
        DATA_ADVICE if has_several_readers else "make batches in several threads",
        *(() if has_several_readers else ("train.readers=4",)),
    )


def _uploads(facts: Facts) -> Iterator[Finding]:
    share = facts.wall_share(shares.UPLOADS)
    yield Finding(
        "uploads",
        share,
        f"{share:.0%} of the time was spent waiting for uploads to the bucket at the end",
        "use a nearer bucket or a faster connection, or upload one model less",
        () if facts.setting("keep_best") == 0 else ("train.keep_best=0",),
        gain=gain_of(share),
        at_most=True,
    )


def _compiling(facts: Facts) -> Iterator[Finding]:
    # Compilation during the first half of the updates does not slow down the rest.
    share = facts.late_compiling
    yield Finding(
        "compiling",
        share,
        f"{share:.0%} of the time of the later updates was spent compiling the model for new "
        "shapes",
        "do not compile the model",
        ("train.compile=false",),
        gain=gain_of(share),
        at_most=True,
    )


def _host(facts: Facts) -> Iterator[Finding]:
    yield _lost_time(
        "throttling",
        facts,
        shares.THROTTLED,
        "the process was paused by a limit on processor time (of a container or a job)",
        "raise the limit, or use only as many threads as it allows",
    )

    if not facts.host:
        return

    cores = facts.start_number("hardware", "cores")
    of_cores = f" of {cores:.0f}" if cores else ""
    has_spinning_threads = _has_spinning_threads(facts)
    lever = "end the other programs"
    if has_spinning_threads:
        lever += ", or let threads sleep while they wait for each other"

    yield _lost_time(
        "other programs",
        facts,
        shares.OTHERS,
        "a thread of the run waited for a core, because other programs used "
        f"{facts.host['others_cores']:.1f}{of_cores} cores",
        lever,
        environment=PASSIVE if has_spinning_threads else None,
    )

    yield _lost_time(
        "standing still",
        facts,
        shares.STILL,
        "the process did nothing: it was stopped, or waited for something outside of it",
        "look at what stops it: a scheduler, a debugger, a disk that does not answer",
    )


def _has_spinning_threads(facts: Facts) -> bool:
    """Check whether threads on a CPU spin while they wait, and the user did not choose it."""
    hardware = mapping(facts.start.get("hardware"))
    has_several_threads = (number(hardware.get("threads")) or 2) > 1
    is_chosen = chosen_by_user(mapping(hardware.get("waits")))
    return facts.device == "cpu" and has_several_threads and not is_chosen


def _evaluation(facts: Facts) -> Iterator[Finding]:
    share = facts.share(shares.EVALUATION)
    n = facts.n_evaluations
    interval, saved = _longer_interval(facts, share, n, setting="evaluate_every")
    is_enough = bool(interval) and share - saved < NOTABLE
    fewer: tuple[str, ...] = ()
    if not is_enough:
        # A missing max_examples means all examples. Missing texts means no texts.
        used = {"max_examples": None, "texts": 0} | dict(
            mapping(facts.start.get("evaluation"))
        )
        fewer = tuple(
            f"evaluation.{name}={enough}"
            for name, enough in _SMALL_EVALUATION.items()
            if used[name] is None or (number(used[name]) or 0) > enough
        )

    remedies = []
    if interval:
        remedies.append("less often")
    if fewer:
        remedies.append("on fewer examples and texts")
    yield Finding(
        "evaluation",
        saved if is_enough else share,
        f"{_of_time(facts, shares.EVALUATION)} of the time went into {n:,} "
        f"{'evaluation' if n == 1 else 'evaluations'}",
        lever=f"evaluate {' and '.join(remedies)}" if remedies else None,
        settings=(*interval, *fewer),
        gain=gain_of(saved) if is_enough else None,
    )


def _saving(facts: Facts) -> Iterator[Finding]:
    n, n_skipped = facts.n_saves, facts.skipped_saves
    if (
        n + n_skipped == 0
    ):  # the last part of a run may be timed as saving without a save
        return
    share = facts.share(shares.SAVING)
    interval, saved = _longer_interval(
        facts, share, n + n_skipped, setting="save_every"
    )
    sentence = (
        f"{_of_time(facts, shares.SAVING)} of the time went into {n:,} "
        f"{'checkpoint' if n == 1 else 'checkpoints'}"
    )
    if n_skipped:
        sentence += f"; {n_skipped} more were skipped, because the disk was too slow"
    yield Finding(
        "saving",
        saved if interval else share,
        sentence,
        lever="save less often" if interval else "save to a faster disk",
        settings=interval,
        gain=gain_of(saved) if interval else None,
    )


def _longer_interval(
    facts: Facts, share: float, n_times: int, *, setting: str
) -> tuple[tuple[str, ...], float]:
    """Choose an interval of at most half the run that reduces a share to `_TARGET_SHARE`.

    Return an override and the share that it saves, or an empty tuple and 0.
    """
    match = AMOUNT.match(str(facts.setting(setting) or ""))
    if match is None or n_times < 2:
        return (), 0.0
    present, unit = float(match[1]), match[2]

    stop_after = AMOUNT.match(str(facts.start.get("stop_after") or ""))
    run_length = float(facts.n_updates) if unit == "steps" else present * (n_times - 1)
    if stop_after is not None and stop_after[2] == unit:
        run_length = float(stop_after[1])
    half = 50.0 if unit == "%" else run_length / 2

    factor = max(1.0, math.ceil(share / (1.0 - min(share, 0.99)) / _TARGET_SHARE))
    amount = present * factor
    if unit == "steps" and present:
        amount = _round_up(amount)
        half = half // 1
    amount = min(amount, half)
    if not 0 < 2 * present <= amount:
        return (), 0.0
    return (f"train.{setting}={amount:g} {unit}",), share * (1.0 - present / amount)


def _round_up(amount: float) -> float:
    """Round up to one significant digit.

    >>> _round_up(34.0), _round_up(50.0), _round_up(117.0)
    (40.0, 50.0, 200.0)
    """
    unit = 10.0 ** math.floor(math.log10(amount))
    return math.ceil(amount / unit) * unit


def _precision(facts: Facts) -> Iterator[Finding]:
    has_fast_bf16 = mapping(facts.start.get("hardware")).get("fast_bf16") is True
    if not has_fast_bf16 or facts.start.get("precision") != "float32":
        return
    float32_peak = facts.start_number("peak_flops_per_second")
    bf16_peak = facts.start_number("bf16_peak")
    saved = 0.0
    if float32_peak and bf16_peak and bf16_peak > float32_peak:
        saved = facts.share(shares.PRODUCTS) * (1.0 - float32_peak / bf16_peak)
    yield Finding(
        "float32",
        max(saved, 0.3 * facts.computing),  # important even without a measured speed
        "products are computed in float32, although this machine is faster in bfloat16",
        lever="let Toque choose the precision",
        settings=("train.precision=auto",),
        gain=gain_of(saved) if saved else None,
    )


def _dense_attention(facts: Facts) -> Iterator[Finding]:
    products = facts.start_number("arithmetic", "products") or 0.0
    needed = facts.start_number("arithmetic", "attention") or 0.0
    computed = facts.start_number("arithmetic", "attention_computed") or 0.0
    if (
        facts.device != "cpu"
        or not facts.computes_padding
        or products + computed <= 0.0
    ):
        return
    excess = (computed - needed) / (products + computed)
    # Padding is a separate finding.
    saved = facts.computing * (1.0 - facts.pad_fraction) * excess
    yield Finding(
        "dense attention",
        saved,
        "attention is computed over entire rows and masked: "
        f"{computed / max(needed, 1.0):.0f} times the necessary attention, {excess:.0%} of the "
        "arithmetic",
        lever="do not compile the model, so that attention is computed per example",
        settings=("train.compile=false",),
        gain=gain_of(saved),
    )


def _padding(facts: Facts) -> Iterator[Finding]:
    pad = facts.pad_fraction
    if pad < _MUCH_PADDING:
        return
    if facts.computes_padding:
        saved = pad * facts.computing
        weight = saved
        effect = "is computed like other tokens"
    else:
        saved = pad * facts.share(shares.OPTIMIZER, shares.HOST)
        weight = max(saved, NOTABLE * (0.5 + pad))
        effect = "is not computed, but makes updates smaller"
    is_unpacked = facts.setting("pack") is False
    yield Finding(
        "padding",
        weight,
        f"{pad:.0%} of every batch is padding, which {effect}",
        lever="pack several examples into a row"
        if is_unpacked
        else "use rows of a length that suits the data",
        settings=("train.pack=true",) if is_unpacked else ("train.row_tokens=auto",),
        gain=gain_of(saved),
    )


def _tiny_batches(facts: Facts) -> Iterator[Finding]:
    tokens = facts.tokens / facts.n_updates
    batch = AMOUNT.match(str(facts.setting("batch") or ""))
    if tokens >= _FEW_TOKENS or batch is None:
        return
    factor = 2.0 ** math.ceil(math.log2(2 * _FEW_TOKENS / max(1.0, tokens)))
    idle = 0.0 if facts.utilisation is None else max(0.0, 1.0 - facts.utilisation)
    saved = facts.share(shares.OPTIMIZER, shares.HOST) * (1.0 - 1.0 / factor)
    yield Finding(
        "tiny batches",
        max(saved, 0.5 * facts.computing * idle),
        f"an update has only {tokens:,.0f} tokens, so its fixed costs dominate: "
        f"{_of_time(facts, shares.OPTIMIZER, shares.HOST)} of the time is not in forward and "
        "backward",
        lever="use larger updates, which change the result and need a higher optim.peak_lr",
        settings=(f"train.batch={float(batch[1]) * factor:g} {batch[2]}",),
        gain=gain_of(saved),
    )


def _memory(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.setting("micro_batch_rows"), int):
        yield from _micro_batch(facts)
        return
    is_checkpointing = facts.start.get("gradient_checkpointing") is True
    remedies = memory_ladder(checkpointing=is_checkpointing, optimizer="adamw")
    yield _lost_time(
        "memory",
        facts,
        shares.PAGING,
        "was spent waiting for memory, because it is too small",
        f"use less memory: {'; '.join(remedies)}",
        *(() if is_checkpointing else ("train.gradient_checkpointing=true",)),
    )


def _micro_batch(facts: Facts) -> Iterator[Finding]:
    """Check a size of the micro-batch that the user chose."""
    rows = number(facts.start.get("micro_batch_rows"))
    if rows is None:
        return
    row_tokens = sum(
        facts.start_number("row", side) or 0.0 for side in ("source", "target")
    )
    update_tokens = facts.tokens / facts.n_updates / max(0.05, 1.0 - facts.pad_fraction)
    tokens = min(rows * row_tokens, update_tokens)
    stalled = facts.share(shares.PAGING)
    if stalled < NOTABLE and tokens <= _MANY_TOKENS_PER_STEP:
        return
    sentence = f"train.micro_batch_rows is {rows:.0f}, about {tokens:,.0f} tokens"
    if stalled:
        sentence += (
            f", and {_of_time(facts, shares.PAGING)} of the time went into "
            "waiting for memory"
        )
    yield Finding(
        "oversized micro-batch",
        max(stalled, 0.5 * facts.computing * (1.0 - (facts.utilisation or 0.5))),
        sentence,
        lever="let Toque choose the number of rows, which does not change the result",
        settings=("train.micro_batch_rows=auto",),
        gain=gain_of(stalled) if stalled >= NOTABLE else None,
    )


def _gpu(facts: Facts) -> Iterator[Finding]:
    busy = facts.gpu_busy
    if busy is not None and busy < GPU_BUSY:
        idle = (1.0 - busy) * facts.computing
        is_compiled = facts.start.get("compile") is True
        yield Finding(
            "host",
            idle,
            f"the GPU computes {busy:.0%} of the time, and waits for the host the rest of it",
            lever="use larger micro-batches" if is_compiled else "compile the model",
            settings=("train.micro_batch_rows=auto",)
            if is_compiled
            else ("train.compile=true",),
            gain=gain_of(idle),
            at_most=True,
        )
    if facts.gpu_throttled:
        reason, share = max(facts.gpu_throttled.items(), key=lambda item: item[1])
        yield Finding(
            "throttling",
            share * 0.5,
            f"the clock of the GPU was reduced in {share:.0%} of the samples, because of {reason}",
            lever="improve the cooling or raise the power limit",
        )


def _threads(facts: Facts) -> Iterator[Finding]:
    threads = facts.start_number("hardware", "threads")
    cores = facts.start_number("hardware", "cores")
    if (
        facts.device != "cpu"
        or not threads
        or not cores
        or facts.start.get("ranks", 1) != 1
    ):
        return
    one_per_core = {
        "OMP_NUM_THREADS": f"{cores:.0f}",
        "MKL_NUM_THREADS": f"{cores:.0f}",
    }
    if threads > cores:
        yield _lost_time(
            "threads",
            facts,
            shares.CROWDED,
            f"a thread waited for a core, because {threads:.0f} threads share {cores:.0f} cores",
            f"use one thread per core (OMP_NUM_THREADS={cores:.0f})",
            environment=one_per_core,
        )
    elif facts.host and threads < cores - facts.host["others_cores"] - 0.5:
        saved = (facts.computing + facts.share(shares.OPTIMIZER)) * (
            1.0 - threads / cores
        )
        yield Finding(
            "threads",
            saved,
            f"only {threads:.0f} of {cores:.0f} cores compute",
            lever="unset OMP_NUM_THREADS, so that every core computes",
            environment=one_per_core,
            gain=gain_of(saved),
            at_most=True,
        )


RULES: Final[tuple[Callable[[Facts], Iterator[Finding]], ...]] = (
    _data,
    _uploads,
    _compiling,
    _host,
    _evaluation,
    _saving,
    _threads,
    _precision,
    _dense_attention,
    _padding,
    _tiny_batches,
    _memory,
    _gpu,
)
