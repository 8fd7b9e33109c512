"""A server whose metrics have no room: it serves, says so once, and shows what it has."""

import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.processes import end_with_tests_on_a_disk
from tests.server.conftest import ONE_PROCESS_PER_ENGINE, serving, wait_until
from tests.server.deaths import Tree, ask_for_long, check_port

pytestmark = pytest.mark.engine

ERRORS = "vllm:kvmerge_metrics_write_errors"
TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def server(folder, may_mount):
    """A server that counts on a disk of 192 KB, which are three files; it has more, in two processes."""
    begin = partial(end_with_tests_on_a_disk, str(folder), "192k")
    options = *ONE_PROCESS_PER_ENGINE, "--shutdown-timeout", "1"
    with serving(*options, first=begin, PROMETHEUS_MULTIPROC_DIR=str(folder)) as ready:
        yield ready


def ask(server):
    for policy in ("full", "h2o", "keepkv", "snapkv"):
        body = {"max_tokens": TOKENS, "ignore_eos": True, "kv_compression": {"policy": policy}}
        assert server.complete([2, *range(20, 400)], **body)["usage"]["completion_tokens"] == TOKENS


@pytest.mark.slow
def test_a_full_disk_ends_nothing(server):
    ask(server)
    assert server.process.poll() is None
    assert server.metric(ERRORS) > 0
    assert server.metric("vllm:generation_tokens_total") == 4 * TOKENS
    said = [line for line in server.log if "kept in memory" in line]
    assert 0 < len(said) <= 3 and all("No space left on device" in line for line in said)


def test_a_folder_that_is_emptied_ends_nothing(server, folder):
    before = server.metric("vllm:generation_tokens_total")
    inside = f"/proc/{server.process.pid}/root{folder}"
    subprocess.run(f"rm {inside}/*.db", shell=True, check=True)
    ask(server)
    assert server.metric("vllm:generation_tokens_total") == before + 4 * TOKENS
    # There is room again.
    wait_until(lambda: server.metric("vllm:kvmerge_generation_tokens_total") >= 0)
    assert server.process.poll() is None


def test_requests_that_take_too_long_end_with_an_error_when_it_is_stopped(server):
    """The last test here."""
    tree, asker = Tree(server.process.pid), ask_for_long(server)
    body = {"model": "demo", "prompt": "recall", "max_tokens": 4000, "ignore_eos": True}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(server.post, "/v1/completions", body)
        wait_until(lambda: server.metric("vllm:num_requests_running") == 2)
        server.process.send_signal(signal.SIGTERM)
        refusal = whole.result()
    assert refusal.status_code == 503 and "has been stopped" in refusal.json()["error"]["message"]
    asker.check_told()
    assert asker.seen[-1] == "data: [DONE]" and "has been stopped" in asker.seen[-2]
    assert server.process.wait(60) == 0
    wait_until(lambda: tree.remains() == [])
    check_port(server)
