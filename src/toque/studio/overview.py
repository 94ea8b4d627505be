"""Overview of a studio: its runs, models, files, queue and machine."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Final, final

import psutil

from toque.errors import ConfigError
from toque.hardware.processor import usable_cores
from toque.reporter import clock_text
from toque.reports.run_shares import dict_or_empty
from toque.reports.svg_charts import draw_spark
from toque.runs.history import RunHistory, number
from toque.runs.metric_names import MAIN_SCORES, REWARD, metric_named
from toque.runs.run_record import CONFIG, RunRecord
from toque.runs.run_state import state_of
from toque.serving.watch_app import Watcher
from toque.storage.atomic import TEMP_PREFIX
from toque.studio.jobs import Job
from toque.studio.records import record_of
from toque.studio.workplace import Workplace
from toque.units import Duration

_SOURCE: Final = re.compile(r"(?m)^  - path: (.+?)(?:  #.*)?$")
"""Line of a source in the configuration of a run. Untrusted YAML is not parsed."""
_MAX_SOURCES: Final = 3
_DATA_FILES: Final = (
    ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".txt", ".md", ".html", ".htm",
    ".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz", ".jsonl.zst", ".xml", ".zip", ".tar", ".tar.gz",
    ".tgz", ".paprikarecipes", ".paprikarecipe", ".cook", ".mmf", ".mm",
)  # fmt: skip
_OWN_FILES: Final = ("toque-schema.json", "feedback-both-bad.jsonl")
_MAX_FILES: Final = 200
_MODEL_FILES: Final = ("config.json", "adapter_config.json")


@final
class Overview:
    """Contents of a studio at a point in time.

    Args:
        workplace: Folder of the studio.
        runs: Reader of its runs.
    """

    def __init__(self, workplace: Workplace, runs: Watcher) -> None:
        self._workplace = workplace
        self._runs = runs
        self._contents: dict[str, tuple[RunRecord, int, dict[str, Any]]] = {}
        """Contents of the files of each run, with the record and version that have them."""

    def describe(self, jobs: Sequence[Job]) -> dict[str, Any]:
        """Describe everything that the start view shows."""
        records = self._runs.records()
        by_run = {job.run: job for job in jobs}
        cards = [
            self._describe_run(name, record, by_run.pop(name, None))
            for name, record in records.items()
            # A run that was just deleted is known until the next search.
            if (self._workplace.folder / name).is_dir()
        ]
        # A job that waits, or that failed before its run began, has no run folder yet.
        cards += [_describe_job(job) for job in by_run.values()]
        cards.sort(key=lambda card: -float(card["changed"] or 0.0))
        return {
            "folder": str(self._workplace.folder),
            "machine": self._describe_machine(),
            "runs": cards,
            "models": self.exported_models(),
        }

    def _describe_run(
        self, name: str, run: RunRecord, job: Job | None
    ) -> dict[str, Any]:
        """Describe a run for its card."""
        history = run.history
        state = state_of(run)
        kind: str = state.kind
        sentence = state.sentence
        if job is not None and kind not in ("running", "scoring"):
            kind, sentence = _job_state(job)
        return {
            "name": name,
            "state": kind,
            "sentence": sentence,
            "job": None if job is None else job.id,
            "done": history.done if kind == "running" else None,
            "seconds_left": history.seconds_left if kind == "running" else None,
            "form": _form_of(run),
            "changed": run.written_at,
            "folder_exists": True,
            **self._contents_of(name, run),
        }

    def _contents_of(self, name: str, run: RunRecord) -> dict[str, Any]:
        """Describe the files of a run, again only if they have changed. Each tab asks often."""
        version = run.version
        if name in self._contents:
            described_run, described_version, contents = self._contents[name]
            if described_run is run and described_version == version:
                return contents
        counts: Any = run.history.start.get("parameters") or {}
        contents = {
            "seconds": run.history.progress.seconds,
            "parameters": counts.get("total"),
            "score": _main_score(run),
            "sources": _sources_of(run.text(CONFIG)),
            "curve": _draw_curve(run),
            "is_finished": run.is_scored,
            "saved": run.history.saved,
            "remark": _remark_on_time(run.history),
        }
        self._contents[name] = (run, version, contents)
        return contents

    def _describe_machine(self) -> dict[str, Any]:
        memory = psutil.virtual_memory()
        return {
            "cores": len(usable_cores()),
            "gpus": _gpu_names(),
            "memory_bytes": memory.total,
            "free_memory_bytes": memory.available,
            "free_disk_bytes": self._workplace.free_bytes,
        }

    def exported_models(self) -> list[str]:
        """List the model folders of the studio, which are not part of a run."""
        folder = self._workplace.folder
        candidates = [*folder.glob("*/"), *folder.glob("exports/*/")]
        return sorted(
            self._workplace.name_of(path)
            for path in candidates
            if not path.name.startswith((".", TEMP_PREFIX)) and not path.is_symlink()
            if os.access(path, os.X_OK)  # unlike lost+found
            if any((path / name).is_file() for name in _MODEL_FILES)
        )

    def usable_models(self) -> list[str]:
        """List the runs with a checkpoint or model, and the model folders."""
        folder = self._workplace.folder
        runs = [
            name
            for name in self._runs.records()
            if (folder / name / "model").is_dir()
            or any((folder / name / "checkpoints").glob("step-*"))
        ]
        return [*runs, *self.exported_models()]

    def data_files(self) -> list[dict[str, Any]]:
        """List the data files of the folder, the newest first."""
        files = [
            path
            for path in self._workplace.folder.iterdir()
            if path.name.lower().endswith(_DATA_FILES)
            and path.name not in _OWN_FILES
            and not path.name.startswith(".")
            and path.is_file()
            and not path.is_symlink()
        ]
        states = [(path, path.stat()) for path in files]
        states.sort(key=lambda item: -item[1].st_mtime)
        return [
            {"name": path.name, "bytes": state.st_size}
            for path, state in states[:_MAX_FILES]
        ]


def _describe_job(job: Job) -> dict[str, Any]:
    """Describe a job without a run folder for its card."""
    kind, sentence = _job_state(job)
    return {
        "name": job.run,
        "state": kind,
        "sentence": sentence,
        "job": job.id,
        "sources": [],
        "curve": "",
        "changed": job.queued,
        "is_finished": False,
        "folder_exists": False,
    }


def _job_state(job: Job) -> tuple[str, str]:
    if job.state == "failed":
        return "failed", job.message
    if job.state == "waiting":
        return "queued", "Waits until the run before it has ended."
    return "preparing", "Prepares the data and the model. Training starts soon."


def _main_score(run: RunRecord) -> dict[str, Any] | None:
    """Return the newest value of the most informative score, with its title."""
    generated = run.evaluation().get("generated")
    scores = dict(generated) if isinstance(generated, dict) else {}
    if not scores and run.history.evaluations:
        scores = dict(run.history.evaluations[-1].metrics)
    for name in MAIN_SCORES:
        value = number(scores.get(name))
        if value is not None:
            return {
                "title": metric_named(name).title,
                "value": value,
                "is_share": True,
            }
    best = run.history.best
    if best is not None and run.history.measure != REWARD:
        return {"title": f"held-out {run.history.measure}", "value": best[0]}
    return None


def _remark_on_time(history: RunHistory) -> str:
    """Report that less than half of a run's time was left for training, or return ""."""
    length = str(dict_or_empty(history.start.get("train")).get("stop_after"))
    end = history.end or {}
    try:
        duration = Duration.parse(length)
    except ConfigError:
        return ""
    seconds = history.progress.seconds
    is_short = duration.total and seconds < (duration.seconds or 0.0) / 2
    if not is_short or end.get("reason") != "finished":
        return ""
    requested = replace(duration, total=False).in_words()
    return f"Only {clock_text(seconds)} of the {requested} were left for training. Train it longer."


def _draw_curve(run: RunRecord) -> str:
    """Draw the learning curve of a run without axes."""
    xs, ys = run.history.curves.points_of(f"{run.history.measure} smoothed")
    return draw_spark(xs, ys)


def _form_of(run: RunRecord) -> str:
    """Return the kind of the training data, or "" if it is not known yet."""
    folder = run.place.folder
    assert folder is not None, "the runs of a studio are in its folder"
    record = record_of(folder)
    return "" if record is None else record.form


@cache
def _gpu_names() -> list[str]:
    """Return the names of the GPUs of this machine."""
    import torch  # the studio has loaded it

    return [torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())]


def _sources_of(config: str) -> list[str]:
    """Return the names of the files that a run was trained on."""
    data = config.partition("\ndata:\n")[2].partition("\n  validation:")[0]
    paths = [path.strip("\"'") for path in _SOURCE.findall(data)]
    return [Path(path).name for path in paths[:_MAX_SOURCES]]
