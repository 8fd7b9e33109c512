"""How a budget is split over layers and heads; one file per allocator."""

from vllm_kvmerge.policies.allocators.uniform import Uniform

__all__ = ["Uniform"]
