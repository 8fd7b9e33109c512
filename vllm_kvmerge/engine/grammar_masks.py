"""A grammar's masks of logits, once the answer that they made is known."""

from copy import copy

from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.request import StructuredOutputRequest


class GrammarMasks:
    """The tokens that a request's grammar allows in the place of each token of its answer.

    vLLM compiles and advances the grammar, as it did for the request: after reasoning, if there is any.

    grammars: the engine's. request: the answer's. constraint: the request's, as it was before the first token.
    """

    def __init__(
        self,
        grammars: StructuredOutputManager,
        request: Request,
        constraint: StructuredOutputRequest,
        answer: list[int],
    ) -> None:
        params = request.sampling_params
        assert grammars.backend is not None and params is not None
        self._grammars, self._answer = grammars, answer
        self._request = Request(request.request_id, request.prompt_token_ids, params, pooling_params=None)
        self._request.structured_output_request = constraint = copy(constraint)
        constraint.grammar = grammars.backend.compile_grammar(
            *constraint.structured_output_key, stop_token_ids=params.all_stop_token_ids
        )
        self._masks, self._distinct = list[bytes](), dict[bytes, bytes]()

    def between(self, first: int, end: int) -> list[bytes]:
        """The masks for ``answer[first:end]``. Each has a bit for every token id, in order, from the lowest of a byte
        on; 1: allowed. Equal ones are the same object, which is sent to workers once."""
        request_id = self._request.request_id
        for token in self._answer[len(self._masks) : end]:
            bits = self._grammars.grammar_bitmask({request_id: self._request}, [request_id], {})
            assert bits is not None
            mask = bits.tobytes()
            self._masks.append(self._distinct.setdefault(mask, mask))
            self._request.append_output_token_ids(token)
            self._grammars.accept_tokens(self._request, [token])
        return self._masks[first:end]
