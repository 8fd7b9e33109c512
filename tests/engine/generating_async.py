"""An ``AsyncLLM`` that answers requests at once, some of which are abandoned.

Run as a program: reads a job from stdin (engine arguments, number of tokens, and each request's prompt and compression,
null: none), and prints what became of it.
"""

import asyncio
import json
import sys
from typing import Any

ABANDONED = 3
"""Requests that are given up: by an abort, by leaving their outputs, and by cancelling who waits for them."""


async def main() -> None:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm_kvmerge import compression

    arguments, max_tokens, requests = json.load(sys.stdin)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    def generate(name: str, prompt: list[int], fields: dict[str, Any] | None, num_tokens: int) -> Any:
        extra = compression(**fields) if fields else None
        params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra)
        return llm.generate({"prompt_token_ids": prompt}, params, request_id=name)

    async def answer(number: int) -> dict[str, Any]:
        async for output in generate(f"request-{number}", *requests[number], max_tokens):
            last = output
        proofs = (last.kv_transfer_params or {}).get("kv_compression", [None])
        return {"tokens": list(last.outputs[0].token_ids), "proof": proofs[0]}

    async def abandon(how: int) -> int:
        """The number of tokens that had come."""
        name, num_tokens = f"abandoned-{how}", 0
        prompt = [*requests[0][0][:-1], 100 + how]  # another than those that are answered

        async def follow() -> None:
            nonlocal num_tokens
            async for output in generate(name, prompt, requests[0][1], 2000):
                num_tokens = len(output.outputs[0].token_ids)
                if num_tokens >= 5 and how == 0:
                    await llm.abort(name)
                elif num_tokens >= 5 and how == 1:
                    break

        following = asyncio.create_task(follow())
        while how == 2 and num_tokens < 5:
            await asyncio.sleep(0.01)
        if how == 2:
            following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        return num_tokens

    async def refused() -> str:
        params = SamplingParams(extra_args={"kv_compression": {"policy": "nope"}})
        try:
            async for _ in llm.generate("recall", params, request_id="refused"):
                pass
        except VLLMValidationError as error:
            return str(error)
        return ""

    try:
        answers = asyncio.gather(*map(answer, range(len(requests))))
        abandoned = asyncio.gather(*map(abandon, range(ABANDONED)))
        error = await refused()
        found = {"answers": await answers, "abandoned": await abandoned, "refused": error}
        # vLLM resets its prefix cache once no request holds a block.
        for _ in range(100):
            found["is_empty"] = await llm.reset_prefix_cache()
            if found["is_empty"]:
                break
            await asyncio.sleep(0.1)
        print("FOUND", json.dumps(found), flush=True)
    finally:
        llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
