"""Two tensor-parallel workers with parts that fail, without metrics, and with one worker killed; full shared memory."""

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from tests.policies import failing
from tests.processes import end_with_tests_on_a_disk
from tests.server.conftest import Server, check_refused, free_port, running, serving, wait_until
from tests.server.deaths import Tree, ask_for_long, check_port, kill, log_of
from vllm_kvmerge.engine.processes import METRICS_PREFIX

pytestmark = pytest.mark.engine

SHARED_MEMORY = "/dev/shm"
PROMPT = [2, *range(20, 320)]
FAULTS = [{"select_fault": "raise"}, {"select_fault": "shape"}, {"merge_fault": "nan_rows"}]


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tensor-parallel workers."""
    variables = failing.write_package(tmp_path_factory.mktemp("packages") / "site")
    with serving("--tensor-parallel-size", "2", "--max-compaction-seconds", "1", **variables) as server:
        yield server


def ask(server: Server, **compression: object) -> httpx.Response:
    return server.ask(PROMPT, max_tokens=8, ignore_eos=True, kv_compression={"budget": 64, **compression})


def test_each_part_that_fails_on_two_workers_ends_its_request_alone(parallel: Server) -> None:
    """The slow one would take thirty seconds for each batch, and may take one."""
    expected = ask(parallel, policy="keepkv").json()["choices"]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(ask, parallel, policy=failing.PRESET, **fault) for fault in FAULTS]
        started = time.monotonic()
        slow = pool.submit(ask, parallel, policy=failing.PRESET, merge_fault="sleep")
        fine = [pool.submit(ask, parallel, policy="keepkv") for _ in range(4)]
        assert [answer.result().json()["choices"] for answer in fine] == [expected] * 4
    for future, part in zip(bad, ("selector", "selector", "merger"), strict=True):
        check_refused(future.result(), None, f"{part} failing", 500)
    check_refused(slow.result(), None, "took longer than it may", 500)
    assert time.monotonic() - started < failing.SLEEP
    wait_until(lambda: parallel.metric("vllm:kvmerge_live_bytes") == 0)


@pytest.mark.slow
def test_a_metrics_folder_that_is_deleted_ends_nothing(parallel: Server) -> None:
    (folder,) = Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}{parallel.process.pid}-*")
    before = parallel.metric("vllm:generation_tokens_total")
    moved = shutil.copytree(folder, f"{folder}.kept")
    shutil.rmtree(folder)
    try:
        for policy in ("h2o", "snapkv", "keepkv"):
            assert ask(parallel, policy=policy).status_code == 200
        # The API server's own values, which are in files without a name now.
        assert parallel.metric("vllm:generation_tokens_total") == before + 24
    finally:
        shutil.move(moved, folder)  # for the check that it goes with the server


def test_a_tensor_parallel_worker_is_killed_while_it_answers(parallel: Server) -> None:
    """The last test of this server."""
    kill(parallel, "Worker")


def test_a_server_without_room_in_shared_memory_does_not_start(may_mount: None) -> None:
    begin = partial(end_with_tests_on_a_disk, SHARED_MEMORY, "8m")
    with running("--port", str(free_port()), first=begin) as (process, log, reader):
        assert process.wait(120) == 1
        reader.join(60)
    assert any("Insufficient space in /dev/shm" in line for line in log)
    assert any(line.startswith("vllm-kvmerge: the server stopped: ") for line in log)


@pytest.mark.slow
def test_full_shared_memory_is_named_by_the_server_that_dies_of_it(may_mount: None) -> None:
    # vLLM's queues between an engine and its worker are 400 MiB, of which pages are taken as they are written to.
    with serving(first=partial(end_with_tests_on_a_disk, SHARED_MEMORY, "600m")) as server:
        tree = Tree(server.process.pid)
        asker = ask_for_long(server)
        with open(f"/proc/{server.process.pid}/root{SHARED_MEMORY}/filler", "wb", buffering=0) as filler:
            for size in (1 << 20, 1 << 12):
                with contextlib.suppress(OSError):  # no space left
                    while filler.write(bytes(size)):
                        pass
        assert server.ask([*range(20, 700)] * 5, max_tokens=8).status_code == 500
        asker.check_told()
        assert server.process.wait(120) == 1
        tree.memory.clear()  # in a file system that is gone with its processes
        wait_until(lambda: tree.remains() == [])
        check_port(server)
        said = [line for line in log_of(server).splitlines() if line.startswith("vllm-kvmerge: the server stopped")]
        assert len(said) == 1 and said[0].endswith("; /dev/shm is full)")
