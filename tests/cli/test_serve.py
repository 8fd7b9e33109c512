"""``vllm-kvmerge serve``: what is refused before an engine starts, and the arguments of those that start."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path

import httpx
import pytest
from vllm.envs import disable_envs_cache
from vllm.platforms import current_platform

from tests.cli.conftest import refusal
from tests.random_model import LLAMA
from vllm_kvmerge.cli import arguments, main, memory, serve
from vllm_kvmerge.demo import kvzap_path
from vllm_kvmerge.engine.arguments import SCHEDULER_CLS, VALIDATOR, WORKER_CLS
from vllm_kvmerge.engine.processes import METRICS_DIR
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig
from vllm_kvmerge.ops import choice
from vllm_kvmerge.ops.triton import tuning
from vllm_kvmerge.request import recommended


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """The arguments of servers that would have been started; the process's own state is put back."""
    from vllm.entrypoints.cli import serve as vllm_serve

    monkeypatch.setattr(vllm_serve, "run_server", vllm_serve.run_server)  # the command replaces it
    monkeypatch.setattr(serve, "_announce", lambda args: None)
    calls: list[argparse.Namespace] = []
    monkeypatch.setattr(vllm_serve.ServeSubcommand, "cmd", staticmethod(calls.append))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield calls
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return str(folder)


@pytest.fixture
def port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


@pytest.fixture
def served(started, model, port) -> Callable[..., argparse.Namespace]:
    """The arguments of a server with these options; ``model`` may be another."""

    def serve_model(*options: str, model: str = model) -> argparse.Namespace:
        assert main(["serve", model, "--port", port, *options]) == 0
        return started[-1]

    return serve_model


@pytest.fixture
def refused(capsys, model, port) -> Callable[..., str]:
    """Why a server with these options is not started."""
    return lambda *options, port=port: refusal(capsys, "serve", model, "--port", port, *options)


def test_unknown_option_and_no_model(capsys, refused, tmp_path):
    assert "unrecognized arguments: --prot 1" in refused("--prot", "1")
    assert "vllm-kvmerge serve smollm2" in refusal(capsys, "serve")
    for folder in ("/no/such/model", str(tmp_path)):
        assert folder in refusal(capsys, "serve", folder)


def test_hosts_and_ports_that_cannot_be_listened_on(refused):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        assert f"cannot listen on 127.0.0.1:{port}" in refused(port=port)
    assert "cannot listen on" in refused(port="123456")
    assert "cannot listen on" in refused("--host", "203.0.113.1")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"policy": "nope"}', "unknown policy 'nope'; allowed: "),
        ('{"policy": "streaming_llm", "budget": 0}', "kv_compression.budget: "),
        ('{"policy": ', "--kv-compression"),
        ("keepkv", "neither a JSON object nor the name of a .json or .yaml file"),
        ("no-such-file.yaml", "no such file"),
        ("list.json", "list.json: must be an object with names, got list"),
    ],
)
def test_bad_compression(refused, tmp_path, monkeypatch, value, said):
    (tmp_path / "list.json").write_text("[1]")
    monkeypatch.chdir(tmp_path)
    assert said in refused("--kv-compression", value)


BROKEN = {
    "broken.yaml": b"a: [1",
    "empty.yaml": b"",
    "list.yaml": b"- 1",
    "text.yaml": b"max-model-len",
    "numbers.yaml": b"1: 2",
    "noise.yaml": bytes(range(128, 256)),
}


@pytest.mark.parametrize(
    ("name", "is_systems"),
    [*product([*BROKEN, "folder.yaml"], [False, True]), ("missing.yaml", False)],
)
def test_bad_configuration(refused, monkeypatch, tmp_path, name, is_systems):
    file = tmp_path / name
    if name in BROKEN:
        file.write_bytes(BROKEN[name])
    elif name == "folder.yaml":
        file.mkdir()
    monkeypatch.setattr(arguments, "SYSTEM_CONFIG", file if is_systems else tmp_path / "none")
    assert f"--config {file}: " in refused(*([] if is_systems else ["--config", str(file)]))


@pytest.mark.parametrize(
    ("module", "name", "read"),
    [
        (choice, "RULES", choice.rules),
        (tuning, "RULES", tuning.rules),
        (recommended, "TABLE", recommended.recommendations),
    ],
    ids=["choice", "tuning", "recommended"],
)
@pytest.mark.parametrize(
    "text", ["{", "[]", "[3]", '[{"kernel": "x"}]', '[{"implementation": "triton", "device": 3}]', None], ids=repr
)
def test_broken_tables_of_the_package(refused, monkeypatch, tmp_path, module, name, read, text):
    file = tmp_path / "table.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(module, name, file)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)  # tuning is read there alone
    read.cache_clear()
    try:
        said = refused()
    finally:
        read.cache_clear()
    assert f"{file} {'cannot be read' if text is None else 'is broken'}: " in said and "install" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 2}'], "speculative_config="),
        (["--data-parallel-size", "2", "--data-parallel-rank", "0"], "launch independent vLLM instances"),
        (["--grpc"], "--grpc is not supported: "),
        (["--metrics-port", "9"], "--metrics-port is for --headless alone"),
        (["--hf-overrides", '{"head_dim": 48}'], "its head size is 48"),
        (["--model-runner", "v2"], "CPU has v1 alone"),
        (["--external-cache-bytes", "-1"], "additional_config.kvmerge.external_cache_bytes=-1 is not supported"),
        (["--api-key-routes", "v2"], "invalid choice: 'v2' (choose from 'all', 'v1')"),
        (["--max-body-bytes", "1023"], "additional_config.kvmerge.max_body_bytes=1023 is not supported"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unsupported_option(refused, options, said):
    """tests/engine/test_support.py has all of vLLM's that are refused."""
    assert said in refused(*options)


def test_rust_front_end(refused, monkeypatch):
    disable_envs_cache()  # an engine that was started in this process has made vLLM remember its environment
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND=1 is not supported: " in refused()


def test_node_without_a_server_has_metrics(started, model, port, capsys):
    node = ["serve", model, "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    node += ["--data-parallel-start-rank", "1", "--metrics-port", port]
    assert main(node) == 0
    (args,) = started
    assert args.headless and not hasattr(args, "metrics_port")
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    assert f"cannot listen on 127.0.0.1:{port}" in refusal(capsys, *node)


@pytest.mark.engine
def test_vllm_that_does_not_fit(refused, monkeypatch):
    monkeypatch.setattr("vllm_kvmerge.engine.support._vllm_version", lambda: "0.31.0")
    assert "vllm 0.31.0 is not supported" in refused()


def test_server_is_started_with_the_plugin(served, model, port, tmp_path):
    (tmp_path / "default.yaml").write_text("policy: streaming_llm\nbudget: 64\n")
    args = served("--seed", "5", "--kv-compression", str(tmp_path / "default.yaml"))
    assert (args.model, args.host, args.port, args.seed) == (model, "127.0.0.1", int(port), 5)
    assert (args.worker_cls, args.scheduler_cls, args.block_size) == (WORKER_CLS, SCHEDULER_CLS, 32)
    assert args.logits_processors == [VALIDATOR]
    assert args.additional_config == {"kvmerge": {"default": {"policy": "streaming_llm", "budget": 64}}}
    assert "kvmerge" in os.environ[arguments.ALLOWED_PLUGINS].split(",")
    assert (args.shutdown_timeout, args.middleware) == (arguments.DRAIN_SECONDS, [serve.REQUEST_ID_MIDDLEWARE])


def test_users_options_win(served):
    options = ["--block-size", "64", "--host", "localhost", "--additional-config", '{"other": 1}']
    options += ["--shutdown-timeout", "0", "--middleware", "my.Middleware", "--kv-compression.policy", "full"]
    args = served(*options)
    assert (args.block_size, args.host, args.shutdown_timeout) == (64, "localhost", 0)
    assert args.middleware == ["my.Middleware", serve.REQUEST_ID_MIDDLEWARE]
    assert args.additional_config == {"other": 1, "kvmerge": {"default": {"policy": "full"}}}


def test_runner_and_own_options(served, monkeypatch):
    monkeypatch.setenv(arguments.V2_MODEL_RUNNER, "1")
    additional = '{"kvmerge": {"shared_contexts": false, "external_cache_bytes": 2}}'
    options = ["--external-cache-bytes", "3", "--api-key-routes", "v1", "--max-body-bytes", "2048"]
    args = served("--model-runner", "v1", *options, "--additional-config", additional)
    assert os.environ[arguments.V2_MODEL_RUNNER] == "0"
    own = {"external_cache_bytes": 3, "api_key_routes": "v1", "max_body_bytes": 2048}
    assert args.additional_config == {"kvmerge": {**own, "shared_contexts": False, "default": None}}
    assert not {"model_runner", "kv_compression", "kvzap", *own} & vars(args).keys()


def test_models_that_predict_scores(served, refused, tmp_path):
    """The demo model's own is taken where hidden states can be seen."""
    missing = refused("--kvzap", str(tmp_path / "none"))
    assert f"kvzap={tmp_path}/none is not supported: it has no config.json (No such file or directory)" in missing
    said = refused("--kvzap", kvzap_path())
    assert f"kvzap={kvzap_path()} is not supported: its n_modules is 4, the model's 2; allowed: a KVzap model" in said
    config = SurrogateConfig(input_dim=LLAMA["hidden_size"], output_dim=2, n_modules=2, hidden_dim=8)
    fitting = str(tmp_path / "kvzap")
    Surrogate(config, config.modules()).save(tmp_path / "kvzap")
    said = refused("--kvzap", fitting)
    assert "hidden states cannot be seen, because the server compiles the model; allowed: with --enforce-eager" in said
    given = served("--kvzap", fitting, "--enforce-eager")
    compiled, eager = served(model="demo"), served("--enforce-eager", model="demo")
    chosen = [args.additional_config["kvmerge"].get("kvzap") for args in (given, compiled, eager)]
    assert chosen == [fitting, None, kvzap_path()]


def test_help_lists_the_plugins_options(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help=KV compression"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for name in arguments.PLUGIN_OPTIONS:
        assert f"{arguments.OPTION_NAMES.get(name, '--' + name.replace('_', '-'))} " in help_text


def test_workers_share_the_cores_where_vllm_knows_no_way():
    assert serve.thread_binding(2, 2, [0, 1, 2, 3]) is None
    assert serve.thread_binding(2, 1, [0, 1]) == "0|1"
    assert serve.thread_binding(2, 1, [0, 1, 4, 5, 6, 7, 8]) == "0,1|5,6"
    assert serve.thread_binding(3, 1, [0, 1]) == "nobind"


@pytest.mark.parametrize(("given", "used"), [("nobind", "nobind"), (None, "2|3")])
def test_users_binding_wins(served, monkeypatch, given, used):
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 2})
    monkeypatch.setenv(serve.THREAD_BINDING, given or "")  # so that it is put back
    if given is None:
        monkeypatch.delenv(serve.THREAD_BINDING)
    served("--data-parallel-size", "2")
    assert os.environ[serve.THREAD_BINDING] == used


def test_allowed_plugins():
    unset = arguments.allowed_plugins(None)
    assert "kvmerge" in unset and "lora_filesystem_resolver" in unset  # one of vLLM's own general plugins
    assert arguments.allowed_plugins("mine,kvmerge") == ["mine", "kvmerge"]
    assert arguments.allowed_plugins("mine") == ["mine", "kvmerge"]


def test_metrics_folder_goes_with_the_process(tmp_path):
    code = "import os; from vllm_kvmerge.cli import arguments; arguments.set_environment(); "
    code += f"print(os.environ['{METRICS_DIR}'])"
    environment = {name: value for name, value in os.environ.items() if name != METRICS_DIR}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True
    )
    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("free", "num_workers", "share"),
    [
        ([(10, 20)], 1, 0.45),
        ([(10, 20)], 2, 0.22),
        ([(20, 20), (10, 20)], 2, 0.45),  # a worker each
        ([(20, 20)], 1, 0.9),
    ],
)
def test_workers_take_what_is_free(free, num_workers, share):
    assert memory.fitting_share(free, num_workers) == share


@pytest.mark.parametrize(
    ("options", "share"),
    [([], 0.3), (["--gpu-memory-utilization", "0.5"], 0.5), (["--kv-cache-memory-bytes", "1G"], 0.92)],
)
def test_a_server_that_is_told_nothing_takes_what_is_free(served, monkeypatch, options, share):
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(memory, "fitting_share", lambda free, num_workers: 0.3)
    assert served(*options).gpu_memory_utilization == share
