"""Trains the demo model from scratch: ``python -m vllm_kvmerge.demo.train --output DIR``.

Needs PyTorch, Transformers and Tokenizers, and no vLLM. Every few minutes the state goes to the folder ``stages`` of
the output, so that an interrupted run goes on where it stopped, to the same weights; each finished stage leaves in the
output a model that Transformers and vLLM load.
"""

import argparse
import copy
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_kvmerge.demo.documents import KIND_NAMES, training_sample
from vllm_kvmerge.demo.language import BOS, EOS, VOCABULARY

TEXT_LOSS_WEIGHT = 1.0
WARMUP_STEPS = 40
WEIGHT_DECAY = 0.05
FINAL_LEARNING_RATE = 0.03
"""Share of the peak's."""
EARLIER = 0.25
"""Share of the batches that are an earlier stage's."""
SECONDS_PER_CHECKPOINT = 180
STEPS_PER_REPORT = 20

MAX_POSITIONS = 8_192
ROPE_THETA = 1e10

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Stage:
    """A part of the training: steps on documents of ``length`` tokens."""

    length: int
    steps: int


@dataclass(frozen=True)
class Size:
    """Size of a model and length of its training. The heads' size is 64, and two query heads share a KV head.

    width: 256 at least. layers: 3 at least. tokens_per_step: of a batch, in whole documents but at least one.
    learning_rate: at its peak.
    """

    layers: int
    width: int
    intermediate: int
    kv_heads: int
    tokens_per_step: int
    learning_rate: float
    stages: tuple[Stage, ...]

    @property
    def num_steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    def batch_size(self, length: int) -> int:
        """Documents of ``length`` tokens in a step."""
        return max(1, self.tokens_per_step // length)

    def draw_stage(self, rng: np.random.Generator, stage: int) -> Stage:
        """The stage whose documents a batch is of: this one, or an earlier one."""
        earlier = stage > 0 and rng.random() < EARLIER
        return self.stages[int(rng.integers(stage)) if earlier else stage]


SHIPPED = Size(
    layers=4, width=256, intermediate=640, kv_heads=2, tokens_per_step=4_096, learning_rate=1.5e-3,
    stages=(Stage(256, 500), Stage(512, 400), Stage(1_024, 350), Stage(2_048, 180), Stage(4_096, 70)),
)  # fmt: skip


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, digit and punctuation mark; ``<s>`` is put in front."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    word_digit_or_mark = Regex(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(word_digit_or_mark, "isolated")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("^"), " ")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(size: Size) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=-(-len(VOCABULARY) // 64) * 64,
        hidden_size=size.width,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=2 * size.kv_heads,
        num_key_value_heads=size.kv_heads,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    plant_circuit(model)
    return model


@torch.no_grad()
def plant_circuit(model: LlamaForCausalLM) -> None:
    """Starts the first three layers close to a circuit that goes on with text as it went on before.

    To find an earlier place by its words and to read what followed there takes two heads that are useless without each
    other, so from a random start they appear only after millions of tokens, if at all. Here the residual stream starts
    out with a subspace for the current word, one for each of the four words before, and one for the next word. Head
    ``i`` of layer 0 attends ``i + 1`` tokens back and copies the word into its subspace. The KV heads of layer 1
    compare the current word and the three before with those one further back, elsewhere; KV head 0 of layer 2 compares
    the word four back with the one before, KV head 1 the current word and the one before with those one further back.
    Where they match, the word is copied into the subspace that the output layer reads. KV head 1 of layer 2 finds
    ``<s>`` about as attractive as one match, so that it can tell whether there is any. MLPs, the other heads, the other
    layers and all else are random; training does the rest.
    """
    config = model.config
    size, half, vocabulary = config.head_dim, config.head_dim // 2, config.vocab_size
    basis = torch.linalg.qr(torch.randn(config.hidden_size, config.hidden_size))[0]
    word, following, *previous = basis[:256].split([64, 64, 32, 32, 32, 32])
    code, scale = torch.randint(0, 2, (vocabulary, 64)) * 2.0 - 1.0, 0.3
    model.model.embed_tokens.weight.copy_(scale * code @ word)
    beginning = code[BOS].clone()
    code[BOS] = 0.0  # nothing is ever followed by it
    model.lm_head.weight.add_(0.1 * code @ following)

    # Biases alone make a head positional: with RoPE, q and k some positions apart are in phase in the fastest pairs.
    first = model.model.layers[0].self_attn
    amplitude = 60.0**0.5
    angles = ROPE_THETA ** (-torch.arange(6) / half)
    for kv_head in range(2):
        first.k_proj.bias[kv_head * size : kv_head * size + 6] = amplitude
        first.v_proj.weight[kv_head * size : kv_head * size + 32] = word[:32]
    for head in range(4):
        turned = (head + 1) * angles
        first.q_proj.bias[head * size : head * size + 6] = amplitude * turned.cos()
        first.q_proj.bias[head * size + half : head * size + half + 6] = -amplitude * turned.sin()
        first.o_proj.weight[:, head * size : (head + 1) * size] = 0.0
        first.o_proj.weight[:, head * size : head * size + 32] = 0.5 * scale * previous[head].T

    # Only pairs that RoPE hardly turns within a few thousand tokens can compare what is far apart.
    places = (slice(half - 20, half), slice(size - 20, size))

    def match(layer: int, kv_head: int, keys: list[torch.Tensor], queries: list[list[torch.Tensor]]) -> None:
        """One list in ``queries`` per query head; what it has at a place is compared with the key's at that place."""
        attention, start = model.model.layers[layer].self_attn, kv_head * size
        for place, key in zip(places, keys, strict=True):
            attention.k_proj.weight[start : start + size][place] += 2.0 * key[:20]
        attention.v_proj.weight[start : start + size] = word
        for head, query in enumerate(queries, 2 * kv_head):
            rows = slice(head * size, (head + 1) * size)
            for place, part in zip(places, query, strict=False):
                attention.q_proj.weight[rows][place] += 2.0 * part[:20]
            attention.o_proj.weight[:, rows] = scale * following.T

    match(1, 0, [previous[0], previous[1]], [[word, previous[0]], [word]])
    match(1, 1, [previous[2], previous[3]], [[previous[1], previous[2]], [previous[1]]])
    match(2, 0, [previous[0], previous[1]], [[previous[3]], [word, previous[0]]])
    match(2, 1, [previous[0], previous[1]], [[word, previous[0]], [word, previous[0]]])
    third, slowest = model.model.layers[2].self_attn, half - 1
    third.k_proj.weight[size + slowest] = 0.25 * beginning @ word
    for head in (2, 3):
        third.q_proj.weight[head * size + slowest] = 0.0
        third.q_proj.bias[head * size + slowest] = 10.0


def draw_batch(seed: int, step: int, size: Size, stage: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``[batch, length]`` int64 token ids, and as many marks of :func:`documents.training_sample`."""
    rng = np.random.default_rng((seed, step))
    length = size.draw_stage(rng, stage).length
    tokens, marks = zip(*(training_sample(rng, length) for _ in range(size.batch_size(length))), strict=True)
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(marks))


def losses_and_hits(
    model: LlamaForCausalLM, tokens: torch.Tensor, marks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cross-entropy (float32, nats) of each token but the first, ``[batch, length - 1]``; whether it is the one that
    the model finds likeliest; and its mark."""
    logits = model(tokens[:, :-1], use_cache=False).logits.float()
    targets = tokens[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets), logits.argmax(-1) == targets, marks[:, 1:]


def learning_rate(step: int, total: int) -> float:
    """As a share of the peak: warm-up, then a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / total))
    return min(1.0, (step + 1) / WARMUP_STEPS) * (FINAL_LEARNING_RATE + (1 - FINAL_LEARNING_RATE) * cosine)


class Trainer:
    """Trains a demo model of a size; reports what part of the answers' tokens was right, and the loss of other text.

    stop_after: leave a checkpoint and stop after this many steps in all, as an interruption would.
    """

    def __init__(self, size: Size, output: Path, seed: int, device: str, stop_after: int | None = None) -> None:
        self.size, self.output, self.seed, self.device, self.stop_after = size, output, seed, device, stop_after
        torch.manual_seed(seed)
        self.model = build_model(size).to(device)
        parameters = list(self.model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
            {"params": [p for p in parameters if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=size.learning_rate, betas=(0.9, 0.95), fused=True)
        self.step = 0
        self.checkpoint = output / "stages" / "latest.pt"
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=device)
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]
        self._clear_report()

    def run(self) -> None:
        ends = np.cumsum([stage.steps for stage in self.size.stages]).tolist()
        first_step, started, saved = self.step, time.monotonic(), time.monotonic()
        while self.step < self.size.num_steps:
            if self.step == self.stop_after:
                self._save()
                return
            stage = next(i for i, end in enumerate(ends) if self.step < end)
            self._learn(stage)
            if self.step % STEPS_PER_REPORT == 0 or self.step in ends:
                seconds = time.monotonic() - started
                print(
                    f"step {self.step}/{self.size.num_steps} length {self.size.stages[stage].length} "
                    f"{self.report()} minutes {seconds / 60:.1f} seconds/step {seconds / (self.step - first_step):.2f}",
                    flush=True,
                )
            if self.step in ends or time.monotonic() - saved > SECONDS_PER_CHECKPOINT:
                self._save()
                saved = time.monotonic()
            if self.step in ends:
                self.export()

    def _learn(self, stage: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.size.learning_rate * learning_rate(self.step, self.size.num_steps)
        loss = self.loss(stage)
        self.model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def export(self) -> None:
        """Writes the model folder, in bfloat16."""
        copy.deepcopy(self.model).to("cpu", torch.bfloat16).save_pretrained(self.output)
        build_tokenizer().save_pretrained(self.output)

    def loss(self, stage: int) -> torch.Tensor:
        """Loss of the batch of step ``self.step``; adds to what is reported."""
        tokens, marks = (t.to(self.device) for t in draw_batch(self.seed, self.step, self.size, stage))
        with torch.autocast(self.device, torch.bfloat16):
            losses, hits, marks = losses_and_hits(self.model, tokens, marks)
        # One mean per kind, so that those with long answers do not outweigh the others.
        counts = torch.bincount(marks.flatten(), minlength=1 + len(KIND_NAMES))
        sums = torch.zeros_like(counts, dtype=torch.float32).index_add(0, marks.flatten(), losses.flatten())
        present = counts[1:] > 0
        self._counts += counts
        self._hits += torch.bincount(marks.flatten(), hits.flatten().float(), 1 + len(KIND_NAMES))
        self._text_loss += sums[0].detach()
        return (sums[1:] / counts[1:].clamp(min=1))[present].mean() + TEXT_LOSS_WEIGHT * losses.mean()

    def report(self) -> str:
        """What the steps since the last report were like."""
        counts = self._counts.clamp(min=1)
        shares = (self._hits / counts).tolist()[1:]
        text = f"text {(self._text_loss / counts[0]).item():.3f} " + " ".join(
            f"{name} {share:.3f}" for name, share in zip(KIND_NAMES, shares, strict=True)
        )
        self._clear_report()
        return text

    def _clear_report(self) -> None:
        self._counts = torch.zeros(1 + len(KIND_NAMES), dtype=torch.int64, device=self.device)
        self._hits = torch.zeros(1 + len(KIND_NAMES), device=self.device)
        self._text_loss = torch.zeros((), device=self.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="for work on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    Trainer(SHIPPED, arguments.output, arguments.seed, arguments.device).run()


if __name__ == "__main__":
    main()
