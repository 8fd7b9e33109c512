"""A worker's share of the model's KV heads, and the communication of tensor-parallel workers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group

from vllm_kvmerge.engine.support import full_layer


@dataclass(frozen=True)
class HeadShare:
    """The KV heads of worker ``rank`` of ``num_workers``. num_replicas: workers with the same KV head, more than one if
    there are more workers than heads."""

    rank: int
    num_workers: int
    num_replicas: int

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> "HeadShare":
        """This process's share."""
        num_workers = vllm_config.parallel_config.tensor_parallel_size
        num_replicas = max(1, num_workers // full_layer(vllm_config.model_config).total_num_kv_heads)
        return cls(get_tensor_model_parallel_rank(), num_workers, num_replicas)

    @property
    def is_first_replica(self) -> bool:
        """True if no worker of a lower rank holds the same KV heads."""
        return self.rank % self.num_replicas == 0

    def indices(self, num_kv_heads: int) -> list[int]:
        """Indices of this worker's ``num_kv_heads`` among the model's KV heads."""
        first = self.rank // self.num_replicas * num_kv_heads
        return list(range(first, first + num_kv_heads))

    def gather(self, tensor: Tensor) -> Tensor:
        """``[H, ...]`` of the heads of all workers, from the tensors of each one's own: of a KV head that several hold,
        each has what its own queries say, which count alike."""
        # Where workers share memory, vLLM's operator takes floating-point numbers alone. It copies them bit by bit.
        bits = tensor.contiguous().unsqueeze(-1)
        if not tensor.is_floating_point():
            bits = bits.view(torch.float32)
        return get_tp_group().all_gather(bits, dim=0).view(tensor.dtype).squeeze(-1)

    def failed_anywhere(self, failed: list[bool]) -> list[bool]:
        """Flags of the plans that failed on any worker, from those of this worker."""
        if self.num_workers == 1:
            return failed
        flags = torch.tensor(failed, dtype=torch.int32)
        torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, get_tp_group().cpu_group)
        return flags.bool().tolist()
