"""How a budget is split over layers and heads; one file per allocator."""

from vllm_kvmerge.policies.allocators.adaptive import Adaptive
from vllm_kvmerge.policies.allocators.pyramid import Pyramid
from vllm_kvmerge.policies.allocators.uniform import Uniform
from vllm_kvmerge.policies.allocators.variance import Variance

__all__ = ["Adaptive", "Pyramid", "Uniform", "Variance"]
