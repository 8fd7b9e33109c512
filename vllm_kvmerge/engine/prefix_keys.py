"""Keys of data cached for a request's first tokens: compressed fronts, and scores of contexts."""

from collections.abc import Callable
from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import BlockHash, generate_block_hash_extra_keys, hash_block_tokens
from vllm.v1.request import Request


@dataclass(frozen=True)
class PrefixKeys:
    """Keys made with the prefix cache's ``hash_function``, of the ``block_size`` that requests' hashes are of."""

    hash_function: Callable[[object], bytes]
    block_size: int

    def of(self, request: Request, num_tokens: int, *purpose: str) -> BlockHash | None:
        """The key of what ``purpose`` makes of the request's first ``num_tokens``.

        It is vLLM's hash of the tokens' last, usually partial, block, with the purpose among what else distinguishes
        it, such as LoRA adapters, other modalities and a cache salt. None: the prefix cache does not know its tokens.
        """
        num_full = num_tokens // self.block_size
        start = num_full * self.block_size
        if request.prompt_token_ids is None or len(request.block_hashes) < num_full:
            return None
        extra, _ = generate_block_hash_extra_keys(request, start, num_tokens, 0)
        extra = (*(extra or ()), ("kv_compression", *purpose))
        tokens = request.all_token_ids[start:num_tokens]
        return hash_block_tokens(self.hash_function, self.last_full_block(request, num_tokens), tokens, extra)

    def last_full_block(self, request: Request, num_tokens: int) -> BlockHash | None:
        """Hash of the last full block of the request's first ``num_tokens``; None: there is none."""
        num_full = num_tokens // self.block_size
        return request.block_hashes[num_full - 1] if num_full else None

    def of_part(self, key: BlockHash, index: int) -> BlockHash:
        """The key of a part of what ``key`` is of."""
        return hash_block_tokens(self.hash_function, key, [index])
