"""What vLLM's front end finds out about a request's field once it knows the prompt, for the middleware."""

from contextvars import ContextVar
from dataclasses import dataclass

from vllm_kvmerge.request.parameters import CompressionError


@dataclass
class Verdict:
    """checked: whether a prompt of the request has been looked at. error: why the request is refused, if it is."""

    checked: bool = False
    error: CompressionError | None = None


VERDICT: ContextVar[Verdict | None] = ContextVar("kvmerge_verdict", default=None)
"""That of the HTTP request being served; None outside of one, and for one that is not waited for."""
