"""Ray Serve LLM with KV cache compression: serve run deploy.ray.serve_llm:app

Untested: Ray has not run here, and whether a release of it works with this vLLM is not known. A test holds the engine
arguments against vLLM's own. Ray's ingress knows nothing of the field ``kv_compression``: a request says it in
``vllm_xargs``, as JSON text, for instance
{"model": "qwen", "prompt": "...", "vllm_xargs": {"kv_compression": "{\\"policy\\": \\"keepkv\\", \\"budget\\": 0.2}"}}.
"""

from ray.serve.llm import LLMConfig, build_openai_app

from vllm_kvmerge import kvmerge_engine_args

ENGINE_ARGS = kvmerge_engine_args({"policy": "keepkv", "budget": 0.2}, max_model_len=8192, enforce_eager=True)
"""Requests that say nothing are compressed this way."""

app = build_openai_app(
    {
        "llm_configs": [
            LLMConfig(
                model_loading_config={"model_id": "qwen", "model_source": "Qwen/Qwen3-0.6B"},
                deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 2}},
                engine_kwargs=ENGINE_ARGS,
            )
        ]
    }
)
