"""Words of the field lead to the file that does it, and CONTRIBUTING names files that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACKAGE = REPOSITORY / "src" / "toque"
WORDS = {
    "KV cache": "models/generation/kv_cache.py",
    "collate": "data/loader/collate.py",
    "atomic": "storage/atomic.py",
    "retry": "storage/retry.py",
    "gradient accumulation": "training/trainer.py",
    "activation checkpointing": "models/forward/activation_checkpointing.py",
    "checksum": "storage/checksums.py",
    "throughput": "training/observers/step_window.py",
    "out of memory": "training/autotune/oom_fallback.py",
    "prefetch": "data/loader/prefetch.py",
    "variable-length attention": "models/forward/varlen_attention.py",
    "cross-entropy": "models/forward/cross_entropy.py",
    "MinHash": "data/prepare/minhash.py",
    "all-reduce": "training/distributed/collectives.py",
    "resume": "training/checkpoint/resume.py",
}


@pytest.mark.parametrize("word", WORDS)
def test_the_module_docstring_says_the_word(word: str) -> None:
    text = (PACKAGE / WORDS[word]).read_text(encoding="utf-8")
    docstring = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
    assert word.lower() in docstring.lower()


def glossary() -> list[str]:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.findall(
        r"(?m)^\| ([^|`]+?) \|", text.partition("## Glossary")[2].partition("\n## ")[0]
    )


def test_the_glossary_has_forty_words_in_order() -> None:
    words = [word.lower() for word in glossary() if word not in ("word", "---")]
    assert len(words) >= 40
    assert words == sorted(words)


def test_contributing_names_files_that_exist() -> None:
    text = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = re.findall(r"`([a-z_0-9]+/[a-z_0-9/]+(?:/|\.py|\.md))`", text)
    assert len(named) > 30
    missing = [
        path for path in named if not any((base / path).exists() for base in (PACKAGE, REPOSITORY))
    ]
    assert missing == []
