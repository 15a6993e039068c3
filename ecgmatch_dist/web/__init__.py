"""A small web server for pages that a command shows: on this machine alone unless told otherwise (docs/security.md).

address.py     a socket to listen on, or why there is none
guard.py       what every request passes: host, origin, size, time; what every answer carries
server.py      routes -> an application -> a server that Ctrl-C ends

Needs the extra `web`. A command calls `need_web()` first, then imports server.py.
"""

from importlib.util import find_spec

from ecgmatch_dist.errors import UserError


def need_web(command: str) -> None:
    """Refuse to go on without the libraries of the extra."""
    missing = [name for name in ("starlette", "uvicorn", "python_multipart") if find_spec(name) is None]
    if missing:
        raise UserError(f"{command}: {', '.join(missing)} not installed; pip install 'ecgmatch-dist[web]'")
