"""``vllm-kvmerge health``: checks the health of this user's servers on this machine, wherever they listen."""

import atexit
import http.client
import json
import os
import ssl
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from vllm_kvmerge.cli.common import CommandParser

DEFAULT_HOST = "127.0.0.1"


def run(argv: list[str]) -> int:
    """Prints which servers are healthy. Returns 0 if there is one, and all are; 1 otherwise, with a line on stderr."""
    parser = CommandParser(prog="vllm-kvmerge health")
    parser.add_argument("--timeout", type=float, default=4, help="seconds that a server has to answer; 4 by default")
    timeout = parser.parse_args(argv).timeout
    found = _servers()
    ill = [f"{host}:{port}" for host, port, is_tls in found if not is_healthy(host, port, is_tls, timeout)]
    if well := [address for host, port, _ in found if (address := f"{host}:{port}") not in ill]:
        print(f"healthy: {', '.join(well)}")
    if ill or not found:
        print("vllm-kvmerge health:", f"no answer from {', '.join(ill)}" if ill else "no server", file=sys.stderr)
    return int(bool(ill) or not found)


def announce(host: str | None, port: int, *, is_tls: bool) -> None:
    """Lets ``vllm-kvmerge health`` find this process's server, until the process ends."""
    own = os.getpid()
    path = _path(own)
    path.unlink(missing_ok=True)  # of an earlier process with this id, as all first processes of containers have
    # Created, not opened: the folder is everyone's, and whoever else put a file there does not decide what is read.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump([reachable(host), port, is_tls], file)
    atexit.register(lambda: path.unlink(missing_ok=True) if os.getpid() == own else None)  # forks are not it


def reachable(host: str | None) -> str:
    """An address at which this machine reaches a server that listens on ``host``."""
    return host if host not in (None, "", "0.0.0.0", "::") else DEFAULT_HOST


def is_healthy(host: str, port: int, is_tls: bool, timeout: float = 2) -> bool:
    connect: Callable[..., http.client.HTTPConnection] = http.client.HTTPConnection
    if is_tls:
        # The certificate is not checked: it may be for another name.
        connect = partial(http.client.HTTPSConnection, context=ssl._create_unverified_context())
    with closing(connect(host, port, timeout=timeout)) as connection, suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def _path(process: int | str) -> Path:
    return Path(tempfile.gettempdir(), f"vllm-kvmerge-server-{process}.json")


def _servers() -> list[tuple[str, int, bool]]:
    """Host, port, and whether it speaks TLS, of each server of this user whose process is there."""
    found = []
    for path in _path("*").parent.glob(_path("*").name):
        process = path.stem.rsplit("-", 1)[1]
        with suppress(FileNotFoundError, ValueError):  # just gone, or not yet written
            if path.lstat().st_uid == os.getuid() and Path("/proc", process).exists():
                found.append(tuple(json.loads(path.read_text())))
    return found
