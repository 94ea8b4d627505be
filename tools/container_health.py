"""Health of Toque's container: whether a server answers, and at build time whether torch fits.

    python container_health.py          exit code 0 when healthy; what HEALTHCHECK asks
    python container_health.py cpu      exit code 0 when torch is a CPU build; or cuda

A container that trains is healthy while it runs: its own exit code says how it ended.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

PORT = 8000
SECONDS = 5.0


def port_of(command: Sequence[str]) -> int | None:
    """The port of a command that serves; None for any other.

    >>> port_of(["python", "toque", "serve", "runs/mine", "--port", "9000"])
    9000
    """
    if "serve" not in command:
        return None
    for word, after in zip(command, [*command[1:], ""], strict=True):
        if word.startswith("--port="):
            return int(word.partition("=")[2])
        if word == "--port":
            return int(after)
    return PORT


def answers(port: int) -> bool:
    """Whether the server on this machine says that it is well."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def refusal(device: str) -> str | None:
    """Why the torch that pip took is not the one asked for; None when it is."""
    import torch

    found = "cpu" if torch.version.cuda is None else "cuda"
    if found == device:
        return None
    return (
        f"DEVICE is {device}, and pip took torch {torch.__version__}, a {found} build. Tell pip "
        "where the other is with --build-arg PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, or build with "
        f"--build-arg DEVICE={found}."
    )


def main(arguments: Sequence[str]) -> int:
    """The exit code."""
    if arguments:
        said = refusal(arguments[0])
        if said is not None:
            print(said, file=sys.stderr)
        return int(said is not None)
    command = Path("/proc/1/cmdline").read_bytes().decode(errors="replace").split("\0")
    port = port_of(command)
    return int(port is not None and not answers(port))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
