"""Mergers: what becomes of the entries that do not stay."""

from vllm_kvmerge.policies.mergers.asymkv import AsymKVMerger
from vllm_kvmerge.policies.mergers.cam import CamMerger
from vllm_kvmerge.policies.mergers.d2o import D2OMerger
from vllm_kvmerge.policies.mergers.drop import DropMerger
from vllm_kvmerge.policies.mergers.kvmerger import KVMergerMerger
from vllm_kvmerge.policies.mergers.neighbour_value import NeighbourValueMerger
from vllm_kvmerge.policies.mergers.regression import RegressionMerger
from vllm_kvmerge.policies.mergers.residual import ResidualMerger
from vllm_kvmerge.policies.mergers.zip_merge import ZipMerger

__all__ = [
    "AsymKVMerger",
    "CamMerger",
    "D2OMerger",
    "DropMerger",
    "KVMergerMerger",
    "NeighbourValueMerger",
    "RegressionMerger",
    "ResidualMerger",
    "ZipMerger",
]
