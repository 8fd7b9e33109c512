"""What Triton's attention needs of the workspace."""

from vllm_kvmerge.ops.triton.plan import AttentionPlan
from vllm_kvmerge.ops.types import PagedKVCache
from vllm_kvmerge.ops.workspace import Workspace, uses_workspace, workspace_of

__all__ = ["Workspace", "workspace_of"]


@uses_workspace
def _sizes(pages: PagedKVCache, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    return AttentionPlan.of(pages, num_heads, num_queries, rows, max_blocks).sizes
