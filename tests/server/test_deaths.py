"""Servers that are killed and that no other test starts; the others are killed where they have been used.

Also ``test_nodes``, which kills one of several API servers, and ``tests/engine/test_crashes.py``, which kills a server
while its engine starts.
"""

import pytest

from tests.server.conftest import serving
from tests.server.deaths import ask_for_long, kill

pytestmark = [pytest.mark.engine, pytest.mark.deaths]

SEVERAL = ("--data-parallel-size", "2", "--api-server-count", "2")


@pytest.mark.parametrize("kind", ["APIServer", "EngineCore", "DPCoordinator", "main"])
def test_one_process_of_several_servers_is_killed(kind):
    with serving(*SEVERAL) as server:
        asker = ask_for_long(server)
        kill(server, kind)
        asker.join(120)
        assert not asker.is_alive()


@pytest.mark.parametrize("is_busy", [False, True])
def test_the_engine_of_a_server_is_killed(is_busy):
    with serving() as server:
        asker = ask_for_long(server) if is_busy else None
        kill(server, "EngineCore")
        if asker:
            asker.join(120)
            assert not asker.is_alive()
