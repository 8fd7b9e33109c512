"""The request field ``kv_compression``: its parameters, its schema, what it may name, and what it may cost."""

from vllm_kvmerge.request.parameters import (
    EXTRA_ARGS_KEY,
    FULL,
    CompressionConfig,
    CompressionError,
    compression,
    parse_compression,
    request_schema,
)

__all__ = [
    "EXTRA_ARGS_KEY",
    "FULL",
    "CompressionConfig",
    "CompressionError",
    "compression",
    "parse_compression",
    "request_schema",
]
