"""Bottleneck rules: causes that slow down a run, with their share of its time, and remedies.

A gain is the relative increase of the training loop's tokens per second: 0.25 is 25 % faster. It
is None if the measurements do not allow an estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from toque.hardware.thread_waits import PASSIVE, chosen_by_user
from toque.reports import run_shares as shares
from toque.reports.run_shares import Facts, dict_or_empty
from toque.runs.history import number
from toque.training.bottlenecks import DATA_ADVICE, GPU_BUSY, memory_ladder

NOTABLE: Final = 0.05
"""Fraction of the time below which a cause is not reported."""
AMOUNT: Final = re.compile(r"(\d{1,20}(?:\.\d{1,20})?) ?([a-z%]{1,12})\Z")
"""Number and unit of a setting such as "10 steps"."""
_TARGET_SHARE: Final = 0.02
"""Acceptable time for evaluations or saves, relative to the time for updates."""
_SMALL_EVALUATION: Final = {"max_examples": 64, "texts": 4}
"""Numbers of examples and texts that are enough for an evaluation. A guess."""
_MUCH_PADDING: Final = 0.15
"""Fraction of padding in a batch above which it is reported."""
_FEW_TOKENS: Final = 1024
"""Tokens per update below which fixed costs dominate. A guess."""
_MANY_TOKENS_PER_STEP: Final = 16_384
"""Tokens per micro-batch above which memory becomes the limit. A guess. On a CPU, 4096
tokens suffice for full speed."""
_IDLE_WEIGHT: Final = 0.5
"""Fraction of the idle arithmetic that another batch size may recover. A guess."""


@dataclass(frozen=True)
class Finding:
    """A cause that slows down a run, with a remedy if one is known."""

    cause: str
    weight: float
    """Fraction of the loop's time that the remedy could save. Findings are sorted by it."""
    sentence: str
    lever: str | None = None
    """Description of the remedy."""
    settings: tuple[str, ...] = ()
    """Remedy as overrides, such as `train.pack=true`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Remedy as environment variables."""
    gain: float | None = None
    at_most: bool = False
    """True if the gain is an upper limit."""


Findings = Iterator[Finding]


def find_bottlenecks(facts: Facts) -> list[Finding]:
    """List the causes that notably slow down the run, the most important first."""
    notable = [
        finding
        for rule in RULES
        for finding in rule(facts)
        if finding.weight >= NOTABLE
    ]
    return sorted(notable, key=lambda finding: -finding.weight)


def speed_gain(saved_share: float) -> float:
    """Convert a saved fraction of the time into a gain in speed.

    >>> speed_gain(0.2)
    0.25
    """
    return 1.0 / (1.0 - min(saved_share, 0.99)) - 1.0


def _lost_time_finding(
    cause: str,
    facts: Facts,
    share_name: str,
    sentence: str,
    lever: str,
    *settings: str,
    environment: Mapping[str, str] = {},
) -> Finding:
    """Make a finding about lost time. `sentence` continues "5 % of the time"."""
    share = facts.share(share_name)
    return Finding(
        cause,
        share,
        f"{_format_wall_share(facts, share_name)} of the time {sentence}",
        lever,
        settings,
        environment,
        speed_gain(share),
        at_most=True,
    )


def _format_wall_share(facts: Facts, *share_names: str) -> str:
    """Format a fraction of the wall time, as in the table of shares."""
    return f"{facts.wall_share(*share_names):.0%}"


def _check_data_wait(facts: Facts) -> Findings:
    """Check if the loader is slower than training."""
    has_several_readers = (number(facts.setting("readers")) or 1) > 1
    lever = "make batches in several threads"
    settings = ["train.readers=4"]
    if has_several_readers:
        lever = DATA_ADVICE
        settings = []
    yield _lost_time_finding(
        "waiting for data",
        facts,
        shares.DATA,
        "was spent waiting for batches",
        lever,
        *settings,
    )


def _check_uploads(facts: Facts) -> Findings:
    """Check if the run waited for its last uploads."""
    share = facts.wall_share(shares.UPLOADS)
    yield Finding(
        "uploads",
        share,
        f"{share:.0%} of the time was spent waiting for uploads to the bucket at the end",
        "use a nearer bucket or a faster connection, or upload one model fewer",
        () if facts.setting("keep_best") == 0 else ("train.keep_best=0",),
        gain=speed_gain(share),
        at_most=True,
    )


def _check_compiling(facts: Facts) -> Findings:
    """Check if new shapes were compiled during the later updates."""
    # Compilation during the first half of the updates does not slow down the rest.
    share = facts.late_compiling
    yield Finding(
        "compiling",
        share,
        f"{share:.0%} of the time of the later updates was spent compiling the model for new "
        "shapes",
        "do not compile the model",
        ("train.compile=false",),
        gain=speed_gain(share),
        at_most=True,
    )


def _check_host(facts: Facts) -> Findings:
    """Check if the process was paused, disturbed by other programs, or idle."""
    yield _lost_time_finding(
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
    lever = "end the other programs"
    environment: Mapping[str, str] = {}
    if _has_spinning_threads(facts):
        lever += ", or let threads sleep while they wait for each other"
        environment = PASSIVE
    yield _lost_time_finding(
        "other programs",
        facts,
        shares.OTHERS,
        "a thread of the run waited for a core, because other programs used "
        f"{facts.host['others_cores']:.1f}{of_cores} cores",
        lever,
        environment=environment,
    )

    yield _lost_time_finding(
        "standing still",
        facts,
        shares.STILL,
        "the process did nothing: it was stopped, or waited for something outside of it",
        "look at what stops it: a scheduler, a debugger, a disk that does not respond",
    )


def _has_spinning_threads(facts: Facts) -> bool:
    """Check whether threads on a CPU spin while they wait, unless the user chose how they wait."""
    hardware = dict_or_empty(facts.start.get("hardware"))
    has_several_threads = (number(hardware.get("threads")) or 2) > 1
    is_chosen = chosen_by_user(dict_or_empty(hardware.get("waits")))
    return facts.device == "cpu" and has_several_threads and not is_chosen


def _check_evaluation(facts: Facts) -> Findings:
    """Check if evaluations are too frequent or too large."""
    share = facts.share(shares.EVALUATION)
    n = facts.n_evaluations
    longer = _propose_longer_interval(facts, share, n, setting="evaluate_every")
    sentence = (
        f"{_format_wall_share(facts, shares.EVALUATION)} of the time went into {n:,} "
        f"{'evaluation' if n == 1 else 'evaluations'}"
    )
    weight = share
    gain = None
    remedies = []
    settings = []
    if longer is not None:
        remedies.append("less often")
        settings.append(longer.override)
    if longer is not None and share - longer.saved < NOTABLE:
        weight = longer.saved
        gain = speed_gain(weight)
    # Fewer examples make the scores less precise, so they are the second remedy.
    elif reductions := _smaller_evaluation(facts):
        remedies.append("on fewer examples and texts")
        settings += reductions
    yield Finding(
        "evaluation",
        weight,
        sentence,
        lever=f"evaluate {' and '.join(remedies)}" if remedies else None,
        settings=tuple(settings),
        gain=gain,
    )


def _smaller_evaluation(facts: Facts) -> tuple[str, ...]:
    """Return overrides that reduce the evaluation's examples and texts to a sufficient number."""
    # A missing max_examples means all examples. Missing texts means no texts.
    defaults = {"max_examples": None, "texts": 0}
    settings = defaults | dict(dict_or_empty(facts.start.get("evaluation")))
    overrides = []
    for name, sufficient in _SMALL_EVALUATION.items():
        value = settings[name]
        if value is None or (number(value) or 0) > sufficient:
            overrides.append(f"evaluation.{name}={sufficient}")
    return tuple(overrides)


def _check_saving(facts: Facts) -> Findings:
    """Check if checkpoints are saved too often for the disk."""
    n = facts.n_saves
    n_skipped = facts.skipped_saves
    if n + n_skipped == 0:
        return  # the last part of a run may be timed as saving without a save

    share = facts.share(shares.SAVING)
    longer = _propose_longer_interval(facts, share, n + n_skipped, setting="save_every")
    sentence = (
        f"{_format_wall_share(facts, shares.SAVING)} of the time went into {n:,} "
        f"{'checkpoint' if n == 1 else 'checkpoints'}"
    )
    if n_skipped:
        sentence += f"; {n_skipped} more were skipped, because the disk was too slow"
    if longer is None:
        yield Finding("saving", share, sentence, lever="save to a faster disk")
        return
    yield Finding(
        "saving",
        longer.saved,
        sentence,
        lever="save less often",
        settings=(longer.override,),
        gain=speed_gain(longer.saved),
    )


class _LongerInterval(NamedTuple):
    """A longer interval between evaluations or saves."""

    override: str
    saved: float
    """Fraction of the loop's time that it saves."""


def _propose_longer_interval(
    facts: Facts, share: float, n_times: int, *, setting: str
) -> _LongerInterval | None:
    """Propose an interval of at most half the run that reduces the share to `_TARGET_SHARE`.

    Return None if the interval is unknown, or if a longer one would save too little.
    """
    interval = AMOUNT.match(str(facts.setting(setting) or ""))
    if interval is None or n_times < 2:
        return None
    current, unit = float(interval[1]), interval[2]
    if not current:
        return None

    longest = _run_length(facts, current, unit, n_times) / 2

    # k times the interval divides this time by k. The time of the updates stays the same.
    relative_time = share / (1.0 - min(share, 0.99))
    factor = max(1.0, math.ceil(relative_time / _TARGET_SHARE))
    amount = current * factor
    if unit == "steps":
        amount = _round_up(amount)
        longest = math.floor(longest)
    amount = min(amount, longest)
    if amount < 2 * current:
        return None
    override = f"train.{setting}={amount:g} {unit}"
    return _LongerInterval(override, share * (1.0 - current / amount))


def _run_length(facts: Facts, interval: float, unit: str, n_times: int) -> float:
    """Return the length of the run in `unit`, estimated if train.stop_after has another unit."""
    if unit == "%":
        return 100.0
    stop_after = AMOUNT.match(str(facts.start.get("stop_after") or ""))
    if stop_after is not None and stop_after[2] == unit:
        return float(stop_after[1])
    if unit == "steps":
        return facts.n_updates
    return interval * (n_times - 1)


def _round_up(amount: float) -> float:
    """Round up to one significant digit.

    >>> _round_up(34.0), _round_up(50.0), _round_up(117.0)
    (40.0, 50.0, 200.0)
    """
    unit = 10.0 ** math.floor(math.log10(amount))
    return math.ceil(amount / unit) * unit


def _check_precision(facts: Facts) -> Findings:
    """Check if matmuls use float32 on a machine with fast bfloat16."""
    hardware = dict_or_empty(facts.start.get("hardware"))
    has_fast_bf16 = hardware.get("fast_bf16") is True
    if not has_fast_bf16 or facts.start.get("precision") != "float32":
        return

    float32_peak = facts.start_number("peak_flops_per_second")
    bf16_peak = facts.start_number("bf16_peak")
    saved = 0.0
    if float32_peak and bf16_peak and bf16_peak > float32_peak:
        saved = facts.share(shares.MATMULS) * (1.0 - float32_peak / bf16_peak)
    # A guess for the weight, because this matters even if the peaks were not measured.
    weight = max(saved, 0.3 * facts.computing)
    yield Finding(
        "float32",
        weight,
        "matmuls are computed in float32, although this machine is faster in bfloat16",
        lever="let Toque choose the precision",
        settings=("train.precision=auto",),
        gain=speed_gain(saved) if saved else None,
    )


def _check_dense_attention(facts: Facts) -> Findings:
    """Check if attention is computed between different examples of a row."""
    matmuls = facts.start_number("arithmetic", "products") or 0.0
    needed = facts.start_number("arithmetic", "attention") or 0.0
    computed = facts.start_number("arithmetic", "attention_computed") or 0.0
    all_flops = matmuls + computed
    if facts.device != "cpu" or not facts.computes_padding or all_flops <= 0.0:
        return

    excess = (computed - needed) / all_flops
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
        gain=speed_gain(saved),
    )


def _check_padding(facts: Facts) -> Findings:
    """Check if much of a batch is padding."""
    pad = facts.pad_fraction
    if pad < _MUCH_PADDING:
        return

    if facts.computes_padding:
        saved = pad * facts.computing
        weight = saved
        effect = "is computed like other tokens"
    else:
        saved = pad * facts.share(shares.OPTIMIZER, shares.HOST)
        # From half a batch of padding on, this is notable even if it costs little time.
        weight = max(saved, NOTABLE * (0.5 + pad))
        effect = "is not computed, but makes updates smaller"

    lever = "use rows of a length that suits the data"
    setting = "train.row_tokens=auto"
    if facts.setting("pack") is False:
        lever = "pack several examples into a row"
        setting = "train.pack=true"
    yield Finding(
        "padding",
        weight,
        f"{pad:.0%} of every batch is padding, which {effect}",
        lever,
        (setting,),
        gain=speed_gain(saved),
    )


def _check_tiny_batches(facts: Facts) -> Findings:
    """Check if updates have too few tokens for their fixed costs."""
    tokens = facts.tokens / facts.n_updates
    batch = AMOUNT.match(str(facts.setting("batch") or ""))
    if tokens >= _FEW_TOKENS or batch is None:
        return

    # A power of two that raises an update to at least twice the limit.
    factor = 2.0 ** math.ceil(math.log2(2 * _FEW_TOKENS / max(1.0, tokens)))
    saved = facts.share(shares.OPTIMIZER, shares.HOST) * (1.0 - 1.0 / factor)
    idle = 0.0 if facts.utilisation is None else max(0.0, 1.0 - facts.utilisation)
    yield Finding(
        "tiny batches",
        max(saved, _IDLE_WEIGHT * facts.computing * idle),
        f"an update has only {tokens:,.0f} tokens, so its fixed costs dominate: "
        f"{_format_wall_share(facts, shares.OPTIMIZER, shares.HOST)} of the time is outside the "
        "forward and backward passes",
        lever="use larger updates, which change the result and need a higher optim.peak_lr",
        settings=(f"train.batch={float(batch[1]) * factor:g} {batch[2]}",),
        gain=speed_gain(saved),
    )


def _check_memory(facts: Facts) -> Findings:
    """Check if the micro-batches or the memory are too small."""
    if isinstance(facts.setting("micro_batch_rows"), int):
        yield from _check_micro_batch(facts)
        return

    is_checkpointing = facts.start.get("gradient_checkpointing") is True
    remedies = memory_ladder(checkpointing=is_checkpointing, optimizer="adamw")
    settings = [] if is_checkpointing else ["train.gradient_checkpointing=true"]
    yield _lost_time_finding(
        "memory",
        facts,
        shares.PAGING,
        "was spent waiting for memory, because it is too small",
        f"use less memory: {'; '.join(remedies)}",
        *settings,
    )


def _check_micro_batch(facts: Facts) -> Findings:
    """Check a number of rows per micro-batch that the user chose."""
    rows = number(facts.start.get("micro_batch_rows"))
    if rows is None:
        return

    row_tokens = 0.0
    for side in ("source", "target"):
        row_tokens += facts.start_number("row", side) or 0.0
    share_of_tokens = max(0.05, 1.0 - facts.pad_fraction)
    computed_per_update = facts.tokens / facts.n_updates / share_of_tokens
    tokens = min(rows * row_tokens, computed_per_update)
    stalled = facts.share(shares.PAGING)
    if stalled < NOTABLE and tokens <= _MANY_TOKENS_PER_STEP:
        return

    sentence = f"train.micro_batch_rows is {rows:.0f}, about {tokens:,.0f} tokens"
    if stalled:
        sentence += (
            f", and {_format_wall_share(facts, shares.PAGING)} of the time went into "
            "waiting for memory"
        )
    utilisation = facts.utilisation or 0.5  # 0.5 is a guess for an unknown utilisation
    yield Finding(
        "oversized micro-batch",
        max(stalled, _IDLE_WEIGHT * facts.computing * (1.0 - utilisation)),
        sentence,
        lever="let Toque choose the number of rows, which does not change the result",
        settings=("train.micro_batch_rows=auto",),
        gain=speed_gain(stalled) if stalled >= NOTABLE else None,
    )


def _check_gpu(facts: Facts) -> Findings:
    """Check if the GPU waits for the host, or reduces its clock."""
    busy = facts.gpu_busy
    if busy is not None and busy < GPU_BUSY:
        idle = (1.0 - busy) * facts.computing
        lever = "compile the model"
        setting = "train.compile=true"
        if facts.start.get("compile") is True:
            lever = "use larger micro-batches"
            setting = "train.micro_batch_rows=auto"
        yield Finding(
            "host",
            idle,
            f"the GPU computes {busy:.0%} of the time, and waits for the host the rest of it",
            lever,
            (setting,),
            gain=speed_gain(idle),
            at_most=True,
        )

    if facts.gpu_throttled:
        reason, share = max(facts.gpu_throttled.items(), key=lambda item: item[1])
        yield Finding(
            "throttling",
            0.5 * share,  # a guess, because the size of the reduction is unknown
            f"the clock of the GPU was reduced in {share:.0%} of the samples, because of {reason}",
            lever="improve the cooling or raise the power limit",
        )


def _check_threads(facts: Facts) -> Findings:
    """Check if there are more or fewer threads than cores."""
    threads = facts.start_number("hardware", "threads")
    cores = facts.start_number("hardware", "cores")
    if not threads or not cores:
        return
    # Several ranks share the cores, so the counts of one rank mean little.
    if facts.device != "cpu" or facts.start.get("ranks", 1) != 1:
        return

    one_per_core = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), f"{cores:.0f}")
    if threads > cores:
        yield _lost_time_finding(
            "threads",
            facts,
            shares.CROWDED,
            f"a thread waited for a core, because {threads:.0f} threads share {cores:.0f} cores",
            f"use one thread per core (OMP_NUM_THREADS={cores:.0f})",
            environment=one_per_core,
        )
        return

    # Less than half an idle core is within the precision of the counters.
    if facts.host and cores - facts.host["others_cores"] - threads > 0.5:
        parallel = facts.computing + facts.share(shares.OPTIMIZER)
        saved = parallel * (1.0 - threads / cores)
        yield Finding(
            "threads",
            saved,
            f"only {threads:.0f} of {cores:.0f} cores compute",
            lever="unset OMP_NUM_THREADS, so that every core computes",
            environment=one_per_core,
            gain=speed_gain(saved),
            at_most=True,
        )


RULES: Final[tuple[Callable[[Facts], Findings], ...]] = (
    _check_data_wait,
    _check_uploads,
    _check_compiling,
    _check_host,
    _check_evaluation,
    _check_saving,
    _check_threads,
    _check_precision,
    _check_dense_attention,
    _check_padding,
    _check_tiny_batches,
    _check_memory,
    _check_gpu,
)
