"""Two tensor-parallel workers with parts that fail, without metrics, and with one worker killed; full shared memory.

What is killed: ``deaths``. A disk for metrics that is full, and a stop that requests do not outlive:
``test_metric_faults``.
"""

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests.policies import failing
from tests.processes import end_with_tests_on_a_disk
from tests.server.conftest import Server, free_port, running, serving, wait_until
from tests.server.deaths import Tree, ask_for_long, check_port, kill, log_of
from vllm_kvmerge.engine.processes import METRICS_PREFIX

pytestmark = pytest.mark.engine

SHARED_MEMORY = "/dev/shm"
PROMPT = [2, *range(20, 320)]
FAULTS = [("select_fault", fault) for fault in ("raise", "shape")] + [("merge_fault", "nan_rows")]


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two tensor-parallel workers."""
    variables = failing.write_package(tmp_path_factory.mktemp("packages") / "site")
    with serving("--tensor-parallel-size", "2", "--max-compaction-seconds", "1", **variables) as server:
        yield server


def ask(server: Server, **compression: object) -> dict:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = server.post("/v1/completions", body | {"kv_compression": {"budget": 64, **compression}})
    return {"status": response.status_code, **response.json()}


def test_each_part_that_fails_on_two_workers_ends_its_request_alone(parallel: Server) -> None:
    """The slow one would take thirty seconds for each batch, and may take one."""
    expected = ask(parallel, policy="keepkv")["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        bad = [pool.submit(ask, parallel, policy=failing.PRESET, **{field: fault}) for field, fault in FAULTS]
        started = time.monotonic()
        slow = pool.submit(ask, parallel, policy=failing.PRESET, merge_fault="sleep")
        fine = [pool.submit(ask, parallel, policy="keepkv") for _ in range(4)]
        assert {answer.result()["choices"][0]["text"] for answer in fine} == {expected}
    for future, (field, fault) in zip(bad, FAULTS, strict=True):
        answer = future.result()
        assert answer["status"] == 500, fault
        part = "selector failing" if field == "select_fault" else "merger failing"
        assert part in answer["error"]["message"], fault
    assert slow.result()["status"] == 500 and "took longer than it may" in slow.result()["error"]["message"]
    assert time.monotonic() - started < failing.SLEEP
    assert ask(parallel, policy="keepkv")["choices"][0]["text"] == expected
    wait_until(lambda: parallel.metric("vllm:kvmerge_live_bytes") == 0)


@pytest.mark.slow
def test_a_metrics_folder_that_is_deleted_ends_nothing(parallel: Server) -> None:
    (folder,) = Path(tempfile.gettempdir()).glob(f"{METRICS_PREFIX}{parallel.process.pid}-*")
    before = parallel.metric("vllm:generation_tokens_total")
    moved = shutil.copytree(folder, f"{folder}.kept")
    shutil.rmtree(folder)
    try:
        for policy in ("h2o", "snapkv", "keepkv"):
            assert ask(parallel, policy=policy)["status"] == 200
        # The API server's own values, which are in files without a name now.
        assert parallel.metric("vllm:generation_tokens_total") == before + 24
    finally:
        shutil.move(moved, folder)  # for the check that it goes with the server


def test_a_tensor_parallel_worker_is_killed_while_it_answers(parallel: Server) -> None:
    """The last test of this server."""
    asker = ask_for_long(parallel)
    kill(parallel, "Worker")
    asker.check_told()


@pytest.fixture
def may_mount() -> None:
    mount = ["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", SHARED_MEMORY]
    if shutil.which("unshare") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("this user may not mount a file system")


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
        long = server.post("/v1/completions", {"model": "demo", "prompt": [*range(20, 700)] * 5, "max_tokens": 8})
        assert long.status_code == 500
        asker.check_told()
        assert server.process.wait(120) == 1
        tree.memory.clear()  # in a file system that is gone with its processes
        wait_until(lambda: tree.remains() == [])
        check_port(server)
        said = [line for line in log_of(server).splitlines() if line.startswith("vllm-kvmerge: the server stopped")]
        assert len(said) == 1 and said[0].endswith("; /dev/shm is full)")
