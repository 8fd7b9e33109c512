"""Patches: every place where vLLM, one of its objects, or a library that it uses is changed rather than subclassed.

Each is one function, which says what would make it unnecessary. Importing this module has no effect; functions import
vLLM when they run. Each kind of process calls its own ``install`` function; calling it again has no effect.
"""

import logging
import math
import os
import pkgutil
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client import Gauge, multiprocess, values

from vllm_kvmerge.engine.metric_files import MetricFile, MetricFiles
from vllm_kvmerge.engine.processes import METRICS_DIR, end_with_parent

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from torch import Tensor
    from vllm import PoolingParams
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.engine.arg_utils import EngineArgs
    from vllm.engine.protocol import EngineClient
    from vllm.inputs import EngineInput
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.request import Request

CPU_BACKEND = "vllm_kvmerge.engine.attention.cpu.MergeableAttentionBackend"
CPU_LATENT_BACKEND = "vllm_kvmerge.engine.attention.cpu_latent.LatentAttentionBackend"
CUDA_BACKEND = "vllm_kvmerge.engine.attention.cuda.CUDAAttentionBackend"

SHARED_MEMORY = "/dev/shm"
LEAST_BYTES = 1 << 20
"""Room in it below which it is to blame for an engine's death."""

API_SERVER, ENGINE_CORE = "run_api_server_worker_proc", "run_engine_core"
MOVED = {
    "kv_cache_planning": ("vllm.v1.core.kv_cache_planning", "vllm.v1.core.kv_cache_utils"),
    "cli_args": ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args"),
    "startup": ("vllm.entrypoints.common.startup", "vllm.entrypoints.serve.utils.api_utils"),
}
"""Modules with what is elsewhere in vLLM 0.32, and where it is there."""

PROCESSES = {
    API_SERVER: "vllm.v1.utils",
    ENGINE_CORE: "vllm.v1.engine.core:EngineCoreProc",
    "run_coordinator": "vllm.v1.engine.coordinator:DPCoordinatorProc",
}
"""Functions that vLLM starts processes with, and their modules or classes."""


def moved(name: str) -> Any:
    """The module of ``MOVED``, wherever this vLLM has it. vLLM 0.32 not being supported would make it unnecessary."""
    newer, older = MOVED[name]
    return import_module(newer if find_spec(newer) else older)


def install() -> None:
    """Prepares any process of an engine or a server, before it counts or logs anything."""
    end_with_parent()
    log_as_vllm()
    keep_metric_files()


def install_worker(vllm_config: "VllmConfig") -> None:
    """Prepares a worker's process, before the worker is initialized."""
    install()
    start_with_small_pools()  # where the worker is in the core's process
    register_cache_spec()
    register_attention_backend()
    drop_validator(vllm_config)


PromptCheck = Callable[["EngineInput", "SamplingParams | PoolingParams"], None]

Handler = Callable[[Any], Awaitable[Any]]
"""Of one request's body; returns the response."""


def install_front_end(check_prompt: PromptCheck) -> None:
    """Prepares a process that admits requests, before the first one; ``check_prompt`` raises to refuse."""
    from vllm_kvmerge.request.proof import PROOFS_KEY  # with all policies, which stock servers shall not wait for

    install()
    check_prompts(check_prompt)
    join_params(PROOFS_KEY)


@cache
def install_server() -> None:
    """Prepares the process of the command ``serve``, before vLLM's server and its engines start."""
    install()
    prepare_processes()
    fail_when_engine_dies()
    fail_when_headless_engine_dies()
    leave_signals_alone()


@cache
def complete_engine_args(complete: Callable[["EngineArgs"], None]) -> None:
    """Passes engine arguments through ``complete`` before a configuration is made of them.

    A hook for plugins there, or a plugin's own defaults for ``scheduler_cls`` and ``worker_cls``, would make this
    unnecessary.
    """
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    @wraps(create)
    def create_completed(self: "EngineArgs", *args: Any, **kwargs: Any) -> "VllmConfig":
        complete(self)
        return create(self, *args, **kwargs)

    EngineArgs.create_engine_config = create_completed  # type: ignore[method-assign]


@cache
def delegate_serve(serve: Callable[["Namespace"], None]) -> None:
    """Passes the arguments of vLLM's commands that start a server, ``vllm serve`` and ``python -m
    vllm.entrypoints.openai.api_server``, to ``serve``, which need not return.

    A command that plugins can add to or replace would make this unnecessary.
    """
    if (cli := sys.modules.get("vllm.entrypoints.cli.serve")) is not None:
        validate = cli.ServeSubcommand.validate

        @wraps(validate)
        def validate_or_serve(self: Any, args: "Namespace") -> None:
            serve(args)
            validate(self, args)

        cli.ServeSubcommand.validate = validate_or_serve
    if (entry := sys.modules.get("vllm.entrypoints.launchers.api_server.entry")) is not None:
        run_server = entry.run_server

        @wraps(run_server)
        def run_or_serve(args: "Namespace", **kwargs: Any) -> Awaitable[None]:
            serve(args)
            return run_server(args, **kwargs)  # type: ignore[no-any-return]

        entry.run_server = run_or_serve  # type: ignore[attr-defined]


@cache
def pass_batch_files(start: Callable[["EngineClient"], Awaitable[Callable[[Handler, str], Handler]]]) -> None:
    """Passes the requests of batch files (``vllm run-batch``) to what ``start`` returns makes of vLLM's handlers and
    their URLs.

    Middleware around those handlers, as around a server's, would make this unnecessary.
    """
    if (module := sys.modules.get("vllm.entrypoints.launchers.run_batch")) is None:
        return
    run_batch, run_request = module.run_batch, module.run_request
    around: list[Callable[[Handler, str], Handler]] = []

    @wraps(run_batch)
    async def run_started(engine_client: "EngineClient", args: "Namespace") -> None:
        around.append(await start(engine_client))
        await run_batch(engine_client, args)

    @wraps(run_request)
    async def run_answered(handler: Handler, request: Any, tracker: Any) -> Any:
        return await run_request(around[-1](handler, request.url), request, tracker)

    module.run_batch, module.run_request = run_started, run_answered  # type: ignore[attr-defined]


@cache
def after_endpoints(hook: Callable[["FastAPI"], None]) -> None:
    """Calls ``hook`` with each server's application, after its endpoint plugins.

    Endpoint plugins without routes, which vLLM would load without being told their names, would make this unnecessary.
    """
    from vllm.plugins.endpoint_plugins import interface

    attach = interface.attach_endpoint_plugins

    @wraps(attach)
    def attach_and_call(app: "FastAPI", *args: Any, **kwargs: Any) -> None:
        attach(app, *args, **kwargs)
        hook(app)

    interface.attach_endpoint_plugins = attach_and_call
    for module in [one for name, one in sys.modules.items() if name.startswith("vllm.entrypoints.")]:
        if getattr(module, "attach_endpoint_plugins", None) is attach:
            module.attach_endpoint_plugins = attach_and_call  # type: ignore[attr-defined]


def log_as_vllm() -> None:
    """Sends the package's log lines where vLLM's go, in their format, unless it has a handler already.

    A vLLM setting for additional loggers, other than a file for all of them, would make this unnecessary.
    """
    ours, theirs = logging.getLogger("vllm_kvmerge"), logging.getLogger("vllm")
    # Processes that have not set up vLLM's logging yet call this again when they have.
    if theirs.handlers and not ours.hasHandlers():
        ours.handlers = theirs.handlers
        ours.setLevel(theirs.level)


def keep_metric_files() -> None:
    """Makes prometheus_client, and so vLLM's metrics as well as ours, use our files, which never end a process.

    Call it before anything is counted: files are opened then. prometheus_client has no setting for the class that
    stores its values. If it reserved disk space and tolerated errors, this would be unnecessary.
    """
    if values.MmapedDict is MetricFile:
        return
    if folder := os.environ.get(METRICS_DIR):
        # A worker that Ray starts on another machine gets the first machine's variables, but not its folder.
        with suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    values.MmapedDict = multiprocess.MmapedDict = MetricFile  # type: ignore[misc]
    multiprocess.MultiProcessCollector = MetricFiles  # type: ignore[misc]
    gauge = Gauge(
        "vllm:kvmerge_metrics_write_errors",
        "Values of metrics that could not be written to PROMETHEUS_MULTIPROC_DIR.",
        multiprocess_mode="livesum",
    )
    if gauge._value._multiprocess:
        MetricFile.write_errors = gauge


def start_with_small_pools() -> None:
    """Makes vLLM start, with a warning, although a request of ``max_model_len`` does not fit into the KV cache.

    Compressed requests of that length may fit, and others are refused (``Limits.check_room``). It has an effect in the
    process of the engine's core. A setting of vLLM's for that would make this unnecessary.
    """
    from vllm.logger import init_logger

    planning = moved("kv_cache_planning")
    check = planning._check_enough_kv_cache_memory
    if hasattr(check, "__wrapped__"):
        return

    @wraps(check)
    def check_or_warn(
        available_memory: int, needed_memory: Callable[[], int], max_model_len: int, longest: Callable[[int], int]
    ) -> None:
        if 0 < available_memory < needed_memory() and (length := longest(available_memory)) > 0:
            init_logger(__name__).warning(
                "The KV cache has room for %d tokens, fewer than max_model_len (%d): longer prompts are served only to "
                "requests that are compressed while they are computed (prefill.chunk)",
                length,
                max_model_len,
            )
            return
        check(available_memory, needed_memory, max_model_len, longest)

    planning._check_enough_kv_cache_memory = check_or_warn


def register_cache_spec() -> None:
    """Makes vLLM use ``MergeableAttentionManager`` for the compressed layers' specs, by vLLM's own registration."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

    from vllm_kvmerge.engine.blocks import MERGEABLE_SPECS, MergeableAttentionManager

    KVCacheSpecRegistry._ensure_registered()
    for spec in MERGEABLE_SPECS:
        KVCacheSpecRegistry.register(
            spec, manager_class=MergeableAttentionManager, uniform_type_base_spec=FullAttentionSpec
        )


class Hook:
    """Has an object call another method instead of its own, while it is on. A step without compressed requests would
    ask ours for each of its requests in vain."""

    def __init__(self, owner: Any, name: str, method: Callable[..., Any], is_on: bool = True) -> None:
        self._owner, self._name, self._method = owner, name, method
        self.switch(is_on)

    def switch(self, is_on: bool) -> None:
        if is_on:
            setattr(self._owner, self._name, self._method)
        else:
            vars(self._owner).pop(self._name, None)


def hash_blocks_of(coordinator: "KVCacheCoordinator", may_hash: Callable[["Request"], bool]) -> Hook:
    """Makes the blocks of requests for which ``may_hash`` is false stay out of the prefix cache, those of all layers.

    vLLM asks the manager of each group of layers, and only ours knows. A setting of requests for that, beside the one
    that has them read nothing from the prefix cache, would make this unnecessary.
    """
    hash_blocks = coordinator.cache_blocks

    def hash_some_blocks(request: "Request", num_computed_tokens: int) -> None:
        if may_hash(request):
            hash_blocks(request, num_computed_tokens)

    return Hook(coordinator, "cache_blocks", hash_some_blocks)


def watch_asked_blocks(coordinator: "KVCacheCoordinator", note: Callable[[str, int], None]) -> Hook:
    """Tells ``note`` of which request vLLM asks whether it finds room, and how many blocks of all layers it needs.

    vLLM tells a scheduler that a request found none, not how much was missing. An attribute of the cache manager with
    the last answer would make this unnecessary.
    """
    ask = coordinator.get_num_blocks_to_allocate

    def ask_and_note(request_id: str, *args: Any, **kwargs: Any) -> int:
        needed = ask(request_id, *args, **kwargs)
        note(request_id, needed)
        return needed

    return Hook(coordinator, "get_num_blocks_to_allocate", ask_and_note)


def watch_new_blocks(pool: "BlockPool", note: Callable[[list["KVCacheBlock"]], None]) -> None:
    """Tells ``note`` of all blocks that a pool hands out, while ``debug_poison_freed`` is on.

    vLLM's cache managers note those of new tokens alone. A class for the pool that could be chosen, or a watcher of all
    its blocks, would make this unnecessary.
    """
    get = pool.get_new_blocks

    def get_and_note(num_blocks: int) -> list["KVCacheBlock"]:
        blocks = get(num_blocks)
        note(blocks)
        return blocks

    pool.get_new_blocks = get_and_note  # type: ignore[method-assign]


def register_attention_backend() -> None:
    """Makes this worker use our attention, by vLLM's own registration.

    vLLM's CPU platform ignores a custom backend's name but honours an override of its own backend.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cuda():
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)
    else:
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
        register_backend(AttentionBackendEnum.CPU_MLA, CPU_LATENT_BACKEND)


def forget_worker_memory() -> None:
    """Takes away the names of the memory that tensor-parallel workers on CPU share, once all of them have it.

    vLLM does so in a destructor, which does not run in a worker that is told to stop, or killed: each server left 4 MiB
    per worker in /dev/shm. The memory itself goes with the last process. Doing so in vLLM would make this unnecessary.
    """
    communicator: Any = import_module("vllm.distributed.device_communicators.cpu_communicator")
    shared = communicator._CPUSHMDistributed
    share = shared._init_cpu_shm
    if hasattr(share, "__wrapped__"):
        return

    @wraps(share)
    def share_and_forget(self: Any) -> int:
        handle: int = share(self)  # at its end workers wait for each other
        Path(f"{SHARED_MEMORY}/{self.group_name}_{self.communicator.rank}").unlink(missing_ok=True)
        return handle

    shared._init_cpu_shm = share_and_forget


def drop_validator(vllm_config: "VllmConfig") -> None:
    """Removes the validator from a worker's configuration: the front end has loaded it by then.

    With any custom logits processor, vLLM's V1 runner hands every request's output tokens to the sampler at each step,
    and under asynchronous scheduling waits for the last step's tokens. A separate hook for validation would make this
    unnecessary.
    """
    from vllm_kvmerge.engine.arguments import VALIDATOR

    model_config = vllm_config.model_config
    model_config.logits_processors = [p for p in model_config.logits_processors or () if p != VALIDATOR] or None


def sample_beside_drafts() -> None:
    """Has drafts verified with their requests' temperature, top_k and top_p, on the CPU.

    vLLM's kernel for CPUs writes these to a copy of what it returns, unless they are int64, so that drafts are verified
    with whatever lies in memory. A kernel that writes to its output would make this unnecessary.
    """
    from vllm.v1.sample import rejection_sampler

    def expand_batch_to_tokens(
        x: "Tensor", cu_num_tokens: "Tensor", num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> "Tensor":
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def keep_from_connector(connector: "KVConnectorBase_V1", is_hidden: Callable[["Request"], bool]) -> None:
    """Has this one connector, in a scheduler, neither load blocks for requests that are hidden nor know of them.

    vLLM's scheduler asks its connector about every request, within a long method. If it asked about those alone that
    take part, this would be unnecessary.
    """
    matched, allocated = connector.get_num_new_matched_tokens, connector.update_state_after_alloc
    begin = connector.on_new_request

    def get_num_new_matched_tokens(request: "Request", num_computed_tokens: int) -> tuple[int | None, bool]:
        return (0, False) if is_hidden(request) else matched(request, num_computed_tokens)

    def update_state_after_alloc(request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int) -> None:
        if not is_hidden(request):
            allocated(request, blocks, num_external_tokens)

    def on_new_request(request: "Request") -> None:
        if not is_hidden(request):
            begin(request)

    connector.get_num_new_matched_tokens = get_num_new_matched_tokens  # type: ignore[method-assign]
    connector.update_state_after_alloc = update_state_after_alloc  # type: ignore[method-assign]
    connector.on_new_request = on_new_request  # type: ignore[method-assign]


def check_prompts(check_prompt: PromptCheck) -> None:
    """Passes the prompt and parameters of each request to ``check_prompt`` before vLLM queues it.

    A logits processor sees no prompt; the platform, which vLLM asks next, does. Passing the prompt to logits
    processors too would make this unnecessary.
    """
    from vllm.platforms import current_platform

    if "validate_request" in vars(current_platform):
        return
    validate = current_platform.validate_request

    def validate_request(processed_inputs: "EngineInput", params: "SamplingParams | PoolingParams") -> None:
        validate(processed_inputs, params)
        check_prompt(processed_inputs, params)

    current_platform.validate_request = validate_request  # type: ignore[method-assign]


Outputs = AsyncGenerator["RequestOutput", None]


Watch = Callable[[Outputs, Any, "SamplingParams", str, Callable[["SamplingParams"], Outputs]], Outputs]


def watch_outputs(engine_client: "EngineClient", watch: Watch) -> None:
    """Passes the outputs of each request of this one client through ``watch``, with its prompt (None: with a LoRA
    adapter), its parameters, its id, and what sends it again with other parameters.

    Error messages from schedulers, and ``kv_transfer_params`` in every chunk of streamed responses, would make this
    unnecessary.
    """
    generate = engine_client.generate

    @wraps(generate)
    def generate_and_watch(
        prompt: Any, sampling_params: "SamplingParams", request_id: str, *args: Any, **kwargs: Any
    ) -> Outputs:
        def again(params: "SamplingParams") -> Outputs:
            return generate(prompt, params, f"{request_id}-again", *args, **kwargs)

        outputs = generate(prompt, sampling_params, request_id, *args, **kwargs)
        own = prompt if kwargs.get("lora_request") is None else None
        return watch(outputs, own, sampling_params, request_id, again)

    engine_client.generate = generate_and_watch  # type: ignore[method-assign]


@cache
def join_params(key: str) -> None:
    """Gives the last output of a request with several sequences the lists that schedulers put under ``key`` into the
    ``kv_transfer_params`` of all of them.

    vLLM keeps those of the sequence that ends last. If it kept all, this would be unnecessary.
    """
    from vllm.v1.engine.output_processor import OutputProcessor

    process_outputs = OutputProcessor.process_outputs

    @wraps(process_outputs)
    def process_joined(
        self: "OutputProcessor", engine_core_outputs: "list[EngineCoreOutput]", *args: Any, **kwargs: Any
    ) -> Any:
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if params is None or key not in params:
                continue
            state = self.request_states.get(output.request_id)
            if state is not None and state.parent_req is not None:
                lists = state.parent_req.__dict__.setdefault("kvmerge_lists", {})
                lists[output.request_id] = params[key]
                params[key] = [one for some in lists.values() for one in some]
        return process_outputs(self, engine_core_outputs, *args, **kwargs)

    OutputProcessor.process_outputs = process_joined  # type: ignore[method-assign]


def logits_under(model: Any, adapter: int) -> "Callable[[Tensor], Tensor | None]":
    """The model's ``compute_logits`` for rows of a single request. adapter: LoRA's id; 0: none.

    With adapters, vLLM's takes the rows for those that the step samples, in this order. If it were told the adapters,
    this would be unnecessary.
    """
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        compute_logits: Callable[[Tensor], Tensor | None] = model.compute_logits
        return compute_logits

    def compute(hidden_states: "Tensor") -> "Tensor | None":
        of_step = manager._last_mapping
        manager.set_adapter_mapping(replace(of_step, prompt_mapping=(adapter,) * len(hidden_states)))
        logits: Tensor | None = model.compute_logits(hidden_states)
        manager.set_adapter_mapping(of_step)
        return logits

    return compute


def answer_servers() -> None:
    """Lets API servers call the scheduler of this process's engine core, by ``call_utility_async("kvmerge_contexts")``
    and ``"kvmerge_verify"``, whose answer comes later.

    vLLM's servers can call methods of engine cores and of workers; a way to those of schedulers would make this
    unnecessary.
    """
    from vllm.v1.engine.core import EngineCore

    def call(engine_core: Any, text: str) -> str:
        return str(engine_core.scheduler.call_contexts(text))

    def verify(engine_core: Any, text: str) -> "Future[str]":
        future: Future[str] = engine_core.scheduler.verify(text)
        return future

    EngineCore.kvmerge_contexts, EngineCore.kvmerge_verify = call, verify  # type: ignore[attr-defined]


def _is_no_end(record: logging.LogRecord) -> bool:
    from vllm.v1.engine.exceptions import EngineDeadError

    return not (record.exc_info and isinstance(record.exc_info[1], EngineDeadError))


def before_shutdown(engine_client: "EngineClient", hook: Callable[[float | None], float | None]) -> None:
    """Calls ``hook`` before this one client stops its engine, the newest hook first.

    It takes the seconds left to finish requests, and returns the rest of them. When signalled, vLLM's launcher stops
    the engine first and tells nobody; a shutdown event or hook would make this unnecessary. That the engine is gone
    then is what was asked for: vLLM's client does not log it as an error any more.
    """
    shut_down = engine_client.shutdown

    @wraps(shut_down)
    def shutdown(timeout: float | None = None) -> None:
        remaining = hook(timeout)
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_is_no_end)
        shut_down(timeout=remaining)

    engine_client.shutdown = shutdown  # type: ignore[method-assign]


class EngineDiedError(RuntimeError):
    """The engine died without the server having been told to stop."""

    def __init__(self, manager: Any) -> None:
        ended = manager.finished_procs() if manager is not None else {}
        processes = ", ".join(f"{name} with exit code {code}" for name, code in ended.items())
        # What is written to shared memory without room ends its process by this signal, without a word.
        is_full = -signal.SIGBUS in ended.values() or _free_bytes(SHARED_MEMORY) < LEAST_BYTES
        reason = f"; {SHARED_MEMORY} is full" if is_full else ""
        super().__init__(f"the engine has died ({processes or 'its log says why'}{reason})")


def _free_bytes(folder: str) -> float:
    try:
        return shutil.disk_usage(folder).free
    except OSError:  # there is none
        return math.inf


_originals: dict[str, Callable[..., Any]] = {}
"""vLLM's own functions by name, in the process that replaced them and those forked from it."""


def prepare_processes() -> None:
    """Makes each process that vLLM starts prepare itself; a hook at its start would make this unnecessary."""
    for name, owner in PROCESSES.items():
        holder = pkgutil.resolve_name(owner)
        _originals[name] = getattr(holder, name)
        run: Any = partial(_run_process, name)
        setattr(holder, name, staticmethod(run) if isinstance(holder, type) else run)


def _run_process(name: str, *args: Any, **kwargs: Any) -> None:
    install()
    if name == API_SERVER:
        fail_when_engine_dies()
    elif name == ENGINE_CORE:
        start_with_small_pools()
    run = _originals.get(name) or getattr(pkgutil.resolve_name(PROCESSES[name]), name)
    run(*args, **kwargs)


def fail_when_engine_dies() -> None:
    """Makes an API server raise EngineDiedError where vLLM's exits normally, as if it had been told to stop.

    A nonzero exit status in vLLM would make this and the next function unnecessary.
    """
    entry: Any = import_module("vllm.entrypoints.launchers.api_server.entry")
    build_and_serve = entry.build_and_serve
    if hasattr(build_and_serve, "__wrapped__"):  # in a process forked from one that has been here
        return

    @wraps(build_and_serve)
    async def serve_or_fail(engine_client: "EngineClient", *args: Any, **kwargs: Any) -> Any:
        was_told = False

        def note(timeout: float | None) -> float | None:
            nonlocal was_told
            was_told = True
            return timeout

        before_shutdown(engine_client, note)
        ended = await build_and_serve(engine_client, *args, **kwargs)
        if engine_client.errored and not was_told:
            ended.close()
            resources = getattr(getattr(engine_client, "engine_core", None), "resources", None)
            raise EngineDiedError(getattr(resources, "engine_manager", None))
        return ended

    entry.build_and_serve = serve_or_fail


def fail_when_headless_engine_dies() -> None:
    """Does the same for a node without an API server; the same would make it unnecessary."""
    serve: Any = import_module("vllm.entrypoints.cli.serve")

    class EngineProcesses(serve.CoreEngineProcManager):  # type: ignore[misc]
        def monitor_engine_liveness(self) -> None:
            super().monitor_engine_liveness()
            if self.failed_proc_name is not None:
                raise EngineDiedError(self)

    serve.CoreEngineProcManager = EngineProcesses


def leave_signals_alone() -> None:
    """Leaves SIGTERM to the command's own handler until the HTTP server sets its own.

    vLLM's ``run_server`` turns it into a KeyboardInterrupt, which its zmq_socket_ctx swallows: a server told to stop
    while its engine starts would start nonetheless, or hang for ten minutes. A zmq_socket_ctx that lets the exception
    pass would make this unnecessary.
    """
    serve: Any = import_module("vllm.entrypoints.cli.serve")

    async def run_server(args: "Namespace") -> None:
        from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
        from vllm.utils.system_utils import decorate_logs

        decorate_logs("APIServer", skip_if_decorated=True)
        listen_address, sock = setup_server(args, reuse_port=False)
        await run_server_worker(listen_address, sock, args)

    serve.run_server = run_server
