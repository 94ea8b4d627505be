"""Imports that runs in processes of their own share: made once, before the fork, without computing.

A program that was forked begins in a moment where one that imports torch and transformers itself
needs seconds.
"""

import importlib
from contextlib import suppress
from typing import Final

from toque.models.lora.quantised import silence_bitsandbytes

_NAMES: Final = (
    "toque.models.families",
    "toque.workflows.train",
    "transformers.models.auto.modeling_auto",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.t5.modeling_t5",
    "peft",  # imports bitsandbytes
)

silence_bitsandbytes()
for name in _NAMES:
    with suppress(ImportError):  # what is not installed, a run that needs it says itself
        importlib.import_module(name)
