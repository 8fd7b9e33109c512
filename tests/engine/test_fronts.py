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
from vllm_kvmerge.engine.plan import Segments
from vllm_kvmerge.engine.prefix_keys import PrefixKeys
from vllm_kvmerge.request.parameters import parse_compression

BLOCK_SIZE = 32
POLICY = '{"policy":"snapkv","budget":8}'
LENGTHS = 20, 64, 75
"""Of contexts: in the first block, with none that is not full, and with one."""


def adapter(name: str, number: int, path: str | None = None) -> LoRARequest:
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
    # The tokens after a context, and the request's name for an adapter, do not matter.
    for name, fields in kinds.items():
        assert fronts.key(make_request(num_tokens, **fields), num_tokens, POLICY) == keys[name]
    again = make_request(lora_request=adapter("a", 9))
    assert fronts.key(again, num_tokens, POLICY) == keys["adapter"]
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
    context's end."""
    requests = [make_request(images=(image(name, offset),)) for name in ("cat", "cat", "dog")]
    same, again, other = (fronts.key(one, 75, POLICY) for one in requests)
    moved = fronts.key(make_request(images=(image("cat", offset + 1),)), 75, POLICY)
    assert same == again and len({same, other, moved, fronts.key(make_request(), 75, POLICY)}) == 4
    # A second one after it too.
    two = [make_request(images=(image("cat", 5), image(name, offset))) for name in ("cat", "dog")]
    assert len({fronts.key(one, 75, POLICY) for one in two} | {same}) == 3


def test_images_after_the_context_do_not_matter(fronts):
    for num_tokens in LENGTHS:
        with_one = make_request(images=(image("cat", num_tokens),))
        assert fronts.key(with_one, num_tokens, POLICY) == fronts.key(make_request(), num_tokens, POLICY)


def test_prompts_without_tokens_have_no_key(fronts):
    request = make_request()
    request.prompt_token_ids = None  # it is given as embeddings
    assert fronts.key(request, 75, POLICY) is None
    request = make_request()
    request.block_hashes.clear()  # its server has no prefix cache
    assert fronts.key(request, 75, POLICY) is None


def test_workers_memory_is_for_the_fronts_that_were_used_last(pool):
    fronts = FrontCache(pool, 0, PrefixKeys(sha256, BLOCK_SIZE), 2)

    def add(name: bytes) -> None:
        blocks = tuple(pool.get_new_blocks(1))
        fronts.add(SharedFront(BlockHash(name), Segments(8, 8, 8), BLOCK_SIZE, (0,), blocks, kept_bytes=1))

    for name in (b"one", b"two"):
        add(name)
    assert fronts.find(BlockHash(b"one")) is not None
    add(b"three")
    assert list(fronts._fronts) == [b"one", b"three"] and fronts.take_forgotten() == [b"two"]


def keep_turn(pool: BlockPool, fronts: FrontCache, request: Request, num_tokens: int, policy: str = POLICY):
    key = fronts.key(request, num_tokens, policy, TURN)
    assert key is not None
    rows = tuple(range(-(-num_tokens // BLOCK_SIZE)))
    segments = Segments(8, tail=8, changed_at=8)
    turn = fronts.turn(request, num_tokens, policy)
    front = SharedFront(key, segments, num_tokens, rows, tuple(pool.get_new_blocks(len(rows))), turn=turn)
    fronts.add(front)
    return front


def test_the_longest_turn_is_found(pool, fronts):
    request = make_request(100)
    assert fronts.find_turn(request, POLICY) is None
    kept = {num_tokens: keep_turn(pool, fronts, request, num_tokens) for num_tokens in (64, 70, 75, 33)}
    salted = keep_turn(pool, fronts, make_request(100, cache_salt="mine"), 90)
    another = keep_turn(pool, fronts, request, 91, POLICY + " ")
    for length, found in ((100, 75), (76, 75), (75, 70), (70, 64), (64, 33), (33, None), (10, None)):
        assert fronts.find_turn(make_request(length), POLICY) is kept.get(found)
    edited = make_request(100)
    edited._all_token_ids[72] ^= 1  # in the last block of one of them, which has no hash of its own
    assert fronts.find_turn(edited, POLICY) is kept[70]
    # Of one length and with one last full block, what differs is in the block that is not full.
    other = make_request(100)
    other._all_token_ids[66] ^= 1
    beside = keep_turn(pool, fronts, other, 75)
    assert fronts.find_turn(other, POLICY) is beside and fronts.find_turn(request, POLICY) is kept[75]
    for num_tokens in (75, 70, 33):
        fronts.lose(kept[num_tokens].blocks[:1])
    assert fronts.find_turn(request, POLICY) is kept[64] and fronts.find_turn(other, POLICY) is beside
    fronts.lose([*beside.blocks, *kept[64].blocks])
    assert fronts.find_turn(request, POLICY) is fronts.find_turn(other, POLICY) is None
    fronts.lose([*salted.blocks, *another.blocks])
    assert len(fronts) == fronts.num_blocks == 0 and fronts._turns == {}
    assert pool.get_num_free_blocks() == 19


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_turns_of_adapters_are_their_own(pool, fronts, num_tokens):
    of = {name: make_request(lora_request=adapter(name, ord(name))) for name in ("a", "b")} | {"": make_request()}
    for name, request in of.items():
        assert fronts.find_turn(request, POLICY) is None, name
        kept = keep_turn(pool, fronts, request, num_tokens)
        assert fronts.find_turn(request, POLICY) is kept
