"""The request field ``kv_compression``: parameters, schema, catalogue, and limits on its cost."""

from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY as EXTRA_ARGS_KEY
from vllm_kvmerge.request.parameters import FULL as FULL
from vllm_kvmerge.request.parameters import CompressionConfig as CompressionConfig
from vllm_kvmerge.request.parameters import CompressionError as CompressionError
from vllm_kvmerge.request.parameters import compression as compression
from vllm_kvmerge.request.parameters import parse_compression as parse_compression
from vllm_kvmerge.request.parameters import request_schema as request_schema
