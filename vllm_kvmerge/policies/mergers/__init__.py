"""Mergers: what becomes of the entries that do not stay."""

from vllm_kvmerge.policies.mergers.drop import DropMerger
from vllm_kvmerge.policies.mergers.residual import ResidualMerger
from vllm_kvmerge.policies.mergers.zip_merge import ZipMerger

__all__ = ["DropMerger", "ResidualMerger", "ZipMerger"]
