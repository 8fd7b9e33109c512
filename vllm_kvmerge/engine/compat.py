"""What vLLM's server and the processes that it starts do first, and how it ends when its engine has died."""

import importlib
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from vllm_kvmerge.engine.processes import end_with_parent

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

_originals: dict[str, Callable[..., Any]] = {}
"""vLLM's functions that ``prepare`` has replaced, in the process that did so and those forked from it."""


class EngineDiedError(RuntimeError):
    """The engine is gone though nobody stopped the server."""


@cache
def prepare() -> None:
    """Makes vLLM's server fail when its engine has died, and its processes end with their parent.

    vLLM starts processes with functions of its own and gives no hook that all of them pass, and ends in good order,
    with status 0, when an engine has died. A hook at the start of each process, and a status that tells, would make
    this unnecessary.
    """
    importlib.import_module("vllm_kvmerge.engine.metrics")
    utils = importlib.import_module("vllm.v1.utils")
    core = importlib.import_module("vllm.v1.engine.core")
    coordinator = importlib.import_module("vllm.v1.engine.coordinator")
    serve: Any = importlib.import_module("vllm.entrypoints.cli.serve")
    _replace(utils, run_api_server_worker_proc)
    _replace(core.EngineCoreProc, run_engine_core)
    _replace(coordinator.DPCoordinatorProc, run_coordinator)
    _fail_when_engine_dies()

    class EngineProcesses(serve.CoreEngineProcManager):  # type: ignore[misc]
        def monitor_engine_liveness(self) -> None:
            super().monitor_engine_liveness()
            if self.failed_proc_name is not None:
                raise EngineDiedError(_fate(self))

    serve.CoreEngineProcManager = EngineProcesses


def _replace(owner: Any, ours: Callable[..., Any]) -> None:
    _originals.setdefault(ours.__name__, getattr(owner, ours.__name__))
    setattr(owner, ours.__name__, staticmethod(ours) if isinstance(owner, type) else ours)


def _begin() -> None:
    end_with_parent()
    # Before vLLM makes a metric.
    importlib.import_module("vllm_kvmerge.engine.metrics")


def run_api_server_worker_proc(*args: Any, **kwargs: Any) -> None:
    """vLLM's, for one of several API servers."""
    _begin()
    _fail_when_engine_dies()
    utils = importlib.import_module("vllm.v1.utils")
    _originals.get("run_api_server_worker_proc", utils.run_api_server_worker_proc)(*args, **kwargs)


def run_engine_core(*args: Any, **kwargs: Any) -> None:
    """vLLM's, for an engine core."""
    _begin()
    core = importlib.import_module("vllm.v1.engine.core")
    _originals.get("run_engine_core", core.EngineCoreProc.run_engine_core)(*args, **kwargs)


def run_coordinator(*args: Any, **kwargs: Any) -> None:
    """vLLM's, for the process between several engines and API servers."""
    _begin()
    coordinator = importlib.import_module("vllm.v1.engine.coordinator")
    _originals.get("run_coordinator", coordinator.DPCoordinatorProc.run_coordinator)(*args, **kwargs)


def _fail_when_engine_dies() -> None:
    """Makes an API server raise EngineDiedError where vLLM's ends as if it had been told to."""
    entry: Any = importlib.import_module("vllm.entrypoints.launchers.api_server.entry")
    build_and_serve = entry.build_and_serve

    @wraps(build_and_serve)
    async def serve_or_fail(engine_client: "EngineClient", *args: Any, **kwargs: Any) -> Any:
        was_told = False
        shut_down = engine_client.shutdown

        @wraps(shut_down)
        def shutdown(timeout: float | None = None) -> None:
            nonlocal was_told
            was_told = True
            shut_down(timeout=timeout)

        # The launcher calls it before it stops the HTTP server, and only if it was signalled.
        engine_client.shutdown = shutdown  # type: ignore[method-assign]
        ended = await build_and_serve(engine_client, *args, **kwargs)
        if engine_client.errored and not was_told:
            ended.close()
            resources = getattr(getattr(engine_client, "engine_core", None), "resources", None)
            raise EngineDiedError(_fate(getattr(resources, "engine_manager", None)))
        return ended

    entry.build_and_serve = serve_or_fail


def _fate(manager: Any) -> str:
    """What became of the engine's processes, as far as their parent knows."""
    ended = manager.finished_procs() if manager is not None else {}
    processes = ", ".join(f"{name} with exit code {code}" for name, code in ended.items())
    return f"the engine has died ({processes or 'its log says why'})"
