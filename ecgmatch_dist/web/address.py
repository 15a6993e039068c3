"""Where a server listens."""

import errno
import ipaddress
import socket
from contextlib import suppress

from ecgmatch_dist.errors import UserError


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0: any that is free. An address that cannot be had is refused, with one that is free."""
    try:
        return _open(host, port)
    except (OSError, OverflowError) as error:
        reason = "no such port" if isinstance(error, OverflowError) else (error.strerror or str(error))
        taken = isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EACCES)
        remedy = (
            _free_port(host, port) if taken else "give another --host or --port"
        )  # a name may take seconds to ask for
        raise UserError(f"{host}:{port}: {reason.split(' (while')[0]}; {remedy}") from None


def refuse_a_taken_port(host: str, port: int) -> None:
    """For programs that open their socket themselves."""
    listen(host, port).close()


def url_of(bound: socket.socket) -> str:
    """The address for a browser on this machine."""
    host, port = bound.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _open(host: str, port: int) -> socket.socket:
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128)


def _free_port(host: str, port: int) -> str:
    for number in range(port + 1, min(port + 100, 65536)):
        with suppress(OSError), _open(host, number):
            return f"give --port {number}, which is free"
    return "give another --host or --port"
