"""Stopping the server; runs after the other tests of this folder, which share it."""

import os
import signal
import subprocess
import time


def test_sigterm_ends_every_process(server):
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(server.process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert children
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) is not None
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.2)
