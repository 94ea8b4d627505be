"""Plan: memory, time and disk of a run, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toque.hardware.memory import in_words
from toque.models.flops import ParameterCounts
from toque.reporter import millions, size_text
from toque.runs.estimate import Disk, Machine, Memory, Time, Work
from toque.workflows.plan.several import SharedUpdate


@dataclass(frozen=True)
class Lever:
    """A change of settings, and what a run then takes."""

    settings: str  # settings as they are written on the command line
    total: int
    fits: bool
    update_seconds: float
    changes: str


@dataclass(frozen=True)
class Plan:
    """Memory, arithmetic, time, disk and traffic of a run that has not begun."""

    parameters: ParameterCounts
    machine: Machine
    work: Work
    memory: Memory
    time: Time
    disk: Disk
    levers: Sequence[Lever]
    shared: SharedUpdate | None = None  # None with one GPU

    @property
    def fits(self) -> bool:
        """True if the run fits into the machine's memory."""
        return self.memory.fits

    def record(self) -> dict[str, Any]:
        """The same as JSON: bytes, seconds and FLOPs."""
        time, memory, machine, updates = self.time, self.memory, self.machine, self._updates()
        return {
            "machine": {
                "name": machine.name,
                "device": machine.where,
                "precision": machine.precision,
                "memory_bytes": machine.memory_bytes,
                "source": machine.card.source if machine.card else None,
            },
            "parameters": asdict(self.parameters),
            "rows": asdict(self.work.row) | {"update": self.work.update_rows},
            "lengths": self.work.how,
            "memory": {
                "parts": dict(memory.parts),
                "tensors": memory.tensors,
                "beside": dict(memory.beside),
                "total": memory.total,
                "host": memory.host,
                "fits": memory.fits,
                "micro_batch_rows": memory.micro_batch_rows,
                "gradient_checkpointing": memory.recompute,
            },
            "flops": {
                "token": self.work.flops_per_token,
                "update": time.flops_per_update,
                "run": None if updates is None else updates * time.flops_per_update,
            },
            "time": asdict(time) | {"utilisation": time.utilisation},
            "totals": dict(self.work.totals),
            "disk": asdict(self.disk) | {"total": self.disk.total},
            "levers": [asdict(lever) for lever in self.levers],
            "shared": None if self.shared is None else self.shared.record(),
        }

    def _updates(self) -> float | None:
        if self.work.seconds is not None:
            return self.work.seconds / self.time.update_seconds
        return self.work.totals.get("steps")

    def __str__(self) -> str:
        blocks = [self._heading(), self._memory(), self._shared(), self._time(), self._disk()]
        blocks.append(self._changes())
        return "\n\n".join(block for block in blocks if block)

    def _heading(self) -> str:
        n, row = self.parameters, self.work.row
        rows = f"{row.source} + {row.target}" if row.source else f"{row.target}"
        trained = "" if n.trainable == n.total else f", {n.trainable / 1e6:,.2f} M of them trained"
        return (
            f"{millions(n.total)} parameters ({millions(n.non_embedding)} without embeddings)"
            f"{trained}; on {self.machine.name} in {self.machine.precision}\n"
            f"an update: {self.work.update_rows:,} rows of {rows} tokens, "
            f"{self.memory.micro_batch_rows} at once"
            f"{', activations recomputed' if self.memory.recompute else ''}; "
            f"{self.work.tokens_per_update:,.0f} tokens that are no padding\n"
            f"lengths: {self.work.how}"
        )

    def _memory(self) -> str:
        memory, total = self.memory, in_words(self.memory.total)
        parts = [(name, in_words(size)) for name, size in memory.parts.items() if size]
        parts.append(("tensors together", in_words(memory.tensors)))
        parts += [(f"{name}, on top", in_words(size)) for name, size in memory.beside.items()]
        verdict = "fits" if self.fits else "DOES NOT FIT"
        host = ""
        if memory.host is not None:
            by = "" if self.shared is None else " by each process"
            host = f"\nThe machine's own memory: {in_words(memory.host)} to read the model{by}."
        rows = _columns([*parts, ("all together", total)])
        of = "Memory" if self.shared is None else "Memory of each GPU"
        return f"{of}\n{rows}\n{total} of {in_words(memory.room)}: it {verdict}.{host}"

    def _shared(self) -> str:
        if self.shared is None:
            return ""
        lines = self.shared.lines(self.work.update_rows, self.memory.micro_batch_rows)
        e = self.shared.exchange
        return f"Shared by {e.ranks} GPUs, train.strategy={e.strategy}\n{_columns(lines)}"

    def _time(self) -> str:
        time, used, updates = self.time, self.time.utilisation, self._updates()
        lines = [
            ("an update", f"{time.flops_per_update:.3g} FLOP, {_seconds(time.update_seconds)}"),
            ("peak", f"{time.peak.flops_per_second / 1e12:,.2f} TFLOP/s, {time.peak.origin}"),
            ("of it used", f"not known: {time.peak.too_low}" if used is None else f"{used:.0%}"),
            ("by", time.how),
        ]
        if updates is None or time.run_seconds is None:
            million = 1e6 / self.work.tokens_per_update * time.update_seconds
            lines.append(("a million tokens", _seconds(million)))
            lines.append(("the run", "not known before its data is prepared: toque prepare"))
        else:
            whole = f"{updates:,.0f} updates, {updates * time.flops_per_update:.3g} FLOP, "
            whole += f"{_seconds(time.run_seconds)}, held-out losses among it, the texts at the end"
            lines.append(("the run", f"{whole} not"))
        return f"Time\n{_columns(lines)}"

    def _disk(self) -> str:
        disk = self.disk
        lines = [
            ("a checkpoint", size_text(disk.checkpoint)),
            ("checkpoints, at most", size_text(disk.kept)),
            ("the finished model", size_text(disk.model)),
        ]
        if disk.store:
            lines.append(("the store", size_text(disk.store)))
        if disk.uploaded:
            sent = f"{size_text(disk.uploaded)} in {disk.saves:,.0f} saves"
            lines.append(("to the bucket", sent))
        return f"Disk\n{_columns(lines)}"

    def _changes(self) -> str:
        if not self.levers:
            return ""
        head = "What would change it" if self.fits else "What to change so that it fits"
        lines = []
        for lever in self.levers:
            memory = in_words(lever.total) + ("" if lever.fits else ", does not fit")
            seconds = _seconds(lever.update_seconds)
            lines.append((lever.settings, f"{memory}; {seconds} an update; {lever.changes}"))
        return f"{head}\n{_columns(lines)}"


def _columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _seconds(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:,.0f} ms"
    if seconds < 120.0:
        return f"{seconds:,.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.1f} hours"
