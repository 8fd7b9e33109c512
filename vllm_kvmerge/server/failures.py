"""What the engine says of a request that it had to end, as the error of that request's HTTP answer."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.exceptions import GenerationError

from vllm_kvmerge.engine.arguments import plugin_config, request_limits
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY
from vllm_kvmerge.engine.validation import Terms, enforce
from vllm_kvmerge.policies.cost import Rates
from vllm_kvmerge.request.parameters import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams


async def enforce_limits(engine_client: "EngineClient") -> None:
    """Has requests refused, before they are queued, that would cost more than the engine allows; its workers say how
    fast they are."""
    config = engine_client.vllm_config
    workers = [Rates(**rates) for rates in await engine_client.collective_rpc("compression_rates")]
    slowest = Rates(
        products_per_second=min(rates.products_per_second for rates in workers),
        touches_per_second=min(rates.touches_per_second for rates in workers),
    )
    enforce(Terms(replace(request_limits(config), rates=slowest), plugin_config(config).default))


def name_failures(engine_client: "EngineClient") -> None:
    """Makes an answer whose compression failed say so, instead of "Internal server error".

    Replaces ``generate`` of this one object. Needed until vLLM lets a scheduler give an error's message.
    """
    generate = engine_client.generate
    has_default = plugin_config(engine_client.vllm_config).default is not None

    def generate_and_name(
        prompt: Any, sampling_params: "SamplingParams", *args: Any, **kwargs: Any
    ) -> "AsyncGenerator[RequestOutput]":
        outputs = generate(prompt, sampling_params, *args, **kwargs)
        if not has_default and EXTRA_ARGS_KEY not in (sampling_params.extra_args or {}):
            return outputs
        return _raising(outputs)

    engine_client.generate = generate_and_name  # type: ignore[method-assign]


async def _raising(outputs: "AsyncGenerator[RequestOutput]") -> "AsyncGenerator[RequestOutput]":
    async with aclosing(outputs):
        async for output in outputs:
            report = (output.kv_transfer_params or {}).get(REPORT_KEY) or {}
            if ERROR_KEY in report:
                raise GenerationError(f"{EXTRA_ARGS_KEY}: {report[ERROR_KEY]}")
            yield output
