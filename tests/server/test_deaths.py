"""Servers that are killed: the one that tests share, when all have done with it, and some that no other test starts.

Also ``test_limits`` and ``test_nodes``, whose last tests kill a worker, an engine and one of several API servers.
"""

import pytest

from tests.server.conftest import free_port, running, serving
from tests.server.deaths import kill

pytestmark = pytest.mark.engine

SEVERAL = ("--data-parallel-size", "2", "--api-server-count", "2")


@pytest.mark.last
def test_nothing_is_left_of_a_server_that_is_killed(server):
    kill(server, "main")


@pytest.mark.deaths
@pytest.mark.parametrize("kind", ["APIServer", "EngineCore", "DPCoordinator", "main"])
def test_one_process_of_several_servers_is_killed(kind):
    with serving(*SEVERAL) as server:
        kill(server, kind)


@pytest.mark.deaths
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_engine_of_a_server_is_killed(is_busy):
    with serving() as server:
        kill(server, "EngineCore", is_busy)


def test_a_server_that_cannot_start_says_why_at_the_end():
    """What its worker says, and what to do."""
    with running("--port", str(free_port()), "--kv-cache-memory-bytes", str(1 << 50)) as (process, log, reader):
        assert process.wait(200) == 1
        reader.join()
    last = [line for line in log if line.startswith("vllm-kvmerge: ")][-1]
    assert "the server stopped: Available memory on node" in last and "Decrease --kv-cache-memory-bytes" in last
