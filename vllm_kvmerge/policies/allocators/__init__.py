"""Allocators: split a budget over layers and heads."""

from vllm_kvmerge.policies.allocators.adaptive import Adaptive as Adaptive
from vllm_kvmerge.policies.allocators.all_heads import AllHeads as AllHeads
from vllm_kvmerge.policies.allocators.calibrated import Calibrated as Calibrated
from vllm_kvmerge.policies.allocators.pyramid import Pyramid as Pyramid
from vllm_kvmerge.policies.allocators.threshold import Threshold as Threshold
from vllm_kvmerge.policies.allocators.uniform import Uniform as Uniform
from vllm_kvmerge.policies.allocators.variance import Variance as Variance
