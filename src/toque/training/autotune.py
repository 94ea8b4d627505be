"""Autotuner: micro-batch, gradient checkpointing and torch.compile for the machine of a run."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from toque.config.schema import OptimConfig, TrainConfig
from toque.data.loader.batch_stream import (
    CPU_MICRO_BATCH_TOKENS,
    BatchStream,
    usual_rows,
)
from toque.errors import ConfigError
from toque.hardware.memory import (
    HEADROOM,
    describe_free_memory,
    free_bytes,
    in_words,
    is_out_of_memory,
    peak_bytes,
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
from toque.runs.estimate import even_rows, largest_rows
from toque.storage.atomic import atomic_write
from toque.storage.download import cache_folder
from toque.training.bottlenecks import memory_ladder
from toque.training.checkpoint.saved import Checkpoint
from toque.training.micro_batch import Probe, WorstBatch, shortest_time
from toque.training.optim.factory import gradient_and_state_bytes
from toque.training.optimisations import training_loss
from toque.training.resources import Resources, previous_resources
from toque.training.runtime import Runtime
from toque.units import Cursor
from toque.version import __version__


def _read_cache(key: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the choices from an earlier run with the same `key`, or None."""
    with contextlib.suppress(OSError, ValueError):
        stored = json.loads(_cache_file(key).read_text(encoding="utf-8"))
        if isinstance(stored, dict) and stored.get("of") == json.loads(json.dumps(key)):
            return dict(stored["found"])
    return None


def _write_cache(key: Mapping[str, Any], choices: Mapping[str, Any]) -> None:
    """Store choices. If the folder is not writable, the next identical run measures again."""
    text = json.dumps({"of": key, "found": choices}, indent=1) + "\n"
    file = _cache_file(key)
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(file, text.encode())


def _cache_file(key: Mapping[str, Any]) -> Path:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return cache_folder("measured") / f"{digest[:24]}.json"


@dataclass(frozen=True)
class Fitted:
    """Choices for a machine, to which the model has been adapted."""

    resources: Resources
    line: str  # description of the choices and their reasons
    warnings: tuple[str, ...] = ()
    update_seconds: float | None = None
    """Approximate seconds per update, or None if they were not measured."""


def fit_to_machine(
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    *,
    run: Path,
    train: TrainConfig,
    optim: OptimConfig,
    in_step: bool = False,
    checkpoint: Checkpoint | None = None,
    max_seconds: float = math.inf,
    reporter: Reporter = SILENT,
) -> Fitted:
    """Choose the settings that are `auto`, and prepare the model for them.

    Measurements use the largest possible batch. Choices of an earlier session, or else of an
    identical run on this machine, have precedence, so that repeated runs are bitwise identical.

    Args:
        model: Model, already on its device.
        stream: Training data.
        runtime: Device and ranks of the run.
        run: The run folder.
        train: Settings of the section `train`.
        optim: Settings of the section `optim`.
        in_step: Whether the weights are sharded, so that no rank can measure alone.
        checkpoint: Checkpoint from which the run continues.
        max_seconds: Seconds after which a measurement is not repeated.
        reporter: Receives notices about the choices.

    Raises:
        ConfigError: One row does not fit into memory.
    """
    tuner = _Tuner(model, stream, runtime, train, optim, reporter)
    ranks = runtime.ranks
    if not in_step and not ranks.is_main:
        # Rank 0 chooses. Each rank has its own record of the steps at which its memory ran out.
        chosen = Resources(**ranks.broadcast())
        previous, _ = previous_resources(
            run, checkpoint, chosen.machine, rank=ranks.rank
        )
        smaller_from = {} if previous is None else previous.smaller_from
        return tuner.apply(replace(chosen, smaller_from=smaller_from))

    key = tuner.cache_key()
    previous, notes = previous_resources(run, checkpoint, key, rank=ranks.rank)
    if previous is None and not in_step:
        previous = tuner.find_cached(key)
    if previous is not None:
        fitted = tuner.apply(previous)
    elif in_step:
        fitted = tuner.choose_unmeasured(key)
    else:
        fitted = tuner.choose(key)
    fitted.resources.save(run, rank=ranks.rank)

    seconds = None
    if not in_step:
        ranks.broadcast(asdict(replace(fitted.resources, smaller_from={})))
        seconds = tuner.measure_update(fitted.resources, max_seconds)
    return replace(fitted, warnings=(*notes, *fitted.warnings), update_seconds=seconds)


@dataclass
class _Tuner:
    """Measurements of one model on one machine, and the choices that follow from them."""

    model: PreTrainedModel
    stream: BatchStream
    runtime: Runtime
    train: TrainConfig
    optim: OptimConfig
    reporter: Reporter
    warnings: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_batch = self.stream.at(Cursor()).batch
        self.update_rows = self.first_batch.n_rows  # number of rows on this rank

        plan = self.stream.plan
        shape = self.stream.layout.shape
        longest_source = int(plan.source_lengths.max())
        longest_target = int(plan.target_lengths.max())
        row_source, row_target = shape.source, shape.target
        if not self.stream.layout.packed:
            row_source = longest_source if shape.source else 0
            row_target = longest_target
        vocab_size = output_head(self.model)[0].shape[0]
        self.worst = WorstBatch(
            row_source, row_target, longest_source, longest_target, vocab_size
        )
        self.row_tokens = row_source + row_target
        loss_fn = training_loss(
            self.train.optimisations, smoothing=self.optim.label_smoothing
        )
        self.probe = Probe(self.model, loss_fn, self.runtime, self.worst)

    def cache_key(self) -> dict[str, Any]:
        """Return the facts that determine the choices. Equal keys give equal choices."""
        shapes = [
            (n, list(p.shape), p.requires_grad)
            for n, p in self.model.named_parameters()
        ]
        architecture = repr((self.model.config.model_type, shapes))
        model = hashlib.sha256(architecture.encode()).hexdigest()
        device = self.runtime.device
        ranks = self.runtime.ranks
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        else:
            name = platform.processor() or platform.machine()

        key: dict[str, Any] = {
            "device": f"{device.type} {name}",
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
        if ranks.is_distributed:
            key["ranks"] = ranks.world_size
        return key

    def find_cached(self, key: dict[str, Any]) -> Resources | None:
        """Return the choices from an identical run on this machine, if they still fit in memory."""
        cached = _read_cache(key)
        if cached is None:
            return None
        resources = Resources(machine=key, **cached)
        self._set_recomputing(resources.gradient_checkpointing)
        rows = min(resources.micro_batch_rows, self.update_rows)
        limit = self._free_activation_bytes(rows)
        fits = self.probe.activation_bytes(rows, limit) is not None
        return resources if fits else None

    def apply(self, resources: Resources) -> Fitted:
        """Prepare the model for choices from an earlier session, an identical run or rank 0."""
        compiled = resources.compile and self._compile(resources.micro_batch_rows)
        self._set_recomputing(resources.gradient_checkpointing)
        if self.train.compile is True and not resources.compile:
            self.warnings.append(
                "not compiled, because it failed in an earlier session"
            )
        applied = replace(resources, compile=compiled)
        line = f"{_describe(applied)}, as before"
        return Fitted(applied, line, tuple(self.warnings))

    def choose_unmeasured(self, key: dict[str, Any]) -> Fitted:
        """Choose without measurements. `auto` is a fixed number of tokens per micro-batch, or off.

        The model is prepared for the choices.
        """
        rows = self.train.micro_batch_rows
        reason = "as set"
        if not isinstance(rows, int):
            rows = usual_rows(self.row_tokens)
            reason = "not measured"
        recompute = self.train.gradient_checkpointing is True
        compiled = self.train.compile is True
        if compiled:
            compile_blocks(self.model)
        self._set_recomputing(recompute)
        resources = Resources(rows, recompute, compiled, machine=key)
        return Fitted(resources, _describe(resources, f" ({reason})"))

    def choose(self, key: dict[str, Any]) -> Fitted:
        """Choose by measurements, prepare the model, and cache the choices for identical runs."""
        recompute, row_bytes = self._choose_recomputing()
        rows, reason = self._choose_rows(row_bytes)
        should_compile = self.train.compile
        if should_compile == "auto":
            should_compile = self.runtime.device.type == "cuda"
        compiled = should_compile and self._compile(rows)
        self._set_recomputing(recompute)

        resources = Resources(rows, recompute, compiled, machine=key)
        if not self.warnings:  # the cause of a warning, such as little memory, may pass
            _write_cache(key, resources.record())
        line = _describe(resources, f" ({reason})")
        return Fitted(resources, line, tuple(self.warnings))

    def measure_update(self, resources: Resources, max_seconds: float) -> float | None:
        """Measure a micro-batch and return the seconds per update. None if memory runs out."""
        rows = min([resources.micro_batch_rows, *resources.smaller_from.values()])
        micro_batch = self.first_batch.split(rows)[0]
        try:
            seconds = shortest_time(
                lambda: self.probe.seconds_of(micro_batch), most_seconds=max_seconds
            )
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if not is_out_of_memory(error):
                raise
            return None
        return seconds * self.update_rows / min(rows, self.update_rows)

    def _choose_recomputing(self) -> tuple[bool, int]:
        """Choose gradient checkpointing, and return it with the activation bytes per row.

        Raises:
            ConfigError: One row does not fit into memory.
        """
        setting = self.train.gradient_checkpointing
        recompute = setting is True
        self._set_recomputing(recompute)
        limit = self._free_activation_bytes(1)
        one_row = self.probe.activation_bytes(1, limit)
        if one_row is None and setting == "auto":
            recompute = True
            self._set_recomputing(True)
            one_row = self.probe.activation_bytes(1, limit)
            if one_row is not None:
                self.warnings.append(
                    "activations of one row do not fit into memory, so the backward pass "
                    "recomputes them (train.gradient_checkpointing): bitwise identical, about a "
                    "third slower"
                )
        if one_row is None:
            raise self._too_little_memory(limit, recompute=recompute)

        two_rows = None
        if self.update_rows > 1:
            two_rows = self.probe.activation_bytes(2, limit)
        if two_rows is None:
            return recompute, one_row
        # A batch also has activations that do not depend on the number of rows.
        return recompute, max(1, two_rows - one_row)

    def _too_little_memory(self, limit: int, *, recompute: bool) -> ConfigError:
        """Build the error for a row with more than `limit` bytes of activations."""
        sizes = {
            part: in_words(n_bytes) for part, n_bytes in self._fixed_bytes(1).items()
        }
        ways = memory_ladder(checkpointing=recompute, optimizer=self.optim.name)
        return ConfigError(
            f"One row of {self.row_tokens} tokens does not fit into the "
            f"{describe_free_memory(self.runtime.device)}, and a micro-batch has at least one "
            f"row. It needs: weights {sizes['weights']} (already allocated), gradients "
            f"{sizes['gradients']}, optimizer {sizes['optimizer']}, logits {sizes['logits']}, and "
            f"activations of more than {in_words(max(0, limit))}. Try {'; '.join(ways)}."
        )

    def _choose_rows(self, row_bytes: int) -> tuple[int, str]:
        """Choose the rows of a micro-batch, and return them with the reason."""
        setting = self.train.micro_batch_rows
        if isinstance(setting, int):
            return setting, "as set"
        if self.runtime.device.type == "cuda":
            return self._find_largest_rows(), "the most that fit"

        # The rows affect the order of sums and so the last bits, which must not depend on measured
        # times. Twice as many rows were 2 to 6 % faster, but took 0.5 to 1 GB (lab/notes.md).
        usual = usual_rows(self.row_tokens)
        limit = self._free_activation_bytes(min(usual, self.update_rows))
        max_rows = max(1, limit // max(1, row_bytes))
        rows = even_rows(self.update_rows, min(usual, max_rows))
        if usual <= max_rows:
            return rows, f"{CPU_MICRO_BATCH_TOKENS:,} tokens"
        return rows, "the most that fit"

    def _find_largest_rows(self) -> int:
        """Try micro-batches on the GPU, and return the largest number of rows that fits."""
        device = self.runtime.device
        # The first update allocates the optimizer's state. Until then, reserve its memory.
        state_bytes = self._fixed_bytes(1)["optimizer"]
        state = torch.empty(state_bytes, dtype=torch.uint8, device=device)
        with self.reporter.working("measuring how many rows fit into memory"):
            rows = largest_rows(
                lambda n: peak_bytes(lambda: self.probe.seconds(n), device),
                update_rows=self.update_rows,
                available_bytes=lambda: HEADROOM * free_bytes(device),
            )
        del state
        torch.cuda.empty_cache()
        return rows

    def _free_activation_bytes(self, rows: int) -> int:
        """Return the free bytes for the activations of a micro-batch. They may be negative."""
        fixed = self._fixed_bytes(rows)
        to_allocate = sum(fixed.values()) - fixed["weights"]
        return int(HEADROOM * free_bytes(self.runtime.device)) - to_allocate

    def _fixed_bytes(self, rows: int) -> dict[str, int]:
        """Return the bytes of an update except its activations, by part."""
        positions = rows * self.worst.target
        quantised = [
            b for _, layer in quantised_layers(self.model) for b in layer.buffers()
        ]
        return {
            "weights": sum(t.nbytes for t in (*self.model.parameters(), *quantised)),
            "logits": logits_bytes(
                self.worst.vocab_size, self.runtime.device.type, positions=positions
            ),
            **gradient_and_state_bytes(self.model, self.optim),
        }

    def _set_recomputing(self, on: bool) -> None:  # noqa: FBT001 - the name is the argument
        """Turn gradient checkpointing of the blocks on or off."""
        stop_recomputing(self.model)
        if on:
            recompute_blocks(self.model, offload=self.train.activation_offload)

    def _compile(self, rows: int) -> bool:
        """Compile the blocks and run the model. If this fails, warn and return False."""
        stop_recomputing(self.model)
        compile_blocks(self.model)
        try:
            with self.reporter.working("compiling the model with torch.compile"):
                self.probe.seconds(min(rows, self.update_rows))
        except (RuntimeError, OSError, ImportError) as error:
            if is_out_of_memory(error):
                raise
            stop_compiling(self.model)
            reason = (str(error).strip() or repr(error)).splitlines()[0]
            self.warnings.append(
                f"torch.compile failed, so the run is not compiled: {reason}"
            )
            return False
        return True


def _describe(resources: Resources, reason: str = "") -> str:
    rows = resources.micro_batch_rows
    text = f"{rows} row{'s' if rows > 1 else ''} per micro-batch"
    if resources.gradient_checkpointing:
        text += ", activations recomputed"
    return f"{text}{reason}; {'compiled' if resources.compile else 'not compiled'}"
