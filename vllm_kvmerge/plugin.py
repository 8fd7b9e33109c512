"""Entry points that vLLM finds in every server of an environment where the package is installed."""

import logging
import os
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastapi import FastAPI
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.protocol import EngineClient

PLUGIN = "kvmerge"
"""Our part of ``additional_config``, and what our endpoint marks the application's state with."""

API_SERVER = "vllm.entrypoints.openai.api_server"
"""The module whose name is a command of vLLM's, beside ``vllm serve``."""

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``kvmerge`` of ``vllm.general_plugins``, which vLLM calls in every process of every server.

    Where the engine's ``additional_config`` has an object ``kvmerge``, compression is on, and everything else that it
    takes is filled in: vLLM's commands that start a server go on as ``vllm-kvmerge serve``. Everywhere else vLLM stays
    as it is, except that its server refuses the field ``kv_compression`` instead of ignoring it.
    """
    try:
        from vllm_kvmerge.engine import compat

        compat.complete_engine_args(_complete)
        compat.delegate_serve(_serve)
        compat.after_endpoints(_refuse)
    except Exception:  # of a release of vLLM that is not supported, whose servers must run all the same
        logger.exception("vllm-kvmerge cannot be switched on by additional_config in this release of vLLM")


def _is_asked(additional_config: Any) -> bool:
    # What decides it is imported where it is needed: stock servers shall not wait for it.
    return isinstance(additional_config, dict) and additional_config.get(PLUGIN) is not None


def _complete(engine_args: "EngineArgs") -> None:
    """Fills in what compression takes if that is asked for; by now the command, if it is ``run-batch``, is imported."""
    from vllm_kvmerge.engine import compat

    compat.pass_batch_files(_start_batch_files)
    if _is_asked(engine_args.additional_config):
        from vllm_kvmerge.engine.arguments import complete

        complete(engine_args)


def _refuse(app: "FastAPI") -> None:
    """Refuses the field where no endpoint of ours reads it."""
    if PLUGIN not in app.state._state:
        from vllm_kvmerge.server.refusal import refuse_field

        refuse_field(app)


async def _start_batch_files(engine_client: "EngineClient") -> Any:
    from vllm_kvmerge.server.batch_file import start

    return await start(engine_client)


def _serve(args: Namespace) -> None:
    """Goes on as ``vllm-kvmerge serve`` in the same process if that is asked for: metrics and exit statuses depend on
    what happens before vLLM is imported."""
    argv = sys.argv[1:]
    if getattr(sys.modules["__main__"].__spec__, "name", None) == API_SERVER:
        argv = ["serve", *argv]
    if argv[:1] != ["serve"] or not _is_asked(args.additional_config):
        return
    if args.host is None and not args.uds:
        argv += ["--host", "0.0.0.0"]
    argv += ["--shutdown-timeout", str(args.shutdown_timeout)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vllm_kvmerge.cli", *argv])
