"""A run's files, written by hand as training writes them."""

import json
from pathlib import Path
from typing import Any


class WrittenRun:
    """Appends events to the files of a run's folder."""

    def __init__(
        self, folder: Path, *, stop_after: str = "10 steps", begin: bool = True
    ) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics = folder / "metrics.jsonl"
        self.stop_after = stop_after
        if begin:
            self.start(0)

    def raw(self, text: str) -> None:
        with self.metrics.open("a", encoding="utf-8") as file:
            file.write(text)

    def event(self, event: str, **fields: Any) -> None:
        self.raw(json.dumps({"event": event, **fields}) + "\n")

    def start(self, step: int) -> None:
        self.event("start", step=step, epoch=0.0, stop_after=self.stop_after)

    def step(self, step: int, loss: float | None = None, **fields: Any) -> None:
        self.event(
            "step", step=step, epoch=step / 10, loss=10.0 / step if loss is None else loss,
            lr=1e-3, grad_norm=1.0, target_tokens=50, tokens=100, pad_fraction=0.1, seconds=2.0,
            tokens_per_second=50.0, data_wait_seconds=0.5, mfu=None, **fields,
        )  # fmt: skip

    def evaluation(self, step: int, loss: float, **metrics: float) -> None:
        self.event(
            "evaluation", step=step, epoch=0.1, metrics={"loss": loss, **metrics}
        )

    def save(self, step: int) -> None:
        self.event(
            "save", step=step, path="x", bytes=1, seconds=1.0, blocked_seconds=0.5
        )

    def end(self, step: int, reason: str = "finished") -> None:
        self.event("end", step=step, reason=reason, seconds=9.0)

    def system(self, step: int, **fields: Any) -> None:
        figures = {
            "seconds": 60.0, "cpu_percent": 75.0, "process_cpu_percent": 150.0,
            "memory_used_bytes": 4e9, "memory_total_bytes": 8e9, "process_resident_bytes": 2e9,
            "disk_read_bytes_per_second": 1e6, "disk_write_bytes_per_second": 2e6,
            "network_received_bytes_per_second": 0.0, "network_sent_bytes_per_second": 0.0,
            "gpus": [], **fields,
        }  # fmt: skip
        self.event("system", step=step, **figures)

    def text(self, step: int, prompt: str, text: str) -> None:
        line = {
            "step": step,
            "prompt": prompt,
            "text": text,
            "metrics": {"recipe_score": 0.5},
        }
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def lock(self, pid: int) -> None:
        (self.folder / "checkpoints").mkdir(exist_ok=True)
        (self.folder / "checkpoints" / ".lock").write_text(str(pid))
