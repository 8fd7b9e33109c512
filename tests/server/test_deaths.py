"""A server of which one process is killed: its exit status, its last words, and nothing left behind."""

import re
import socket
import tempfile
import threading
from collections import defaultdict
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.conftest import Server, free_port, running, serving, wait_until
from vllm_kvmerge.engine.processes import METRICS_PREFIX

KINDS = ("EngineCore", "Worker", "APIServer", "DPCoordinator", "resource_tracker")
SEVERAL = ("--data-parallel-size", "2", "--api-server-count", "2")
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
        self.memory = set(re.findall(r"/dev/shm/psm_\w+", maps))

    def remains(self) -> list[str]:
        """Processes, shared memory and folders that are still there."""
        alive = [str(one) for one in self.processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        return alive + [str(path) for path in [*self.folders, *map(Path, self.memory)] if path.exists()]


def ask_for_long(server: Server) -> threading.Thread:
    """A request that is being answered, until the server dies."""
    begun = threading.Event()

    def stream() -> None:
        body = {"model": "demo", "prompt": "recall", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        body["kv_compression"] = {"policy": "keepkv", "budget": 128}
        try:
            with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=120) as response:
                for _ in response.iter_lines():
                    begun.set()
        except httpx.HTTPError:
            pass

    thread = threading.Thread(target=stream)
    thread.start()
    assert begun.wait(120)
    return thread


def log_of(server: Server) -> str:
    server.reader.join(60)
    return "".join(server.log)


def kill(server: Server, kind: str) -> None:
    """Kills the first process of this kind and checks what comes of it."""
    tree = Tree(server.process.pid)
    assert tree.kinds[kind] and tree.memory and len(tree.folders) == 1, tree.kinds
    tree.kinds[kind][0].kill()
    status = server.process.wait(120)
    assert status == (-9 if kind == "main" else 1), log_of(server)[-3000:]
    wait_until(lambda: tree.remains() == [])
    said = LAST_WORDS.search(log_of(server))
    assert (said is None) == (kind == "main")


def more(*values):
    """A case beside those that every run tries: each starts servers of its own."""
    return pytest.param(*values, marks=pytest.mark.deaths)


@pytest.mark.parametrize(
    ("kind", "is_busy"), [("EngineCore", False), more("EngineCore", True), ("Worker", True), ("main", True)]
)
def test_one_process_of_a_server_is_killed(kind, is_busy):
    with serving() as server:
        asker = ask_for_long(server) if is_busy else None
        kill(server, kind)
        if asker:
            asker.join(120)
            assert not asker.is_alive()
        with socket.create_server(("127.0.0.1", int(server.url.rpartition(":")[2]))):
            pass


@pytest.mark.parametrize("kind", [more("main"), "EngineCore", "APIServer", more("DPCoordinator")])
def test_one_process_of_several_servers_is_killed(kind):
    with serving(*SEVERAL) as server:
        asker = ask_for_long(server)
        kill(server, kind)
        asker.join(120)
        assert not asker.is_alive()


@pytest.mark.parametrize("kind", [more("main"), "EngineCore"])
def test_one_process_of_a_node_without_api_server_is_killed(kind):
    data_parallel = ("--data-parallel-size", "2", "--data-parallel-size-local", "1")
    data_parallel += ("--data-parallel-address", "127.0.0.1", "--data-parallel-rpc-port", str(free_port()))
    with (
        running(*data_parallel, "--headless", "--data-parallel-start-rank", "1") as node,
        serving(*data_parallel, "--api-server-count", "1"),
    ):
        kill(Server("", *node), kind)


def test_a_server_is_killed_while_its_engine_starts():
    with running("--port", str(free_port())) as (process, *_):
        wait_until(lambda: len(psutil.Process(process.pid).children()) > 1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children))
