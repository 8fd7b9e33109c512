"""``positions: cache``: RoPE counts the entries of the cache, so that a request may outlast the trained length."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import rotate_half
from vllm import SamplingParams

from tests.engine.conftest import random_prompt
from vllm_kvmerge import compression, demo

PROMPT, BUDGET, ANSWER, SINKS = 300, 96, 150, 4


class StreamingLLM:
    """A transcription of StreamingLLM's attention with positions shifted: the cache holds keys before RoPE, which are
    turned anew for each query, to positions that count entries."""

    def __init__(self, budget: int) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(demo.model_path(), dtype=torch.float32, local_files_only=True)
        self.budget = budget
        self.cache: list[tuple[Tensor, Tensor] | None] = [None] * len(self.model.model.layers)

    def __len__(self) -> int:
        """Entries of the cache."""
        return 0 if self.cache[0] is None else self.cache[0][0].shape[2]

    def read(self, tokens: list[int]) -> int:
        """The next token."""
        inner, count, start = self.model.model, len(tokens), len(self)
        hidden = inner.embed_tokens(torch.tensor([tokens]))
        cos, sin = inner.rotary_emb(hidden, torch.arange(start + count)[None])

        def turned(vectors: Tensor, first: int) -> Tensor:
            return vectors * cos[:, None, first:] + rotate_half(vectors) * sin[:, None, first:]

        visible = torch.ones(count, start + count, dtype=torch.bool).tril(start)
        for index, layer in enumerate(inner.layers):
            attention, normed = layer.self_attn, layer.input_layernorm(hidden)
            query, key, value = (
                project(normed).view(1, count, -1, attention.head_dim).transpose(1, 2)
                for project in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if (held := self.cache[index]) is not None:
                key, value = torch.cat([held[0], key], 2), torch.cat([held[1], value], 2)
            self.cache[index] = key, value
            attended = scaled_dot_product_attention(
                turned(query, start), turned(key, 0), value, attn_mask=visible, enable_gqa=True
            )
            hidden = hidden + attention.o_proj(attended.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return int(self.model.lm_head(inner.norm(hidden[:, -1])).argmax())

    def evict(self) -> None:
        """All but the first entries and the newest."""
        for index, held in enumerate(self.cache):
            first, newest = (
                [plane[:, :, part] for plane in held] for part in (slice(SINKS), slice(SINKS - self.budget, None))
            )
            self.cache[index] = tuple(torch.cat(pair, 2) for pair in zip(first, newest, strict=True))

    @torch.no_grad()
    def generate(self, prompt: list[int], num_tokens: int, interval: int, chunk: int | None = None) -> list[int]:
        while chunk is not None and len(prompt) > (size := self.budget + chunk - len(self)):
            self.read(prompt[:size])
            self.evict()
            prompt = prompt[size:]
        answer = [self.read(prompt)]
        self.evict()
        while len(answer) < num_tokens:
            answer.append(self.read(answer[-1:]))
            if len(self) >= self.budget + interval:
                self.evict()
        return answer


@pytest.mark.thin(4)
@pytest.mark.parametrize("chunk", [None, 60])
@pytest.mark.parametrize("interval", [1, 16])
def test_streaming_llm_with_positions_shifted(engine, interval, chunk):
    prompt = random_prompt(np.random.default_rng(31), PROMPT)
    fields = {"budget": BUDGET, "interval": interval, "num_sink_tokens": SINKS, "prefill": chunk and {"chunk": chunk}}
    expected = StreamingLLM(BUDGET).generate(prompt, ANSWER, interval, chunk)
    for positions in ("cache", "text"):
        extra = compression("streaming_llm", **fields, positions=positions)
        params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, extra_args=extra)
        assert (engine.tokens([prompt], params) == [expected]) == (positions == "cache")
