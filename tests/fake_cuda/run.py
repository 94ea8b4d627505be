"""A Python whose torch has a card that is not there: a script, a module or code runs on it.

    tests/fake_cuda/python bench/speed/sweep.py --family neox --shape neox-1.2b
    tests/fake_cuda/python -m toque doctor

Processes that the script starts by `sys.executable` have the card, too. Kernels are not compiled.
$TOQUE_FAKE_CARD is its name and memory, as "NVIDIA H100 80GB HBM3, 80 GiB, 9.0" by default.
"""

from __future__ import annotations

import atexit
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
DEFAULT_CARD = "NVIDIA H100 80GB HBM3, 80 GiB, 9.0"
HEADROOM = 0.95
"""Share of a card's memory that large tensors can have of it; a process that held more ends with
exit code 1."""


def card_of(words: str) -> tuple[str, int, tuple[int, int]]:
    """Name, bytes and capability of a card.

    >>> card_of("NVIDIA A100, 40 GiB, 8.0")
    ('NVIDIA A100', 42949672960, (8, 0))
    """
    name, memory, capability = (word.strip() for word in words.split(","))
    major, _, minor = capability.partition(".")
    return name, int(memory.removesuffix("GiB")) << 30, (int(major), int(minor))


def _applied(module: Any, change: Callable[[Any], Any], _recurse: object = None) -> Any:
    """`Module._apply`, as of `to`: torch's own swaps contents, which fake tensors refuse."""
    import torch

    made: dict[int, Any] = {}
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is not None and id(old) not in made:
                    with torch.no_grad():
                        new = change(old)
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new
                held[name] = None if old is None else made[id(old)]
    return module


def _fits(card: Any, room: list[float]) -> None:
    if card.peak > room[0] * card.memory:
        most, there = (n / 2**30 for n in (card.peak, room[0] * card.memory))
        print(
            f"{most:.1f} GiB were held, and {there:.1f} fit",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def main() -> None:
    """Run what the command line names, as Python itself would."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    while words[0].startswith("-") and words[0] not in (
        "-",
        "-c",
        "-m",
    ):  # Python's own
        del words[: 2 if words[0] == "-X" else 1]
    sys.executable = str(HERE / "python")
    sys.path[0] = str(HERE.parent)
    from fake_cuda import hooks

    hooks.install()
    import torch

    from fake_cuda.card import fake_card

    room = [HEADROOM]

    def limit(share: float, *_: object) -> None:
        room[0] = share * HEADROOM

    name, memory, capability = card_of(os.environ.get("TOQUE_FAKE_CARD", DEFAULT_CARD))
    with (
        fake_card(name, memory=memory, capability=capability) as card,
        patch.object(torch.cuda, "max_memory_reserved", lambda *_: card.peak),
        patch.object(torch.cuda, "set_per_process_memory_fraction", limit),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda *_: 0, create=True),
        patch.object(torch.nn.Module, "compile", lambda *_, **__: None),
        patch.object(torch.nn.Module, "_apply", _applied),
    ):
        atexit.register(_fits, card, room)
        if words[0] == "-m":
            sys.argv = words[1:]
            sys.path.insert(0, "")
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] in ("-", "-c"):
            typed = words[0] == "-c"
            code = words[1] if typed else sys.stdin.read()
            sys.argv = [words[0], *words[1 + typed :]]
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})  # noqa: S102
        else:
            sys.argv = words
            sys.path.insert(0, str(Path(words[0]).resolve().parent))
            runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
