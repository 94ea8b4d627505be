"""The guide's table of one to eight GPUs, each row a plan.

`pytest -m slow --regenerate tests/docs/test_several_gpus.py` writes it; the same test compares it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from toque.config import load_config
from toque.hardware.cards import card_named
from toque.workflows.plan.plan import plan

PRESET: Final = "neox-1.2b"
ROW_TOKENS: Final = 2048
GUIDE: Final = (
    (1, "rtx-4090", 16),
    (2, "rtx-4090", 32),
    (4, "a100", 128),
    (8, "h100", 128),
)
"""Number of GPUs, card, rows of an update."""
HEAD: Final = (
    "GPUs", "rows per update", "`train.batch`", "strategy", "rows x micro-batches", "GiB per GPU",
    "GB sent per GPU", "exchange, s", "update, s", "`optim.peak_lr`",
)  # fmt: skip
BEGIN: Final = (
    "<!-- Written by `pytest -m slow --regenerate tests/docs` from plans. -->\n"
)


def row(gpus: int, card: str, rows: int) -> str:
    """A line of the table."""
    batch = f"{rows * ROW_TOKENS} tokens"
    config = load_config(
        PRESET, overrides=[f"train.batch={batch}"], hardware=card
    ).config
    found = plan(config, hardware=card, gpus=gpus)
    memory, shared = found.memory, found.shared
    own = rows if shared is None else shared.rows
    exchange = None if shared is None else shared.exchange
    gib = 2.0**30
    fits = "" if memory.fits else ", does not fit"
    cells = (
        f"{gpus} x {card}", rows, f'"{batch}"', exchange.strategy if exchange else "single",
        f"{memory.micro_batch_rows} x {-(-own // memory.micro_batch_rows)}",
        f"{memory.total / gib:.1f} of {card_named(card).memory_bytes / gib:.1f}{fits}",
        f"{exchange.sent / 1e9:.1f}" if exchange else "–",
        f"{shared.seconds:.2f}" if shared and shared.seconds is not None else "–",
        f"{found.time.update_seconds:.1f}",
        f"{config.optim.peak_lr * (rows / GUIDE[0][2]) ** 0.5:.1e}",
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def written(path: Path) -> str:
    """The page at `path` with the table of today."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    after = rest[rest.index("\n\n") :]
    lines = [
        f"| {' | '.join(HEAD)} |",
        "|" + "---|" * len(HEAD),
        *(row(*of) for of in GUIDE),
    ]
    return f"{before}{BEGIN}" + "\n".join(lines) + after
