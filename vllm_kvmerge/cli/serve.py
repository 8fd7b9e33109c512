"""The command ``vllm-kvmerge``: vLLM's server with compression switched on, evaluation, and the list of policies."""

import argparse
import atexit
import http.client
import importlib
import json
import logging
import os
import shutil
import signal
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import yaml

from vllm_kvmerge import __version__
from vllm_kvmerge.engine.processes import METRICS_DIR, make_metrics_folder
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config, check_vllm_version
from vllm_kvmerge.errors import CommandError

if TYPE_CHECKING:
    from rich.table import Table
    from vllm.utils.argparse_utils import FlexibleArgumentParser

DEMO = "demo"
DEFAULT_HOST = "127.0.0.1"
PLUGIN = "kvmerge"
DRAIN_SECONDS = 30
"""How long a server that is told to stop may go on with the requests that it has, unless --shutdown-timeout says."""

SYSTEM_CONFIG = Path("/etc/vllm-kvmerge/serve.yaml")
"""Options of ``serve`` for a whole machine or image; read where --config names no other file."""

REQUEST_ID_MIDDLEWARE = "vllm_kvmerge.server.request_id.RequestIdMiddleware"
ALLOWED_PLUGINS = "VLLM_PLUGINS"
V2_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
THREAD_BINDING = "VLLM_CPU_OMP_THREADS_BIND"
PLUGIN_OPTIONS = (
    "query_rings",
    "query_ring_size",
    "allowed_policies",
    "max_compaction_bytes",
    "max_compaction_seconds",
    "api_key_routes",
    "max_body_bytes",
)
"""Fields of PluginConfig that are options too."""

logger = logging.getLogger("vllm_kvmerge.server")

LISTED_GROUPS = (
    "vllm.general_plugins",
    "vllm.platform_plugins",
    "vllm.io_processor_plugins",
    "vllm.stat_logger_plugins",
)
"""Entry point groups of which vLLM loads everything as long as VLLM_PLUGINS is unset."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise CommandError(f"{message}; see vllm-kvmerge --help")


def main(argv: list[str] | None = None) -> int:
    """Runs the command; returns its exit status. A fault is one line on stderr and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        if argv[:1] == ["serve"]:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, _exit_at_once)
            return serve(argv)
        if argv[:1] == ["eval"]:
            return evaluate(argv[1:])
        if argv[:1] == ["doctor"]:
            return doctor(argv[1:])
        parser = _Parser(prog="vllm-kvmerge", description=__doc__)
        parser.add_argument("--version", action="version", version=f"vllm-kvmerge {__version__}")
        commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
        commands.add_parser(
            "serve", help="serve a model over HTTP: vllm-kvmerge serve MODEL [any option of vllm serve]"
        )
        commands.add_parser("eval", help="measure policies and budgets on tasks: vllm-kvmerge eval CONFIG.yaml")
        commands.add_parser("doctor", help="print versions, devices, operators in use, and what is not supported")
        policies = commands.add_parser("policies", help="list the policies and parts that a request can name")
        policies.add_argument("--json", action="store_true", help="everything as JSON, with the schema of the field")
        print_policies(parser.parse_args(argv).json)
        return 0
    except CommandError as fault:
        print("vllm-kvmerge:", " ".join(str(fault).split()), file=sys.stderr)
        return 2


def _exit_at_once(number: int, _: Any) -> NoReturn:
    """Handles a signal until the server is up; from then on vLLM stops it in good order."""
    sys.exit(128 + number)


def evaluate(argv: list[str]) -> int:
    """``vllm-kvmerge eval``; ``argv`` without that word."""
    if argv[:1] == ["attention"]:
        module = importlib.import_module("vllm_kvmerge.evaluation.attention")
        return module.main(argv[1:]) or 0
    from vllm_kvmerge.evaluation import command

    return command.main(argv)


def doctor(argv: list[str]) -> int:
    """``vllm-kvmerge doctor``; ``argv`` without that word. Status 1: no server can start here, or not that one."""
    from rich.console import Console

    parser = _Parser(prog="vllm-kvmerge doctor", description=doctor.__doc__)
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument(
        "server", nargs=argparse.REMAINDER, metavar="MODEL [OPTION...]", help="would vllm-kvmerge serve take these?"
    )
    args = parser.parse_args(argv)
    with _quiet():
        from vllm_kvmerge.cli.doctor import examine

        report = examine()
        if args.server:
            fault = _serve_fault(args.server)
            report["server"] = {"arguments": args.server, "fault": fault}
            report["problems"] += [fault] if fault else []
    status = 1 if report["problems"] else 0
    if args.json:
        print(json.dumps(report, indent=2))
        return status
    tables = [_pairs(name, report[name]) for name in ("versions", "operators", "unsupported")]
    tables.insert(1, _pairs("devices", dict(line.split(": ", 1) for line in report["devices"])))
    console = Console(markup=False)
    console.print(*tables, sep="\n")
    for problem in report["problems"]:
        console.print(f"Problem: {problem}", soft_wrap=True)
    if not report["problems"]:
        console.print("vllm-kvmerge serve", *args.server, "can start here." if args.server else "MODEL can start here.")
    return status


def _serve_fault(arguments: list[str]) -> str | None:
    """Why ``serve`` would refuse these arguments before it starts an engine; None if it would not."""
    _set_environment()
    try:
        parser, options = _serve_parser()
        args = _parse(parser, _with_system_config(["serve", *arguments]))
        _check_front_end(args)
        _check_model(args)
        _set_engine_args(args, options)
        _check_engine_config(args)
    except CommandError as fault:
        return str(fault)
    return None


def _pairs(title: str, rows: dict[str, str]) -> "Table":
    """A table of names and what is said of each."""
    table = _table(title.capitalize(), "name", "")
    table.show_header = False
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def print_policies(as_json: bool = False) -> None:
    """Tables of the presets and of the parts that they are made of."""
    from rich.console import Console

    from vllm_kvmerge.request.catalogue import describe_policies

    catalogue = describe_policies()
    if as_json:
        print(json.dumps(catalogue, indent=2))
        return
    policies = _table("Policies", "policy", "parts", "parameters", "source")
    policies.caption = "A request may name other parts, and gives the parameters of those that it ends up with."
    for preset in catalogue["presets"]:
        parts = [f"{kind} {name}" for kind, name in preset["parts"].items()]
        values = {"decode": preset["decode"], **preset["defaults"]} if parts else {}
        policies.add_row(
            preset["name"],
            "\n".join(parts),
            "\n".join(f"{name}={json.dumps(value)}" for name, value in values.items()),
            preset["source"],
        )
    tables = [policies]
    for kind, described in catalogue["parts"].items():
        table = _table(f"{kind.capitalize()}s", kind, "what it does", "parameters", "source")
        for part in described:
            fields = (
                f"{field['name']}={json.dumps(field['default'])} ({field['type']}): {field['description']}"
                for field in part["fields"]
            )
            table.add_row(part["name"], part["summary"], "\n".join(fields), part["source"])
        tables.append(table)
    # Square brackets in a text are no markup.
    Console(markup=False).print(*tables, sep="\n")


def _table(title: str, *headers: str) -> "Table":
    """An empty table whose first column, the names, is never cut."""
    from rich.table import Column, Table

    first, *others = headers
    columns = [Column(first, no_wrap=True), *(Column(header, overflow="fold") for header in others)]
    return Table(*columns, title=title, show_lines=True)


def serve(argv: list[str]) -> int:
    """Runs vLLM's server with the plugin's engine arguments. ``argv`` starts with the word ``serve``.

    Returns the exit status: 0 if the server was told to stop, 1 if it stopped by itself.

    Raises:
        CommandError: the server cannot be started as asked.
    """
    _set_environment()
    parser, options = _serve_parser()
    args = _parse(parser, _with_system_config(argv))
    _check_front_end(args)
    _check_model(args)
    _check_port(args)
    metrics_port = args.metrics_port
    _set_engine_args(args, options)
    _check_engine_config(args)
    _bind_threads(args)
    if metrics_port is not None:
        _serve_metrics(args.host, metrics_port)
    args.middleware = [*args.middleware, REQUEST_ID_MIDDLEWARE]
    threading.Thread(target=_announce, args=(args,), daemon=True).start()
    from vllm.entrypoints.cli import serve as vllm_serve

    from vllm_kvmerge.engine import compat as children

    # Needed until vLLM's zmq_socket_ctx stops swallowing the KeyboardInterrupt that its run_server makes of SIGTERM: a
    # server that was told to stop while its engine started would start all the same, or hang for ten minutes.
    vllm_serve.run_server = _run_server
    children.prepare()
    try:
        vllm_serve.ServeSubcommand.cmd(args)
    except Exception as error:
        # The engine's processes have logged their traceback by now.
        print("vllm-kvmerge: the server stopped:", _one_line(error), file=sys.stderr)
        return 1
    return 0


def _bind_threads(args: argparse.Namespace) -> None:
    """Gives each worker its own cores on CPU, where vLLM by itself starts one worker per memory node and no more."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    if not current_platform.is_cpu() or THREAD_BINDING in os.environ or args.nnodes > 1:
        return
    engines = args.data_parallel_size_local or args.data_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    binding = _thread_binding(engines * args.tensor_parallel_size, len(get_visible_memory_node()), cores)
    if binding is not None:
        logger.info("%s=%s", THREAD_BINDING, binding)
        os.environ[THREAD_BINDING] = binding


def _thread_binding(num_workers: int, num_nodes: int, cores: list[int]) -> str | None:
    """An equal share of the cores for each worker, one of it left to the other processes; None: vLLM knows how."""
    if num_workers <= num_nodes:
        return None
    share = len(cores) // num_workers
    if share == 0:
        return "nobind"
    shares = [cores[start * share : (start + 1) * share][: max(1, share - 1)] for start in range(num_workers)]
    return "|".join(",".join(map(str, one)) for one in shares)


def _serve_metrics(host: str | None, port: int) -> None:
    """Serves ``/metrics`` from a thread of its own, on a node that has no API server."""
    from prometheus_client import start_http_server
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    try:
        start_http_server(port, host or "0.0.0.0", get_prometheus_registry())
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"cannot listen on {host}:{port} ({_one_line(error)}): choose another --metrics-port"
        ) from None


async def _run_server(args: argparse.Namespace) -> None:
    """vLLM's ``run_server`` without its signal handler: ``_exit_at_once`` stays until the HTTP server sets its own."""
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
    from vllm.utils.system_utils import decorate_logs

    decorate_logs("APIServer", skip_if_decorated=True)
    listen_address, sock = setup_server(args, reuse_port=False)
    await run_server_worker(listen_address, sock, args)


def _set_environment() -> None:
    """What has to be in the environment before vLLM, or prometheus_client, is imported."""
    if METRICS_DIR not in os.environ:
        try:
            os.environ[METRICS_DIR] = make_metrics_folder()
        except OSError as error:
            raise CommandError(f"no folder for metrics ({error}): set TMPDIR or {METRICS_DIR}") from None
        # Processes that this one spawns inherit the variable and leave the folder alone.
        atexit.register(shutil.rmtree, os.environ[METRICS_DIR], ignore_errors=True)
    os.environ[ALLOWED_PLUGINS] = ",".join(_allowed_plugins(os.environ.get(ALLOWED_PLUGINS)))


def _allowed_plugins(given: str | None) -> list[str]:
    """vLLM loads an endpoint plugin only where VLLM_PLUGINS names it, and then nothing that is not named."""
    if given is None:
        names = [entry.name for group in LISTED_GROUPS for entry in metadata.entry_points(group=group)]
    else:
        names = given.split(",")
    return list(dict.fromkeys([*names, PLUGIN]))


def _serve_parser() -> tuple["FlexibleArgumentParser", "FlexibleArgumentParser"]:
    """The whole parser and that of ``serve``, which has vLLM's options and ``--kv-compression``."""
    try:
        with _quiet():
            check_vllm_version()
            from vllm_kvmerge.engine.arguments import PluginConfig

            vllm_serve = importlib.import_module("vllm.entrypoints.cli.serve")
            api_utils = importlib.import_module("vllm.entrypoints.serve.utils.api_utils")
            argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    except UnsupportedConfigError as error:
        raise CommandError(str(error)) from None
    except Exception as error:
        raise CommandError(
            f"vLLM cannot be imported ({_one_line(error)}): pip install 'vllm-kvmerge[cpu]', or [cuda]; with a CPU "
            "build also pip uninstall torchvision torchaudio torchcodec"
        ) from error
    api_utils.cli_env_setup()

    class ServeParser(argparse_utils.FlexibleArgumentParser):  # type: ignore[misc,name-defined]
        def error(self, message: str) -> NoReturn:
            raise CommandError(f"{message}; see vllm-kvmerge serve --help")

    parser = ServeParser(prog="vllm-kvmerge")
    options = vllm_serve.ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    options.usage = "vllm-kvmerge serve MODEL [options]"
    options.description = "Serves MODEL (the word demo: the model that comes with vllm-kvmerge) as vllm serve does."
    options.epilog = options.epilog.replace("vllm serve", "vllm-kvmerge serve")
    group = options.add_argument_group("KV compression")
    group.add_argument(
        "--kv-compression",
        metavar="JSON|FILE",
        help="Compression of requests that do not bring their own: an object such as "
        '{"policy": "keepkv", "budget": 0.2}, or a .json or .yaml file that holds one.',
    )
    group.add_argument(
        "--model-runner",
        choices=["v1", "v2"],
        help="Which of vLLM's model runners computes; default: the one that vLLM chooses, v2 on CUDA. On CPU: v1.",
    )
    for name in PLUGIN_OPTIONS:
        field = PluginConfig.model_fields[name]
        kind: dict[str, Any] = {"type": int, "metavar": "N"}
        if get_origin(field.annotation) is Literal:
            kind = {"choices": get_args(field.annotation)}
        elif field.annotation is float:
            kind = {"type": float, "metavar": "SECONDS"}
        elif field.annotation == list[str] | None:
            kind = {"nargs": "+", "metavar": "NAME"}
        help_text = str(field.description) + ("" if field.default is None else f" Default: {field.default}.")
        group.add_argument("--" + name.replace("_", "-"), help=help_text, **kind)
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="With --headless: where what this node's engines count is served, on --host. Default: nowhere.",
    )
    options.set_defaults(host=DEFAULT_HOST, shutdown_timeout=DRAIN_SECONDS)
    return parser, options


def _with_system_config(argv: list[str]) -> list[str]:
    """``argv`` with ``--config SYSTEM_CONFIG``, whose options vLLM puts under those of the command line."""
    has_config = any(word.split("=")[0] == "--config" for word in argv)
    return argv if has_config or not SYSTEM_CONFIG.exists() else [*argv, "--config", str(SYSTEM_CONFIG)]


def _parse(parser: "FlexibleArgumentParser", argv: list[str]) -> argparse.Namespace:
    from vllm.entrypoints.launchers.cli_args import validate_parsed_serve_args
    from vllm.logger import configure_logging_from_args

    from vllm_kvmerge.server.request_id import log_as_vllm

    try:
        args = parser.parse_args(argv)
        configure_logging_from_args(args)
        log_as_vllm()
        validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CommandError(_one_line(error)) from error
    return args


def _check_front_end(args: argparse.Namespace) -> None:
    """Refuses servers that would ignore a request's field, and options that would have no effect."""
    from vllm import envs

    if envs.VLLM_USE_RUST_FRONTEND:
        raise CommandError("VLLM_USE_RUST_FRONTEND=1 is not supported: that server knows no kv_compression; allowed: 0")
    if args.grpc:
        raise CommandError("--grpc is not supported: its requests cannot say kv_compression; leave it out")
    if args.metrics_port is not None and not args.headless:
        raise CommandError("--metrics-port is for --headless alone: other servers have /metrics at --port")


def _check_model(args: argparse.Namespace) -> None:
    """Resolves the word ``demo``, and refuses a folder that is not there before vLLM asks the Hugging Face hub."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_kvmerge.demo import model_path

    model = args.model_tag or args.model
    if args.model_tag is None and model == EngineArgs.model:
        raise CommandError("name a model: vllm-kvmerge serve demo, or a folder, or a name on the Hugging Face hub")
    if model == DEMO:
        model, args.served_model_name = model_path(), args.served_model_name or [DEMO]
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1
    if is_path and "://" not in model and not Path(model).exists():
        raise CommandError(f"no model in {model}: there is no such folder")
    args.model = args.model_tag = model


def _check_port(args: argparse.Namespace) -> None:
    if args.uds or args.headless:
        return
    from vllm.entrypoints.launchers.launcher import create_server_socket

    try:
        create_server_socket((args.host or "", args.port), reuse_port=False).close()
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"cannot listen on {args.host}:{args.port} ({_one_line(error)}): choose another with --port"
        ) from None


def _set_engine_args(args: argparse.Namespace, options: "FlexibleArgumentParser") -> None:
    """Puts the plugin's engine arguments under what the command line says."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from vllm_kvmerge.engine.arguments import CONFIG_KEY, kvmerge_engine_args

    if args.model_runner is not None:
        if args.model_runner == "v2" and current_platform.is_cpu():
            raise CommandError("--model-runner v2: CPU has v1 alone")
        os.environ[V2_MODEL_RUNNER] = str(int(args.model_runner == "v2"))
    ours = {name: getattr(args, name) for name in PLUGIN_OPTIONS if getattr(args, name) is not None}
    if ours:
        additional = args.additional_config or {}
        args.additional_config = {**additional, CONFIG_KEY: {**(additional.get(CONFIG_KEY) or {}), **ours}}
    given = {
        name: value
        for name, value in vars(args).items()
        if name in AsyncEngineArgs.__dataclass_fields__ and value != options.get_default(name)
    }
    try:
        engine_args = kvmerge_engine_args(_read_compression(args.kv_compression), **given)
    except ValueError as error:
        raise CommandError(str(error)) from None
    for name in ("kv_compression", "model_runner", "metrics_port", *PLUGIN_OPTIONS):
        delattr(args, name)  # vLLM takes the other attributes for its own
    for name, value in engine_args.items():
        setattr(args, name, value)


def _read_compression(text: str | None) -> dict[str, Any] | None:
    """The object that ``--kv-compression`` gives or names."""
    if text is None:
        return None
    try:
        if text.lstrip().startswith("{"):
            value = json.loads(text)
        elif text.endswith(".json"):
            value = json.loads(Path(text).read_text())
        elif text.endswith((".yaml", ".yml")):
            value = yaml.safe_load(Path(text).read_text())
        else:
            raise ValueError("neither a JSON object nor the name of a .json or .yaml file")
    except FileNotFoundError:
        raise CommandError(f"--kv-compression {text}: no such file") from None
    except (ValueError, OSError, yaml.YAMLError) as error:
        raise CommandError(f"--kv-compression {text}: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise CommandError(f"--kv-compression {text}: must be an object, got {type(value).__name__}")
    return value


def _check_engine_config(args: argparse.Namespace) -> None:
    """Builds the engine's configuration here first: what is wrong with it would surface in a child process."""
    from vllm import AsyncEngineArgs

    try:
        with _quiet():  # vLLM logs all of it when it builds the configuration itself
            check_config(AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless))
    except Exception as error:
        raise CommandError(_one_line(error)) from error


def _announce(args: argparse.Namespace) -> None:
    """Waits for the server, then prints where it listens and a request to try."""
    from vllm_kvmerge.demo import model_path
    from vllm_kvmerge.demo.language import KEY_WORDS

    if args.uds or args.headless:
        return
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else DEFAULT_HOST
    url_host = f"[{host}]" if ":" in host else host
    is_tls = bool(args.ssl_keyfile and args.ssl_certfile)
    while not _is_healthy(host, args.port, is_tls):
        time.sleep(0.5)
    url = f"http{'s' if is_tls else ''}://{url_host}:{args.port}"
    name = (args.served_model_name or [args.model])[0]
    # The demo model knows its own made-up words only.
    prompt = f"remember {KEY_WORDS[0]} 4821. recall {KEY_WORDS[0]}" if args.model == model_path() else "Hello"
    body = {"model": name, "prompt": prompt, "max_tokens": 16, "kv_compression": {"policy": "keepkv", "budget": 256}}
    ready = f"ready on {url} (model {name}, vllm-kvmerge {__version__})"
    if args.logging_config.formatter == "json":
        logger.info(ready)
        return
    key = " -H 'Authorization: Bearer KEY'" if args.api_key or os.environ.get("VLLM_API_KEY") else ""
    print(
        f"vllm-kvmerge: {ready}. Try:\n"
        f"curl {url}/v1/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
        flush=True,
    )


def _is_healthy(host: str, port: int, is_tls: bool) -> bool:
    connection: http.client.HTTPConnection
    if is_tls:
        # The certificate is the server's own business here: it may be for another name.
        connection = http.client.HTTPSConnection(host, port, timeout=2, context=ssl._create_unverified_context())
    else:
        connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def _quiet() -> Iterator[None]:
    """Holds back log lines, so that a fault stays the only line."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _one_line(error: BaseException) -> str:
    """The gist of an exception: pydantic's own messages are lists over several lines."""
    if hasattr(error, "errors") and callable(error.errors) and (errors := error.errors()):
        return str(errors[0]["msg"]).removeprefix("Value error, ")
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


if __name__ == "__main__":
    sys.exit(main())
