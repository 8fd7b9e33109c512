"""The engine arguments that switch compression on in vLLM."""

import json
from typing import Any

from vllm_kvmerge.config import EXTRA_ARGS_KEY, CompressionError, parse_compression
from vllm_kvmerge.kernels import OPERATORS
from vllm_kvmerge.kernels.choice import check_overrides
from vllm_kvmerge.support import UnsupportedConfigError, check_options

WORKER_CLS = "vllm_kvmerge.worker.worker.KVMergeWorker"
SCHEDULER_CLS = "vllm_kvmerge.cache.scheduler.KVMergeScheduler"
VALIDATOR = "vllm_kvmerge.server.validation:CompressionValidator"
CONFIG_KEY = "kvmerge"
"""The plugin's part of vLLM's ``additional_config``: its ``default`` compresses requests that do not say how; its
``operators`` names implementations of operators to run instead of those in ``kernels/choice.json``."""

BLOCK_SIZE = 32


def kvmerge_engine_args(kv_compression: dict[str, Any] | str | None = None, **overrides: Any) -> dict[str, Any]:
    """``LLM(model, **kvmerge_engine_args())``: what vLLM needs to compress per request.

    kv_compression: compression of requests that do not bring their own (an object or its JSON text); default: none.
    overrides: any other engine argument; what is given here wins over the plugin's own choice.

    Raises:
        CompressionError: kv_compression is not valid (a ValueError, like the next).
        UnsupportedConfigError: an override does not work with compression.
    """
    check_options(overrides)
    overrides["additional_config"] = _with_default(overrides.get("additional_config"), kv_compression)
    processors = list(overrides.get("logits_processors") or [])
    overrides["logits_processors"] = processors if VALIDATOR in processors else [*processors, VALIDATOR]
    return {"worker_cls": WORKER_CLS, "scheduler_cls": SCHEDULER_CLS, "block_size": BLOCK_SIZE} | overrides


def _with_default(
    additional_config: dict[str, Any] | None, kv_compression: dict[str, Any] | str | None
) -> dict[str, Any]:
    """``additional_config`` with the validated default in the plugin's part of it."""
    ours = dict((additional_config or {}).get(CONFIG_KEY) or {})
    given = ours.get("default")
    if given is not None and kv_compression is not None:
        raise UnsupportedConfigError(
            f"additional_config.{CONFIG_KEY}.default={given} is not supported together with {EXTRA_ARGS_KEY}; give one"
        )
    default = given if kv_compression is None else kv_compression
    config = parse_compression(default)
    if config is not None and config.context_tokens is not None:
        raise CompressionError(
            f"{EXTRA_ARGS_KEY}.context_tokens",
            f"{config.context_tokens} cannot be a default, because prompts differ; allowed: in a request",
            "not_a_default",
        )
    try:
        check_overrides(ours.get("operators") or {}, OPERATORS)
    except ValueError as error:
        raise UnsupportedConfigError(f"additional_config.{CONFIG_KEY}.operators: {error}") from error
    if isinstance(default, str):
        default = json.loads(default)
    return {**(additional_config or {}), CONFIG_KEY: ours | {"default": default}}
