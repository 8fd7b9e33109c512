"""Backends that answer an evaluation's requests: an engine in this process, or a server."""

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from vllm_kvmerge import demo
from vllm_kvmerge.engine.usage import ERROR_KEY, REPORT_KEY, USAGE_KEY
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.config import EndpointOptions, EngineOptions
from vllm_kvmerge.evaluation.tasks.base import Tokenizer
from vllm_kvmerge.request.proof import Verified
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY

if TYPE_CHECKING:
    import httpx

K = TypeVar("K")

MAX_SECONDS = 3600.0
"""Limit of the time that a compression, or a verification, may take in this process."""

CPU_SEQUENCES = 8
"""Requests at a time on CPU, unless told: more would not end sooner, and all would end late."""


@dataclass(frozen=True)
class Request:
    """token_ids: the prompt. compression: ``kv_compression``. continuation: token ids to generate; empty: freely.
    verify: whether the answer is compared with the full cache. sampling: how tokens are drawn, by vLLM's names."""

    token_ids: list[int]
    compression: dict[str, Any]
    max_tokens: int
    continuation: list[int]
    verify: bool = False
    sampling: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})


@dataclass(frozen=True)
class Answer:
    """logprobs: of the continuation's tokens. seconds: from submission to the end, waiting included.

    usage: what the scheduler counted of the request's cache (``Account.report``); None where a server does not say.
    """

    text: str
    logprobs: list[float]
    usage: dict[str, Any] | None
    seconds: float
    verified: Verified | None = None


class RequestError(Exception):
    """One request failed; others may do."""


class BackendError(Exception):
    """Nothing more can be asked: the engine died, or the server cannot be reached."""


class Backend(Protocol):
    """Interface between the runner and an engine or server."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    def start(self, longest: int, with_logprobs: bool) -> None:
        """Makes ready for requests of up to ``longest`` tokens, generated ones included.

        Raises:
            CommandError: they are too long, or the engine cannot be started.
        """

    def run(self, requests: Iterable[tuple[K, Request]]) -> Iterator[tuple[K, Answer | RequestError]]:
        """Answers in the order in which they come; several requests are under way at a time.

        Raises:
            BackendError: what has not been answered by then will not be.
        """

    def versions(self) -> dict[str, str]:
        """Versions, or the server's name, for the report."""

    def close(self) -> None: ...


def load_tokenizer(name: str, **options: Any) -> Tokenizer:
    """A model's tokenizer, by folder or hub name.

    Raises:
        CommandError: there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, **options)
    except (OSError, ValueError) as error:
        raise CommandError(f"no tokenizer in {name}: {error}") from None


class EngineBackend:
    """vLLM in this process."""

    def __init__(self, model: str, options: EngineOptions) -> None:
        # Read when vLLM is imported. What it logs at start-up says nothing about an evaluation, and in a process of its
        # own an engine would take twice as long to start and not stop at once.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        self.model, self.options = model, options
        trusted = options.model_dump(include={"revision", "trust_remote_code"}, exclude_none=True)
        self.tokenizer = load_tokenizer(model, **trusted)
        self._llm: Any = None
        self._outputs: list[Any] = []
        """Of requests that went on while an answer was verified."""

    def start(self, longest: int, with_logprobs: bool) -> None:
        arguments = self.options.arguments()
        surrogate = arguments.pop("kvzap", None)
        if surrogate is None and self.model == demo.model_path() and self.options.enforce_eager:
            surrogate = demo.kvzap_path()
        head_budgets = arguments.pop("head_budgets", None)
        limit = arguments.setdefault("max_model_len", longest)
        if limit < longest:
            raise CommandError(f"engine.max_model_len: the longest sample takes {longest} tokens, got {limit}")
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            arguments.setdefault("max_num_seqs", CPU_SEQUENCES)
        if with_logprobs:
            from vllm_kvmerge.evaluation.continuation import ForcedContinuation

            arguments["logits_processors"] = [ForcedContinuation]
        try:
            from vllm import LLM

            from vllm_kvmerge.engine.arguments import CONFIG_KEY, kvmerge_engine_args

            # Nobody waits for these compressions, and where others use the processor they may take long.
            own = {"max_compaction_seconds": MAX_SECONDS, "kvzap": surrogate, "head_budgets": head_budgets}
            arguments["additional_config"] = {CONFIG_KEY: own}
            self._llm = LLM(self.model, **kvmerge_engine_args(**arguments))
        except Exception as error:
            raise CommandError(f"the engine does not start: {error}") from error

    def run(self, requests: Iterable[tuple[K, Request]]) -> Iterator[tuple[K, Answer | RequestError]]:
        from vllm.exceptions import VLLMClientError

        engine = self._llm.llm_engine
        limit = engine.vllm_config.scheduler_config.max_num_seqs
        waiting, number = iter(requests), 0
        running: dict[str, tuple[K, Request, float]] = {}
        prompt, first = None, None
        try:
            while True:
                # A new prompt's first request is alone until the prompt is computed; the others find it in the cache.
                while first is None and len(running) < limit and (fresh := next(waiting, None)) is not None:
                    key, request = fresh
                    name, number = str(number), number + 1
                    try:
                        self._add(name, request)
                    except (ValueError, VLLMClientError) as error:
                        yield key, RequestError(str(error))
                        continue
                    running[name] = key, request, time.monotonic()
                    if request.token_ids != prompt:
                        prompt, first = request.token_ids, name
                if not running:
                    return
                outputs, self._outputs = self._outputs or engine.step(), []
                for output in outputs:
                    if output.request_id == first:
                        first = None
                    if output.finished:
                        key, request, started = running.pop(output.request_id)
                        answer = _read_output(output, request, time.monotonic() - started)
                        if request.verify and isinstance(answer, Answer):
                            answer = replace(answer, verified=self._verify(output))
                        yield key, answer
        except Exception as error:
            raise BackendError(f"the engine failed: {type(error).__name__}: {error}") from error

    def _add(self, name: str, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        extra: dict[str, Any] = {EXTRA_ARGS_KEY: json.dumps(request.compression), USAGE_KEY: True}
        options: dict[str, Any] = {"max_tokens": request.max_tokens, **request.sampling}
        if request.continuation:
            from vllm_kvmerge.evaluation.continuation import CONTINUATION

            extra[CONTINUATION] = request.continuation
            options = {"max_tokens": len(request.continuation), "temperature": 0, "ignore_eos": True, "logprobs": 0}
        if request.verify:
            from vllm_kvmerge.engine.verification import VERIFY_KEY

            extra[VERIFY_KEY] = name
            options["logprobs"] = 0
        params = SamplingParams(extra_args=extra, **options)
        self._llm.llm_engine.add_request(name, tokens_input(request.token_ids), params)

    def _verify(self, output: Any) -> Verified:
        """The answer as the full cache has it: no request begins meanwhile, those that run go on."""
        engine, (completion,) = self._llm.llm_engine, output.outputs
        asked = {"key": output.request_id, "answer": list(completion.token_ids), "is_last": True}
        asked |= {"seconds": MAX_SECONDS, "max_tokens": sys.maxsize, "may_evict": True}
        client, text = engine.engine_core, json.dumps(asked)
        if hasattr(client, "call_utility"):  # its engine is in another process
            found = client.call_utility("kvmerge_verify", text)
        else:
            future = client.engine_core.kvmerge_verify(text)
            while not future.done():
                self._outputs += engine.step()
            found = future.result()
        return Verified.of(json.loads(found), _logprobs(completion), is_sampled=False)

    def versions(self) -> dict[str, str]:
        import torch
        import vllm

        return {"vllm": vllm.__version__, "torch": torch.__version__}

    def close(self) -> None:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None


def _logprobs(completion: Any) -> list[float]:
    """Of each token, ln p."""
    return [at[token].logprob for at, token in zip(completion.logprobs, completion.token_ids, strict=True)]


def _read_output(output: Any, request: Request, seconds: float) -> Answer | RequestError:
    (completion,) = output.outputs
    report = (output.kv_transfer_params or {}).get(REPORT_KEY)
    if report is not None and ERROR_KEY in report:
        return RequestError(report[ERROR_KEY])
    logprobs = []
    if request.continuation:
        if list(completion.token_ids) != request.continuation:
            return RequestError("the engine did not generate the continuation that it was given")
        logprobs = _logprobs(completion)
    return Answer(completion.text, logprobs, report, seconds)


class EndpointBackend:
    """A server that runs vllm-kvmerge, over HTTP."""

    def __init__(self, model: str | None, options: EndpointOptions) -> None:
        try:
            import httpx
        except ImportError:
            raise CommandError("an endpoint needs httpx: pip install 'vllm-kvmerge[eval]'") from None
        self.options = options
        self.url = options.url.rstrip("/").removesuffix("/v1")
        headers = {}
        if options.api_key_env is not None:
            if options.api_key_env not in os.environ:
                raise CommandError(f"endpoint.api_key_env: the environment has no variable {options.api_key_env}")
            headers["Authorization"] = f"Bearer {os.environ[options.api_key_env]}"
        limits = httpx.Limits(max_connections=options.concurrency)
        self._client = httpx.Client(headers=headers, timeout=options.timeout, limits=limits)
        self.model, self.max_model_len = self._find_model(model)
        if self._get("/kvmerge/policies").status_code != 200:
            raise CommandError(f"endpoint.url: {self.url} does not run vllm-kvmerge: it would ignore kv_compression")
        self.tokenizer: Tokenizer = (
            ServerTokenizer(self) if options.tokenizer is None else load_tokenizer(options.tokenizer)
        )

    def _get(self, path: str) -> "httpx.Response":
        import httpx

        try:
            return self._client.get(self.url + path)
        except httpx.HTTPError as error:
            raise CommandError(f"endpoint.url: {self.url} cannot be reached: {_gist(error)}") from None

    def _find_model(self, name: str | None) -> tuple[str, int | None]:
        """Its name as requests have it, and the most tokens that a request of it may have, where the server says."""
        response = self._get("/v1/models")
        if response.status_code != 200:
            raise CommandError(
                f"endpoint.url: {self.url}/v1/models answers {response.status_code}: {response.text[:200]}"
            )
        served = {model["id"]: model.get("max_model_len") for model in response.json()["data"]}
        if name is None:
            name = next(iter(served))
        if name not in served:
            raise CommandError(f"model: the server has no {name!r}; allowed: {', '.join(served)}")
        return name, served[name]

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer's JSON.

        Raises:
            RequestError: the server refused, or took too long. BackendError: it cannot be reached.
        """
        import httpx

        try:
            response = self._client.post(self.url + path, json={"model": self.model, **body})
        except httpx.TimeoutException:
            raise RequestError(f"no answer within {self.options.timeout:g} s") from None
        except httpx.HTTPError as error:
            raise BackendError(f"{self.url} cannot be reached: {_gist(error)}") from None
        if response.status_code != 200:
            try:
                message = response.json()["error"]["message"]
            except (ValueError, KeyError, TypeError):
                message = response.text[:500]
            raise RequestError(f"HTTP {response.status_code}: {message}")
        return response.json()

    def start(self, longest: int, with_logprobs: bool) -> None:
        if self.max_model_len is not None and longest > self.max_model_len:
            raise CommandError(
                f"endpoint.url: the longest sample takes {longest} tokens, the server {self.max_model_len}"
            )
        if with_logprobs:
            raise CommandError("a server does not give log-probabilities of a given continuation; leave endpoint out")

    def run(self, requests: Iterable[tuple[K, Request]]) -> Iterator[tuple[K, Answer | RequestError]]:
        waiting = iter(requests)
        pool = ThreadPoolExecutor(self.options.concurrency)
        running: dict[Future[Answer | RequestError], K] = {}
        try:
            while True:
                for key, request in islice(waiting, self.options.concurrency - len(running)):
                    running[pool.submit(self._answer, request)] = key
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield running.pop(future), future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _answer(self, request: Request) -> Answer | RequestError:
        started = time.monotonic()
        body = {
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            **request.sampling,
            EXTRA_ARGS_KEY: request.compression | ({"verify": True} if request.verify else {}),
            "vllm_xargs": {USAGE_KEY: 1},
        }
        try:
            answer = self.post("/v1/completions", body)
        except RequestError as error:
            return error
        usage = (answer.get("kv_transfer_params") or {}).get(REPORT_KEY)
        verified = Verified.model_validate(answer["usage"][EXTRA_ARGS_KEY]["verified"]) if request.verify else None
        return Answer(answer["choices"][0]["text"], [], usage, time.monotonic() - started, verified)

    def versions(self) -> dict[str, str]:
        response = self._get("/version")
        version = response.json().get("version", "?") if response.status_code == 200 else "?"
        return {"server": self.url, "model": self.model, "vllm": version}

    def close(self) -> None:
        self._client.close()


class ServerTokenizer:
    """The server's own. Decoded text keeps special tokens: the server has no option to leave them out."""

    def __init__(self, backend: EndpointBackend) -> None:
        self._backend = backend

    def _post(self, path: str, **body: Any) -> Any:
        try:
            return self._backend.post(path, body)
        except (RequestError, BackendError) as error:
            raise CommandError(f"{path}: {error}; name a local tokenizer in endpoint.tokenizer") from None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._post("/tokenize", prompt=text, add_special_tokens=add_special_tokens)["tokens"]

    def chat_text(self, messages: list[dict[str, str]]) -> str:
        """What the model reads of a chat, up to its own turn."""
        return self.decode(self._post("/tokenize", messages=messages, add_generation_prompt=True)["tokens"])

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return self._post("/detokenize", tokens=list(token_ids))["prompt"]


def _gist(error: Exception) -> str:
    return str(error) or type(error).__name__
