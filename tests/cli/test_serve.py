"""``vllm-kvmerge serve``: what is refused before an engine starts, and the arguments of those that start."""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from vllm.envs import disable_envs_cache
from vllm.platforms import current_platform

from tests.cli.commands import refusal
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
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[argparse.Namespace]]:
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_unknown_option(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert "unrecognized arguments: --prot 1" in refusal(capsys, "serve", model, "--prot", "1")


def test_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "vllm-kvmerge serve smollm2" in refusal(capsys, "serve")


def test_missing_model_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such/model" in refusal(capsys, "serve", "/no/such/model")


def test_folder_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path, port: str) -> None:
    assert str(tmp_path) in refusal(capsys, "serve", str(tmp_path), "--port", port)


def test_taken_port(capsys: pytest.CaptureFixture[str], model: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"127.0.0.1:{port}" in refusal(capsys, "serve", model, "--port", port)


def test_bad_host_and_port(capsys: pytest.CaptureFixture[str], model: str) -> None:
    assert "cannot listen on" in refusal(capsys, "serve", model, "--port", "123456")
    assert "cannot listen on" in refusal(capsys, "serve", model, "--host", "203.0.113.1")


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ('{"policy": "nope"}', "unknown policy 'nope'; allowed: "),
        ('{"policy": "streaming_llm", "budget": 0}', "kv_compression.budget: "),
        ('{"policy": ', "--kv-compression"),
        ("keepkv", "neither a JSON object nor the name of a .json or .yaml file"),
        ("no-such-file.yaml", "no such file"),
    ],
)
def test_bad_compression(capsys: pytest.CaptureFixture[str], model: str, port: str, value: str, said: str) -> None:
    assert said in refusal(capsys, "serve", model, "--port", port, "--kv-compression", value)


@pytest.mark.parametrize(("name", "text"), [("list.json", "[1]"), ("text.yaml", "keepkv"), ("broken.yaml", "a: [1")])
def test_bad_compression_file(
    capsys: pytest.CaptureFixture[str], model: str, port: str, tmp_path: Path, name: str, text: str
) -> None:
    (tmp_path / name).write_text(text)
    assert name in refusal(capsys, "serve", model, "--port", port, "--kv-compression", str(tmp_path / name))


BROKEN = {
    "broken.yaml": b"a: [1",
    "empty.yaml": b"",
    "list.yaml": b"- 1",
    "text.yaml": b"max-model-len",
    "numbers.yaml": b"1: 2",
    "noise.yaml": bytes(range(128, 256)),
}


@pytest.mark.parametrize("name", [*BROKEN, "missing.yaml", "folder.yaml"])
@pytest.mark.parametrize("is_systems", [False, True])
def test_bad_configuration(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    port: str,
    tmp_path: Path,
    name: str,
    is_systems: bool,
) -> None:
    file = tmp_path / name
    if name in BROKEN:
        file.write_bytes(BROKEN[name])
    elif name == "folder.yaml":
        file.mkdir()
    elif is_systems:
        return  # then there is none to be read
    monkeypatch.setattr(arguments, "SYSTEM_CONFIG", file if is_systems else tmp_path / "none")
    options = [] if is_systems else ["--config", str(file)]
    assert f"--config {file}: " in refusal(capsys, "serve", model, "--port", port, *options)


BROKEN_TABLES = "{", "[]", "[3]", '[{"kernel": "x"}]', '[{"implementation": "triton", "device": 3}]'
TABLES: list[tuple[ModuleType, str, Any]] = [
    (choice, "RULES", choice.rules),
    (tuning, "RULES", tuning.rules),
    (recommended, "TABLE", recommended.recommendations),
]


@pytest.mark.parametrize("table", TABLES, ids=["choice", "tuning", "recommended"])
@pytest.mark.parametrize("text", [*BROKEN_TABLES, None], ids=repr)
def test_broken_tables_of_the_package(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    port: str,
    tmp_path: Path,
    table: tuple[ModuleType, str, Any],
    text: str | None,
) -> None:
    module, name, read = table
    file = tmp_path / "table.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setattr(module, name, file)
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)  # tuning is read there alone
    read.cache_clear()
    try:
        said = refusal(capsys, "serve", model, "--port", port)
    finally:
        read.cache_clear()
    assert f"{file} {'cannot be read' if text is None else 'is broken'}: " in said and "install" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--speculative-config", '{"method": "suffix", "num_speculative_tokens": 2}'], "speculative_config="),
        (["--kv-transfer-config", '{"kv_connector": "X", "kv_role": "kv_both"}'], "kv_transfer_config="),
        (["--kv-cache-dtype", "fp8_inc"], "kv_cache_dtype=fp8_inc is not supported: allowed: auto"),
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size=2 is not supported: allowed: 1"),
        (["--prefill-context-parallel-size", "2"], "prefill_context_parallel_size=2 is not supported: allowed: 1"),
        (["--distributed-executor-backend", "ray"], "distributed_executor_backend=ray is not supported: "),
        (["--data-parallel-backend", "ray"], "data_parallel_backend=ray is not supported: "),
        (
            ["--data-parallel-multi-port-external-lb", "--data-parallel-size", "2", "--data-parallel-size-local", "2"],
            "data_parallel_multi_port_external_lb=True is not supported: ",
        ),
        (["--data-parallel-size", "2", "--data-parallel-rank", "0"], "launch independent vLLM instances"),
        (["--grpc"], "--grpc is not supported: "),
        (["--metrics-port", "9"], "--metrics-port is for --headless alone"),
        (["--block-size", "48"], "block_size=48 is not supported: allowed on CPU: multiples of 32"),
        (["--hf-overrides", '{"head_dim": 48}'], "its head size is 48"),
        (["--runner", "pooling"], "runner=pooling is not supported: allowed: generate"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_unsupported_option(
    capsys: pytest.CaptureFixture[str], model: str, port: str, options: list[str], said: str
) -> None:
    assert said in refusal(capsys, "serve", model, "--port", port, *options)


@pytest.mark.slow
def test_a_model_of_embeddings(capsys: pytest.CaptureFixture[str], model: str, port: str) -> None:
    """One that vLLM recognizes as such."""
    bert = {**LLAMA, "architectures": ["BertModel"], "model_type": "bert", "max_position_embeddings": 512}
    (Path(model) / "config.json").write_text(json.dumps(bert))
    said = refusal(capsys, "serve", model, "--port", port, "--skip-tokenizer-init")
    assert "runner=pooling is not supported: allowed: generate" in said


def test_rust_front_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    disable_envs_cache()  # an engine that was started in this process has made vLLM remember its environment
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert "VLLM_USE_RUST_FRONTEND=1 is not supported: " in refusal(capsys, "serve", model)


def test_node_without_a_server_has_metrics(
    started: list[argparse.Namespace], model: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    node = ["serve", model, "--headless", "--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    node += ["--data-parallel-start-rank", "1", "--metrics-port", port]
    assert main(node) == 0
    (args,) = started
    assert args.headless and not hasattr(args, "metrics_port")
    assert httpx.get(f"http://127.0.0.1:{port}/metrics").status_code == 200
    assert f"cannot listen on 127.0.0.1:{port}" in refusal(capsys, *node)


@pytest.mark.engine
def test_vllm_that_does_not_fit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_kvmerge.engine.support._vllm_version", lambda: "0.31.0")
    assert "vllm 0.31.0 is not supported" in refusal(capsys, "serve", "demo")


def test_server_is_started_with_the_plugin(
    started: list[argparse.Namespace], model: str, port: str, tmp_path: Path
) -> None:
    (tmp_path / "default.yaml").write_text("policy: streaming_llm\nbudget: 64\n")
    compression = str(tmp_path / "default.yaml")
    assert main(["serve", model, "--port", port, "--seed", "5", "--kv-compression", compression]) == 0
    (args,) = started
    assert (args.model, args.host, args.port, args.seed) == (model, "127.0.0.1", int(port), 5)
    assert (args.worker_cls, args.scheduler_cls, args.block_size) == (WORKER_CLS, SCHEDULER_CLS, 32)
    assert args.logits_processors == [VALIDATOR]
    assert args.additional_config == {"kvmerge": {"default": {"policy": "streaming_llm", "budget": 64}}}
    assert not hasattr(args, "kv_compression")
    assert "kvmerge" in os.environ[arguments.ALLOWED_PLUGINS].split(",")
    assert (args.shutdown_timeout, args.middleware) == (arguments.DRAIN_SECONDS, [serve.REQUEST_ID_MIDDLEWARE])


def test_users_options_win(started: list[argparse.Namespace], model: str, port: str) -> None:
    options = ["--block-size", "64", "--host", "localhost", "--additional-config", '{"other": 1}']
    options += ["--shutdown-timeout", "0", "--middleware", "my.Middleware"]
    assert main(["serve", model, "--port", port, "--kv-compression.policy", "full", *options]) == 0
    (args,) = started
    assert (args.block_size, args.host, args.shutdown_timeout) == (64, "localhost", 0)
    assert args.middleware == ["my.Middleware", serve.REQUEST_ID_MIDDLEWARE]
    assert args.additional_config == {"other": 1, "kvmerge": {"default": {"policy": "full"}}}


def test_runner_and_own_options(
    started: list[argparse.Namespace],
    model: str,
    port: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(arguments.V2_MODEL_RUNNER, "1")
    additional = '{"kvmerge": {"head_pages": false, "external_cache_bytes": 2}}'
    options = ["--external-cache-bytes", "3", "--additional-config", additional]
    assert main(["serve", model, "--port", port, "--model-runner", "v1", *options]) == 0
    assert os.environ[arguments.V2_MODEL_RUNNER] == "0"
    (args,) = started
    assert args.additional_config == {"kvmerge": {"external_cache_bytes": 3, "head_pages": False, "default": None}}
    assert not {"model_runner", "external_cache_bytes"} & vars(args).keys()
    assert "CPU has v1 alone" in refusal(capsys, "serve", model, "--port", port, "--model-runner", "v2")
    said = refusal(capsys, "serve", model, "--port", port, "--external-cache-bytes", "-1")
    assert "additional_config.kvmerge.external_cache_bytes=-1 is not supported" in said


def test_options_of_the_front_door(
    started: list[argparse.Namespace], model: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["serve", model, "--port", port]
    assert main([*command, "--api-key-routes", "v1", "--max-body-bytes", "2048"]) == 0
    (args,) = started
    assert args.additional_config["kvmerge"] == {"api_key_routes": "v1", "max_body_bytes": 2048, "default": None}
    assert not {"api_key_routes", "max_body_bytes"} & vars(args).keys()
    assert "invalid choice: 'v2' (choose from 'all', 'v1')" in refusal(capsys, *command, "--api-key-routes", "v2")
    said = refusal(capsys, *command, "--max-body-bytes", "1023")
    assert "additional_config.kvmerge.max_body_bytes=1023 is not supported" in said and "1024" in said


def test_models_that_predict_scores(
    started: list[argparse.Namespace], model: str, port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The demo model's own is taken where hidden states can be seen."""
    command = ["serve", model, "--port", port, "--kvzap"]
    missing = refusal(capsys, *command, str(tmp_path / "none"))
    assert f"kvzap={tmp_path}/none is not supported: it has no config.json (No such file or directory)" in missing
    said = refusal(capsys, *command, kvzap_path())
    assert f"kvzap={kvzap_path()} is not supported: its n_modules is 4, the model's 2; allowed: a KVzap model" in said
    sizes = {"input_dim": LLAMA["hidden_size"], "output_dim": 2, "n_modules": 2}
    config = SurrogateConfig(**sizes, hidden_dim=8)
    Surrogate(config, config.modules()).save(tmp_path / "kvzap")
    said = refusal(capsys, *command, str(tmp_path / "kvzap"))
    assert "hidden states cannot be seen, because the server compiles the model; allowed: with --enforce-eager" in said
    assert main([*command, str(tmp_path / "kvzap"), "--enforce-eager"]) == 0
    for options in ([], ["--enforce-eager"]):
        assert main(["serve", "demo", "--port", port, *options]) == 0
    given, compiled, eager = [args.additional_config["kvmerge"].get("kvzap") for args in started]
    assert (given, compiled, eager) == (str(tmp_path / "kvzap"), None, kvzap_path())
    assert not any(hasattr(args, "kvzap") for args in started)


def test_help_lists_the_plugins_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["serve", "--help=KV compression"])
    assert stop.value.code == 0
    help_text = capsys.readouterr().out
    for name in arguments.PLUGIN_OPTIONS:
        assert f"{arguments.OPTION_NAMES.get(name, '--' + name.replace('_', '-'))} " in help_text
    _, options = arguments._serve_parser()
    assert options._action_groups[0].title == "KV compression"  # before vLLM's thirty
    assert "--kvzap MODEL" in help_text and "--kvmerge-contexts DIR" in help_text


def test_workers_share_the_cores_where_vllm_knows_no_way() -> None:
    assert serve.thread_binding(2, 2, [0, 1, 2, 3]) is None
    assert serve.thread_binding(2, 1, [0, 1]) == "0|1"
    assert serve.thread_binding(2, 1, [0, 1, 4, 5, 6, 7, 8]) == "0,1|5,6"
    assert serve.thread_binding(3, 1, [0, 1]) == "nobind"


def test_users_binding_wins(
    started: list[argparse.Namespace], model: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.utils.cpu_resource_utils.get_visible_memory_node", lambda: [0])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 2})
    for given, used in (("nobind", "nobind"), (None, "2|3")):
        monkeypatch.setenv(serve.THREAD_BINDING, "")  # so that it is put back
        monkeypatch.delenv(serve.THREAD_BINDING)
        if given:
            monkeypatch.setenv(serve.THREAD_BINDING, given)
        assert main(["serve", model, "--port", port, "--data-parallel-size", "2"]) == 0
        assert os.environ[serve.THREAD_BINDING] == used


def test_allowed_plugins() -> None:
    unset = arguments.allowed_plugins(None)
    assert "kvmerge" in unset and "lora_filesystem_resolver" in unset  # one of vLLM's own general plugins
    assert arguments.allowed_plugins("mine,kvmerge") == ["mine", "kvmerge"]
    assert arguments.allowed_plugins("mine") == ["mine", "kvmerge"]


def test_metrics_folder_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "import os; from vllm_kvmerge.cli import arguments; arguments.set_environment(); "
        f"print(os.environ['{METRICS_DIR}'])"
    )
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
def test_workers_take_what_is_free(free: list[tuple[int, int]], num_workers: int, share: float) -> None:
    assert memory.fitting_share(free, num_workers) == share


def test_a_server_that_is_told_nothing_takes_what_is_free(
    started: list[argparse.Namespace], model: str, port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(memory, "fitting_share", lambda free, num_workers: 0.3)
    for options in ([], ["--gpu-memory-utilization", "0.5"], ["--kv-cache-memory-bytes", "1G"]):
        assert main(["serve", model, "--port", port, *options]) == 0
    assert [args.gpu_memory_utilization for args in started] == [0.3, 0.5, 0.92]
