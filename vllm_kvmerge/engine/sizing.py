"""How many requests of one kind fit into a KV cache, from the schedule that the engine itself follows."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.kv_cache_interface import FullAttentionSpec

from vllm_kvmerge.engine.arguments import request_limits
from vllm_kvmerge.engine.blocks import MergeableAttentionSpec
from vllm_kvmerge.engine.schedule import UNCOMPRESSED, RequestCompression, cdiv
from vllm_kvmerge.engine.support import UnsupportedConfigError
from vllm_kvmerge.request.spec import CompressionSpec

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass(frozen=True)
class Life:
    """Blocks that one request holds at most: until its context has been compressed for the last time (``reading``), and
    from then on."""

    reading: int
    generating: int

    @classmethod
    def of(cls, compression: RequestCompression | None, num_tokens: int, block_size: int) -> "Life":
        """compression: None: none. num_tokens: whose keys and values are computed. Raises PartError."""
        reading, generating, front_blocks, segments = 0, 0, 0, UNCOMPRESSED

        def held(count: int) -> int:
            # Null blocks lie between the front and the block in which the tail begins.
            return front_blocks + cdiv(count, block_size) - max(front_blocks, segments.tail // block_size)

        while compression is not None and (count := compression.next_compression(segments)) is not None:
            if count > num_tokens or count <= segments.changed_at:
                break
            if compression.is_in_context(segments):
                reading = max(reading, held(count))
            else:
                generating = max(generating, held(count))
            front, segments = compression.compressed(segments, count)
            front_blocks = front.num_blocks
        generating = max(generating, held(num_tokens))
        return cls(max(reading, generating), generating)

    def num_fitting(self, num_blocks: int) -> int:
        """Requests that run at once without preempting each other, if one at a time reads its context."""
        return 0 if self.reading > num_blocks else 1 + (num_blocks - self.reading) // self.generating


@dataclass(frozen=True)
class Sizing:
    """Of one worker. block_bytes: of all layers. num_blocks: that requests can hold."""

    block_size: int
    block_bytes: int
    num_blocks: int
    life: Life

    @property
    def num_requests(self) -> int:
        return self.life.num_fitting(self.num_blocks)


def size(
    vllm_config: "VllmConfig", memory: int, context: int, answer: int, config: CompressionSpec | None
) -> tuple[Sizing, Sizing]:
    """Requests with a prompt of ``context`` tokens and ``answer`` new ones: without compression on stock vLLM, and with
    ``config`` (None: without) on ours.

    memory: bytes of a worker's KV cache.

    Raises:
        CompressionError: such requests are refused.
        UnsupportedConfigError: what they hold depends on other requests, or the model's layers are not all alike.
    """
    limits = request_limits(vllm_config)
    shape, cache, model = limits.shape, vllm_config.cache_config, vllm_config.model_config
    if shape.has_windows or shape.has_states or shape.has_latents:
        raise UnsupportedConfigError("sizes are known for models with full attention alone in all layers")
    if context + answer > limits.max_model_len:
        raise UnsupportedConfigError(f"{context} + {answer} tokens: --max-model-len allows {limits.max_model_len}")
    if config is not None and (config.awaits_pressure or config.policy.tracker.repeats_context):
        what = "trigger: pressure" if config.awaits_pressure else f"{config.name}, which repeats contexts,"
        raise UnsupportedConfigError(f"what requests with {what} hold depends on the others")
    compression = None
    if config is not None:
        limits.check(config, context, answer)
        if not config.never_compresses(context, answer):
            compression = RequestCompression.of(config, context, answer, limits)
    dtype = kv_cache_dtype_str_to_dtype(cache.cache_dtype, model)
    stock = FullAttentionSpec(
        block_size=limits.block_size, num_kv_heads=shape.num_kv_heads, head_size=shape.head_size, dtype=dtype
    )

    def sizing(spec: FullAttentionSpec, compression: RequestCompression | None) -> Sizing:
        block_bytes = shape.num_layers * spec.page_size_bytes
        # The last token is never read. One block, the null block, is nobody's.
        life = Life.of(compression, context + answer - 1, limits.block_size)
        return Sizing(limits.block_size, block_bytes, max(0, memory // block_bytes - 1), life)

    return sizing(stock, None), sizing(MergeableAttentionSpec.of(stock), compression)
