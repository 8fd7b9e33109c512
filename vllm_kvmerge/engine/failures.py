"""Requests that the engine ends with an error, each alone, with a message for its client."""

from collections.abc import Callable, Iterable

from vllm.logger import init_logger
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request

from vllm_kvmerge.engine.contexts import ContextRefused
from vllm_kvmerge.engine.metrics import FAILED
from vllm_kvmerge.engine.plan import Failure
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY
from vllm_kvmerge.policies.errors import PartError, describe
from vllm_kvmerge.request.parameters import CompressionError

logger = init_logger(__name__)


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
            failure = Failure(str(error))
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
            output = EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                events=request.take_events(),
                kv_transfer_params={REPORT_KEY: {ERROR_KEY: failure.message}},
                trace_headers=request.trace_headers,
            )
            outputs_by_client.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(output)
        self._ended = []
