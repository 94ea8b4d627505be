"""Fitting a run to its machine: micro-batch and gradient checkpointing, measured; torch.compile."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toque.config.schema import OptimConfig, TrainConfig
from toque.data.loader.batch_stream import CPU_MICRO_BATCH_TOKENS, BatchStream, usual_rows
from toque.errors import ConfigError
from toque.hardware.memory import (
    HEADROOM,
    free_bytes,
    free_in_words,
    in_words,
    is_out_of_memory,
    peak_of,
)
from toque.models.forward.blocks import (
    compile_blocks,
    recompute_blocks,
    stop_compiling,
    stop_recomputing,
)
from toque.models.forward.loss import logits_bytes
from toque.models.forward.packed import output_head
from toque.models.lora.quantised import quantised_layers
from toque.reporter import SILENT, Reporter
from toque.runs.estimate import evenly, largest_rows
from toque.storage.atomic import atomic_write
from toque.storage.download import cache_folder
from toque.training.bottlenecks import memory_ladder
from toque.training.checkpoint.saved import Checkpoint
from toque.training.micro_batch import Probe, WorstBatch, least_of
from toque.training.optim.factory import held_bytes
from toque.training.placement import training_loss
from toque.training.resources import Resources, earlier_choices
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.version import __version__


def _remembered(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The measurement of an equal `key` on this machine; the cache may vanish at any time."""
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(_cache_file(key).read_text(encoding="utf-8"))
        if isinstance(stored, dict) and stored.get("of") == json.loads(json.dumps(key)):
            return dict(stored["found"])
    return None


def _remember(key: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Keep a measurement; a folder that cannot be written costs another one next time."""
    text, file = json.dumps({"of": key, "found": found}, indent=1) + "\n", _cache_file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())


def _cache_file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("measured") / f"{digest[:24]}.json"


@dataclass(frozen=True)
class Fitted:
    """Choices for a machine, their reasons as a line, and sentences for the user."""

    resources: Resources
    line: str
    warnings: tuple[str, ...] = ()
    update_seconds: float | None = None
    """Seconds of one update, about; None where that was not measured."""


def fit_to_machine(
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    *,
    run: Path,
    train: TrainConfig,
    optim: OptimConfig,
    in_step: bool = False,
    found: Checkpoint | None = None,
    most_seconds: float = math.inf,
    reporter: Reporter = SILENT,
) -> Fitted:
    """Choose the settings that are `auto`, and prepare the model accordingly.

    The worst batch is tried before step 1. Choices of an earlier session of the run are kept, and
    those of an equal run on this machine too, so that equal runs have equal bits. The record of the
    checkpoint that is continued from, `found`, goes before resources.json. Ranks that hold parts of
    the weights compute `in_step`: none can measure. A measurement that took `most_seconds` is not
    repeated. A ConfigError where not even one row fits.
    """
    fit, ranks = _Fit(model, stream, runtime, train, optim, reporter), runtime.ranks
    if not in_step and not ranks.is_main:  # rank 0's choices; where memory ran out is each one's
        chosen = Resources(**ranks.broadcast())
        own, _ = earlier_choices(run, found, chosen.machine, rank=ranks.rank)
        smaller = chosen.smaller_from if own is None else own.smaller_from
        return fit.again(replace(chosen, smaller_from=smaller))
    key = fit.cache_key()
    known, notes = earlier_choices(run, found, key, rank=ranks.rank)
    if in_step:
        fitted = fit.again(known) if known is not None else fit.unmeasured(key)
        fitted.resources.save(run, rank=ranks.rank)
        return replace(fitted, warnings=(*notes, *fitted.warnings))
    if known is None and (equal := _remembered(key)) is not None:
        equal_run = Resources(machine=key, **equal)
        # The machine may have less free memory than it had then.
        known = equal_run if fit.has_room(equal_run) else None
    if known is not None:
        fitted = fit.again(known)
    else:
        fitted = fit.measured(key)
        if not fitted.warnings:  # warnings depend on the day
            _remember(key, fitted.resources.record())
    fitted.resources.save(run)
    ranks.broadcast(asdict(replace(fitted.resources, smaller_from={})))
    seconds = fit.update_seconds(fitted.resources, most_seconds)
    return replace(fitted, warnings=(*notes, *fitted.warnings), update_seconds=seconds)


class _Fit:
    def __init__(
        self,
        model: PreTrainedModel,
        stream: BatchStream,
        runtime: Runtime,
        train: TrainConfig,
        optim: OptimConfig,
        reporter: Reporter,
    ) -> None:
        self.model, self.stream, self.runtime = model, stream, runtime
        self.train, self.optim, self.reporter = train, optim, reporter
        batch = stream.at(Cursor()).batch  # packed once, and again by the loop from its memory
        self.first, self.update_rows = batch, batch.n_rows
        plan, shape = stream.plan, stream.layout.shape
        longest = int(plan.source_lengths.max()), int(plan.target_lengths.max())
        packed = stream.layout.packed
        self.worst = WorstBatch(
            source=shape.source if packed else longest[0] if shape.source else 0,
            target=shape.target if packed else longest[1],
            longest_source=longest[0],
            longest_target=longest[1],
            vocab_size=output_head(model)[0].shape[0],
        )
        self.row_tokens = self.worst.source + self.worst.target
        loss_fn = training_loss(self.train.optimisations, smoothing=optim.label_smoothing)
        self.probe = Probe(model, loss_fn, self.runtime, self.worst)
        self.warnings: list[str] = []

    def cache_key(self) -> dict[str, Any]:
        """Facts that the choices depend on: runs with equal keys get equal choices."""
        shapes = [(n, list(p.shape), p.requires_grad) for n, p in self.model.named_parameters()]
        model = hashlib.sha256(repr((self.model.config.model_type, shapes)).encode()).hexdigest()
        device, ranks = self.runtime.device, self.runtime.ranks
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        key: dict[str, Any] = {
            "device": f"{device.type} {name or platform.machine()}",
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
            "toque": __version__,
            "model": model[:16],
            "precision": self.runtime.precision,
            "deterministic": self.runtime.deterministic,
            "optimizer": self.optim.name,
            "row": [self.worst.source, self.worst.target],
            "longest": [self.worst.longest_source, self.worst.longest_target],
            "update_rows": self.update_rows,
            "gradient_checkpointing": self.train.gradient_checkpointing,
            "compile": self.train.compile,
            "optimisations": self.train.optimisations.model_dump(),
            "micro_batch_rows": self.train.micro_batch_rows,
        }
        if self.train.activation_offload:
            key["activation_offload"] = True
        return key | ({"ranks": ranks.world_size} if ranks.is_distributed else {})

    def again(self, known: Resources) -> Fitted:
        """Apply known choices."""
        compiled = known.compile and self._compile(known.micro_batch_rows)
        self._recompute(known.gradient_checkpointing)
        if self.train.compile is True and not known.compile:
            self.warnings.append("not compiled, as in this run's earlier sessions, where it failed")
        kept = replace(known, compile=compiled)
        return Fitted(kept, f"{self._words(kept)}, as before", tuple(self.warnings))

    def unmeasured(self, key: dict[str, Any]) -> Fitted:
        """The choices that are set; auto is the usual, without compiling or recomputing."""
        asked, recompute = self.train.micro_batch_rows, self.train.gradient_checkpointing is True
        usual = usual_rows(self.row_tokens)
        rows, why = (asked, "as set") if isinstance(asked, int) else (usual, "not measured")
        compiled = self.train.compile is True
        if compiled:
            compile_blocks(self.model)
        self._recompute(recompute)
        resources = Resources(rows, recompute, compiled, machine=key)
        return Fitted(resources, self._words(resources, f" ({why})"))

    def has_room(self, known: Resources) -> bool:
        """True if the micro-batch fits into memory now."""
        self._recompute(known.gradient_checkpointing)
        rows = self._at_once(known.micro_batch_rows)
        return self.probe.activation_bytes(rows, self._room(rows)) is not None

    def measured(self, key: dict[str, Any]) -> Fitted:
        """Measure and choose."""
        recompute, each = self._fitting()
        asked, device = self.train.micro_batch_rows, self.runtime.device
        if isinstance(asked, int):
            rows, why = asked, "as set"
        elif device.type == "cuda":
            # The first update allocates the optimizer's state; until then this takes its place.
            state = torch.empty(self._needs(1)["optimizer"], dtype=torch.uint8, device=device)
            with self.reporter.working("measuring how many rows at once fit into memory"):
                rows = largest_rows(
                    lambda n: peak_of(lambda: self.probe.seconds(n), device),
                    update_rows=self.update_rows,
                    room=lambda: HEADROOM * free_bytes(device),
                )
            why = "the most that fit"
            del state
            torch.cuda.empty_cache()
        else:
            # A rule, not a trial: rows decide the order of sums, so the clock would decide bits.
            # Twice as many were 2 to 6 % faster for 0.5 to 1 GB, half as many never (lab/notes.md).
            usual = usual_rows(self.row_tokens)
            most = max(1, self._room(self._at_once(usual)) // max(1, each))
            rows = evenly(self.update_rows, min(usual, most))
            why = f"{CPU_MICRO_BATCH_TOKENS:,} tokens" if usual <= most else "the most that fit"
        asked_compile = self.train.compile
        wanted = device.type == "cuda" if asked_compile == "auto" else asked_compile
        compiled = wanted and self._compile(rows)
        self._recompute(recompute)
        resources = Resources(rows, recompute, compiled, machine=key)
        return Fitted(resources, self._words(resources, f" ({why})"), tuple(self.warnings))

    def update_seconds(self, chosen: Resources, most_seconds: float) -> float | None:
        """Seconds of an update's micro-batches, by the run's first; None when memory runs out."""
        rows = min([chosen.micro_batch_rows, *chosen.smaller_from.values()])
        first = self.first.split(rows)[0]
        try:
            seconds = least_of(lambda: self.probe.seconds_of(first), most_seconds=most_seconds)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            return None
        return seconds * self.update_rows / min(rows, self.update_rows)

    def _at_once(self, rows: int) -> int:
        """Rows of the largest micro-batch there is: however many are allowed, an update has few."""
        return min(rows, self.update_rows)

    def _words(self, chosen: Resources, why: str = "") -> str:
        n, recompute = chosen.micro_batch_rows, chosen.gradient_checkpointing
        recomputed = ", activations recomputed" if recompute else ""
        compiled = "compiled" if chosen.compile else "not compiled"
        return f"{n} row{'s' * (n > 1)} at once{recomputed}{why}; {compiled}"

    def _fitting(self) -> tuple[bool, int]:
        """Recomputing or not, and bytes of one row's activations."""
        asked = self.train.gradient_checkpointing
        recompute = asked is True
        self._recompute(recompute)
        room = self._room(1)
        one = self.probe.activation_bytes(1, room)
        if one is None and asked == "auto":
            recompute = True
            self._recompute(True)
            one = self.probe.activation_bytes(1, room)
            if one is not None:
                self.warnings.append(
                    "activations of one row do not fit into memory, so they are computed again in "
                    "backward (train.gradient_checkpointing): the same bits, about a third slower"
                )
        if one is None:
            device, needs = self.runtime.device, self._needs(1)
            size = {name: in_words(n_bytes) for name, n_bytes in needs.items()}
            levers = memory_ladder(checkpointing=recompute, optimizer=self.optim.name)
            raise ConfigError(
                f"One row of {self.row_tokens} tokens does not fit into the "
                f"{free_in_words(device)}, and a micro-batch is at least one row. It takes: "
                f"weights {size['weights']} (there already), gradients {size['gradients']}, "
                f"optimizer {size['optimizer']}, logits {size['logits']}, and "
                f"activations of more than {in_words(max(0, room))}. Try {'; '.join(levers)}."
            )
        two = self.probe.activation_bytes(2, room) if self.update_rows > 1 else None
        return recompute, one if two is None else max(1, two - one)

    def _room(self, rows: int) -> int:
        """Bytes left for activations of so many rows beside the fixed parts; may be negative."""
        needs = self._needs(rows)
        fixed = sum(needs.values()) - needs["weights"]  # those lie on the device already
        return int(HEADROOM * free_bytes(self.runtime.device)) - fixed

    def _needs(self, rows: int) -> dict[str, int]:
        """Bytes of an update at so many rows by part, activations aside."""
        vocabulary, where = self.worst.vocab_size, self.runtime.device.type
        quantised = [b for _, layer in quantised_layers(self.model) for b in layer.buffers()]
        return {
            "weights": sum(t.nbytes for t in (*self.model.parameters(), *quantised)),
            "logits": logits_bytes(vocabulary, where, positions=rows * self.worst.target),
            **held_bytes(self.model, self.optim),
        }

    def _recompute(self, on: bool) -> None:  # noqa: FBT001 - the name is the argument
        stop_recomputing(self.model)
        if on:
            recompute_blocks(self.model, offload=self.train.activation_offload)

    def _compile(self, rows: int) -> bool:
        """Compile and try; False, with a warning, when that does not work."""
        stop_recomputing(self.model)
        compile_blocks(self.model)
        try:
            with self.reporter.working("compiling the model with torch.compile"):
                self.probe.seconds(self._at_once(rows))
        except (RuntimeError, OSError, ImportError) as error:
            if is_out_of_memory(error):
                raise
            stop_compiling(self.model)
            first = (str(error).strip() or repr(error)).splitlines()[0]
            self.warnings.append(f"torch.compile failed, so the run is not compiled: {first}")
            return False
        return True
