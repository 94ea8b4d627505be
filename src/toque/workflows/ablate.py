"""Ablation runs, one process each, and the table of what each improvement is worth.

The processes are forked by a server that has imported torch and computed nothing: starting a run
costs tenths of a second instead of several.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from toque.config import Resolved, load_config, resolved_yaml
from toque.config.user_code import refuse_foreign_code
from toque.errors import ConfigError, Interrupted, argument
from toque.evaluation.bootstrap import paired
from toque.reporter import SILENT, Reporter
from toque.reports.page import Grid, Page, PageHead, Section, Sentence, aligned
from toque.runs.history import METRICS, read_metrics
from toque.storage.atomic import atomic_write
from toque.storage.locks import file_lock
from toque.storage.no_follow import open_append
from toque.units import Duration
from toque.version import __version__
from toque.workflows.ablation_plan import AblationPlan, Variant, plan_ablation
from toque.workflows.configure import Configured, configure, with_origins
from toque.workflows.prepare import prepare

SHARE_FOR_TRAINING: Final = 0.7
"""Share of a budget in minutes; the rest goes to starting, evaluating and writing. A guess."""
SHOWN: Final = (
    ("loss", "held-out loss", 4, 1.0),
    ("recipe_score", "recipe score", 3, 1.0),
    ("ingredient_coverage", "coverage", 3, 1.0),
    ("rougeL", "ROUGE-L", 3, 1.0),
    ("training_seconds", "seconds", 1, 1.0),
    ("peak_bytes", "peak MB", 0, 1e6),
)
"""Measure, its heading, digits and unit."""
_PRELOAD: Final = (
    "toque.workflows.train",
    "transformers.models.auto.modeling_auto",
    "transformers.models.t5.modeling_t5",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "peft",
)
"""Imported once for all runs; one that is not installed is passed over."""
_LOCK: Final = ".ablate.lock"
_EXAMPLE: Final = 'budget="90 minutes"'
_METHOD: Final = (
    "Differences are with the improvement minus without, over runs of the same seed: mean and 95 % "
    "interval of Student's t. * where the interval leaves zero out; of twenty such intervals one "
    "misses, so a single star among many is weak. Time is training alone; memory is the highest of "
    "the whole process."
)


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    key: str
    code: int
    measures: Mapping[str, float]
    peak_bytes: int
    said: str = ""
    """The last words of a run that failed."""


@dataclass(frozen=True)
class Ablation:
    """Outcome of an ablation."""

    json: Path
    """Every number."""
    page: Path
    """The same as an HTML page."""
    record: Mapping[str, Any]
    """The content of `json`; `effects` by improvement, way and measure."""

    def __str__(self) -> str:
        """The table for people."""
        failed = [
            f"failed: {name} (its log is in the folder logs)" for name in self.record["failed"]
        ]
        where = f"{self.json} holds every number, {self.page} is a page of it."
        return "\n".join([*aligned(_effects(self.record)), *failed, _METHOD, where])


def ablate(
    config: Configured,
    overrides: Sequence[str] = (),
    *,
    seeds: int = 5,
    steps: int | None = None,
    budget: str | None = None,
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
        budget: time for all runs together instead, e.g. "90 minutes".
        out: folder of the runs and the results; runs that are done there are not done again.
        trust_code: where `config` is a run's own config.yaml, import the metrics and callbacks it
            names.
        reporter: hears of each run.

    Raises:
        ConfigError: a configuration or a number that cannot be used.
        Interrupted: a run was stopped by a signal; the same call goes on.
    """
    out = Path(out)
    config = _named(config, overrides, out, trust_code=trust_code)
    words = [*overrides, *_length(config, overrides, seeds=seeds, steps=steps, budget=budget)]
    plan = plan_ablation(config, words, seeds=seeds)
    for name, why in plan.left_out.items():
        reporter.line(f"left out: {name}: {why}")
    if (settings := load_config(config, words).config).data.sources:
        prepare(settings)
    results: dict[str, Result] = {}
    runs = plan.runs
    with _alone(out):
        for i, (key, variant) in enumerate(runs.items(), start=1):
            results[key] = _done(out, key) or _run(config, variant, out, trust_code=trust_code)
            reporter.line(
                f"{i}/{len(runs)}  seed {variant.seed}  {variant.name}: {_in_words(results[key])}"
            )
        record = summary(plan, results) | {"config": config, "overrides": list(words)}
        found = Ablation(out / "ablation.json", out / "ablation.html", record)
        atomic_write(found.json, json.dumps(record, indent=1).encode())
        atomic_write(found.page, _page(plan, record, results).html().encode())
    return found


@contextmanager
def _alone(out: Path) -> Iterator[None]:
    """Hold the folder: two ablations in one would train each other's runs."""

    def refuse(holder: str) -> None:
        raise ConfigError(
            f"Another `toque ablate` ({holder}) writes into {out}. Wait for it, or name another "
            f"folder with {argument('out')}."
        )

    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(out / _LOCK, refuse))
        except OSError as error:
            raise ConfigError(
                f"{out} cannot hold an ablation: {error.strerror}. Name a folder that can be "
                f"written with {argument('out')}."
            ) from error
        yield


def summary(plan: AblationPlan, results: Mapping[str, Result]) -> dict[str, Any]:
    """The differences with their intervals, and what they are made from, as JSON."""

    def values(name: str, measure: str) -> list[float | None]:
        return [_measure(results[key], measure) for key in plan.keys(name)]

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


def _length(
    config: str, overrides: Sequence[str], *, seeds: int, steps: int | None, budget: str | None
) -> list[str]:
    if steps is not None and budget is not None:
        raise ConfigError(
            f"{argument('steps')} and {argument('budget')} both say how long runs are. Give one of "
            "them."
        )
    if steps is not None:
        if steps < 1:
            raise ConfigError(f"{argument('steps')} is {steps}. A run has at least one update.")
        return [f"train.stop_after={steps} steps"]
    if budget is None:
        return []
    whole = Duration.parse(budget)
    if whole.seconds is None or whole.amount <= 0:
        raise ConfigError(
            f"{argument('budget')} is {budget!r}. Give a time, such as {argument(_EXAMPLE)}."
        )
    runs = len(plan_ablation(config, overrides, seeds=seeds).runs)
    each = whole.in_minutes().amount * SHARE_FOR_TRAINING / runs
    return [f"train.stop_after={each:.4g} minutes"]


def _named(config: Configured, overrides: Sequence[str], out: Path, *, trust_code: bool) -> str:
    """A file of the configuration: each run reads it with changes of its own.

    Raises:
        ConfigError: it names code that nobody vouches for.
    """
    if isinstance(config, str | Path):
        if not trust_code:
            refuse_foreign_code(load_config(config, overrides).config.foreign_code)
        return str(config)
    settings = configure(config)
    if not trust_code:
        refuse_foreign_code(settings.foreign_code)
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "ablation.yaml", resolved_yaml(with_origins(settings)).encode())
    return str(out / "ablation.yaml")


def _run(config: str, variant: Variant, out: Path, *, trust_code: bool) -> Result:
    """Train in a process of its own, whose memory and failures are its own."""
    run, log = out / "runs" / variant.key, out / "logs" / f"{variant.key}.txt"
    for folder in (run.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    words = [*variant.overrides, f"run_dir={run}"]
    resolved = load_config(config, words, trust_code=trust_code or None)
    processes = get_context("forkserver")
    processes.set_forkserver_preload(list(_PRELOAD))
    hears, tells = processes.Pipe(duplex=False)
    child = processes.Process(target=_train, args=(resolved, log, dict(os.environ), tells))
    child.start()
    tells.close()
    try:
        child.join()
    except KeyboardInterrupt:  # the child has had the signal, too, and saves
        child.join()
        raise
    code = child.exitcode or 0
    peak = hears.recv() if hears.poll() else 0
    if code == Interrupted.exit_code:
        raise Interrupted(
            f"A run of the ablation was stopped by a signal and saved. The same command goes on; "
            f"{out} holds what is done."
        )
    if code:
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        return Result(variant.key, code, {}, peak, "".join(last))
    result = Result(variant.key, code, _measures(run), peak)
    (out / "results").mkdir(exist_ok=True)
    atomic_write(out / "results" / f"{variant.key}.json", json.dumps(asdict(result)).encode())
    return result


def _train(resolved: Resolved, log: Path, environment: dict[str, str], tells: Connection) -> None:
    """Train, with output in `log`; tell the most memory it held, in bytes."""
    from toque.workflows.train import train_in_child

    os.environ.update(environment)
    file = open_append(log)
    for standard in (1, 2):
        os.dup2(file, standard)
    code = train_in_child(resolved, log)
    kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    tells.send(kib * (1 if sys.platform == "darwin" else 1024))
    sys.exit(code)


def _done(out: Path, key: str) -> Result | None:
    """Result of an earlier `ablate`; failed runs are tried again."""
    try:
        record = json.loads((out / "results" / f"{key}.json").read_text())
        return Result(**record)
    except (OSError, ValueError, TypeError):
        return None


def _measures(run: Path) -> dict[str, float]:
    record = json.loads((run / "evaluation.json").read_text())
    ends = [e for e in read_metrics(run / METRICS) if e["event"] == "end"]
    found = {**record["heldout"], **record["generated"]}
    if ends:
        found["training_seconds"] = ends[-1]["training_seconds"]
    return {name: float(value) for name, value in found.items() if value is not None}


def _measure(result: Result, name: str) -> float | None:
    if result.code:
        return None
    return float(result.peak_bytes) if name == "peak_bytes" else result.measures.get(name)


def _in_words(result: Result) -> str:
    if result.code:
        return f"failed with exit code {result.code}: {result.said}"
    seconds = result.measures.get("training_seconds", 0.0)
    return f"held-out loss {result.measures['loss']:.4f}, {seconds:.1f} s"


def _effects(record: Mapping[str, Any]) -> Grid:
    heads = ("improvement", "how", *(head for _, head, _, _ in SHOWN))
    rows = [
        (name, way, *(_cell(found.get(m), digits, unit) for m, _, digits, unit in SHOWN))
        for name, ways in record["effects"].items()
        for way, found in ways.items()
    ]
    return Grid(heads, rows, _METHOD)


def _cell(found: Mapping[str, Any] | None, digits: int, unit: float) -> str:
    if found is None:
        return "-"
    text = f"{found['mean'] / unit:+.{digits}f}"
    if found["low"] is not None:
        text += f" ({found['low'] / unit:.{digits}f}..{found['high'] / unit:.{digits}f})"
    return text + ("*" if found["decided"] else " ")


def _page(plan: AblationPlan, record: Mapping[str, Any], results: Mapping[str, Result]) -> Page:
    runs = [(v.name, str(v.seed), _in_words(results[v.key])) for v in plan.variants]
    seeds = len(record["seeds"])
    count = f"{len(plan.improvements)} improvements, {seeds} seeds, {len(plan.runs)} runs."
    left_out = [Sentence(f"Left out: {name}. {why}", "warn")
                for name, why in plan.left_out.items()]  # fmt: skip
    sections = (
        Section("effects", "What each improvement changes", [_effects(record), *left_out]),
        Section("runs", "Runs", [Grid(("run", "seed", "result"), runs)]),
    )
    return Page(PageHead("Ablation", f"Ablation of {record['config']}", count), sections)
