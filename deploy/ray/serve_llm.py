"""Ray Serve LLM with KV cache compression, on CPU: serve run deploy.ray.serve_llm:app

On GPUs, leave ``accelerator_config`` out, and import this where vLLM sees a GPU: the engine's classes depend on the
platform. Ray's ingress takes the field ``kv_compression`` for one that it does not know and ignores it: a request says
it in ``vllm_xargs``, as JSON text, for instance
{"model": "demo", "prompt": "...", "vllm_xargs": {"kv_compression": "{\\"budget\\": 0.25}"}}.
"""

from ray.serve.llm import LLMConfig, build_openai_app

from vllm_kvmerge import demo, kvmerge_engine_args

ENGINE_ARGS = kvmerge_engine_args(
    {"budget": 0.25}, max_model_len=4096, enforce_eager=True, kv_cache_memory_bytes=1 << 26
)
"""Requests that say nothing are compressed this way."""

app = build_openai_app(
    {
        "llm_configs": [
            LLMConfig(
                model_loading_config={"model_id": "demo", "model_source": demo.model_path()},
                accelerator_config={"kind": "cpu"},
                deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
                engine_kwargs=ENGINE_ARGS,
            )
        ]
    }
)
