"""Servers that are killed: the one that tests share, when all have done with it, and some that no other test starts.

Also ``test_limits`` and ``test_nodes``, whose last tests kill a worker, an engine and one of several API servers, and
``tests/engine/test_crashes.py``, which kills a server while its engine starts.
"""

import pytest

from tests.server.conftest import serving
from tests.server.deaths import ask_for_long, kill

pytestmark = pytest.mark.engine

SEVERAL = ("--data-parallel-size", "2", "--api-server-count", "2")


@pytest.mark.last
def test_nothing_is_left_of_a_server_that_is_killed(server):
    asker = ask_for_long(server)
    kill(server, "main")
    asker.check_told()


@pytest.mark.deaths
@pytest.mark.parametrize("kind", ["APIServer", "EngineCore", "DPCoordinator", "main"])
def test_one_process_of_several_servers_is_killed(kind):
    with serving(*SEVERAL) as server:
        asker = ask_for_long(server)
        kill(server, kind)
        asker.check_told()


@pytest.mark.deaths
@pytest.mark.parametrize("is_busy", [False, True])
def test_the_engine_of_a_server_is_killed(is_busy):
    with serving() as server:
        asker = ask_for_long(server) if is_busy else None
        kill(server, "EngineCore")
        if asker:
            asker.check_told()
