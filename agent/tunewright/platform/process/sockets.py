"""Ports: which are free, and which process really listens on one. Read from /proc, so Linux only."""

import errno
import socket
from collections.abc import Iterable
from pathlib import Path

from tunewright.platform.process import environ
from tunewright.ports import PortError

PORT_VARIABLE = "TUNEWRIGHT_PORT"
"""In a server's environment: its port is taken from the launch on, long before vLLM binds it."""

RANGE = 400
"""How many ports from the first are tried."""

_LISTEN = "0A"


def free_port(first: int) -> int:
    """The first port from `first` upwards that nobody listens on and that no server was launched for.

    Raises `PortError` when all of the range are taken.
    """
    promised = {int(port) for port in environ.values(PORT_VARIABLE) if port.isdigit()}
    last = min(first + RANGE, 65536)
    for port in range(first, last):
        if port not in promised and is_free(port):
            return port
    raise PortError(f"no port from {first} to {last - 1} is free; end what listens there, or choose another firstPort")


def is_free(port: int) -> bool:
    """Whether a server could listen on it now, on every address."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # no IPv6 here
            continue
        with probe:
            # As servers do: connections that linger after a close do not count, a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
                probe.listen(1)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL:  # IPv6 is switched off
                    continue
                return False
    return True


def is_here(host: str) -> bool:
    """Whether a server could listen at `host`, a name or an address, on some port."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(address)
        except OSError:  # as ::1, where IPv6 is switched off
            continue
        return True
    return False


def listening_sockets(port: int) -> set[int]:
    """Inodes of all sockets that listen on `port`, on any address. Raises `PortError` without /proc."""
    found = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/net/{table}").read_text().splitlines()[1:]
        except OSError as error:
            if table == "tcp6":
                continue
            raise PortError(f"can't read /proc/net/tcp: {error}; Tunewright's processes need Linux") from error
        for line in lines:
            fields = line.split()
            if fields[3] == _LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(int(fields[9]))
    return found


def held_by(pids: Iterable[int]) -> set[int]:
    """Inodes of the sockets that these processes have open."""
    found = set()
    for pid in pids:
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:  # ended meanwhile, or another user's
            continue
        for descriptor in descriptors:
            try:
                target = str(descriptor.readlink())
            except OSError:
                continue
            if target.startswith("socket:["):
                found.add(int(target[8:-1]))
    return found
