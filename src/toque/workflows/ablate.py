"""Ablation: what each improvement is worth, by runs with and without it, one process each.

Each improvement is taken away from a run that has all of them, and added to a run that has none,
with the same seeds: the difference of two runs of one seed is free of what the seed alone does to
both. The processes are forked by a server that has imported torch and computed nothing: starting a
run costs tenths of a second instead of several.
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
from toque.evaluation.bootstrap import paired
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
)  # measure, its heading, digits and unit
_QUIET: Final = ("observe.webhook=null", "observe.trackers=[]", "checkpoint.upload=null")
"""Overrides for what the runs of an ablation do without."""
_LOCK: Final = ".ablate.lock"  # it stays, so that an ablation's folder is recognised
_METHOD: Final = (
    "Differences are with the improvement minus without, over runs of the same seed: mean and 95 % "
    "interval of Student's t. * where the interval leaves zero out; of twenty such intervals one "
    "misses, so a single star among many is weak. Time is training alone; memory is the highest of "
    "the whole process."
)


class Improvement(NamedTuple):
    """Something that can be switched on and off by settings alone."""

    name: str
    setting: str  # a configuration that has a value there has its own
    on: tuple[str, ...]  # overrides for a configuration that does not have it
    off: tuple[str, ...] = ()  # overrides for one that does; without any, the setting becomes null
    only: str = ""  # if set, the one value of the setting that is on


_STAGES: Final = 'curriculum={stages: [{from: "0 %"}, {from: "33 %"}, {from: "67 %"}]}'
"""Stages of an ablation whose configuration has none; several improvements bound them."""
_DIFFICULTY: Final = [
    f"curriculum.stages.{n}.max_difficulty={most}" for n, most in enumerate(("easy", "medium"))
]
_QUALITY: Final = [f"curriculum.stages.{n}.min_quality=0.{5 + n}" for n in range(3)]
_WORDINGS: Final = [f"augmentation.{part}=0.3" for part in ("instructions", "paraphrase", "tips")]
_RESTARTS: Final = (
    "optim.schedule=cosine_restarts",
    # Three whole cycles, each twice as long as the one before: 1 + 2 + 4 sevenths.
    'optim.cycles={first: "14.2 %"}',
)
_NO_RESTARTS: Final = ("optim.schedule=cosine", "optim.cycles=null")
_SMOOTHING: Final = "optim.label_smoothing"

IMPROVEMENTS: Final = (
    Improvement("adapter", "adapter", ("adapter={kind: lora}",)),
    Improvement("label smoothing", _SMOOTHING, (f"{_SMOOTHING}=0.1",), (f"{_SMOOTHING}=0.0",)),
    Improvement("warm restarts", "optim.schedule", _RESTARTS, _NO_RESTARTS, "cosine_restarts"),
    Improvement("gradient noise", "optim.gradient_noise", ("optim.gradient_noise={}",)),
    Improvement("curriculum", "curriculum", (_STAGES, *_DIFFICULTY)),
    Improvement("rising quality", "curriculum", (_STAGES, *_QUALITY)),
    Improvement("prompt formats", "augmentation", ("augmentation.prompt_formats=true",)),
    Improvement("other wordings", "augmentation", (*_WORDINGS,)),
)
"""Packing is not listed: it does not change the arithmetic. Neither are the held-out loss and the
recipe scores: they are the yardstick."""


@dataclass(frozen=True)
class Variant:
    """One configuration of the ablation, for one seed."""

    name: str
    seed: int
    overrides: tuple[str, ...]
    key: str  # hash of all its settings but the run folder: equal variants are one run


@dataclass(frozen=True)
class AblationPlan:
    """Runs to be compared."""

    improvements: tuple[str, ...]
    left_out: Mapping[str, str]  # improvement -> why this configuration cannot have it
    variants: tuple[Variant, ...]

    @property
    def runs(self) -> dict[str, Variant]:
        """Every run once, by its key."""
        return {variant.key: variant for variant in self.variants}

    def of_store(self, fingerprint: str) -> AblationPlan:
        """The same runs on a store: on another one each is another run."""
        variants = (replace(v, key=f"{v.key}-{fingerprint[:12]}") for v in self.variants)
        return replace(self, variants=tuple(variants))

    def keys(self, name: str) -> list[str]:
        """Keys of the variant `name`, one a seed."""
        return [variant.key for variant in self.variants if variant.name == name]


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    key: str
    code: int
    measures: Mapping[str, float]
    peak_bytes: int
    said: str = ""  # the last words of a run that failed

    def measure(self, name: str) -> float | None:
        """One of `SHOWN`; None where it was not measured, or the run failed."""
        if self.code:
            return None
        return float(self.peak_bytes) if name == "peak_bytes" else self.measures.get(name)

    def __str__(self) -> str:
        """The outcome in a few words."""
        if self.code:
            return f"failed with exit code {self.code}: {self.said}"
        seconds = self.measures.get("training_seconds", 0.0)
        return f"held-out loss {self.measures['loss']:.4f}, {seconds:.1f} s"


@dataclass(frozen=True)
class Ablation:
    """Outcome of an ablation."""

    json: Path  # every number
    record: Mapping[str, Any]  # the content of `json`; `effects` by improvement, way and measure

    def __str__(self) -> str:
        """The table for people."""
        names = self.record["failed"]
        failed = [f"failed: {name} (its log is in the folder logs)" for name in names]
        where = f"{self.json} holds every number."
        return "\n".join([*aligned(_effects(self.record)), *failed, _METHOD, where])


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
        config: what `configure` takes.
        overrides: settings that hold in all runs, as "section.field=value".
        seeds: runs of each combination.
        steps: updates of each run; the configuration's length when None.
        out: folder of the runs and the results; runs that are done there, with the same settings on
            the same store, are not done again.
        trust_code: where `config` is a run's own config.yaml, import the metrics and callbacks it
            names.
        reporter: hears of each run.

    Raises:
        ConfigError: a configuration or a number that cannot be used.
        DataError: no store, and no sources to prepare one from.
        Interrupted: a run was stopped by a signal; the same call goes on.
    """
    out = named_path(out)
    _refuse_users_files(out)
    config = _named(config, overrides, out, trust_code=trust_code)
    if steps is not None and steps < 1:
        raise ConfigError(f"{argument('steps')} is {steps}. A run has at least one update.")
    words = [*overrides, *([] if steps is None else [f"train.stop_after={steps} steps"])]
    plan = plan_ablation(config, words, seeds=seeds)
    for name, why in plan.left_out.items():
        reporter.line(f"left out: {name}: {why}")
    if (settings := load_config(config, words).config).data.sources:
        prepare(settings)
    plan = plan.of_store(read_manifest(Path(settings.data.store)).fingerprint)
    results: dict[str, Result] = {}
    runs, found = plan.runs, out / "ablation.json"
    with _alone(out):
        for i, (key, variant) in enumerate(runs.items(), start=1):
            results[key] = _done(out, key) or _run(config, variant, out, trust_code=trust_code)
            reporter.line(f"{i}/{len(runs)}  seed {variant.seed}  {variant.name}: {results[key]}")
        record = summary(plan, results) | {"config": config, "overrides": list(words)}
        atomic_write(found, json.dumps(record, indent=1).encode())
    return Ablation(found, record)


def _refuse_users_files(out: Path) -> None:
    """Refuse a folder with files of the user's that an ablation would write over."""
    settings, results = out / "ablation.yaml", out / "ablation.json"
    users = [results] if results.exists() and not (out / _LOCK).exists() else []
    if settings.exists() and not settings.read_bytes().startswith(HEADER.encode()):
        users.append(settings)
    if users:
        raise ConfigError(
            f"{users[0]} is there already and no ablation wrote it. Name another folder with "
            f"{argument('out')}, or move the file away."
        )


def _named(config: Configured, overrides: Sequence[str], out: Path, *, trust_code: bool) -> str:
    """A file of the configuration, which each run changes; refuses code that nobody vouches for."""
    if isinstance(config, str | Path):
        settings, name = load_config(config, overrides).config, str(config)
    else:
        settings, name = configure(config), ""
    if not trust_code:
        refuse_foreign_code(settings.foreign_code)
    if name:
        return name
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "ablation.yaml", resolved_yaml(with_origins(settings)).encode())
    return str(out / "ablation.yaml")


def plan_ablation(config: str, overrides: Sequence[str], *, seeds: int) -> AblationPlan:
    """The runs for a file or a preset, or a ConfigError where no improvement fits it."""
    if seeds < 2:
        raise ConfigError(
            f"{argument('seeds')} is {seeds}, and a single pair of runs says nothing of how sure a "
            "difference is. Give at least 2; 5 is a good number."
        )
    common = [*overrides, *_QUIET]
    able, left_out = _able(config, common)
    if not able:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise ConfigError(f"None of the improvements fits {config}: {reasons}")
    first = load_config(config, common).config.seed
    variants = []
    for seed in range(first, first + seeds):
        for base, change in (("on", "off"), ("off", "on")):
            for changed in ("", *able):
                # A setting that several share is written once, before what each adds to it.
                words = dict.fromkeys(
                    word
                    for name, (on, off) in able.items()
                    for word in (on if (base == "on") != (name == changed) else off)
                )
                given = (*common, f"seed={seed}", *words)
                name = f"all {base}, {changed} {change}" if changed else f"all {base}"
                key = config_sha256(load_config(config, [*given, "run_dir=run"]).config)[:16]
                variants.append(Variant(name, seed, given, key))
    return AblationPlan(tuple(able), left_out, tuple(variants))


def _able(
    config: str, overrides: Sequence[str]
) -> tuple[dict[str, tuple[tuple[str, ...], tuple[str, ...]]], dict[str, str]]:
    """Improvements that fit, each with overrides for on and off; and why the others do not."""
    base = load_config(config, overrides).config
    able: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    left_out: dict[str, str] = {}
    its_own: dict[str, str] = {}
    for name, setting, on, off, only in IMPROVEMENTS:
        value = attrgetter(setting)(base)
        if value == only if only else value not in (None, 0.0):
            # Its value is what is switched; a value has one switch.
            first = its_own.setdefault(setting, name)
            if first == name:
                able[name] = (), off or (f"{setting}=null",)
            else:
                left_out[name] = (
                    f"the configuration has its own `{setting}`, which is switched as a whole: see "
                    f"{first}."
                )
            continue
        try:
            load_config(config, [*overrides, *on])
        except ConfigError as error:
            left_out[name] = str(error)
        else:
            able[name] = on, ()
    return able, left_out


def _alone(out: Path) -> AbstractContextManager[object]:
    """Hold the folder: two ablations in one would train each other's runs."""

    def refuse(holder: str) -> None:
        raise ConfigError(
            f"Another `toque ablate` ({holder}) writes into {out}. Wait for it, or name another "
            f"folder with {argument('out')}."
        )

    return file_lock(out / _LOCK, refuse)


def _run(config: str, variant: Variant, out: Path, *, trust_code: bool) -> Result:
    """Train in a process of its own, whose memory and failures are its own."""
    key = variant.key
    for name in ("runs", "logs", "results"):
        (out / name).mkdir(parents=True, exist_ok=True)
    log = out / "logs" / f"{key}.txt"
    words = [*variant.overrides, f"run_dir={out / 'runs' / key}"]
    resolved = load_config(config, words, trust_code=trust_code or None)
    processes = get_context("forkserver")
    processes.set_forkserver_preload(["toque.workflows.preloaded"])
    child = processes.Process(target=_train, args=(resolved, out, key, log, dict(os.environ)))
    child.start()
    with _told_to_stop(child) as told:
        try:
            child.join()
        except KeyboardInterrupt:  # the child has had the signal, too, and saves
            child.join()
            raise
    if told or child.exitcode == Interrupted.exit_code:
        raise Interrupted(
            f"A run of the ablation was stopped by a signal. The same command goes on; {out} holds "
            "what is done and saved."
        )
    if child.exitcode == 0 and (done := _done(out, key)) is not None:
        return done
    last = log.read_text(errors="replace").strip().splitlines()[-1:] if log.exists() else []
    return Result(key, child.exitcode or 1, {}, 0, "".join(last))


@contextmanager
def _told_to_stop(child: BaseProcess) -> Iterator[list[int]]:
    """Pass on to the child, which saves, what asks this process to stop; the signals so far."""
    told: list[int] = []
    # Whoever tells both of them sends the child two: a hangup is never taken for asking twice.
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    first = signal.SIGTERM if ignored else signal.SIGHUP

    def pass_on(number: int, _frame: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(child.pid or 0, number if told else first)
        told.append(number)

    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        asking = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, pass_on) for number in asking}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _train(
    resolved: Resolved, out: Path, key: str, log: Path, environment: Mapping[str, str]
) -> None:
    """Train, with output in `log`, and write the result of a run that did not fail."""
    from toque.workflows.train import train_in_child

    os.environ.update(environment)
    file = open_append(log)
    for standard in (1, 2):
        os.dup2(file, standard)
    code, run = train_in_child(resolved, log), Path(resolved.config.run_dir)
    if code == 0:
        done = TrainedRun(run, 0, "finished")
        measures = {name: float(value) for name, value in done.metrics.items() if value is not None}
        for event in done.history:
            if event["event"] == "end":
                measures["training_seconds"] = float(event["training_seconds"])
        kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = Result(key, 0, measures, kib * (1 if sys.platform == "darwin" else 1024))
        atomic_write(out / "results" / f"{key}.json", json.dumps(asdict(result)).encode())
    sys.exit(code)


def _done(out: Path, key: str) -> Result | None:
    """Result of a run that did not fail; failed runs are tried again."""
    try:
        return Result(**json.loads((out / "results" / f"{key}.json").read_text()))
    except (OSError, ValueError, TypeError):
        return None


def summary(plan: AblationPlan, results: Mapping[str, Result]) -> dict[str, Any]:
    """The differences with their intervals, and what they are made from, as JSON."""

    def values(name: str, measure: str) -> list[float | None]:
        return [results[key].measure(measure) for key in plan.keys(name)]

    effects: dict[str, dict[str, dict[str, Any]]] = {}
    for improvement in plan.improvements:
        pairs = {
            "taken from all on": ("all on", f"all on, {improvement} off"),
            "added to all off": (f"all off, {improvement} on", "all off"),
        }
        for way, (having, lacking) in pairs.items():
            found = {m: paired(values(having, m), values(lacking, m)) for m, *_ in SHOWN}
            effects.setdefault(improvement, {})[way] = {
                m: asdict(e) | {"decided": e.decided} for m, e in found.items() if e is not None
            }
    return {
        "toque": __version__,
        "seeds": sorted({v.seed for v in plan.variants}),
        "effects": effects,
        "left_out": dict(plan.left_out),
        "runs": [{"name": v.name, "seed": v.seed, **asdict(results[v.key])} for v in plan.variants],
        "failed": sorted({v.name for v in plan.variants if results[v.key].code != 0}),
        "method": _METHOD,
    }


def _effects(record: Mapping[str, Any]) -> Grid:
    def cell(found: Mapping[str, Any] | None, digits: int, unit: float) -> str:
        if found is None:
            return "-"
        text = f"{found['mean'] / unit:+.{digits}f}"
        if found["low"] is not None:
            text += f" ({found['low'] / unit:.{digits}f}..{found['high'] / unit:.{digits}f})"
        return text + ("*" if found["decided"] else " ")

    heads = ("improvement", "how", *(head for _, head, _, _ in SHOWN))
    rows = [
        (name, way, *(cell(found.get(m), digits, unit) for m, _, digits, unit in SHOWN))
        for name, ways in record["effects"].items()
        for way, found in ways.items()
    ]
    return Grid(heads, rows, _METHOD)
