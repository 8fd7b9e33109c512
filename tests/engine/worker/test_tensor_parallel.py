"""Which KV heads a tensor-parallel worker has."""

import pytest

from vllm_kvmerge.engine.worker.tensor_parallel import HeadShare


@pytest.mark.parametrize(
    ("num_workers", "num_replicas", "num_kv_heads", "indices"),
    [(1, 1, 4, [[0, 1, 2, 3]]), (2, 1, 2, [[0, 1], [2, 3]]), (4, 2, 1, [[0], [0], [1], [1]])],
)
def test_workers_hold_all_heads_in_order_and_share_those_that_are_too_few(
    num_workers, num_replicas, num_kv_heads, indices
):
    shares = [HeadShare(rank, num_workers, num_replicas) for rank in range(num_workers)]
    assert [share.indices(num_kv_heads) for share in shares] == indices
    first = [indices.index(own) == rank for rank, own in enumerate(indices)]
    assert [share.is_first_replica for share in shares] == first
