"""vLLM's unmodified commands that start a server: with our part of ``additional_config`` they compress, without it
``vllm serve`` refuses the field and is otherwise stock."""

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.server.conftest import VLLM, Server, check_refused, serving
from tests.server.test_hostile_input import KNOWN
from vllm_kvmerge import demo
from vllm_kvmerge.engine.arguments import SCHEDULER_CLS, VALIDATOR, WORKER_CLS, plugin_config
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.server.endpoint import POLICIES_ROUTE

PROMPT = [3 + i % 200 for i in range(300)]
LOCAL = {"policy": "local", "budget": 64}

SERVER_ERRORS = {
    "/v1/systemone": {"state": "a", "questions": {"a": {"type": "boolean"}}},
    "/v1/responses": {"input": [{"type": "message", "role": "assistant", "content": []}], "max_output_tokens": 4},
}

SERVE = str(VLLM), "serve", demo.model_path(), "--served-model-name", "demo"
API_SERVER = "-m", "vllm.entrypoints.openai.api_server", "--model", demo.model_path(), "--served-model-name", "demo"
ASKS = "--additional-config", '{"kvmerge": {"max_compaction_seconds": 4.5}}'


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Server, Server]]:
    """One that compresses, and a stock one."""
    with (
        serving(*ASKS, "--host", "127.0.0.1", command=SERVE, from_scratch=True) as ours,
        serving(command=SERVE, from_scratch=True, ready="Application startup complete") as stock,
    ):
        yield ours, stock


pytestmark = [pytest.mark.engine, pytest.mark.slow]


def check_compresses(server: Server) -> None:
    told = server.complete(PROMPT, max_tokens=4, kv_compression=LOCAL)["usage"]["kv_compression"]
    assert told["compressions"] == 1 and told["entries"]["most"] == 64
    assert server.metric("vllm:kvmerge_requests_total", policy="local") == 1
    check_refused(server.ask(PROMPT, kv_compression={"policy": "nope"}), "kv_compression.policy", "unknown policy")
    assert "local" in httpx.get(server.url + POLICIES_ROUTE).text


def test_compression_is_on_where_the_configuration_asks_for_it(servers):
    ours, _ = servers
    check_compresses(ours)


def test_and_so_it_is_where_charts_start_the_module():
    with serving(*ASKS, command=API_SERVER, from_scratch=True) as ours:
        check_compresses(ours)


def test_a_stock_server_refuses_the_field_and_says_how_to_turn_it_on(servers):
    _, stock = servers
    for route in ("completions", "chat/completions", "responses", "embeddings", "messages"):
        body = {"model": "demo", "prompt": PROMPT, "input": "a", "messages": [], "kv_compression": LOCAL}
        check_refused(stock.post(f"/v1/{route}", body), "kv_compression", "--additional-config")


def test_a_stock_server_is_otherwise_itself(servers):
    _, stock = servers
    plain = [server.complete(PROMPT, max_tokens=8) for server in servers]
    assert plain[0]["choices"][0]["text"] == plain[1]["choices"][0]["text"]
    assert "kv_compression" not in plain[1]["usage"]
    assert "vllm:kvmerge" not in httpx.get(stock.url + "/metrics", timeout=120).text


@pytest.mark.parametrize(("route", "status", "said"), KNOWN)
def test_what_fuzzing_allows_is_what_a_stock_server_answers(servers, route, status, said):
    ours, stock = (server.post(route, {"model": "demo"} | SERVER_ERRORS[route]) for server in servers)
    assert (ours.status_code, ours.text) == (stock.status_code, stock.text)
    assert ours.status_code == status and said in ours.text


def test_it_is_on_wherever_plugins_were_loaded_first():
    program = f"""
from vllm.plugins import load_general_plugins

load_general_plugins()
from vllm.engine.arg_utils import EngineArgs

arguments = EngineArgs({demo.model_path()!r}, max_model_len=512, additional_config={{"kvmerge": {{}}}})
assert arguments.create_engine_config().scheduler_config.scheduler_cls == {SCHEDULER_CLS!r}
"""
    subprocess.run([sys.executable, "-c", program], timeout=600, check=True)


def test_engine_arguments_are_completed_where_the_configuration_asks_for_it():
    arguments = {"model": demo.model_path(), "dtype": "float32", "max_model_len": 512}
    stock = EngineArgs(**arguments).create_engine_config()
    assert stock.scheduler_config.scheduler_cls is None and not stock.model_config.logits_processors
    ours = {"kvmerge": {"max_compaction_seconds": 4.5}}
    config = EngineArgs(**arguments, additional_config=ours).create_engine_config()
    assert (config.scheduler_config.scheduler_cls, config.parallel_config.worker_cls) == (SCHEDULER_CLS, WORKER_CLS)
    assert config.model_config.logits_processors == [VALIDATOR] and config.cache_config.block_size == 32
    assert plugin_config(config).max_compaction_seconds == 4.5
    with pytest.raises(UnsupportedConfigError, match="additional_config.kvmerge.nope=1"):
        EngineArgs(**arguments, additional_config={"kvmerge": {"nope": 1}}).create_engine_config()
