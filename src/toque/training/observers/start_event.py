"""Start event of metrics.jsonl: versions, hardware, sizes and precision of a session."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import psutil
import torch
import transformers
from transformers import PreTrainedModel

from toque.data.loader.batch_stream import BatchStream
from toque.hardware.processor import usable_cores
from toque.models.flops import parameter_counts
from toque.models.precision import has_fast_bf16
from toque.training.autotune.resources import Resources
from toque.training.distributed.sharing import Sharing
from toque.training.placement import Arithmetic, attention_in, rate_of_bf16
from toque.training.runtime import Runtime
from toque.version import __version__


def start_event(
    model: PreTrainedModel,
    stream: BatchStream,
    runtime: Runtime,
    sharing: Sharing,
    resources: Resources,
    arithmetic: Arithmetic,
) -> dict[str, Any]:
    """The fields that describe what is computed, and where."""
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    counts = parameter_counts(model)
    return {
        "versions": {
            "toque": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": {
            "device": cuda or platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "cores": len(usable_cores()),
            "fast_bf16": has_fast_bf16(runtime.device),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "parameters": asdict(counts) | {"trainable_share": counts.trainable / counts.total},
        "row": asdict(stream.layout.shape),
        "arithmetic": arithmetic.record(),
        "precision": runtime.precision,
        "deterministic": runtime.deterministic,
        "attention": attention_in(model, runtime).name,
        "readers": stream.readers,
        "ranks": runtime.ranks.world_size,
        "strategy": sharing.strategy,
        **resources.record(),
        **rate_of_bf16(runtime, arithmetic),
    }
