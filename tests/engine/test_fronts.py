"""The cache of fronts alone: what their keys tell apart, and which turn a request finds."""

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from vllm_kvmerge.engine.fronts import TURN, FrontCache, SharedFront
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.engine.schedule import Segments
from vllm_kvmerge.request.spec import parse_compression

BLOCK_SIZE = 32
POLICY = '{"policy":"snapkv","budget":8}'
LENGTHS = 20, 64, 75
"""Of contexts: in the first block, with none that is not full, and with one."""


def adapter(name: str, number: int = 1, path: str | None = None) -> LoRARequest:
    return LoRARequest(name, number, path or f"/adapters/{name}")


def image(identifier: str, offset: int, length: int = 6) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def make_request(num_tokens: int = 100, images: tuple[MultiModalFeatureSpec, ...] = (), **fields) -> Request:
    init_none_hash(sha256)
    return Request(
        request_id="one",
        prompt_token_ids=[7 * index % 800 for index in range(num_tokens)],
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        mm_features=list(images),
        block_hasher=get_request_block_hasher(BLOCK_SIZE, sha256),
        **fields,
    )


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(20, enable_caching=True, hash_block_size=BLOCK_SIZE)


@pytest.fixture
def fronts(pool) -> FrontCache:
    return FrontCache(pool, 0, PrefixKeys(sha256, BLOCK_SIZE), 1 << 20)


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_what_vllm_tells_apart_is_told_apart(fronts, num_tokens):
    kinds = {
        "plain": {},
        "adapter": {"lora_request": adapter("a", 1)},
        "another adapter": {"lora_request": adapter("b", 2)},
        "an adapter's name with other weights": {"lora_request": adapter("a", 1, "/adapters/c")},
        "salt": {"cache_salt": "mine"},
        "another salt": {"cache_salt": "yours"},
        "image": {"images": (image("cat", 5),)},
        "another image": {"images": (image("dog", 5),)},
        "elsewhere": {"images": (image("cat", 6),)},
        "all of them": {"lora_request": adapter("a", 1), "cache_salt": "mine", "images": (image("cat", 5),)},
    }
    keys = {name: fronts.key(make_request(**fields), num_tokens, POLICY) for name, fields in kinds.items()}
    assert None not in keys.values() and len(set(keys.values())) == len(kinds)
    # Tokens and images after a context, and the request's name for an adapter, do not matter.
    for name, fields in kinds.items():
        assert fronts.key(make_request(num_tokens, **fields), num_tokens, POLICY) == keys[name]
    same = {"adapter": {"lora_request": adapter("a", 9)}, "plain": {"images": (image("cat", num_tokens),)}}
    for name, fields in same.items():
        assert fronts.key(make_request(**fields), num_tokens, POLICY) == keys[name]
    others = [(POLICY, TURN), (POLICY.replace("8", "9"),), (POLICY.replace("8", "9"), TURN)]
    assert len({keys["plain"], *(fronts.key(make_request(), num_tokens, *one) for one in others)}) == 4


def test_what_a_front_is_made_by_is_told_apart():
    def policy(**fields) -> str:
        return parse_compression({"policy": "snapkv", "budget": 96, **fields}).front_policy

    assert {policy(context_tokens=9), policy(context_messages=2), policy(reuse="turns")} == {policy()}
    others = [{"budget": 97}, {"decode": "bounded"}, *({"protect": {"tokens": [[0, end]]}} for end in (4, 5))]
    assert len({policy(), *(policy(**fields) for fields in others)}) == 1 + len(others)


@pytest.mark.parametrize("offset", [59, 62, 66, 70, 73])
def test_images_that_reach_into_the_last_block_are_told_apart(fronts, offset):
    """Of a context of 75 tokens, whose last block begins at 64: before it, in it, and across its beginning or the
    context's end; alone, and after another one."""

    def key(*images: MultiModalFeatureSpec) -> BlockHash | None:
        return fronts.key(make_request(images=images), 75, POLICY)

    assert key(image("cat", offset)) == key(image("cat", offset))
    others = [(image("dog", offset),), (image("cat", offset + 1),), ()]
    others += [(image("cat", 5), image(name, offset)) for name in ("cat", "dog")]
    assert len({key(image("cat", offset)), *(key(*images) for images in others)}) == 1 + len(others)


def test_prompts_without_tokens_have_no_key(fronts):
    embedded, uncached = make_request(), make_request()
    embedded.prompt_token_ids = None
    uncached.block_hashes.clear()  # its server has no prefix cache
    assert fronts.key(embedded, 75, POLICY) is fronts.key(uncached, 75, POLICY) is None


def test_workers_memory_is_for_the_fronts_that_were_used_last(pool):
    fronts = FrontCache(pool, 0, PrefixKeys(sha256, BLOCK_SIZE), 2)
    for name in (b"one", b"two", b"three"):
        if name == b"three":
            assert fronts.find(BlockHash(b"one")) is not None
        blocks = tuple(pool.get_new_blocks(1))
        fronts.add(SharedFront(BlockHash(name), Segments(8, 8, 8), BLOCK_SIZE, (0,), blocks, kept_bytes=1))
    assert list(fronts._fronts) == [b"one", b"three"] and fronts.take_forgotten() == [b"two"]


def keep_turn(pool: BlockPool, fronts: FrontCache, request: Request, num_tokens: int, policy: str = POLICY):
    key, turn = fronts.key(request, num_tokens, policy, TURN), fronts.turn(request, num_tokens, policy)
    rows = tuple(range(-(-num_tokens // BLOCK_SIZE)))
    blocks = tuple(pool.get_new_blocks(len(rows)))
    front = SharedFront(key, Segments(8, tail=8, changed_at=8), num_tokens, rows, blocks, turn=turn)
    fronts.add(front)
    return front


def other_token(at: int) -> Request:
    request = make_request()
    request._all_token_ids[at] ^= 1
    return request


def test_the_longest_turn_is_found(pool, fronts):
    request = make_request()
    assert fronts.find_turn(request, POLICY) is None
    kept = {num_tokens: keep_turn(pool, fronts, request, num_tokens) for num_tokens in (64, 70, 75, 33)}
    salted = keep_turn(pool, fronts, make_request(cache_salt="mine"), 90)
    another = keep_turn(pool, fronts, request, 91, POLICY + " ")
    for length, found in ((100, 75), (76, 75), (75, 70), (70, 64), (64, 33), (33, None), (10, None)):
        assert fronts.find_turn(make_request(length), POLICY) is kept.get(found)
    # An edit in the last block of one of them, which has no hash of its own.
    assert fronts.find_turn(other_token(72), POLICY) is kept[70]
    # Of one length and with one last full block, what differs is in the block that is not full.
    other = other_token(66)
    beside = keep_turn(pool, fronts, other, 75)
    assert fronts.find_turn(other, POLICY) is beside and fronts.find_turn(request, POLICY) is kept[75]
    for num_tokens in (75, 70, 33):
        fronts.lose(kept[num_tokens].blocks[:1])
    assert fronts.find_turn(request, POLICY) is kept[64] and fronts.find_turn(other, POLICY) is beside
    for one in (beside, kept[64], salted, another):
        fronts.lose(one.blocks)
    assert fronts.find_turn(request, POLICY) is fronts.find_turn(other, POLICY) is None
    assert len(fronts) == fronts.num_blocks == 0 and fronts._turns == {}
    assert pool.get_num_free_blocks() == 19
