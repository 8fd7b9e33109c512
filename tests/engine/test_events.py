"""vLLM's KV events: whoever follows them knows what the prefix cache holds, shared fronts included."""

from collections import Counter

import numpy as np
import pytest
from msgspec import msgpack
from vllm import SamplingParams
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.v1.core.kv_cache_utils import ExternalBlockHash, get_block_hash, maybe_convert_block_hash

from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression

pytestmark = pytest.mark.slow


class Subscriber:
    """What one that gets all events knows: how many blocks there are of each hash, and which were stored as fronts."""

    def __init__(self) -> None:
        self.held: Counter[ExternalBlockHash] = Counter()
        self.fronts: list[BlockStored] = []

    def publish(self, batch: KVEventBatch) -> None:
        for event in msgpack.decode(msgpack.encode(batch), type=KVEventBatch).events:
            if isinstance(event, BlockStored):
                self.held.update(event.block_hashes)
                if not event.token_ids:
                    self.fronts.append(event)
            elif isinstance(event, BlockRemoved):
                assert all(self.held[one] for one in event.block_hashes)
                self.held -= Counter(event.block_hashes)
            else:
                assert isinstance(event, AllBlocksCleared)
                self.held.clear()


@pytest.fixture
def subscriber(engine, fronts, monkeypatch) -> Subscriber:
    """As if the engine had been started with ``kv_events_config``."""
    one = Subscriber()
    monkeypatch.setattr(engine.pool, "enable_kv_cache_events", True)
    monkeypatch.setattr(engine.scheduler.kv_event_publisher, "publish", one.publish)
    return one


def held(engine, subscriber: Subscriber) -> Counter[ExternalBlockHash]:
    """What the pool holds, once the subscriber has been told everything."""
    subscriber.publish(KVEventBatch(ts=0.0, events=engine.scheduler.kv_cache_manager.take_events()))
    found: Counter[ExternalBlockHash] = Counter()
    for hashed, blocks in engine.pool.cached_block_hash_to_block._cache.items():
        found[maybe_convert_block_hash(get_block_hash(hashed))] += len(blocks) if isinstance(blocks, dict) else 1
    return found


def params(policy: str | None, max_tokens: int, **fields) -> SamplingParams:
    extra = None if policy is None else compression(policy, **{"budget": 96, "interval": 8} | fields)
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


@pytest.mark.parametrize(("coding", "num_blocks"), [(None, 3), ("int8", 2), ("int4", 1)])
def test_fronts_are_announced_and_revoked(engine, fronts, subscriber, coding, num_blocks):
    context = 276
    fields = {"context_tokens": context, "front": coding}
    engine.generate([random_prompt(np.random.default_rng(91), 300)], params("snapkv", 20, **fields))
    assert held(engine, subscriber) == subscriber.held
    (front,) = fronts._fronts.values()
    (stored,) = subscriber.fronts
    # Blocks of no tokens, after one that nobody has: what looks for a prompt's blocks finds none of them.
    assert stored.parent_block_hash == maybe_convert_block_hash(front.key)
    assert len(set(stored.block_hashes)) == len(front.blocks) == num_blocks
    assert subscriber.held.keys() >= set(stored.block_hashes) and stored.parent_block_hash not in subscriber.held
    fronts.lose(front.blocks[-1:])
    assert held(engine, subscriber) == subscriber.held
    assert not subscriber.held.keys() & set(stored.block_hashes)
    assert sum(subscriber.held.values()) == context // 32
    engine.assert_empty()


def test_a_subscriber_knows_the_pool(engine, fronts, subscriber):
    """Contexts and turns, of which several share blocks, in a pool that holds few of them."""
    rng = np.random.default_rng(92)
    contexts = [random_prompt(rng, int(rng.integers(150, 300))) for _ in range(4)]
    num_shared = 0
    with engine.with_blocks(24):
        for _ in range(12):
            session, policy = contexts[rng.integers(4)], ("snapkv", "h2o", "adakv")[rng.integers(3)]
            fields = {"decode": "bounded"} if policy == "adakv" else {}
            question = random_prompt(rng, int(rng.integers(2, 40)))[1:]
            engine.generate([session + question], params(policy, 4, context_tokens=len(session), **fields))
            engine.generate([session + question], params(None, 4))
            for _ in range(2):
                some = params(policy, int(rng.integers(2, 40)), reuse="turns", **fields)
                session = session + engine.tokens([session], some)[0] + question
                num_shared += sum(map(bool, engine.pool.cached_block_hashes_by_block.values()))
                assert held(engine, subscriber) == subscriber.held
    announced = {one for event in subscriber.fronts for one in event.block_hashes}
    assert 0 < len(announced & subscriber.held.keys()) < len(announced) and num_shared > 0
    engine.assert_empty()
    assert engine.llm.reset_prefix_cache()
    assert held(engine, subscriber) == subscriber.held == Counter()
