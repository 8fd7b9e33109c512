"""KV cache compression per request for stock vLLM."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_kvmerge.engine.arguments import kvmerge_engine_args
    from vllm_kvmerge.request.spec import compression

__version__ = "0.1.0"
__all__ = ["__version__", "compression", "kvmerge_engine_args"]

_HOME = {"compression": "vllm_kvmerge.request.spec", "kvmerge_engine_args": "vllm_kvmerge.engine.arguments"}


def __getattr__(name: str) -> Any:
    # vLLM imports this package in every process that loads plugins: PyTorch and the policies wait until they are used.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
