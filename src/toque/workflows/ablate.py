"""Ablation: the effect of each improvement, from runs with and without it.

Each improvement is removed from a run that has all of them, and added to a run without any. Both
runs of a pair have the same seed, so that the seed does not contribute to their difference. Each
run has its own process. A server that has already imported torch forks it, so a run starts in
tenths of a second instead of seconds.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from toque.config import Resolved, config_sha256, load_config, resolved_yaml
from toque.config.user_code import HEADER, refuse_foreign_code
from toque.data.store.store_manifest import read_manifest
from toque.errors import ConfigError, Interrupted, argument
from toque.evaluation.bootstrap import paired_difference
from toque.reporter import SILENT, Reporter
from toque.reports.page import Grid, format_columns
from toque.storage.atomic import atomic_write
from toque.storage.locks import file_lock
from toque.storage.no_follow import open_append
from toque.user_paths import named_path
from toque.version import __version__
from toque.workflows.configure import Configured, configure, with_origins
from toque.workflows.improvements import find_switches, switch_overrides
from toque.workflows.prepare import prepare
from toque.workflows.results import TrainedRun


class Column(NamedTuple):
    """Column of the table of differences."""

    measure: str
    heading: str
    decimals: int
    unit: float = 1.0
    """Amount of the metric that the table displays as 1."""

    def format_difference(self, difference: Mapping[str, Any] | None) -> str:
        """Format a difference with its interval. A star marks an interval that excludes zero."""
        if difference is None:
            return "-"
        text = f"{difference['mean'] / self.unit:+.{self.decimals}f}"
        if difference["low"] is not None:
            low, high = difference["low"] / self.unit, difference["high"] / self.unit
            text += f" ({low:.{self.decimals}f}..{high:.{self.decimals}f})"
        return text + ("*" if difference["decided"] else " ")


COLUMNS = (
    Column("loss", "held-out loss", 4),
    Column("cookable", "cookable", 3),
    Column("ingredient_coverage", "coverage", 3),
    Column("rougeL", "ROUGE-L", 3),
    Column("training_seconds", "seconds", 1),
    Column("peak_bytes", "peak MB", 0, 1e6),
)
_QUIET = (
    "observe.webhook=null",
    "observe.trackers=[]",
    "checkpoint.upload=null",
)
"""Overrides that switch off services in the runs of an ablation."""
_LOCK = ".ablate.lock"
"""Lock file. It is never removed, because it also marks the folder of an ablation."""
_METHOD = (
    "A difference is the value with the improvement minus the value without it, for runs of the "
    "same seed: the mean and the 95 % interval of Student's t. A star marks an interval without "
    "zero. One of twenty intervals misses the true difference by chance, so a single star among "
    "many is weak evidence. Seconds are the training time alone. Memory is the peak of the process."
)


@dataclass(frozen=True)
class Variant:
    """One configuration of the ablation, for one seed."""

    name: str
    seed: int
    overrides: tuple[str, ...]
    key: str
    """Hash of all settings except the run folder. Variants with equal keys share one run."""


@dataclass(frozen=True)
class AblationPlan:
    """Runs of an ablation."""

    improvements: tuple[str, ...]
    left_out: Mapping[str, str]
    """Improvements that do not apply to the configuration, each with the reason."""
    variants: tuple[Variant, ...]

    @property
    def runs(self) -> dict[str, Variant]:
        """Variants to train, by key. Variants with equal settings share a run."""
        return {variant.key: variant for variant in self.variants}

    def for_store(self, fingerprint: str) -> AblationPlan:
        """Return the plan with keys that also identify the store."""
        variants = (
            replace(v, key=f"{v.key}-{fingerprint[:12]}") for v in self.variants
        )
        return replace(self, variants=tuple(variants))

    def keys(self, name: str) -> list[str]:
        """Return the keys of the variants called `name`, one per seed."""
        return [variant.key for variant in self.variants if variant.name == name]


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    key: str
    code: int
    measures: Mapping[str, float]
    peak_bytes: int
    said: str = ""
    """Last log line of a failed run."""

    def measure(self, name: str) -> float | None:
        """Return a metric of `COLUMNS`, or None if the run failed or did not record it."""
        if self.code:
            return None
        if name == "peak_bytes":
            return float(self.peak_bytes)
        return self.measures.get(name)

    def __str__(self) -> str:
        """Return the outcome in one line."""
        if self.code:
            return f"failed with exit code {self.code}: {self.said}"
        seconds = self.measures.get("training_seconds", 0.0)
        return f"held-out loss {self.measures['loss']:.4f}, {seconds:.1f} s"


@dataclass(frozen=True)
class Ablation:
    """Outcome of an ablation."""

    json: Path
    """File with all results."""
    record: Mapping[str, Any]
    """Content of `json`. Its `effects` are differences by improvement, comparison and metric."""

    def __str__(self) -> str:
        """Return the table of differences."""
        table = format_columns(_effects_table(self.record))
        names = self.record["failed"]
        failures = [f"failed: {name} (its log is in the folder logs)" for name in names]
        return "\n".join(
            [*table, *failures, _METHOD, f"All numbers are in {self.json}."]
        )


def ablate(
    config: Configured,
    overrides: Sequence[str] = (),
    *,
    seeds: int = 5,
    steps: int | None = None,
    out: str | Path = "runs/ablation",
    trust_code: bool = False,
    reporter: Reporter = SILENT,
) -> Ablation:
    """Measure the effect of each improvement on your data: on and off, over several seeds.

    Args:
        config: A configuration, as for `configure`.
        overrides: Settings of all runs, as "section.field=value".
        seeds: Number of runs per combination.
        steps: Updates per run. None means the length in the configuration.
        out: Folder of the runs and results. A completed run in it is not repeated if its settings
            and its store are the same.
        trust_code: Import the metrics and callbacks that a run's config.yaml names.
        reporter: Receives the result of each run.

    Raises:
        ConfigError: The configuration or a number is not valid.
        DataError: The store does not exist, and the configuration has no sources for it.
        Interrupted: A signal stopped a run. Repeat the call to continue.
    """
    out = named_path(out)
    _refuse_users_files(out)
    config_file = _find_or_write_config(config, overrides, out, trust_code=trust_code)
    all_overrides = list(overrides)
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"{argument('steps')} must be at least 1, not {steps}.")
        all_overrides.append(f"train.stop_after={steps} steps")
    plan = plan_ablation(config_file, all_overrides, seeds=seeds)
    for name, reason in plan.left_out.items():
        reporter.line(f"left out: {name}: {reason}")

    settings = load_config(config_file, all_overrides).config
    if settings.data.sources:
        prepare(settings)
    plan = plan.for_store(read_manifest(Path(settings.data.store)).fingerprint)
    with _lock_folder(out):
        results = _train_variants(
            config_file, plan, out, reporter, trust_code=trust_code
        )
        inputs = {"config": config_file, "overrides": all_overrides}
        record = summarise(plan, results) | inputs
        file = out / "ablation.json"
        atomic_write(file, json.dumps(record, indent=1).encode())
    return Ablation(file, record)


def _refuse_users_files(out: Path) -> None:
    """Refuse a folder with the user's files that an ablation would overwrite."""
    results = out / "ablation.json"
    settings = out / "ablation.yaml"
    user_files = []
    if results.exists() and not (out / _LOCK).exists():
        user_files.append(results)
    if settings.exists() and not settings.read_bytes().startswith(HEADER.encode()):
        user_files.append(settings)
    if user_files:
        raise ConfigError(
            f"{user_files[0]} already exists, but no ablation wrote it. Name another folder with "
            f"{argument('out')}, or move the file."
        )


def _find_or_write_config(
    config: Configured, overrides: Sequence[str], out: Path, *, trust_code: bool
) -> str:
    """Return the file or preset of a configuration. Write a file for any other configuration.

    Raises:
        ConfigError: The configuration names code that the user did not trust.
    """
    is_named = isinstance(config, str | Path)
    settings = (
        load_config(str(config), overrides).config if is_named else configure(config)
    )
    if not trust_code:
        refuse_foreign_code(settings.foreign_code)
    if is_named:
        return str(config)
    # Runs read their settings from a file.
    out.mkdir(parents=True, exist_ok=True)
    file = out / "ablation.yaml"
    atomic_write(file, resolved_yaml(with_origins(settings)).encode())
    return str(file)


def plan_ablation(config: str, overrides: Sequence[str], *, seeds: int) -> AblationPlan:
    """Plan the runs for a file or a preset.

    Raises:
        ConfigError: There are too few seeds, or no improvement fits the configuration.
    """
    if seeds < 2:
        raise ConfigError(
            f"{argument('seeds')} must be at least 2, not {seeds}, because one pair of runs has no "
            "confidence interval. 5 is a good choice."
        )
    common = [*overrides, *_QUIET]
    switches, left_out = find_switches(config, common)
    if not switches:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"None of the improvements fits {config}: {reasons}")

    first_seed = load_config(config, common).config.seed
    combinations = _list_combinations([*switches])
    variants = []
    for seed in range(first_seed, first_seed + seeds):
        for name, enabled in combinations.items():
            switched = switch_overrides(switches, enabled)
            variant_overrides = (*common, f"seed={seed}", *switched)
            key = _hash_settings(config, variant_overrides)
            variants.append(Variant(name, seed, variant_overrides, key))
    return AblationPlan(tuple(switches), left_out, tuple(variants))


def _list_combinations(improvements: Sequence[str]) -> dict[str, set[str]]:
    """Return the enabled improvements of each variant, by the variant's name."""
    everything = set(improvements)
    combinations = {"all on": everything}
    for name in improvements:
        combinations[f"all on, {name} off"] = everything - {name}
    combinations["all off"] = set()
    for name in improvements:
        combinations[f"all off, {name} on"] = {name}
    return combinations


def _hash_settings(config: str, overrides: Sequence[str]) -> str:
    """Hash a variant's settings, apart from its run folder."""
    settings = load_config(config, [*overrides, "run_dir=run"]).config
    return config_sha256(settings)[:16]


def _lock_folder(out: Path) -> AbstractContextManager[object]:
    """Lock the folder, because two ablations in it would train the same runs."""

    def refuse(holder: str) -> None:
        raise ConfigError(
            f"Another `toque ablate` ({holder}) is writing to {out}. Wait until it ends, or name "
            f"another folder with {argument('out')}."
        )

    return file_lock(out / _LOCK, refuse)


def _train_variants(
    config: str, plan: AblationPlan, out: Path, reporter: Reporter, *, trust_code: bool
) -> dict[str, Result]:
    """Train each run that has no result, report all runs, and return their results."""
    results: dict[str, Result] = {}
    runs = plan.runs
    for number, (key, variant) in enumerate(runs.items(), start=1):
        result = _read_result(out, key)
        if result is None:
            result = _train_variant(config, variant, out, trust_code=trust_code)
        results[key] = result
        reporter.line(
            f"{number}/{len(runs)}  seed {variant.seed}  {variant.name}: {result}"
        )
    return results


def _train_variant(
    config: str, variant: Variant, out: Path, *, trust_code: bool
) -> Result:
    """Train in a child process, to measure its memory and to survive its failure."""
    key = variant.key
    for name in ("runs", "logs", "results"):
        (out / name).mkdir(parents=True, exist_ok=True)
    log = out / "logs" / f"{key}.txt"
    overrides = [*variant.overrides, f"run_dir={out / 'runs' / key}"]
    resolved = load_config(config, overrides, trust_code=trust_code or None)

    child = _start_child(resolved, out, key, log)
    with _forward_signals(child) as signals:
        try:
            child.join()
        except KeyboardInterrupt:
            # The terminal sends Ctrl-C to the child too, so the child saves.
            child.join()
            raise
    if signals or child.exitcode == Interrupted.exit_code:
        raise Interrupted(
            f"A signal stopped a run of the ablation. {out} has all completed runs and the last "
            "checkpoint. The same command continues."
        )

    result = _read_result(out, key) if child.exitcode == 0 else None
    if result is not None:
        return result
    return Result(key, child.exitcode or 1, {}, 0, _last_line(log))


def _start_child(resolved: Resolved, out: Path, key: str, log: Path) -> BaseProcess:
    """Start the training of a run in a child of a server that has imported torch."""
    processes = get_context("forkserver")
    processes.set_forkserver_preload(["toque.workflows.training_child"])
    # The server keeps the environment it started with, so pass the current one to the child.
    environment = dict(os.environ)
    child = processes.Process(
        target=_train_and_record, args=(resolved, out, key, log, environment)
    )
    child.start()
    return child


def _last_line(log: Path) -> str:
    """Return the last line of a log, or "" for an empty or missing log."""
    if not log.exists():
        return ""
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""


@contextmanager
def _forward_signals(child: BaseProcess) -> Iterator[list[int]]:
    """Forward SIGTERM and SIGHUP to the child, which then saves. Yield the signals so far."""
    signals: list[int] = []
    # A signal to the process group reaches the child twice, and a second SIGTERM would stop it
    # without a save. A run never counts SIGHUP as a second request, so the child gets that first.
    ignores_hangup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    first = signal.SIGTERM if ignores_hangup else signal.SIGHUP

    def forward(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child.pid or 0, number if signals else first)
        signals.append(number)

    handlers: dict[int, Any] = {}
    # Python sets signal handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        numbers = [signal.SIGTERM]
        if not ignores_hangup:
            numbers.append(signal.SIGHUP)
        handlers = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            # None stands for a handler that was not set from Python.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _train_and_record(
    resolved: Resolved, out: Path, key: str, log: Path, environment: Mapping[str, str]
) -> None:
    """Train with output in `log`, write the result if training succeeds, and exit."""
    from toque.workflows.training_child import train_in_child

    os.environ.update(environment)
    log_descriptor = open_append(log)
    for standard_stream in (1, 2):
        os.dup2(log_descriptor, standard_stream)
    code = train_in_child(resolved, log)
    if code == 0:
        measures = _read_measures(Path(resolved.config.run_dir))
        result = Result(key, 0, measures, _peak_memory_bytes())
        atomic_write(_result_file(out, key), json.dumps(asdict(result)).encode())
    sys.exit(code)


def _read_measures(folder: Path) -> dict[str, float]:
    """Read the final scores and the training time of a run."""
    run = TrainedRun(folder, 0, "finished")
    measures = {
        name: float(value) for name, value in run.metrics.items() if value is not None
    }
    for event in run.history:
        if event["event"] == "end":
            measures["training_seconds"] = float(event["training_seconds"])
    return measures


def _peak_memory_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak  # Linux reports KiB


def _result_file(out: Path, key: str) -> Path:
    return out / "results" / f"{key}.json"


def _read_result(out: Path, key: str) -> Result | None:
    """Read the result of a completed run. A failed run has no result, so that it is repeated."""
    try:
        return Result(**json.loads(_result_file(out, key).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def summarise(plan: AblationPlan, results: Mapping[str, Result]) -> dict[str, Any]:
    """Return the effects of all improvements, and the results of all runs, as JSON."""
    variants = plan.variants
    runs = [
        {"name": v.name, "seed": v.seed, **asdict(results[v.key])} for v in variants
    ]
    failed = {v.name for v in variants if results[v.key].code != 0}
    return {
        "toque": __version__,
        "seeds": sorted({v.seed for v in variants}),
        "effects": {
            improvement: _estimate_effects(improvement, plan, results)
            for improvement in plan.improvements
        },
        "left_out": dict(plan.left_out),
        "runs": runs,
        "failed": sorted(failed),
        "method": _METHOD,
    }


def _estimate_effects(
    improvement: str, plan: AblationPlan, results: Mapping[str, Result]
) -> dict[str, dict[str, dict[str, Any]]]:
    """Estimate the differences that an improvement makes, by comparison and metric."""
    comparisons = {
        "taken from all on": ("all on", f"all on, {improvement} off"),
        "added to all off": (f"all off, {improvement} on", "all off"),
    }
    effects = {}
    for comparison, (with_it, without_it) in comparisons.items():
        with_results = [results[key] for key in plan.keys(with_it)]
        without_results = [results[key] for key in plan.keys(without_it)]
        effects[comparison] = _estimate_differences(with_results, without_results)
    return effects


def _estimate_differences(
    with_results: Sequence[Result], without_results: Sequence[Result]
) -> dict[str, dict[str, Any]]:
    """Estimate the difference in each metric over pairs of runs with the same seed.

    A metric that no pair has is left out.
    """
    differences = {}
    for measure in (column.measure for column in COLUMNS):
        interval = paired_difference(
            [result.measure(measure) for result in with_results],
            [result.measure(measure) for result in without_results],
        )
        if interval is not None:
            differences[measure] = asdict(interval) | {"decided": interval.decided}
    return differences


def _effects_table(record: Mapping[str, Any]) -> Grid:
    """Return the table of differences, with a row per improvement and comparison."""
    headings = ("improvement", "how", *(column.heading for column in COLUMNS))
    rows = []
    for improvement, comparisons in record["effects"].items():
        for comparison, differences in comparisons.items():
            cells = [
                column.format_difference(differences.get(column.measure))
                for column in COLUMNS
            ]
            rows.append((improvement, comparison, *cells))
    return Grid(headings, rows, _METHOD)
