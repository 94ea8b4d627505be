"""Meeting of machines: torch's c10d rendezvous, who came to it, and which place each has.

The first machine's launcher holds a key-value store at the address that all of them name. Through
it the launchers wait for each other (torch's `DynamicRendezvousHandler`: heartbeats, a machine
that comes back, a second round after a loss), and the ranks meet and tell of their ends: it
outlives any of them.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public all the same
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from toque.errors import ConfigError, RankLost, argument

PATIENCE_VARIABLE: Final = "TOQUE_NODES_TIMEOUT"
"""Environment variable: seconds that machines wait for each other, at the start and after a loss.
A machine of a cluster may need minutes to be given, hence ten of them when it is not set."""
PATIENCE_SECONDS: Final = 600
PORT: Final = 29400
"""Port of the store if the address names none; torch's own default."""
_CONNECT_SECONDS: Final = 60
"""One attempt to reach the first machine, as long as torch's; as many as fit into the patience."""
_RUN: Final = "toque"
"""One name for every run: machines whose commands differ are to meet, and be told what differs."""


@dataclass(frozen=True)
class Meeting:
    """One machine's knowledge of the others.

    Args:
        handler: torch's; brings the launchers together.
        store: shared by all of them, and by the ranks.
        host: name or address of the machine that holds the store, as all machines reach it.
        is_host: whether that is this one; its ranks come first, so rank 0 is here.
        nodes: how many machines there are to be.
        patience: seconds that they wait for each other.
    """

    handler: RendezvousHandler
    store: TCPStore
    host: str
    is_host: bool
    nodes: int
    patience: int
    name: str = field(default_factory=socket.gethostname)

    def come(self) -> None:
        """Say that this machine is waiting for the next round."""
        key = f"came/{self._round()}"
        self.store.set(f"{key}/{self.store.add(key, 1)}", self.name)

    def missing(self) -> RankLost:
        """The error of a round to which not all machines came."""
        key = f"came/{self._round()}"
        count = self.store.add(key, 0)
        came = {self.store.get(f"{key}/{n}").decode() for n in range(1, count + 1)}
        return RankLost(
            f"Of {self.nodes} machines {len(came)} came to {self.host}:{self.store.port} within "
            f"{self.patience} s ({PATIENCE_VARIABLE}): {', '.join(sorted(came))}. Nothing was "
            "computed without the others, and the last checkpoint stands. Type the same command "
            f"on every machine, with {argument('nodes')} the number of them, and see that each "
            "reaches that address: `nc -vz HOST PORT` tries it."
        )

    def place(self, round_store: Store, group_rank: int) -> tuple[int, int]:
        """This machine's place among those of a round, and how many rounds there were before.

        Torch sorts machines by address and process. Here the host of the store is the first and
        names decide about the others, so that ranks stay where they were after a restart.

        Args:
            round_store: of the round alone.
            group_rank: what torch says of this machine.
        """
        round_store.set(
            f"machine/{group_rank}", json.dumps([not self.is_host, self.name, group_rank])
        )
        keys = [f"machine/{n}" for n in range(self.nodes)]
        machines = sorted(json.loads(found) for found in round_store.multi_get(keys))
        order = [machine[-1] for machine in machines]
        if order[0] == group_rank:
            round_store.set("round", str(self.store.add("rounds", 1)))
        return order.index(group_rank), int(round_store.get("round")) - 1

    def _round(self) -> int:
        return self.store.add("rounds", 0)


def alone() -> Meeting:
    """The meeting of a single machine."""
    here = "localhost"
    return _met(here, 0, nodes=1, patience=_CONNECT_SECONDS, is_host=True, address=here)


def met(endpoint: str, *, nodes: int, patience: int) -> Meeting:
    """Meet at the store of the first machine, which is started where `endpoint` is this one.

    Args:
        endpoint: HOST or HOST:PORT of the first machine.
        nodes: how many machines there are to be.
        patience: seconds to try for.

    Raises:
        ConfigError: the address makes no sense, or another machine counts otherwise.
        RankLost: it cannot be reached.
    """
    host, port = address_of(endpoint)
    deadline = time.monotonic() + patience
    while True:
        try:
            is_host = is_here(host)
            address = host if is_host else _facing(host, port)
            meeting = _met(
                host, port, nodes=nodes, patience=patience, is_host=is_host, address=address
            )
            break
        except (OSError, RendezvousConnectionError) as error:
            if time.monotonic() > deadline:
                raise RankLost(
                    f"{socket.gethostname()} cannot reach {host}:{port}, where the machines of "
                    f"this run meet ({argument('rendezvous')}), since {patience} s: "
                    f"{_reason(error)}. Start the same command on {host} as well; a firewall must "
                    f"let port {port} through."
                ) from error
            time.sleep(1)
    said = meeting.store.compare_set("nodes", "", str(nodes)).decode()
    if said != str(nodes):
        raise ConfigError(
            f"{argument('nodes')} is {nodes} on {meeting.name}, and {said} on the machine that "
            f"came to {host}:{port} first. Type the same command on every machine."
        )
    return meeting


def address_of(endpoint: str) -> tuple[str, int]:
    """Host and port.

    >>> address_of("node-1:4000"), address_of("node-1")
    (('node-1', 4000), ('node-1', 29400))

    Raises:
        ConfigError: it is neither HOST nor HOST:PORT.
    """
    try:
        host, port = parse_rendezvous_endpoint(endpoint, default_port=PORT)
    except ValueError as error:
        raise ConfigError(
            f"{argument('rendezvous')} is {endpoint!r}, where HOST:PORT of the first machine "
            f"belongs, such as node-1:{PORT}: {error}"
        ) from error
    return host, port


def is_here(host: str) -> bool:
    """True if a name or address is this machine's, by the addresses of its network interfaces.

    Raises:
        OSError: the name is not known.
    """
    own = {address.address for part in psutil.net_if_addrs().values() for address in part}
    named = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return bool(named & own) or any(address.startswith("127.") for address in named)


def interface_to(host: str) -> str | None:
    """The network interface that leads to a machine; None where that cannot be told."""
    address = _facing(host, PORT)
    found = (
        name
        for name, parts in psutil.net_if_addrs().items()
        if any(part.address == address for part in parts)
    )
    return next(found, None)


def _met(
    host: str, port: int, *, nodes: int, patience: int, is_host: bool, address: str
) -> Meeting:
    def attempt(*, serves: bool) -> Meeting:
        parameters = RendezvousParameters(
            "c10d",
            f"[{host}]:{port}" if ":" in host else f"{host}:{port}",
            _RUN,
            nodes,
            nodes,
            local_addr=address,
            is_host=str(serves),
            read_timeout=_CONNECT_SECONDS,
            join_timeout=patience,
        )
        backend, store = create_backend(parameters)
        assert isinstance(store, TCPStore)
        # A machine that was cut off for a minute may need another until TCP sends again.
        store.set_timeout(timedelta(seconds=max(patience, _CONNECT_SECONDS)))
        handler = create_handler(store, backend, parameters)
        return Meeting(handler, store, host, is_host, nodes, patience)

    try:
        return attempt(serves=is_host)
    except RendezvousConnectionError:
        if not is_host:
            raise
        return attempt(serves=False)  # two launchers on one machine: the other one holds it


def _facing(host: str, port: int) -> str:
    """This machine's address on the way to another; nothing is sent."""
    kind, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(kind, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _reason(error: BaseException) -> str:
    cause = error.__cause__ or error
    return (str(cause).strip().splitlines() or [repr(cause)])[0].rstrip(".")


def patience_seconds() -> int:
    """Seconds that machines wait for each other.

    Raises:
        ConfigError: the environment does not give a number.
    """
    text = os.environ.get(PATIENCE_VARIABLE, str(PATIENCE_SECONDS))
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"{PATIENCE_VARIABLE} is {text!r} in the environment, where the seconds belong that "
            f"machines wait for each other. Unset it for {PATIENCE_SECONDS}."
        )
    return int(text)
