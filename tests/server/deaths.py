"""Kills one process of a server and checks its exit status, its last words, and that nothing is left behind.

Each kind of process is killed in a server that other tests have done with: see the last tests of ``test_limits``,
``test_nodes``, ``test_endless``, and ``test_deaths``, which also has those that need a server of their own.
"""

import re
import socket
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

from tests.server.conftest import Server, wait_until
from vllm_kvmerge.engine.processes import METRICS_PREFIX

KINDS = ("EngineCore", "Worker", "APIServer", "DPCoordinator", "resource_tracker")
LAST_WORDS = re.compile(r"^vllm-kvmerge: the server stopped: .*\b(died|exit code)\b", re.M)


class Tree:
    """A server's processes and what they hold outside themselves."""

    def __init__(self, pid: int) -> None:
        self.kinds: dict[str, list[psutil.Process]] = defaultdict(list)
        main = psutil.Process(pid)
        self.kinds["main"] = [main]
        self.folders = list(Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}{pid}-*"))
        for process in main.children(recursive=True):
            title = " ".join(process.cmdline())
            self.kinds[next((kind for kind in KINDS if kind in title), title)].append(process)
        self.processes = [process for processes in self.kinds.values() for process in processes]
        maps = "".join(Path(f"/proc/{process.pid}/maps").read_text() for process in self.processes)
        # What has no name any more goes with the last process.
        self.memory = set(re.findall(r"/dev/shm/\S+$(?<!deleted\))", maps, re.M))

    def remains(self) -> list[str]:
        """Processes, shared memory and folders that are still there."""
        alive = [str(one) for one in self.processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return alive + [str(path) for path in [*self.folders, *map(Path, self.memory)] if path.exists()]


class Asker(threading.Thread):
    """A client of a stream. seen: its lines, and the error that cut it off."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server, self.seen, self.begun = server, [], threading.Event()

    def run(self) -> None:
        body = {"model": "demo", "prompt": "recall", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body["kv_compression"] = {"policy": "keepkv", "budget": 128}
        try:
            with httpx.stream("POST", self.server.url + "/v1/completions", json=body, timeout=120) as response:
                for line in filter(None, response.iter_lines()):
                    self.seen.append(line)
                    self.begun.set()
        except httpx.HTTPError as error:
            self.seen.append(f"cut off: {error!r}")

    def check_told(self) -> None:
        """Checks that it has been told of the failure, by an event or by the end of the connection."""
        self.join(120)
        assert not self.is_alive()
        assert any('"error"' in line or line.startswith("cut off") for line in self.seen[-2:]), self.seen[-3:]


def ask_for_long(server: Server) -> Asker:
    """A request that is being answered, until the server dies."""
    asker = Asker(server)
    asker.start()
    assert asker.begun.wait(120)
    return asker


def log_of(server: Server) -> str:
    server.reader.join(60)
    return "".join(server.log)


def check_port(server: Server) -> None:
    """Checks that nobody listens there any more."""
    with socket.create_server(("127.0.0.1", httpx.URL(server.url).port)):
        pass


def kill(server: Server, kind: str, is_busy: bool = True) -> None:
    """Kills the first process of this kind, while it answers a request if it is busy, and checks what comes of it."""
    asker = ask_for_long(server) if is_busy else None
    tree = Tree(server.process.pid)
    assert tree.kinds[kind] and tree.memory and len(tree.folders) == 1, tree.kinds
    tree.kinds[kind][0].kill()
    status = server.process.wait(120)
    assert status == (-9 if kind == "main" else 1), log_of(server)[-3000:]
    wait_until(lambda: tree.remains() == [])
    check_port(server)
    said = LAST_WORDS.search(log_of(server))
    assert (said is None) == (kind == "main")
    if asker:
        asker.check_told()
