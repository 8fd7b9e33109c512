"""Arguments of ``vllm-kvmerge serve``, vLLM's and the plugin's: read and checked before an engine starts."""

import argparse
import atexit
import importlib
import json
import os
import shutil
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, get_args, get_origin

import yaml

from vllm_kvmerge.cli.common import check_folder, one_line, quiet
from vllm_kvmerge.cli.health import DEFAULT_HOST
from vllm_kvmerge.demo import head_budgets_path, kvzap_path, model_path, named
from vllm_kvmerge.engine.processes import METRICS_DIR, make_metrics_folder
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config, check_vllm_version, hidden_states_obstacle
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.shipped import shipped

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

EXAMPLE_PROMPTS = "vllm_kvmerge.demo.recall:draw_example"
DRAIN_SECONDS = 30
"""Default of --shutdown-timeout: seconds that a server that is told to stop has to finish its requests."""

SYSTEM_CONFIG = Path("/etc/vllm-kvmerge/serve.yaml")
"""Options of ``serve`` for a whole machine or image; read unless --config names another file."""

PLUGIN = "kvmerge"
ALLOWED_PLUGINS = "VLLM_PLUGINS"
V2_MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
LISTED_GROUPS = ("general_plugins", "platform_plugins", "io_processor_plugins", "stat_logger_plugins")
"""Entry point groups from which vLLM loads all plugins while VLLM_PLUGINS is unset."""

PLUGIN_OPTIONS = (
    "allowed_policies",
    "max_compaction_bytes",
    "compaction_workspace_bytes",
    "max_compaction_seconds",
    "external_cache_bytes",
    "external_cache_dir",
    "contexts_dir",
    "contexts_dir_bytes",
    "kvzap",
    "head_budgets",
    "api_key_routes",
    "max_body_bytes",
    "verify_share",
    "verify_max_tokens",
    "verify_seconds",
)
"""Fields of PluginConfig that are also options."""

OPTION_NAMES = {"contexts_dir": "--kvmerge-contexts", "contexts_dir_bytes": "--kvmerge-contexts-bytes"}
"""Names of options that are not their fields'."""


def set_environment() -> None:
    """Sets the variables that vLLM and prometheus_client read when they are imported."""
    if METRICS_DIR not in os.environ:
        try:
            os.environ[METRICS_DIR] = make_metrics_folder()
        except OSError as error:
            raise CommandError(f"no folder for metrics ({error}): set TMPDIR or {METRICS_DIR}") from None
        # Processes that this one spawns inherit the variable and leave the folder alone.
        atexit.register(shutil.rmtree, os.environ[METRICS_DIR], ignore_errors=True)
    os.environ[ALLOWED_PLUGINS] = ",".join(allowed_plugins(os.environ.get(ALLOWED_PLUGINS)))


def allowed_plugins(given: str | None) -> list[str]:
    """VLLM_PLUGINS with this plugin: vLLM loads endpoint plugins only by name, and no plugin that the list omits."""
    if given is None:
        names = [entry.name for group in LISTED_GROUPS for entry in metadata.entry_points(group=f"vllm.{group}")]
    else:
        names = given.split(",")
    return list(dict.fromkeys([*names, PLUGIN]))


def read_arguments(argv: list[str], needs_port: bool) -> tuple[argparse.Namespace, int | None]:
    """Arguments for vLLM's ``serve`` with the plugin's engine arguments, and the value of --metrics-port.

    argv: the words after ``serve``. needs_port: whether a port that is in use is an error. Raises CommandError.
    """
    args, options = parse(argv)
    _check_tables()
    _check_front_end(args)
    _check_model(args)
    if needs_port:
        _check_port(args)
    metrics_port = args.metrics_port
    _set_engine_args(args, options)
    _check_engine_config(args)
    return args, metrics_port


def parse(argv: list[str]) -> tuple[argparse.Namespace, "FlexibleArgumentParser"]:
    """Arguments as vLLM validates them, the system's configuration included, and the parser of ``serve``'s options."""
    parser, options = _serve_parser()
    from vllm.logger import configure_logging_from_args

    from vllm_kvmerge.engine.compat import log_as_vllm, moved

    has_config = any(word.split("=")[0] == "--config" for word in argv)
    # The command line's own options win over the file's.
    system_config = [] if has_config or not SYSTEM_CONFIG.exists() else ["--config", str(SYSTEM_CONFIG)]
    _check_config_files([*argv, *system_config])
    try:
        args = parser.parse_args(["serve", *argv, *system_config])
        configure_logging_from_args(args)
        log_as_vllm()
        moved("cli_args").validate_parsed_serve_args(args)
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CommandError(one_line(error)) from error
    return args, options


def _check_config_files(argv: list[str]) -> None:
    """Refuses files of options that vLLM's parser would fail on, or whose errors it would log without their name."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        option, _, path = word.partition("=")
        if option == "--config" and (path or following):
            read_object(option, path or following)


def _serve_parser() -> tuple["FlexibleArgumentParser", "FlexibleArgumentParser"]:
    """The whole parser, and the one of ``serve`` with vLLM's options and the plugin's."""
    try:
        with quiet():
            check_vllm_version()
            from vllm_kvmerge.engine.arguments import PluginConfig
            from vllm_kvmerge.engine.compat import moved

            vllm_serve = importlib.import_module("vllm.entrypoints.cli.serve")
            startup = moved("startup")
            argparse_utils = importlib.import_module("vllm.utils.argparse_utils")
    except UnsupportedConfigError as error:
        raise CommandError(str(error)) from None
    except Exception as error:
        raise CommandError(
            f"vLLM cannot be imported ({one_line(error)}): pip install 'vllm-kvmerge[cpu]', or [cuda]; with a CPU "
            "build also pip uninstall torchvision torchaudio torchcodec"
        ) from error
    startup.cli_env_setup()

    class ServeParser(argparse_utils.FlexibleArgumentParser):  # type: ignore[misc,name-defined]
        def error(self, message: str) -> NoReturn:
            raise CommandError(f"{message}; see vllm-kvmerge serve --help")

    parser = ServeParser(prog="vllm-kvmerge")
    options = vllm_serve.ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    options.usage = "vllm-kvmerge serve MODEL [options]"
    options.description = (
        "Serves MODEL as vllm serve does: a folder, a name on the Hugging Face hub, smollm2 (a small language model), "
        "or demo (a tiny one of made-up words, which comes with vllm-kvmerge)."
    )
    options.epilog = options.epilog.replace("vllm serve", "vllm-kvmerge serve")
    group = options.add_argument_group("KV compression", "What vllm-kvmerge adds: --help='KV compression'.")
    options._action_groups.insert(0, options._action_groups.pop())  # vLLM's are thirty
    group.add_argument(
        "--kv-compression",
        metavar="JSON|FILE",
        help="Compression of requests that do not bring their own: an object such as "
        '{"budget": 0.25}, or a .json or .yaml file that holds one.',
    )
    group.add_argument(
        "--model-runner",
        choices=["v1", "v2"],
        help="vLLM's model runner; default: the one that vLLM chooses, v2 on CUDA. On CPU: v1.",
    )
    for name in PLUGIN_OPTIONS:
        field = PluginConfig.model_fields[name]
        kind: dict[str, Any] = {"type": int, "metavar": "N"}
        if get_origin(field.annotation) is Literal:
            kind = {"choices": get_args(field.annotation)}
        elif field.annotation == str | None:
            kind = {"type": str, "metavar": "DIR" if name.endswith("_dir") else "MODEL"}
        elif field.annotation is float:
            kind = {"type": float, "metavar": "SHARE" if name.endswith("_share") else "SECONDS"}
        elif field.annotation == list[str] | None:
            kind = {"nargs": "+", "metavar": "NAME"}
        help_text = " ".join(str(field.description).split())
        help_text += "" if field.default is None else f" Default: {field.default}."
        option = OPTION_NAMES.get(name, "--" + name.replace("_", "-"))
        group.add_argument(option, dest=name, help=help_text, **kind)
    group.add_argument(
        "--metrics-port",
        type=int,
        metavar="PORT",
        help="With --headless: port on --host where this node serves its engines' metrics. Default: none.",
    )
    options.set_defaults(host=DEFAULT_HOST, shutdown_timeout=DRAIN_SECONDS)
    return parser, options


def _check_tables() -> None:
    """Refuses broken files of the package: they would end the engine, or fail requests."""
    from vllm.platforms import current_platform

    from vllm_kvmerge.ops import choice
    from vllm_kvmerge.request.recommended import recommendations

    try:
        recommendations()
        choice.rules()
        if current_platform.is_cuda():  # there is Triton
            importlib.import_module("vllm_kvmerge.ops.triton.tuning").rules()
    except ValueError as error:
        raise CommandError(f"{error}; it comes with vllm-kvmerge: install that again") from None


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
    """Resolves names that commands know, and refuses a missing folder."""
    from vllm.engine.arg_utils import EngineArgs

    model = args.model_tag or args.model
    if args.model_tag is None and model == EngineArgs.model:
        raise CommandError("name a model: vllm-kvmerge serve smollm2, or a folder, or a name on the Hugging Face hub")
    path = named(model)
    if path != model:
        args.served_model_name = args.served_model_name or [model]
    check_folder(path)
    args.model = args.model_tag = path


def _check_port(args: argparse.Namespace) -> None:
    if args.uds or args.headless:
        return
    from vllm.entrypoints.launchers.launcher import create_server_socket

    try:
        create_server_socket((args.host or "", args.port), reuse_port=False).close()
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"cannot listen on {args.host}:{args.port} ({one_line(error)}): choose another with --port"
        ) from None


def _set_engine_args(args: argparse.Namespace, options: "FlexibleArgumentParser") -> None:
    """Adds the plugin's engine arguments; those of the command line win."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    from vllm_kvmerge.engine.arguments import CONFIG_KEY, kvmerge_engine_args

    if args.model_runner is not None:
        if args.model_runner == "v2" and current_platform.is_cpu():
            raise CommandError("--model-runner v2: CPU has v1 alone")
        os.environ[V2_MODEL_RUNNER] = str(int(args.model_runner == "v2"))
    ours = {name: getattr(args, name) for name in PLUGIN_OPTIONS if getattr(args, name) is not None}
    if (known := head_budgets_path(ours.get("head_budgets", ""))) is not None:
        ours["head_budgets"] = known
    if args.model == model_path():
        ours["example_prompts"] = EXAMPLE_PROMPTS
        if args.enforce_eager:
            ours.setdefault("kvzap", kvzap_path())
    if ours:
        additional = args.additional_config or {}
        args.additional_config = {**additional, CONFIG_KEY: {**(additional.get(CONFIG_KEY) or {}), **ours}}
    given = {
        name: value
        for name, value in vars(args).items()
        if name in AsyncEngineArgs.__dataclass_fields__ and value != options.get_default(name)
    }
    try:
        engine_args = kvmerge_engine_args(read_compression(args.kv_compression), **given)
    except ValueError as error:
        raise CommandError(str(error)) from None
    for name in ("kv_compression", "model_runner", "metrics_port", *PLUGIN_OPTIONS):
        delattr(args, name)  # vLLM takes all attributes for its own
    for name, value in engine_args.items():
        setattr(args, name, value)


def read_compression(text: str | None) -> dict[str, Any] | None:
    """The object given by ``--kv-compression``, as JSON or as the name of a file."""
    if text is None:
        return None
    option = "--kv-compression"
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except ValueError as error:
            raise CommandError(f"{option} {text}: {one_line(error)}") from None
    if not text.endswith((".json", ".yaml", ".yml")):
        raise CommandError(f"{option} {text}: neither a JSON object nor the name of a .json or .yaml file")
    return read_object(option, text)


def read_object(option: str, name: str) -> dict[str, Any]:
    """The object in a .json or .yaml file, of the package if need be. option: what names it, for errors.

    Raises CommandError.
    """
    try:
        text = shipped(name).read_text()
        value = json.loads(text) if name.endswith(".json") else yaml.safe_load(text)
    except (ValueError, OSError, yaml.YAMLError) as error:
        reason = str(error.strerror).lower() if isinstance(error, OSError) else " ".join(str(error).split())
        raise CommandError(f"{option} {name}: {reason}") from None
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise CommandError(f"{option} {name}: must be an object with names, got {type(value).__name__}")
    return value


def _check_engine_config(args: argparse.Namespace) -> None:
    """Builds the engine's configuration once in this process: its errors would otherwise surface in a child process."""
    from vllm import AsyncEngineArgs

    from vllm_kvmerge.engine.arguments import plugin_config
    from vllm_kvmerge.engine.head_budgets import check_head_budgets
    from vllm_kvmerge.engine.surrogate import check_surrogate

    try:
        with quiet():  # vLLM logs all of it when it builds the configuration itself
            config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=args.headless)
            check_config(config)
            if (surrogate := plugin_config(config).kvzap) is not None:
                check_surrogate(surrogate, config.model_config)
                if (obstacle := hidden_states_obstacle(config)) is not None:
                    raise UnsupportedConfigError(
                        f"kvzap={surrogate} is not supported: hidden states cannot be seen, because the server "
                        f"{obstacle}; allowed: with --enforce-eager"
                    )
            if (head_budgets := plugin_config(config).head_budgets) is not None:
                check_head_budgets(head_budgets, config.model_config)
    except Exception as error:
        raise CommandError(one_line(error)) from error
