"""Servers that are killed and that no other test starts; the others are killed where they have been used."""

import psutil
import pytest

from tests.server.conftest import free_port, running, serving, wait_until
from tests.server.deaths import ask_for_long, kill

pytestmark = pytest.mark.engine

SEVERAL = ("--data-parallel-size", "2", "--api-server-count", "2")


def more(kind):
    """A case beside the one that every run tries: each starts five processes of its own."""
    return pytest.param(kind, marks=pytest.mark.deaths)


@pytest.mark.parametrize("kind", ["APIServer", more("EngineCore"), more("DPCoordinator"), more("main")])
def test_one_process_of_several_servers_is_killed(kind):
    with serving(*SEVERAL) as server:
        asker = ask_for_long(server)
        kill(server, kind)
        asker.join(120)
        assert not asker.is_alive()


@pytest.mark.deaths
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_engine_of_a_server_is_killed(is_busy):
    with serving() as server:
        asker = ask_for_long(server) if is_busy else None
        kill(server, "EngineCore")
        if asker:
            asker.join(120)
            assert not asker.is_alive()


def test_a_server_is_killed_while_its_engine_starts():
    with running("--port", str(free_port())) as (process, *_):
        wait_until(lambda: len(psutil.Process(process.pid).children()) > 1)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in children))
