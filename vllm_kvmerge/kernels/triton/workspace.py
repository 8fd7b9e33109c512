"""What Triton's attention needs of the workspace."""

from vllm_kvmerge.kernels.page import Pages
from vllm_kvmerge.kernels.triton.plan import AttentionPlan
from vllm_kvmerge.kernels.workspace import Workspace, uses_workspace, workspace_of

__all__ = ["Workspace", "workspace_of"]


@uses_workspace
def _sizes(pages: Pages, num_heads: int, num_queries: int, rows: int, max_blocks: int) -> dict[str, int]:
    return AttentionPlan.of(pages, num_heads, num_queries, rows, max_blocks).sizes
