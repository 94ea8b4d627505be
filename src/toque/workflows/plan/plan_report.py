"""Report of a plan: memory, time and disk space of a run, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from toque.hardware.memory import in_words
from toque.models.flops import ParameterCounts
from toque.reporter import millions, size_text
from toque.runs.estimate_parts import Disk, Machine, Memory, Time, Work
from toque.workflows.plan.multi_gpu import SharedUpdate


@dataclass(frozen=True)
class Lever:
    """Change to the settings, and the cost of a run with this change."""

    settings: str
    """Settings as written on the command line."""
    total: int
    """Total bytes of memory."""
    fits: bool
    update_seconds: float
    changes: str
    """Effect of the settings on the result."""


@dataclass(frozen=True)
class Plan:
    """Estimated memory, FLOPs, time, disk space and traffic of a run."""

    parameters: ParameterCounts
    machine: Machine
    work: Work
    memory: Memory
    time: Time
    disk: Disk
    levers: Sequence[Lever]
    shared: SharedUpdate | None = None
    """Traffic of several GPUs; None for one GPU."""

    @property
    def fits(self) -> bool:
        """True if the run fits into the memory."""
        return self.memory.fits

    def record(self) -> dict[str, Any]:
        """Return the plan as JSON, in bytes, seconds and FLOPs."""
        time, memory = self.time, self.memory
        machine = self.machine
        updates = self._count_updates()

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
            "pairs": self.work.pairs,
            "texts": None if self.work.texts is None else asdict(self.work.texts),
            "lengths": self.work.how,
            "memory": {
                "parts": dict(memory.parts),
                "tensors": memory.tensors,
                "beside": dict(memory.beside),
                "total": memory.total,
                "host": memory.host,
                "generation": self._generation_record(),
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

    def _generation_record(self) -> dict[str, Any] | None:
        """Return the memory while texts are generated, in bytes."""
        generation = self.memory.generation
        if generation is None:
            return None
        return asdict(generation) | {"total": generation.total}

    def _count_updates(self) -> float | None:
        """Return the number of updates, or None if it is unknown."""
        if self.work.seconds is not None:
            return self.work.seconds / self.time.update_seconds
        return self.work.totals.get("steps")

    def __str__(self) -> str:
        blocks = (
            self._heading(),
            self._memory(),
            self._shared(),
            self._time(),
            self._disk(),
            self._changes(),
        )
        return "\n\n".join(filter(None, blocks))

    def _heading(self) -> str:
        """Describe the model, the machine and the update."""
        counts, row = self.parameters, self.work.row
        parameters = (
            f"{millions(counts.total)} parameters ({millions(counts.non_embedding)} without "
            "embeddings)"
        )
        if counts.trainable != counts.total:
            parameters += f", {counts.trainable / 1e6:,.2f} M of them trained"
        shape = f"{row.source} + {row.target}" if row.source else f"{row.target}"
        micro_batch = f"{self.memory.micro_batch_rows} per micro-batch"
        if self.memory.recompute:
            micro_batch += ", activations recomputed"
        return (
            f"{parameters}; on {self.machine.name} in {self.machine.precision}\n"
            f"update: {self._examples()}{self.work.update_rows:,} rows of {shape} tokens, "
            f"{micro_batch}; {self.work.tokens_per_update:,.0f} tokens without padding\n"
            f"lengths: {self.work.how}{self._text_lengths()}"
        )

    def _examples(self) -> str:
        """Describe the pairs or the generated texts of an update."""
        work = self.work
        if work.pairs is not None:
            return f"{work.pairs:,.0f} pairs in "
        texts = work.texts
        if texts is None:
            return ""
        return (
            f"{texts.samples} texts for each of {texts.prompts:,} prompts are generated, and "
            f"{texts.n_learnt:,} are learned in about "
        )

    def _text_lengths(self) -> str:
        """Return a line about the lengths of generated texts, or "" without such texts."""
        texts = self.work.texts
        if texts is None:
            return ""
        return (
            f"\ntexts: at most {texts.max_tokens:,} tokens, and {texts.mean_tokens:,.0f} on "
            "average, an estimate: the length of the targets"
        )

    def _memory(self) -> str:
        """Format the memory by part, and whether it fits."""
        memory = self.memory
        total = in_words(memory.total)
        parts = [(name, in_words(size)) for name, size in memory.parts.items() if size]
        parts.append(("all tensors", in_words(memory.tensors)))
        parts += [
            (f"{name}, in addition", in_words(size))
            for name, size in memory.beside.items()
        ]
        verdict = "fits" if self.fits else "DOES NOT FIT"
        title, process = "Memory", ""
        if self.shared is not None:
            title, process = "Memory per GPU", " per process"
        host = ""
        if memory.host is not None:
            host = f"\nMain memory: {in_words(memory.host)}{process} to read the model."
        rows = _format_columns([*parts, ("total", total)])
        return (
            f"{title}\n{rows}\n{total} of {in_words(memory.room)}: it {verdict}.{host}"
            f"{self._generation_memory()}"
        )

    def _generation_memory(self) -> str:
        """Describe the memory for generating texts, or return "" without such texts."""
        generation = self.memory.generation
        if generation is None:
            return ""
        sizes = [f"{in_words(size)} {name}" for name, size in generation.parts.items()]
        return (
            f"\nBefore an update, {generation.rows:,} texts are generated at a time. They take "
            f"{in_words(generation.total)} in place of activations: {', '.join(sizes)}."
        )

    def _shared(self) -> str:
        """Format the traffic between several GPUs."""
        if self.shared is None:
            return ""
        lines = self.shared.lines(self.work.update_rows, self.memory.micro_batch_rows)
        exchange = self.shared.exchange
        title = f"Shared by {exchange.ranks} GPUs, train.strategy={exchange.strategy}"
        return f"{title}\n{_format_columns(lines)}"

    def _time(self) -> str:
        """Format the time of an update and of the run."""
        time = self.time
        utilisation = f"unknown: {time.peak.too_low_message}"
        if time.utilisation is not None:
            utilisation = f"{time.utilisation:.0%} of the peak"
        lines = [
            (
                "update",
                f"{time.flops_per_update:.3g} FLOP, {_format_seconds(time.update_seconds)}",
            ),
            (
                "peak",
                f"{time.peak.flops_per_second / 1e12:,.2f} TFLOP/s, {time.peak.origin}",
            ),
            ("utilisation", utilisation),
            ("method", time.how),
        ]
        lines += self._objective_lines()
        updates = self._count_updates()
        if updates is None or time.run_seconds is None:
            million = 1e6 / self.work.tokens_per_update * time.update_seconds
            lines.append(("million tokens", _format_seconds(million)))
            lines.append(("run", "unknown until the data is prepared: toque prepare"))
        else:
            text = (
                f"{updates:,.0f} updates, {updates * time.flops_per_update:.3g} FLOP, "
                f"{_format_seconds(time.run_seconds)} with held-out losses, without the final texts"
            )
            lines.append(("run", text))
        return f"Time\n{_format_columns(lines)}"

    def _objective_lines(self) -> list[tuple[str, str]]:
        """Describe the generation of texts, and the pass of the reference."""
        time, texts = self.time, self.work.texts
        lines = []
        if texts is not None:
            text = "included in the measured update"
            if time.generation_seconds:
                rate = texts.tokens / time.generation_seconds
                text = (
                    f"{_format_seconds(time.generation_seconds)} of an update, {rate:,.0f} tokens "
                    f"per second, {time.generation_how}; without the time of the rewards"
                )
            lines.append(("generation", text))
        if self.work.pairs is None:
            return lines
        text = "unknown until the data is prepared: toque prepare"
        if time.reference_seconds is not None:
            text = f"{_format_seconds(time.reference_seconds)} before training, an estimate"
            if not time.reference_seconds:
                text = "already stored in the run folder"
        return [("reference", text)]

    def _disk(self) -> str:
        """Format the disk space."""
        disk = self.disk
        lines = [
            ("checkpoint", size_text(disk.checkpoint)),
            ("all checkpoints, at most", size_text(disk.kept)),
            ("finished model", size_text(disk.model)),
        ]
        if disk.store:
            lines.append(("store", size_text(disk.store)))
        if disk.reference:
            lines.append(("reference", size_text(disk.reference)))
        if disk.uploaded:
            uploaded = f"{size_text(disk.uploaded)} in {disk.saves:,.0f} saves"
            lines.append(("uploads to the bucket", uploaded))
        return f"Disk\n{_format_columns(lines)}"

    def _changes(self) -> str:
        """Format the proposed changes to settings, with the cost of a run with each."""
        if not self.levers:
            return ""
        title = "Changes to consider" if self.fits else "Changes that may make it fit"
        lines = []
        for lever in self.levers:
            memory = in_words(lever.total)
            if not lever.fits:
                memory += ", does not fit"
            seconds = _format_seconds(lever.update_seconds)
            lines.append(
                (lever.settings, f"{memory}; {seconds} per update; {lever.changes}")
            )
        return f"{title}\n{_format_columns(lines)}"


def _format_columns(rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in rows)


def _format_seconds(seconds: float) -> str:
    if seconds < 1.0:
        return f"{seconds * 1e3:,.0f} ms"
    if seconds < 120.0:
        return f"{seconds:,.1f} s"
    if seconds < 7200.0:
        return f"{seconds / 60:,.0f} minutes"
    return f"{seconds / 3600:,.1f} hours"
