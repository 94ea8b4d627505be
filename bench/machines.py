"""Simulated machines: network namespaces with names of their own on a bridge, links limited.

Needs root, iproute2 and util-linux; nothing outside of the namespaces is touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import harness

NAMED_HOST = 'hostname "$0" && exec "$@"'
BURST_BYTES = 1 << 20
"""What a limited link lets through at once; a tenth of a second of 80 Mbit/s."""


@dataclass
class Machine:
    """A namespace with a name, and the command that runs there."""

    name: str
    namespace: str
    address: str
    process: subprocess.Popen[str] | None = None
    said: list[tuple[float, str]] = field(default_factory=list)
    """Lines of standard error, each with the time at which it came."""

    @property
    def inside(self) -> list[str]:
        """Words before a command that is to run there."""
        space = ["ip", "netns", "exec", self.namespace]
        return [*space, "unshare", "--uts", "sh", "-c", NAMED_HOST, self.name]

    def start(self, *words: str, work: Path, answer: int) -> None:
        """Run a module of Python there, with its arguments."""
        self.said = []
        self.process = subprocess.Popen(  # noqa: S603 - our own command
            [*self.inside, sys.executable, "-m", *words],
            cwd=work,
            env=os.environ
            | {"TOQUE_RANK_TIMEOUT": str(answer), "OMP_NUM_THREADS": "1"}
            | {"GLOO_SOCKET_IFNAME": "eth0"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process is not None
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append((time.monotonic(), line.rstrip()))

    @property
    def text(self) -> str:
        """All that it said."""
        return "\n".join(line for _, line in self.said)


def ip(*words: str) -> None:
    """An `ip` command."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)  # noqa: S603, S607


@contextlib.contextmanager
def network(count: int, *, gbit: float = 0.0) -> Iterator[tuple[str, list[Machine]]]:
    """Machines on a bridge; yields the namespace of the bridge, and them.

    Args:
        count: of machines.
        gbit: what each may send, in 10^9 bits a second; 0 for as much as the processor can.

    Raises:
        harness.Skipped: this machine lets nobody make namespaces.
    """
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        raise harness.Skipped("network namespaces need root, iproute2 and util-linux")
    tag = f"toque{os.getpid()}"
    switch = f"{tag}-switch"
    machines = [Machine(f"machine-{n}", f"{tag}-{n}", f"10.77.0.{n}") for n in range(1, count + 1)]
    made: list[str] = []
    try:
        for name in (switch, *(machine.namespace for machine in machines)):
            ip("netns", "add", name)
            made.append(name)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for machine in machines:
            port, space = f"port-{machine.name}", machine.namespace
            link = ("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("-n", switch, *link)
            ip("-n", switch, "link", "set", port, "master", "bridge", "up")
            ip("-n", space, "address", "add", f"{machine.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", space, "link", "set", device, "up")
            if gbit:
                _limit(space, gbit)
        yield switch, machines
    except subprocess.CalledProcessError as error:
        raise harness.Skipped(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
    finally:
        for machine in machines:
            if machine.process is not None and machine.process.poll() is None:
                machine.process.kill()
        for name in made:
            ip("netns", "delete", name)


def _limit(namespace: str, gbit: float) -> None:
    rate = ["rate", f"{gbit * 1e9:.0f}bit", "burst", str(BURST_BYTES), "latency", "100ms"]
    subprocess.run(  # noqa: S603
        ["tc", "-n", namespace, "qdisc", "add", "dev", "eth0", "root", "tbf", *rate],  # noqa: S607
        check=True, capture_output=True, text=True,
    )  # fmt: skip
