"""Health check of the container: a server must answer at /health; other commands need only run.

The command is read from process 1, so that one check is right for `toque train` and `toque serve`.
"""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path


def port_served(command: list[str]) -> int | None:
    """The port that a command listens on; None where it is not `serve`."""
    if "serve" not in command:
        return None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        if word == "--port":
            return int(following)
        if word.startswith("--port="):
            return int(word.removeprefix("--port="))
    return 8000


def main(process: Path = Path("/proc/1")) -> None:
    """Raise where the server does not answer, which ends the check with 1."""
    port = port_served((process / "cmdline").read_text(encoding="utf-8").split("\0"))
    if port is not None:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/health", timeout=8
        ) as answer:
            sys.stdout.write(f"{answer.status}\n")


if __name__ == "__main__":
    main()
