"""Keys by which a request asks for, and a response reports, the contents of its KV cache."""

from dataclasses import dataclass

from vllm_kvmerge.ops.coded import Coding

USAGE_KEY = "kvmerge_usage"
"""Key in ``SamplingParams.extra_args`` (``vllm_xargs`` of a body): a true value asks for a report at the end."""

STREAM = "stream"
"""Value of ``USAGE_KEY`` that asks for sizes with every output as well."""

REPORT_KEY = "kvmerge"
"""Key of the report in the response's ``kv_transfer_params``, the only field in which vLLM's schedulers can tell a
client about its request. It is meant for KV connectors, whose keys stay beside it."""

ERROR_KEY = "error"
"""Key in the report of a request that failed: the reason."""

STATUS_KEY = "status"
"""Key beside it: the HTTP status, if the client is at fault."""

STEPS_KEY = "steps"
"""Key in the report of a request that asked for a stream: its newest steps, oldest first."""


@dataclass(frozen=True)
class CacheSize:
    """Size of a running request's cache. entries: live ones, per KV head of one layer. tokens: represented by them.
    blocks: held, including shared ones. external_bytes: of the complete cache outside the pool, over all ranks.
    front_blocks: among ``blocks``, those of the front. coding: of the front."""

    entries: int
    tokens: int
    blocks: int
    external_bytes: int = 0
    front_blocks: int = 0
    coding: Coding | None = None
