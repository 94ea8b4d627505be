"""Training in a forked child process.

The parent imports this module before it forks, so that its children share the imports. A child then
starts in tenths of a second. The imports of torch and transformers alone take seconds.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from toque.config import Resolved
from toque.errors import Interrupted, ToqueError
from toque.models.lora.quantised import silence_bitsandbytes
from toque.reporter import LogReporter
from toque.workflows.train import train

_PRELOADED: Final = (
    "toque.models.families",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "peft",  # imports bitsandbytes
)

silence_bitsandbytes()
for name in _PRELOADED:
    with suppress(ImportError):  # a run that needs an absent package reports it
        importlib.import_module(name)


def train_in_child(
    config: Resolved, log: Path, *, callbacks: Sequence[object] = ()
) -> int:
    """Train with messages in `log`. Return the exit code of `toque train`."""
    reporter = LogReporter(log)
    try:
        run = train(config, callbacks=callbacks, reporter=reporter)
    except ToqueError as error:
        reporter.notice(f"toque: {error}")
        return error.exit_code
    return Interrupted.exit_code if run.interrupted else 0
