"""What one request's KV cache held, step by step, for requests that ask."""

from dataclasses import dataclass
from typing import Any

USAGE_KEY = "kvmerge_usage"
"""In ``SamplingParams.extra_args`` (``vllm_xargs`` of a request body): a true value asks for the report."""

REPORT_KEY = "kvmerge"
"""In ``kv_transfer_params`` of the answer: the report. vLLM gives a scheduler no other way to tell a client something
about its request; KV connectors, whose place it is, are refused together with compression."""


@dataclass
class CacheUsage:
    """Sizes after each scheduled step. entries: live entries per KV head of one layer. blocks: held, shared ones too.

    Peaks are over all steps, the mean over those from the end of the prompt on, each taken after its compression.
    """

    num_steps: int = 0
    total_entries: int = 0
    total_blocks: int = 0
    peak_entries: int = 0
    peak_blocks: int = 0

    def note_peak(self, entries: int, blocks: int) -> None:
        self.peak_entries = max(self.peak_entries, entries)
        self.peak_blocks = max(self.peak_blocks, blocks)

    def count_step(self, entries: int, blocks: int) -> None:
        self.num_steps += 1
        self.total_entries += entries
        self.total_blocks += blocks

    def report(self, bytes_per_block: int) -> dict[str, Any]:
        """As JSON has it; bytes over all layers and ranks. Means are None for a request that never ended its prompt."""
        steps = self.num_steps
        return {
            "mean_entries": self.total_entries / steps if steps else None,
            "mean_bytes": self.total_blocks * bytes_per_block / steps if steps else None,
            "peak_entries": self.peak_entries,
            "peak_bytes": self.peak_blocks * bytes_per_block,
        }
