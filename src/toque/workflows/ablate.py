"""Ablation: the value of each improvement, from runs with and without it.

Each improvement is removed from a run that has all of them, and added to a run without any. Both
runs of a pair have the same seed, so that the seed does not contribute to their difference. Each
run has its own process, forked from a server that has already imported torch. So a run starts in
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
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, NamedTuple

from toque.config import Resolved, config_sha256, load_config, resolved_yaml
from toque.config.user_code import HEADER, refuse_foreign_code
from toque.data.store.store_manifest import read_manifest
from toque.errors import ConfigError, Interrupted, argument
from toque.evaluation.bootstrap import paired_difference
from toque.reporter import SILENT, Reporter
from toque.reports.page import Grid, aligned
from toque.storage.atomic import atomic_write
from toque.storage.locks import file_lock
from toque.storage.no_follow import open_append
from toque.user_paths import named_path
from toque.version import __version__
from toque.workflows.configure import Configured, configure, with_origins
from toque.workflows.prepare import prepare
from toque.workflows.results import TrainedRun

SHOWN: Final = (
    ("loss", "held-out loss", 4, 1.0),
    ("recipe_score", "recipe score", 3, 1.0),
    ("ingredient_coverage", "coverage", 3, 1.0),
    ("rougeL", "ROUGE-L", 3, 1.0),
    ("training_seconds", "seconds", 1, 1.0),
    ("peak_bytes", "peak MB", 0, 1e6),
)
"""Measure, heading, number of decimals and unit of each column."""
_QUIET: Final = (
    "observe.webhook=null",
    "observe.trackers=[]",
    "checkpoint.upload=null",
)
"""Overrides that switch off services in the runs of an ablation."""
_LOCK: Final = ".ablate.lock"
"""Lock file. It is never removed, because it also marks the folder of an ablation."""
_METHOD: Final = (
    "A difference is the value with the improvement minus the value without it, for runs of the "
    "same seed: the mean and the 95 % interval of Student's t. A star marks an interval without "
    "zero. One of twenty intervals misses by chance, so a single star among many is weak evidence. "
    "Seconds are those of training alone. Memory is the peak of the process."
)


class Improvement(NamedTuple):
    """An improvement that settings switch on and off."""

    name: str
    setting: str
    """Name of the setting that has a value if the improvement is on."""
    on: tuple[str, ...]
    """Overrides that switch it on."""
    off: tuple[str, ...] = ()
    """Overrides that switch it off; () to set the setting to null."""
    only: str = ""
    """The only value of the setting that counts as on; "" for any value."""


_STAGES: Final = 'curriculum={stages: [{from: "0 %"}, {from: "33 %"}, {from: "67 %"}]}'
"""Stages for a configuration without a curriculum. Several improvements set their limits."""
_DIFFICULTY: Final = [
    f"curriculum.stages.{n}.max_difficulty={level}"
    for n, level in enumerate(("easy", "medium"))
]
_QUALITY: Final = [f"curriculum.stages.{n}.min_quality=0.{5 + n}" for n in range(3)]
_WORDINGS: Final = [
    f"augmentation.{part}=0.3" for part in ("instructions", "paraphrase", "tips")
]
_RESTARTS: Final = (
    "optim.schedule=cosine_restarts",
    # Three complete cycles, each twice as long as the previous one: 1/7 + 2/7 + 4/7.
    'optim.cycles={first: "14.2 %"}',
)
_NO_RESTARTS: Final = ("optim.schedule=cosine", "optim.cycles=null")
_SMOOTHING: Final = "optim.label_smoothing"

IMPROVEMENTS: Final = (
    Improvement("adapter", "adapter", ("adapter={kind: lora}",)),
    Improvement(
        "label smoothing", _SMOOTHING, (f"{_SMOOTHING}=0.1",), (f"{_SMOOTHING}=0.0",)
    ),
    Improvement(
        "warm restarts", "optim.schedule", _RESTARTS, _NO_RESTARTS, "cosine_restarts"
    ),
    Improvement("gradient noise", "optim.gradient_noise", ("optim.gradient_noise={}",)),
    Improvement("curriculum", "curriculum", (_STAGES, *_DIFFICULTY)),
    Improvement("rising quality", "curriculum", (_STAGES, *_QUALITY)),
    Improvement(
        "prompt formats", "augmentation", ("augmentation.prompt_formats=true",)
    ),
    Improvement("other wordings", "augmentation", (*_WORDINGS,)),
)
"""Packing is missing because it does not change the arithmetic."""


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
    """Reason why each other improvement does not fit the configuration."""
    variants: tuple[Variant, ...]

    @property
    def runs(self) -> dict[str, Variant]:
        """Each run once, by its key."""
        return {variant.key: variant for variant in self.variants}

    def for_store(self, fingerprint: str) -> AblationPlan:
        """Return the plan with keys that depend on the store."""
        variants = (
            replace(v, key=f"{v.key}-{fingerprint[:12]}") for v in self.variants
        )
        return replace(self, variants=tuple(variants))

    def keys(self, name: str) -> list[str]:
        """Return the keys of the variant `name`, one per seed."""
        return [variant.key for variant in self.variants if variant.name == name]


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    key: str
    code: int
    measures: Mapping[str, float]
    peak_bytes: int
    said: str = ""
    """Last line of the log of a run that failed."""

    def measure(self, name: str) -> float | None:
        """Return a measure of `SHOWN`, or None if the run failed or did not measure it."""
        if self.code:
            return None
        return (
            float(self.peak_bytes) if name == "peak_bytes" else self.measures.get(name)
        )

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
    """File with all numbers."""
    record: Mapping[str, Any]
    """Content of `json`. `effects` has the differences by improvement, comparison and measure."""

    def __str__(self) -> str:
        """Return the table of differences."""
        table = aligned(_effects_table(self.record))
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
    """Measure what each improvement is worth on your data: on and off, over several seeds.

    Args:
        config: A configuration, as for `configure`.
        overrides: Settings of all runs, as "section.field=value".
        seeds: Number of runs per combination.
        steps: Updates per run. None: the length in the configuration.
        out: Folder of the runs and results. Completed runs in it are not repeated if their settings
            and their store are the same.
        trust_code: Import the metrics and callbacks that a run's config.yaml names.
        reporter: Receives the result of each run.

    Raises:
        ConfigError: The configuration or a number is not valid.
        DataError: The store does not exist, and the configuration has no sources for it.
        Interrupted: A signal stopped a run. Repeat the call to continue.
    """
    out = named_path(out)
    _refuse_users_files(out)
    config_file = _write_config(config, overrides, out, trust_code=trust_code)
    all_overrides = list(overrides)
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"{argument('steps')} is {steps}; it must be at least 1.")
        all_overrides.append(f"train.stop_after={steps} steps")
    plan = plan_ablation(config_file, all_overrides, seeds=seeds)
    for name, reason in plan.left_out.items():
        reporter.line(f"left out: {name}: {reason}")

    settings = load_config(config_file, all_overrides).config
    if settings.data.sources:
        prepare(settings)
    plan = plan.for_store(read_manifest(Path(settings.data.store)).fingerprint)
    runs = plan.runs
    results: dict[str, Result] = {}
    with _lock_folder(out):
        for i, (key, variant) in enumerate(runs.items(), start=1):
            result = _read_result(out, key)
            if result is None:
                result = _run(config_file, variant, out, trust_code=trust_code)
            results[key] = result
            reporter.line(
                f"{i}/{len(runs)}  seed {variant.seed}  {variant.name}: {result}"
            )
        record = summary(plan, results) | {
            "config": config_file,
            "overrides": all_overrides,
        }
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


def _write_config(
    config: Configured, overrides: Sequence[str], out: Path, *, trust_code: bool
) -> str:
    """Return the file or preset of a configuration. Write a file for any other configuration.

    Raises:
        ConfigError: The configuration names code that the user did not trust.
    """
    if isinstance(config, str | Path):
        settings = load_config(config, overrides).config
    else:
        settings = configure(config)
    if not trust_code:
        refuse_foreign_code(settings.foreign_code)
    if isinstance(config, str | Path):
        return str(config)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "ablation.yaml", resolved_yaml(with_origins(settings)).encode())
    return str(out / "ablation.yaml")


def plan_ablation(config: str, overrides: Sequence[str], *, seeds: int) -> AblationPlan:
    """Plan the runs for a file or a preset.

    Raises:
        ConfigError: There are too few seeds, or no improvement fits the configuration.
    """
    if seeds < 2:
        raise ConfigError(
            f"{argument('seeds')} must be at least 2, not {seeds}, because one pair of runs has no "
            "confidence interval. 5 is a good number."
        )
    common = [*overrides, *_QUIET]
    switches, left_out = _find_switches(config, common)
    if not switches:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise ConfigError(f"None of the improvements fits {config}: {reasons}")

    first = load_config(config, common).config.seed
    variants = []
    for seed in range(first, first + seeds):
        for base, change in (("on", "off"), ("off", "on")):
            for changed in ("", *switches):
                # Improvements may share an override, such as the stages. It comes only once.
                words = dict.fromkeys(
                    word
                    for name, (on, off) in switches.items()
                    for word in (on if (base == "on") != (name == changed) else off)
                )
                variant_overrides = (*common, f"seed={seed}", *words)
                name = f"all {base}, {changed} {change}" if changed else f"all {base}"
                settings = load_config(
                    config, [*variant_overrides, "run_dir=run"]
                ).config
                key = config_sha256(settings)[:16]
                variants.append(Variant(name, seed, variant_overrides, key))
    return AblationPlan(tuple(switches), left_out, tuple(variants))


class Switch(NamedTuple):
    """Overrides that switch an improvement on and off."""

    on: tuple[str, ...]
    off: tuple[str, ...]


def _find_switches(
    config: str, overrides: Sequence[str]
) -> tuple[dict[str, Switch], dict[str, str]]:
    """Return the switches of improvements that fit, and the reasons against the remaining ones."""
    base = load_config(config, overrides).config
    switches: dict[str, Switch] = {}
    left_out: dict[str, str] = {}
    switched_by: dict[str, str] = {}
    for name, setting, on, off, only in IMPROVEMENTS:
        value = attrgetter(setting)(base)
        is_on = value == only if only else value not in (None, 0.0)
        if is_on and setting in switched_by:
            left_out[name] = (
                f"the configuration already sets `{setting}`, which {switched_by[setting]} "
                "switches on and off."
            )
        elif is_on:
            switched_by[setting] = name
            switches[name] = Switch((), off or (f"{setting}=null",))
        else:
            try:
                load_config(config, [*overrides, *on])
            except ConfigError as error:
                left_out[name] = str(error)
            else:
                switches[name] = Switch(on, ())
    return switches, left_out


def _lock_folder(out: Path) -> AbstractContextManager[object]:
    """Lock the folder, because two ablations in it would train the same runs."""

    def refuse(holder: str) -> None:
        raise ConfigError(
            f"Another `toque ablate` ({holder}) writes into {out}. Wait until it ends, or name "
            f"another folder with {argument('out')}."
        )

    return file_lock(out / _LOCK, refuse)


def _run(config: str, variant: Variant, out: Path, *, trust_code: bool) -> Result:
    """Train in a child process, to measure its memory and to survive its failure."""
    key = variant.key
    for name in ("runs", "logs", "results"):
        (out / name).mkdir(parents=True, exist_ok=True)

    log = out / "logs" / f"{key}.txt"
    words = [*variant.overrides, f"run_dir={out / 'runs' / key}"]
    resolved = load_config(config, words, trust_code=trust_code or None)

    processes = get_context("forkserver")
    processes.set_forkserver_preload(["toque.workflows.training_child"])
    child = processes.Process(
        target=_train, args=(resolved, out, key, log, dict(os.environ))
    )
    child.start()

    with _forward_signals(child) as signals:
        try:
            child.join()
        except (
            KeyboardInterrupt
        ):  # the terminal sent the child the same signal, so it saves
            child.join()
            raise

    if signals or child.exitcode == Interrupted.exit_code:
        raise Interrupted(
            f"A signal stopped a run of the ablation. {out} has all completed runs and the last "
            "checkpoint. The same command continues."
        )

    if child.exitcode == 0 and (result := _read_result(out, key)) is not None:
        return result

    last_line = ""
    if log.exists() and (lines := log.read_text(errors="replace").strip().splitlines()):
        last_line = lines[-1]
    return Result(key, child.exitcode or 1, {}, 0, last_line)


@contextmanager
def _forward_signals(child: BaseProcess) -> Iterator[list[int]]:
    """Forward signals to stop to the child, which then saves. Yield the signals so far."""
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
    if threading.current_thread() is threading.main_thread():
        numbers = (
            (signal.SIGTERM,) if ignores_hangup else (signal.SIGTERM, signal.SIGHUP)
        )
        handlers = {number: signal.signal(number, forward) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _train(
    resolved: Resolved, out: Path, key: str, log: Path, environment: Mapping[str, str]
) -> None:
    """Train with output in `log`, and write the result if training succeeds."""
    from toque.workflows.training_child import train_in_child

    os.environ.update(environment)
    file = open_append(log)
    for standard_stream in (1, 2):
        os.dup2(file, standard_stream)
    code = train_in_child(resolved, log)
    if code == 0:
        run = TrainedRun(Path(resolved.config.run_dir), 0, "finished")
        measures = {
            name: float(value)
            for name, value in run.metrics.items()
            if value is not None
        }
        for event in run.history:
            if event["event"] == "end":
                measures["training_seconds"] = float(event["training_seconds"])
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        peak_bytes = peak if sys.platform == "darwin" else 1024 * peak
        result = Result(key, 0, measures, peak_bytes)
        atomic_write(
            out / "results" / f"{key}.json", json.dumps(asdict(result)).encode()
        )
    sys.exit(code)


def _read_result(out: Path, key: str) -> Result | None:
    """Read the result of a completed run. A failed run is repeated, so it leaves no result."""
    try:
        return Result(**json.loads((out / "results" / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def summary(plan: AblationPlan, results: Mapping[str, Result]) -> dict[str, Any]:
    """Return the differences with their intervals, and the results of all runs, as JSON."""

    def values(name: str, measure: str) -> list[float | None]:
        return [results[key].measure(measure) for key in plan.keys(name)]

    effects: dict[str, dict[str, dict[str, Any]]] = {}
    for improvement in plan.improvements:
        pairs = {
            "taken from all on": ("all on", f"all on, {improvement} off"),
            "added to all off": (f"all off, {improvement} on", "all off"),
        }
        effects[improvement] = {}
        for comparison, (with_it, without_it) in pairs.items():
            differences = effects[improvement][comparison] = {}
            for measure, *_ in SHOWN:
                estimate = paired_difference(
                    values(with_it, measure), values(without_it, measure)
                )
                if estimate is not None:
                    differences[measure] = asdict(estimate) | {
                        "decided": estimate.decided
                    }
    return {
        "toque": __version__,
        "seeds": sorted({v.seed for v in plan.variants}),
        "effects": effects,
        "left_out": dict(plan.left_out),
        "runs": [
            {"name": v.name, "seed": v.seed, **asdict(results[v.key])}
            for v in plan.variants
        ],
        "failed": sorted({v.name for v in plan.variants if results[v.key].code != 0}),
        "method": _METHOD,
    }


def _effects_table(record: Mapping[str, Any]) -> Grid:
    def format_cell(
        difference: Mapping[str, Any] | None, digits: int, unit: float
    ) -> str:
        if difference is None:
            return "-"
        text = f"{difference['mean'] / unit:+.{digits}f}"
        if difference["low"] is not None:
            low, high = difference["low"] / unit, difference["high"] / unit
            text += f" ({low:.{digits}f}..{high:.{digits}f})"
        return text + ("*" if difference["decided"] else " ")

    heads = ("improvement", "how", *(heading for _, heading, _, _ in SHOWN))
    rows = []
    for name, comparisons in record["effects"].items():
        for comparison, differences in comparisons.items():
            cells = [
                format_cell(differences.get(m), digits, unit)
                for m, _, digits, unit in SHOWN
            ]
            rows.append((name, comparison, *cells))
    return Grid(heads, rows, _METHOD)
