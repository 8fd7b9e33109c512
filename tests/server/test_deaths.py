"""What is left of a server of which one process has been killed: its exit status, its last words, nothing else."""

import re
import signal
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from tests.server.conftest import Server, running, free_port, serving, wait_until

LONG = {"model": "demo", "prompt": "recall", "max_tokens": 3500, "ignore_eos": True, "kv_compression": {"policy": "h2o"}}


def tree(server: Server) -> dict[str, list[psutil.Process]]:
    """The server's processes by what they are."""
    found: dict[str, list[psutil.Process]] = {"server": [psutil.Process(server.process.pid)]}
    for process in found["server"][0].children(recursive=True):
        command = " ".join(process.cmdline())
        kinds = ("EngineCore", "Worker", "APIServer", "Coordinator", "resource_tracker")
        found.setdefault(next((kind for kind in kinds if kind in command), command), []).append(process)
    return found


def test_x():
    with serving() as server:
        for k, v in tree(server).items(): print(k, v)
        for name in Path('/dev/shm').iterdir(): print(name)
        import subprocess
        print(subprocess.run("ls -la /tmp | tail -30; ls -la /tmp/vllm-kvmerge-metrics*; grep -h tree /dev/null; cat /proc/%d/environ | tr '\\0' '\\n' | grep PROM; cat /proc/*/task/*/comm | sort | uniq -c | sort -rn | head -50" % server.process.pid, shell=True, capture_output=True, text=True).stdout)
        engine = tree(server)
        print({k: [p.cmdline() for p in v] for k, v in engine.items()})
        server.process.kill()
        import time
        for i in range(8):
            time.sleep(1); print({k: [p.is_running() for p in v] for k, v in engine.items()})
        print("".join(server.log[-15:]))
    assert 0
