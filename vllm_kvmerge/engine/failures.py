"""Requests that the engine ends with an error, one by one, each with a message for its client."""

from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from vllm_kvmerge.engine.contexts import ContextRefused
from vllm_kvmerge.engine.messages import Failure
from vllm_kvmerge.engine.metrics import FAILED
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY, STATUS_KEY
from vllm_kvmerge.policies.errors import PartError, describe
from vllm_kvmerge.request.spec import CompressionError

logger = init_logger(__name__)

UNSPELLABLE = (
    "structured output: no token of the model's vocabulary can come next in what the grammar, schema, pattern or tools "
    "ask for; allowed: what the tokenizer can spell"
)


class FailedRequests:
    """Requests that have failed but not ended yet, and ended ones whose clients have not been told yet."""

    def __init__(self, engine: int) -> None:
        self._engine = engine
        self._failures: dict[str, Failure] = {}
        self._ended: list[tuple[Request, Failure]] = []

    def __bool__(self) -> bool:
        return bool(self._failures)

    def update(self, failures: dict[str, Failure]) -> None:
        self._failures |= failures

    def add(self, request_id: str, error: Exception) -> None:
        if isinstance(error, CompressionError | ContextRefused):
            failure = Failure(str(error), is_bad=isinstance(error, CompressionError))
        elif isinstance(error, PartError):
            failure = Failure(str(error), error.part)
        else:
            logger.error("Compression of request %s cannot be resolved", request_id, exc_info=error)
            failure = Failure(describe(error), "unknown")
        self._failures[request_id] = failure

    def end(self, finish: Callable[[Iterable[str]], list[Request]], policy_of: Callable[[str], str]) -> None:
        """Ends the failed requests. finish: ends requests by id and returns those that were still running."""
        failures, self._failures = self._failures, {}
        policies = {request_id: policy_of(request_id) for request_id in failures}
        for request in finish(failures):
            failure = failures[request.request_id]
            if failure.part is not None:
                FAILED.labels(policies[request.request_id], failure.part, self._engine).inc()
            self._ended.append((request, failure))

    def tell(self, outputs_by_client: dict[int, EngineCoreOutputs]) -> None:
        """Adds the errors of ended requests to a step's outputs."""
        for request, failure in self._ended:
            report: dict[str, Any] = {ERROR_KEY: failure.message}
            if failure.is_bad:
                report[STATUS_KEY] = HTTPStatus.BAD_REQUEST.value
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params={REPORT_KEY: report},
                trace_headers=request.trace_headers,
            )
            outputs_by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._ended = []


def cannot_be_spelled(request: Request, backend: StructuredOutputBackend | None) -> bool:
    """True for a request that ends because its grammar leaves no token to choose, nor the end.

    The worker then samples one all the same, and vLLM ends the request as if the engine had failed.
    """
    asked = request.structured_output_request
    if request.status != RequestStatus.FINISHED_ERROR or asked is None or backend is None:
        return False
    grammar = asked.grammar
    if not isinstance(grammar, StructuredOutputGrammar):
        return False  # it did not compile
    mask = backend.allocate_token_bitmask(1)
    grammar.fill_bitmask(mask, 0)
    return not mask.any()


def as_bad_request(params: dict[str, Any] | None) -> dict[str, Any]:
    """The ``kv_transfer_params`` of such a request."""
    return {**(params or {}), REPORT_KEY: {ERROR_KEY: UNSPELLABLE, STATUS_KEY: HTTPStatus.BAD_REQUEST.value}}
