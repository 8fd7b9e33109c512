"""Compressions that are spread over steps, so that no other request's token waits long for one."""

import math
from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_kvmerge.engine.plan import CompressionPlan, PartialPlan, Progress, Segments

STEP_SECONDS = 0.035
"""Bound on the estimated time of a step's compressions, in seconds, unless a single one exceeds it that nobody waits
for. Tokens are to wait 50 ms at most; the rest is for what an estimate, and the parts that work comes in, are off."""

LEAST_SECONDS = STEP_SECONDS / 2
"""Of these, what a compression that is spread gets in any case."""


@dataclass
class SpreadCompression:
    """A compression under way, whose request computes nothing until its last part.

    before: the request's segments until then. num_freed: blocks that the pool gains. superseded: blocks that a shared
    front takes the place of. seconds: estimate of all of it. until: share of it that has been scheduled.
    """

    plan: CompressionPlan
    before: Segments
    num_freed: int
    seconds: float
    superseded: list[KVCacheBlock] = field(default_factory=list)
    until: float = 0.0

    def next_part(self, seconds: float) -> PartialPlan | None:
        """What so many seconds suffice for; None: for all the rest."""
        self.until += seconds / self.seconds
        if self.until >= 1.0:
            return None
        # With half a step's work in one part, a step does not take much more than its share.
        return PartialPlan(self.plan, self.until, math.ceil(self.seconds / LEAST_SECONDS), seconds)

    def learn(self, progress: Progress) -> None:
        """Corrects the estimate, which is an upper bound, by what workers report."""
        if progress.seconds is not None:
            # From where they are: what a step leaves for want of a part that is small enough must not add up.
            self.until, self.seconds = progress.done, max(progress.seconds, LEAST_SECONDS)
