"""Own files of a run: the names that leave its folder for a bucket, and that come from one.

Whatever else lies in either place stays there: a key, a dump of memory, a page with a script. A
report is no figure and is made anew by `toque report`.
"""

from __future__ import annotations

import re
from typing import Final

_GROWING: Final = r"(metrics|samples|skipped_updates)\.jsonl|scores_by_text\.json|training\.log"
_SMALL: Final = r"config\.yaml|(end|evaluation|non_finite|resources(-rank\d+)?)\.json"
_OWN: Final = re.compile(rf"{_SMALL}|(?P<growing>{_GROWING})", re.ASCII)
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json")
_MODEL: Final = (
    *("README.md", "config.json", "generation_config.json", "model.safetensors"),
    *("adapter_config.json", "adapter_model.safetensors", "chat_template.jinja"),
    *(*_TOKENIZER, "special_tokens_map.json", "added_tokens.json", "toque/model.json"),
    *(f"toque/{name}" for name in _TOKENIZER),
)
MODEL_FILES: Final = tuple(f"model/{name}" for name in _MODEL)
"""Files of the finished model or adapter."""


def is_own(name: str) -> bool:
    """True if a file of this name in a run's folder is the run's."""
    return _OWN.fullmatch(name) is not None


def grows(name: str) -> bool:
    """True if a run's file has no bound but the disk's."""
    return bool((found := _OWN.fullmatch(name)) and found["growing"])
