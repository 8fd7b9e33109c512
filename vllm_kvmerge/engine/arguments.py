"""Engine arguments that turn compression on in vLLM, the plugin's own included."""

import json
import os
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from vllm_kvmerge.engine.support import (
    QUANTISED,
    UnsupportedConfigError,
    caps_logits,
    check_options,
    front_obstacles,
    full_layer,
    has_sinks,
    has_states,
    has_windows,
    hidden_states_obstacle,
    num_full_layers,
    num_positions,
    platform_obstacle,
    rotation_obstacle,
    window_rotation_obstacle,
)
from vllm_kvmerge.ops import OPERATORS
from vllm_kvmerge.ops.choice import check_overrides, choice
from vllm_kvmerge.policies import PRESETS, load_plugins
from vllm_kvmerge.request.limits import DEVICE_SHARE, Limits, ModelShape
from vllm_kvmerge.request.spec import EXTRA_ARGS_KEY, FULL, CompressionError, parse_compression

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

WORKER_CLS = "vllm_kvmerge.engine.worker.cpu_worker.KVMergeWorker"
CUDA_WORKER_CLS = "vllm_kvmerge.engine.worker.cuda_worker.KVMergeCUDAWorker"
SCHEDULER_CLS = "vllm_kvmerge.engine.scheduler.KVMergeScheduler"
VALIDATOR = "vllm_kvmerge.engine.validation:CompressionValidator"
CONFIG_KEY = "kvmerge"
"""The plugin's part of vLLM's ``additional_config``, see ``PluginConfig``."""

BLOCK_SIZE = 32
LEAST_COMPACTION_BYTES = 256 << 20
LAYERS_AT_ONCE = 3
"""Working memory that suffices for the presets' mergers, as a multiple of one layer of the longest request."""


class PluginConfig(BaseModel):
    """The plugin's part of ``additional_config``."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    default: dict[str, Any] | str | None = None
    """Compression of requests that do not bring their own."""

    allowed_policies: list[str] | None = None
    """Policies, besides full, that requests may name and whose parts they may combine. Default: all."""

    max_compaction_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 40)] | None = Field(
        None,
        description="Memory outside the cache that a request's newest queries may take, and work on one KV head, per "
        f"worker; requests that need more are refused. Default: {LEAST_COMPACTION_BYTES >> 20} MiB, or "
        f"{LAYERS_AT_ONCE} times the float32 keys and values of one layer of the longest request if that is more; "
        f"on a GPU at most {DEVICE_SHARE} of its memory.",
    )
    compaction_workspace_bytes: int = Field(64 << 20, ge=1 << 20, le=1 << 40)
    """Working memory of compactions, per worker: as many layers and heads are compressed at once as fit into it.
    Another package's part that holds more than twice as much, or twice what one KV head takes, is refused by name after
    the second time."""

    max_compaction_seconds: float = Field(5.0, gt=0.0, le=3600.0)
    """Seconds that another package's part may take for one compression; its request ends with an error, and after the
    second time the part is refused by name."""

    external_cache_bytes: int = Field(4 << 30, ge=0)
    """Memory outside the pool, per worker, for the complete caches of requests with a refresh, taken as they come.
    Requests that find no room wait; those that never would are refused."""

    external_cache_dir: str | None = None
    """Folder for complete caches, as files that are gone when their requests are. Default: none, they are in memory."""

    api_key_routes: Literal["all", "v1"] = "all"
    """Routes that require the API key, if there is one. all: all but /health, /ping and /metrics; v1: those below /v1,
    /v2, /inference and /cohere, as in vLLM."""

    max_body_bytes: int = Field(32 << 20, ge=1024)
    """Largest body of an HTTP request, in bytes."""

    kvzap: str | None = None
    """KVzap model that predicts the scores of the policy kvzap: a folder, or a name on the Hugging Face hub, such as
    nvidia/KVzap-mlp-Qwen3-8B. Default: none, and the policy is refused."""

    head_budgets: str | None = None
    """File of the budgets of the model's heads, which vllm-kvmerge calibrate writes, for the policy calibrated, which
    requests that name no policy then get where it is the best; vllm-kvmerge serve takes the names of models whose files
    ship: demo, smollm2, qwen2.5-coder-0.5b, qwen2.5-coder-1.5b, gemma3-270m. Default: none, and the policy is
    refused."""

    shared_contexts: bool = True
    """Whether compressed contexts stay in the prefix cache, if there is one, for later requests with the same context
    and policy."""

    contexts_share: float = Field(0.5, ge=0.0, le=1.0)
    """Largest share of the pool that contexts may hold which are kept under an id; more of them are refused."""

    contexts_dir: str | None = None
    """Folder in which these contexts are saved, for this server after a restart and for others that share the folder.
    Default: none, they are gone with the server."""

    contexts_dir_bytes: int | None = Field(None, ge=1)
    """Largest size of this folder, in bytes. Beyond it contexts are deleted, first those that took the least time to
    make, per byte, and have not been used for longest. Default: any."""

    verify_share: float = Field(0.0, ge=0.0, le=1.0)
    """Share of all requests, plain ones included, whose answers are verified after they have been sent, for metrics."""

    verify_max_tokens: int = Field(32768, ge=1)
    """Most tokens that are computed to verify one answer, those of its prompt that are not cached any more included."""

    verify_seconds: float = Field(30.0, gt=0.0, le=3600.0)
    """Seconds for which the verification of an answer waits until no user does, and is computed; then it is skipped."""

    operators: dict[str, str] = {}
    """Implementations of operators to run instead of those in ops/choice.json."""

    example_prompts: str | None = None
    """Source of the page's example prompts, module:function; the function returns an object with a prompt and the
    answer to it. Default: none."""

    plain_attention: Literal["auto", "vllm", "ours"] = "auto"
    """Attention of requests that have not been compressed. On CPU: vLLM's operator or ours, by default ours for caches
    of 16 and 8 bits per number, and vLLM's for float32; they round differently. On CUDA: ours throughout, or else
    vLLM's FlashAttention wherever it suits the model and no full graph runs."""

    debug_poison_freed: bool = False
    """For tests: blocks that nobody holds any more are filled with NaN, keys, values and metadata, so that whatever
    reads what another request has left shows it. Slower."""

    @field_validator("operators")
    @classmethod
    def _check_operators(cls, operators: dict[str, str]) -> dict[str, str]:
        return check_overrides(operators, OPERATORS)

    @field_validator("external_cache_dir", "contexts_dir")
    @classmethod
    def _check_folder(cls, folder: str | None) -> str | None:
        if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ValueError("must be a folder that can be written to")
        return folder

    @field_validator("allowed_policies")
    @classmethod
    def _check_policies(cls, names: list[str] | None) -> list[str] | None:
        load_plugins()
        unknown = sorted(set(names or ()) - {*PRESETS, FULL})
        if unknown:
            raise ValueError(f"unknown policy {', '.join(unknown)}; allowed: {', '.join(sorted((FULL, *PRESETS)))}")
        if names is not None and not set(names) - {FULL}:
            raise ValueError("must name a policy that compresses; leave it out to allow all")
        return names


def plugin_config(config: "VllmConfig | Namespace") -> PluginConfig:
    """The plugin's part of an engine's ``additional_config``, or of a server's arguments."""
    return PluginConfig.model_validate((config.additional_config or {}).get(CONFIG_KEY) or {})


def shares_contexts(vllm_config: "VllmConfig") -> bool:
    """Whether compressed contexts stay in the prefix cache."""
    # Of a front, layers with a state would need the state at its end, which it does not hold.
    return (
        plugin_config(vllm_config).shared_contexts
        and bool(vllm_config.cache_config.enable_prefix_caching)
        and not has_states(vllm_config.model_config)
    )


def request_limits(vllm_config: "VllmConfig") -> Limits:
    """Limits of an engine's requests."""
    from vllm.platforms import current_platform

    options, model, parallel = plugin_config(vllm_config), vllm_config.model_config, vllm_config.parallel_config
    allowed, layer = options.allowed_policies, full_layer(model)
    num_kv_heads = model.get_num_kv_heads(parallel, layer)
    one_layer = 4 * 2 * num_kv_heads * layer.head_size * model.max_model_len
    max_bytes, device_room = max(LEAST_COMPACTION_BYTES, LAYERS_AT_ONCE * one_layer), None
    attention = None
    if vllm_config.device_config.device_type != "cpu":
        attention = options.operators.get("paged_attention") or choice(
            "paged_attention", current_platform.get_device_name(), layer.head_size
        )
    if vllm_config.device_config.device_type == "cuda":
        device_room = int(DEVICE_SHARE * current_platform.get_device_total_memory())
        max_bytes = min(max_bytes, device_room)
    return Limits(
        allowed_policies=None if allowed is None else frozenset(allowed),
        max_bytes=options.max_compaction_bytes or max_bytes,
        max_seconds=options.max_compaction_seconds,
        workspace_bytes=options.compaction_workspace_bytes,
        shape=ModelShape(
            num_layers=num_full_layers(model, parallel),
            num_kv_heads=num_kv_heads,
            group_size=model.get_num_attention_heads(parallel) // num_kv_heads,
            head_size=layer.head_size,
            hidden_size=model.get_hidden_size(),
            item_size=model.dtype.itemsize,
            cache_item_size=1 if vllm_config.cache_config.cache_dtype in QUANTISED else None,
            caps_logits=caps_logits(model),
            has_sinks=has_sinks(model),
            rotation_obstacle=rotation_obstacle(model),
            hidden_states_obstacle=hidden_states_obstacle(vllm_config),
            has_surrogate=options.kvzap is not None,
            has_head_budgets=options.head_budgets is not None,
            num_positions=num_positions(model),
            has_windows=has_windows(model),
            has_latents=model.use_mla,
            window_rotation_obstacle=window_rotation_obstacle(model),
            has_states=has_states(model),
            front_obstacles=front_obstacles(vllm_config, attention),
        ),
        block_size=vllm_config.cache_config.block_size,
        max_model_len=model.max_model_len,
        max_external_bytes=options.external_cache_bytes,
        num_token_ids=model.get_vocab_size(),
        max_num_seqs=vllm_config.scheduler_config.max_num_seqs,
        has_prefix_cache=bool(vllm_config.cache_config.enable_prefix_caching),
        shares_contexts=shares_contexts(vllm_config),
        device_room=device_room,
        pool_bytes=vllm_config.cache_config.kv_cache_memory_bytes,
        head_pages=attention != "reference",  # that cannot follow a GPU's addresses
    )


def kvmerge_engine_args(kv_compression: dict[str, Any] | str | None = None, **overrides: Any) -> dict[str, Any]:
    """Engine arguments with which vLLM compresses per request: ``LLM(model, **kvmerge_engine_args())``.

    kv_compression: compression of requests that do not bring their own (an object or its JSON text); default: none.
    overrides: any other engine arguments; these win over the plugin's own choices.

    Raises:
        CompressionError: kv_compression is not valid (a ValueError, like the next).
        UnsupportedConfigError: an override, or this platform, does not work with compression.
    """
    from vllm.platforms import current_platform

    check_options(overrides)
    if obstacle := platform_obstacle():
        raise UnsupportedConfigError(obstacle)
    is_cuda = current_platform.is_cuda()
    ours = {"worker_cls": CUDA_WORKER_CLS, "attention_backend": "CUSTOM"} if is_cuda else {"worker_cls": WORKER_CLS}
    overrides = ours | overrides
    overrides["additional_config"] = _with_default(overrides.get("additional_config"), kv_compression)
    processors = list(overrides.get("logits_processors") or [])
    overrides["logits_processors"] = processors if VALIDATOR in processors else [*processors, VALIDATOR]
    return {"scheduler_cls": SCHEDULER_CLS, "block_size": BLOCK_SIZE} | overrides


def complete(engine_args: "EngineArgs") -> None:
    """Fills in what compression takes if ``additional_config`` asks for it. Raises as ``kvmerge_engine_args``."""
    if engine_args.scheduler_cls is not None or not is_asked(engine_args.additional_config):
        return
    given = {
        name: value
        for name, field in type(engine_args).__dataclass_fields__.items()
        if (value := getattr(engine_args, name)) != field.default
    }
    for name, value in kvmerge_engine_args(**given).items():
        setattr(engine_args, name, value)


def is_asked(additional_config: Any) -> bool:
    """Whether an engine's ``additional_config`` asks for compression."""
    return isinstance(additional_config, dict) and additional_config.get(CONFIG_KEY) is not None


def _with_default(
    additional_config: dict[str, Any] | None, kv_compression: dict[str, Any] | str | None
) -> dict[str, Any]:
    """``additional_config`` with the validated default in the plugin's part."""
    ours = dict((additional_config or {}).get(CONFIG_KEY) or {})
    try:
        PluginConfig.model_validate(ours)
    except ValidationError as error:
        fault = error.errors()[0]
        name = ".".join(["additional_config", CONFIG_KEY, *map(str, fault["loc"])])
        raise UnsupportedConfigError(
            f"{name}={fault['input']} is not supported: {fault['msg'].removeprefix('Value error, ')}"
        ) from None
    given = ours.get("default")
    if given is not None and kv_compression is not None:
        raise UnsupportedConfigError(
            f"additional_config.{CONFIG_KEY}.default={given} is not supported together with {EXTRA_ARGS_KEY}; give one"
        )
    default = given if kv_compression is None else kv_compression
    config, allowed = parse_compression(default), ours.get("allowed_policies")
    if config is not None and allowed is not None and config.name not in allowed:
        message = f"{config.name!r} cannot be the default, because it is not among allowed_policies; "
        message += f"allowed: {', '.join(sorted({FULL, *allowed}))}"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.policy", message, "not_allowed")
    for field in ("context_tokens", "context_messages"):
        if config is not None and (length := getattr(config, field)) is not None:
            message = f"{length} cannot be a default, because prompts differ; allowed: in a request"
            raise CompressionError(f"{EXTRA_ARGS_KEY}.{field}", message, "not_a_default")
    if config is not None and config.protect is not None:
        message = "cannot be a default, because prompts differ; allowed: in a request"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.protect", message, "not_a_default")
    if config is not None and config.refresh is not None and ours.get("external_cache_bytes") == 0:
        message = "cannot be a default, because external_cache_bytes is 0; allowed: more"
        raise CompressionError(f"{EXTRA_ARGS_KEY}.refresh", message, "not_a_default")
    if isinstance(default, str):
        default = json.loads(default)
    return {**(additional_config or {}), CONFIG_KEY: ours | {"default": default}}
