"""Entry points that vLLM finds in every server of an environment where the package is installed."""

import logging
import os
import sys
from argparse import Namespace

logger = logging.getLogger(__name__)


def register() -> None:
    """Entry point ``kvmerge`` of ``vllm.general_plugins``, which vLLM calls in every process of every server.

    Where the engine's ``additional_config`` has an object ``kvmerge``, compression is on, and everything else that it
    takes is filled in: ``vllm serve`` goes on as ``vllm-kvmerge serve``. Everywhere else vLLM stays as it is, except
    that its server refuses the field ``kv_compression`` instead of ignoring it.
    """
    if "vllm.engine.arg_utils" not in sys.modules:
        return  # neither a server nor an engine is set up in this process
    try:
        from vllm_kvmerge.engine import compat
        from vllm_kvmerge.engine.arguments import complete
        from vllm_kvmerge.server.refusal import refuse_field

        compat.complete_engine_args(complete)
        compat.delegate_serve(_serve)
        compat.after_endpoints(refuse_field)
    except Exception:  # of a release of vLLM that is not supported, whose servers must run all the same
        logger.exception("vllm-kvmerge cannot be switched on by additional_config in this release of vLLM")


def _serve(args: Namespace) -> None:
    """Goes on as ``vllm-kvmerge serve`` in the same process if that is asked for: metrics and exit statuses depend on
    what happens before vLLM is imported."""
    from vllm_kvmerge.engine.arguments import is_asked

    argv = sys.argv[1:]
    if argv[:1] != ["serve"] or not is_asked(args.additional_config):
        return
    if args.host is None and not args.uds:
        argv += ["--host", "0.0.0.0"]
    argv += ["--shutdown-timeout", str(args.shutdown_timeout)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "vllm_kvmerge.cli", *argv])
