"""``vllm-kvmerge serve``: vLLM's server with compression switched on."""

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

from vllm_kvmerge import __version__
from vllm_kvmerge.cli import health
from vllm_kvmerge.cli.arguments import read_arguments, set_environment
from vllm_kvmerge.cli.common import one_line
from vllm_kvmerge.cli.memory import fit_memory
from vllm_kvmerge.demo import model_path
from vllm_kvmerge.errors import CommandError

REQUEST_ID_MIDDLEWARE = "vllm_kvmerge.server.request_id.RequestIdMiddleware"
THREAD_BINDING = "VLLM_CPU_OMP_THREADS_BIND"

logger = logging.getLogger("vllm_kvmerge.server")


def run(argv: list[str]) -> int:
    """Runs vLLM's server with the plugin's engine arguments.

    Returns the exit status: 0 if the server was told to stop, 1 if it stopped by itself. Raises CommandError if it
    cannot be started with these arguments.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _exit_at_once)
    set_environment()
    args, metrics_port = read_arguments(argv, needs_port=True)
    _bind_threads(args)
    if metrics_port is not None:
        _serve_metrics(args.host, metrics_port)
    if args.headless and metrics_port is not None:
        health.announce(args.host, metrics_port, is_tls=False)  # answers any path
    elif not args.uds:
        health.announce(args.host, args.port, is_tls=_speaks_tls(args))
    fit_memory(args)
    args.middleware = [*args.middleware, REQUEST_ID_MIDDLEWARE]
    threading.Thread(target=_announce, args=(args,), daemon=True).start()
    from vllm.entrypoints.cli import serve as vllm_serve

    from vllm_kvmerge.engine import compat
    from vllm_kvmerge.engine.processes import first_error

    compat.install_server()
    try:
        vllm_serve.ServeSubcommand.cmd(args)
    except Exception as error:
        # The engine's processes have logged their traceback by now.
        reason = one_line(error)
        if "initialization failed" in reason:
            reason = first_error() or reason
        print("vllm-kvmerge: the server stopped:", reason, file=sys.stderr)
        return 1
    return 0


def _exit_at_once(number: int, _: Any) -> NoReturn:
    """Handles signals until the server is up; from then on vLLM shuts it down cleanly."""
    sys.exit(128 + number)


def _bind_threads(args: argparse.Namespace) -> None:
    """Gives each worker its own cores on CPU, where vLLM's own binding supports one worker per memory node."""
    from vllm.platforms import current_platform
    from vllm.utils.cpu_resource_utils import get_visible_memory_node

    if not current_platform.is_cpu() or THREAD_BINDING in os.environ or args.nnodes > 1:
        return
    engines = args.data_parallel_size_local or args.data_parallel_size
    cores = sorted(os.sched_getaffinity(0))
    binding = thread_binding(engines * args.tensor_parallel_size, len(get_visible_memory_node()), cores)
    if binding is not None:
        logger.info("%s=%s", THREAD_BINDING, binding)
        os.environ[THREAD_BINDING] = binding


def thread_binding(num_workers: int, num_nodes: int, cores: list[int]) -> str | None:
    """An equal share of the cores for each worker, with one core of each share left to other processes; None if vLLM's
    own binding works."""
    if num_workers <= num_nodes:
        return None
    share = len(cores) // num_workers
    if share == 0:
        return "nobind"
    shares = [cores[start * share : (start + 1) * share][: max(1, share - 1)] for start in range(num_workers)]
    return "|".join(",".join(map(str, one)) for one in shares)


def _serve_metrics(host: str | None, port: int) -> None:
    """Serves ``/metrics`` from a thread, on a node without an API server."""
    from prometheus_client import start_http_server
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    try:
        start_http_server(port, host or "0.0.0.0", get_prometheus_registry())
    except (OSError, OverflowError) as error:
        raise CommandError(
            f"cannot listen on {host}:{port} ({one_line(error)}): choose another --metrics-port"
        ) from None


def _speaks_tls(args: argparse.Namespace) -> bool:
    return bool(args.ssl_keyfile and args.ssl_certfile)


def _announce(args: argparse.Namespace) -> None:
    """Waits for the server, then prints its URL and an example request."""
    if args.uds or args.headless:
        return
    host = health.reachable(args.host)
    url_host = f"[{host}]" if ":" in host else host
    is_tls = _speaks_tls(args)
    while not health.is_healthy(host, args.port, is_tls):
        time.sleep(0.5)
    url = f"http{'s' if is_tls else ''}://{url_host}:{args.port}"
    name = (args.served_model_name or [args.model])[0]
    prompt = "seq 1 400 | tr '\\n' ' '"
    if args.model == model_path():  # which knows its own made-up words alone
        prompt = f"{sys.executable} -m vllm_kvmerge.demo.recall --length 1000 --facts 16"
    ready = f"ready on {url} (model {name}, vllm-kvmerge {__version__})"
    if args.logging_config.formatter == "json":
        logger.info(ready)
        return
    key = " -H 'Authorization: Bearer KEY'" if args.api_key or os.environ.get("VLLM_API_KEY") else ""
    body = {"model": name, "max_tokens": 8, "temperature": 0, "kv_compression": {"budget": 0.25}}
    print(
        f"vllm-kvmerge: {ready}. Try it; usage.kv_compression of the answer says what became of the cache:",
        f"PROMPT=$({prompt})",
        f"curl -s {url}/v1/completions{key} -H 'Content-Type: application/json' \\",
        f'  -d \'{json.dumps(body)[:-1]}, "prompt": "\'"$PROMPT"\'"}}\'',
        sep="\n",
        flush=True,
    )
