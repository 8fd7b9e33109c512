"""``"budget": "auto"``: a context's budget is the smallest under which answers agree with the full cache's.

Probes are asked about the context and their answers verified, while its uncompressed blocks are in the prefix cache.
"""

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.types import ASGIApp, Scope

from vllm_kvmerge.policies.allocators import Uniform
from vllm_kvmerge.request.proof import Chosen, Tried, Verified
from vllm_kvmerge.request.recommended import recommendations
from vllm_kvmerge.request.spec import AUTO, parse_compression, refusal
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY as FIELD
from vllm_kvmerge.server.body import Refusal
from vllm_kvmerge.server.messages import CHAT_ROUTE, RENDERED_WITH, answered

BUDGETS = (0.5, 0.25, 0.125)
"""Budgets to try, as shares of the context's tokens."""

ANSWERED = {"max_tokens": 32, "temperature": 0.0}
"""How probes are answered."""

MAX_CHOICES = 1024
"""Contexts of chats whose choice is remembered."""

PROBES = (
    "Summarize the text above in two sentences.",
    "List the names, numbers and dates in the text above.",
    "Quote a sentence from the middle of the text above.",
    "What does the end of the text above say?",
)


class AutoBudget(BaseModel):
    """A context's budget is chosen: of 0.5, 0.25 and 0.125, the smallest down to which answers to probes agree with the
    full cache's. If 0.5 fails, the context is not compressed. For `context_messages`, and for contexts that are kept
    under an id. Other fields are the policy's."""

    model_config = ConfigDict(extra="allow", use_attribute_docstrings=True)

    policy: str = AUTO
    """auto: the policies that are best for contexts, the cheapest first."""
    budget: Literal["auto"]
    min_agreement: Annotated[float, Field(gt=0.0, le=1.0)]
    """Share of the answers' tokens that the full cache has to pick too."""
    probes: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=16)] = list(PROBES)
    """Questions about the context; default: four about any text."""

    def candidates(self) -> list[list[dict[str, Any]]]:
        """Fields to try: for each policy, the cheapest first, with each budget. Raises CompressionError: one is
        refused."""
        given = self.model_dump(exclude={"budget", "min_agreement", "probes"})
        policies = [given]
        if self.policy == AUTO:
            del given["policy"]
            is_even = given.get("allocator") == Uniform.name
            best = [recommendations().best("later", is_even, for_turns) for for_turns in (True, False)]
            parameters = {one.label: one.parameters for one in best}.values()
            policies = [{"decode": "grow", **one, **given} for one in parameters]
        found = [[policy | {"budget": budget} for budget in BUDGETS] for policy in policies]
        for one in chain.from_iterable(found):
            parse_compression(one)
        return found


def auto_budget(field: Any) -> AutoBudget | None:
    """A field whose budget is to be chosen; None for any other. Raises CompressionError."""
    if not isinstance(field, dict) or field.get("budget") != AUTO:
        return None
    try:
        return AutoBudget.model_validate(field)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        allowed = {"min_agreement": "a number above 0, up to 1", "policy": "a name"}.get(name, "1 to 16 texts")
        raise refusal(name, "invalid_value", f"{first['msg']}, with budget 'auto'", allowed) from None


Ask = Callable[[dict[str, Any], str], Awaitable[dict[str, Any]]]
"""The body of the answer to a question about the context, with this ``kv_compression``. Raises Refusal."""


def ask_of(app: ASGIApp, scope: Scope, chat: Mapping[str, Any], count: int) -> Ask:
    """Asks about a chat's first messages, of which ``count`` are the context."""
    rendered = {name: chat[name] for name in (*RENDERED_WITH, "cache_salt") if chat.get(name) is not None}
    if "tools" in rendered:
        rendered["tool_choice"] = "none"

    async def ask(field: dict[str, Any], probe: str) -> dict[str, Any]:
        messages = [*chat["messages"][:count], {"role": "user", "content": probe}]
        own = {"messages": messages, FIELD: field | {"context_messages": count}, **ANSWERED}
        return await answered(app, scope, CHAT_ROUTE, rendered | own)

    return ask


async def choose(wanted: AutoBudget, ask: Ask) -> tuple[dict[str, Any] | None, Chosen]:
    """The field to compress a context by, None for the full cache, and what led to it.

    A policy's budgets are tried until one fails, and policies until one passes at the smallest budget. Of equal
    budgets, the cheaper policy's is chosen.

    Raises:
        CompressionError, Refusal: there is nothing to choose from.
    """
    tried, refused = list[Tried](), None
    best: dict[str, Any] | None = None
    for fields in wanted.candidates():
        for field in fields:
            try:
                verified = await _agreement(field, wanted.probes, ask)
            except Refusal as error:
                if error.status_code >= 500:
                    raise
                refused = error  # the policy does not suit the model or the server
                break
            tried.append(Tried(kv_compression=field, verified=verified))
            if verified.agreeing is None or verified.agreeing < wanted.min_agreement:
                break
            if best is None or field["budget"] < best["budget"]:
                best = field
        if best is not None and best["budget"] == BUDGETS[-1]:
            break
    if not tried and refused is not None:
        raise refused
    budget = None if best is None else best["budget"]
    return best, Chosen(min_agreement=wanted.min_agreement, budget=budget, tried=tried)


async def _agreement(field: dict[str, Any], probes: list[str], ask: Ask) -> Verified:
    async def verified(probe: str) -> Verified:
        answer = await ask(field | {"verify": True}, probe)
        return Verified.model_validate(answer["usage"][FIELD]["verified"])

    first, *others = probes
    # The first one's context is there for the others.
    found = [await verified(first), *await asyncio.gather(*map(verified, others))]
    return Verified.of_all(found)


class Choices:
    """What has been chosen for contexts that chats bring, so that it is not chosen again."""

    def __init__(self) -> None:
        self._tasks: OrderedDict[str, asyncio.Task[tuple[dict[str, Any] | None, Chosen]]] = OrderedDict()

    async def of(
        self, auto: AutoBudget, app: ASGIApp, scope: Scope, chat: Mapping[str, Any], count: int
    ) -> tuple[dict[str, Any] | None, Chosen]:
        """``choose`` for a chat's first ``count`` messages."""
        rendered = {name: chat.get(name) for name in (*RENDERED_WITH, "cache_salt")}
        key = json.dumps([auto.model_dump(), rendered, chat["messages"][:count]], sort_keys=True)
        key = hashlib.sha256(key.encode()).hexdigest()
        if (task := self._tasks.get(key)) is None:
            # Of requests that come together, the first one's client may leave.
            task = self._tasks[key] = asyncio.create_task(choose(auto, ask_of(app, scope, chat, count)))
            task.add_done_callback(lambda done: self._forget_failed(key, done))
            if len(self._tasks) > MAX_CHOICES:
                self._tasks.popitem(last=False)
        return await asyncio.shield(task)

    def _forget_failed(self, key: str, task: "asyncio.Task[Any]") -> None:
        if (task.cancelled() or task.exception() is not None) and self._tasks.get(key) is task:
            del self._tasks[key]
