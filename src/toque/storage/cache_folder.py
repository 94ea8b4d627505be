"""The cache folder: $TOQUE_CACHE or ~/.cache/toque, the one root of all that may be made again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, Literal

CACHE_VARIABLE: Final = "TOQUE_CACHE"


def cache_folder(kind: Literal["sources", "measured", "runs"]) -> Path:
    """The folder of one kind of cached data.

    Args:
        kind: "sources" for files fetched from buckets, "measured" for measurements of this
            machine, "runs" for the working folders of runs whose `run_dir` is a bucket's address.
    """
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root).expanduser() if root else Path.home() / ".cache" / "toque") / kind
