"""Requests of every kind to a server of the demo model, drawn at random: what ``soak.py`` sends.

Each call draws from random numbers of its own, so the same seed sends the same calls, whatever their answers take.
"""

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from vllm_kvmerge.demo.recall import draw_prompt
from vllm_kvmerge.policies import PRESETS
from vllm_kvmerge.request.parameters import CompressionError, parse_compression

Body = dict[str, Any]
POLICIES = sorted(PRESETS)
LONGEST = 1200
"""Tokens of a prompt."""

SMALL: dict[str, Body] = {"kvzap": {"window_size": 32}, "kvzip": {"chunk_size": 256}}
"""What presets need for small budgets and contexts."""

CHANGES: tuple[Body, ...] = (
    {"decode": "bounded"},
    {"decode": "grow"},
    {"budget": {"threshold": 0.002, "max": 0.5}},
    {"allocator": "adaptive"},
    {"allocator": "pyramid"},
    {"skip_layers": 1},
    {"merger": "attention_matching"},
    {"merger": "zip"},
    {"score_window": "all"},
    {"prefill": {"chunk": 100}},
    {"trigger": "pressure"},
    {"refresh": {"every": 24}},
    {"reuse": "turns"},
    {"positions": "cache", "decode": "bounded"},
    {"budget": 300, "protect": {"tokens": [[0, 24]]}},
)
"""What a request may ask for beside a policy, a budget and an interval."""

REFUSED: tuple[tuple[Body, int], ...] = (
    ({"kv_compression": {"policy": "nonsense", "budget": 64}}, 400),
    ({"kv_compression": {"policy": "snapkv", "budget": 1.5}}, 400),
    ({"kv_compression": {"policy": "h2o", "budget": 64, "window_size": 8}}, 400),
    ({"kv_compression": {"policy": "keydiff", "budget": 64, "context_tokens": 100_000}}, 400),
    ({"kv_compression": {"policy": "kvzip", "budget": 64, "prefill": {"chunk": 64}}}, 400),
    ({"kv_compression": {"context": "ctx-0"}}, 404),
    ({"kv_compresion": {"policy": "snapkv"}}, 400),
    ({"max_tokens": -1}, 400),
    ({"prompt": [5] * 10_000}, 400),
)
"""What is wrong with an invalid request, and how it is answered."""


@dataclass(frozen=True)
class Outcome:
    """One HTTP request. started: in seconds of time.monotonic. fault: what was not as it should be, or empty."""

    kind: str
    started: float
    seconds: float
    status: int
    fault: str


def is_valid(fields: Body) -> bool:
    try:
        parse_compression(fields)
    except CompressionError:
        return False
    return True


def random_tokens(rng: np.random.Generator, length: int) -> list[int]:
    """Words and digits of the demo model."""
    return rng.integers(19, 780, length).tolist()


def random_fields(rng: np.random.Generator, policy: str, length: int) -> Body:
    """A valid ``kv_compression`` for a prompt of this length."""
    budget = [64, 128, 300, 0.1, 0.3, 0.9][rng.integers(6)]
    fields: Body = {"policy": policy, "budget": budget, "interval": int(rng.integers(1, 50)), **SMALL.get(policy, {})}
    changes = [CHANGES[number] for number in rng.choice(len(CHANGES), 2, replace=False)]
    for change in [*changes, {"context_tokens": int(rng.integers(1, length + 1))}][rng.integers(3) :]:
        too_small = "protect" in fields and "budget" in change  # for what is protected; it needs a model to see that
        if is_valid(fields | change) and not too_small:
            fields |= change
    return fields


class Traffic:
    """Sends requests, and keeps what came of them. Answers to the same request must be the same each time.

    stock: to a server that knows nothing of compression, the same requests as plain ones.
    """

    def __init__(self, client: httpx.AsyncClient, seed: int, stock: bool = False) -> None:
        self.outcomes: list[Outcome] = []
        self.answers: dict[int, str] = {}
        self._client = client
        self._seed = seed
        self._stock = stock
        self._kinds: dict[Callable[[str, int, np.random.Generator], Awaitable[None]], float] = {
            self._plain: 0.12,
            self._compressed: 0.4,
            self._aborted: 0.1,
            self._shared_context: 0.12,
            self._kept_context: 0.04,
            self._turns: 0.06,
            self._repeated: 0.08,
            self._refused: 0.08,
        }

    async def send(self, index: int) -> None:
        """The request of this index, or the few that belong together."""
        rng = np.random.default_rng([self._seed, index])
        kinds = list(self._kinds)
        kind = kinds[rng.choice(len(kinds), p=list(self._kinds.values()))]
        if self._stock and kind in (self._kept_context, self._refused):
            return
        name, start = kind.__name__.strip("_").replace("_", " "), time.monotonic()
        try:
            await kind(name, index, rng)
        except Exception as error:  # the others go on
            self.outcomes.append(Outcome(name, start, time.monotonic() - start, 0, repr(error)))

    async def _plain(self, kind: str, index: int, rng: np.random.Generator) -> None:
        await self._generate(kind, self._draw(rng, None), rng)

    async def _compressed(self, kind: str, index: int, rng: np.random.Generator) -> None:
        await self._generate(kind, self._draw(rng, POLICIES[index % len(POLICIES)]), rng)

    async def _aborted(self, kind: str, index: int, rng: np.random.Generator) -> None:
        policy = POLICIES[index % len(POLICIES)] if rng.random() < 0.8 else None
        body = self._draw(rng, policy) | {"max_tokens": 200, "ignore_eos": True}
        if rng.random() < 0.5:
            await self._stream(kind, body, stop_after=int(rng.integers(1, 30)))
            return
        start = time.monotonic()
        # A connection of its own, which ends with it.
        async with httpx.AsyncClient(base_url=self._client.base_url, verify=False) as client:
            with suppress(httpx.ReadTimeout):
                seconds = float(rng.uniform(0.01, 0.6))
                await client.post("/v1/completions", json=self._json(body), timeout=httpx.Timeout(60, read=seconds))
        self.outcomes.append(Outcome(kind, start, time.monotonic() - start, 0, ""))

    async def _shared_context(self, kind: str, index: int, rng: np.random.Generator) -> None:
        """A question about one of six documents, which are others after every 200 requests."""
        number = int(rng.integers(6))
        own = np.random.default_rng([self._seed, 1, index // 200, number])
        document = random_tokens(own, int(own.integers(200, 900)))
        policy = POLICIES[int(own.integers(len(POLICIES)))]
        fields = {"policy": policy, "budget": 0.3, "context_tokens": len(document), **SMALL.get(policy, {})}
        prompt = document + random_tokens(rng, int(rng.integers(1, 40)))
        await self._generate(kind, {"prompt": prompt, "max_tokens": 16, "kv_compression": fields}, rng)

    async def _kept_context(self, kind: str, index: int, rng: np.random.Generator) -> None:
        prompt = random_tokens(rng, int(rng.integers(200, 700)))
        fields = {"policy": ["snapkv", "keydiff", "h2o", "keepkv"][rng.integers(4)], "budget": 64}
        route = "/v1/kvmerge/contexts"
        # Several at a time may not fit into the share of the pool that is theirs.
        body = {"model": "demo", "prompt": prompt, "kv_compression": fields, "ttl": 600}
        made = await self._post(kind, route, body, (200, 409))
        if "id" in made:
            name = {"context": made["id"]}
            for _ in range(2):
                question = random_tokens(rng, int(rng.integers(1, 40)))
                await self._generate(kind, {"prompt": question, "max_tokens": 8, "kv_compression": name}, rng)
            await self._request(kind, lambda: self._client.delete(f"{route}/{made['id']}"), (200, 204))

    async def _turns(self, kind: str, index: int, rng: np.random.Generator) -> None:
        messages: list[Body] = []
        for _ in range(3):
            text = draw_prompt(rng, 150, 4)
            messages.append({"role": "user", "content": text.text})
            fields = {"policy": "keydiff", "budget": 128, "reuse": "turns"}
            body = {"model": "demo", "messages": messages, "max_tokens": 12, "kv_compression": fields}
            answer = await self._post(kind, "/v1/chat/completions", body)
            if "choices" not in answer:
                break
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})

    async def _repeated(self, kind: str, index: int, rng: np.random.Generator) -> None:
        """One of as many requests as there are policies; each policy is answered as it was the first time."""
        number = int(rng.integers(len(POLICIES)))
        own = np.random.default_rng([self._seed, 2, number])
        policy = POLICIES[number]
        fields = {"policy": policy, "budget": 0.5, **SMALL.get(policy, {})}
        prompt = draw_prompt(own, 500, 8).text
        body = {"model": "demo", "prompt": prompt, "max_tokens": 5, "temperature": 0, "kv_compression": fields}
        answer = await self._post(kind, "/v1/completions", body)
        if "choices" in answer:
            text = answer["choices"][0]["text"]
            first = self.answers.setdefault(number, text)
            if text != first:
                self.outcomes.append(Outcome("mismatch", time.monotonic(), 0, 200, f"{policy}: {first} -> {text}"))

    async def _refused(self, kind: str, index: int, rng: np.random.Generator) -> None:
        wrong, status = REFUSED[index % len(REFUSED)]
        body = {"model": "demo", "prompt": random_tokens(rng, 200), "max_tokens": 4, **wrong}
        await self._post(kind, "/v1/completions", body, (status,))

    def _draw(self, rng: np.random.Generator, policy: str | None) -> Body:
        """A random prompt, which often begins as others do, and parameters."""
        length = int(np.exp(rng.uniform(np.log(50), np.log(LONGEST))))
        prompt = random_tokens(rng, length)
        if rng.random() < 0.4:
            common = int(rng.integers(1, length))
            prompt[:common] = random_tokens(np.random.default_rng([self._seed, 3, int(rng.integers(5))]), common)
        body: Body = {"prompt": prompt, "max_tokens": int(rng.integers(2, 80)), "ignore_eos": bool(rng.random() < 0.8)}
        body["temperature"] = float(rng.choice([0, 0, 1]))
        for name, value in (("logprobs", 2), ("n", 2), ("stop", ["."]), ("seed", 7)):
            if rng.random() < 0.1 and (name != "n" or body["temperature"]):
                body[name] = value
        return body if policy is None else body | {"kv_compression": random_fields(rng, policy, length)}

    async def _generate(self, kind: str, body: Body, rng: np.random.Generator) -> None:
        body = {"model": "demo", **body}
        await (self._stream(kind, body) if rng.random() < 0.5 else self._post(kind, "/v1/completions", body))

    def _json(self, body: Body) -> Body:
        sent = {"model": "demo"} | body
        if self._stock:
            sent.pop("kv_compression", None)
        return sent

    async def _post(self, kind: str, path: str, body: Body, expected: tuple[int, ...] = (200,)) -> Any:
        return await self._request(kind, lambda: self._client.post(path, json=self._json(body)), expected)

    async def _request(
        self, kind: str, call: Callable[[], Awaitable[httpx.Response]], expected: tuple[int, ...]
    ) -> Any:
        answer: Any = {}
        start, status, fault = time.monotonic(), 0, ""
        try:
            response = await call()
            status = response.status_code
            fault = "" if status in expected else response.text[:500]
            answer = response.json() if response.content else {}
        except httpx.HTTPError as error:
            fault = repr(error)
        self.outcomes.append(Outcome(kind, start, time.monotonic() - start, status, fault))
        return answer

    async def _stream(self, kind: str, body: Body, stop_after: int | None = None) -> None:
        """stop_after: events, after which the connection is closed."""
        start, status, fault, events = time.monotonic(), 0, "", 0
        try:
            async with self._client.stream(
                "POST", "/v1/completions", json=self._json(body) | {"stream": True}
            ) as response:
                status = response.status_code
                async for line in response.aiter_lines():
                    if status != 200 or (line.startswith("data: {") and "error" in json.loads(line[6:])):
                        fault = line[:500]
                    events += line.startswith("data: ")
                    if events == stop_after:
                        break
        except httpx.HTTPError as error:
            fault = repr(error)
        self.outcomes.append(Outcome(kind, start, time.monotonic() - start, status, fault))
