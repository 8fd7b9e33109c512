"""Mergers: merge or drop the entries that do not stay."""

from vllm_kvmerge.policies.mergers.asymkv import AsymKVMerger as AsymKVMerger
from vllm_kvmerge.policies.mergers.attention_matching import AttentionMatchingMerger as AttentionMatchingMerger
from vllm_kvmerge.policies.mergers.cam import CamMerger as CamMerger
from vllm_kvmerge.policies.mergers.d2o import D2OMerger as D2OMerger
from vllm_kvmerge.policies.mergers.drop import DropMerger as DropMerger
from vllm_kvmerge.policies.mergers.kvmerger import KVMergerMerger as KVMergerMerger
from vllm_kvmerge.policies.mergers.neighbour_value import NeighbourValueMerger as NeighbourValueMerger
from vllm_kvmerge.policies.mergers.regression import RegressionMerger as RegressionMerger
from vllm_kvmerge.policies.mergers.residual import ResidualMerger as ResidualMerger
from vllm_kvmerge.policies.mergers.zip_merge import ZipMerger as ZipMerger
