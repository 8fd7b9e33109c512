"""Trains the demo model from scratch: ``python -m vllm_kvmerge.demo.train --output DIR``.

Ten minutes on one CPU core. Each finished stage leaves a checkpoint in DIR/stages, so that an interrupted run
goes on where it stopped; DIR ends up holding a model folder that Transformers and vLLM load.
"""

import argparse
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from vllm_kvmerge.demo import recall

TOKENS_PER_STEP = 8_192
PEAK_LEARNING_RATE = 1.5e-3
WARMUP_STEPS = 30
LANGUAGE_MODEL_LOSS_WEIGHT = 0.1
MAX_POSITIONS = 8_192
ROPE_THETA = 1e7

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ ' ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ ' ' + eos_token }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Stage:
    length: int
    num_facts: int
    num_questions: int
    steps: int


STAGES = (
    Stage(128, 4, 8, 60),
    Stage(256, 8, 12, 60),
    Stage(512, 12, 16, 80),
    Stage(1_024, 16, 24, 200),
    Stage(2_048, 24, 32, 100),
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word, digit and punctuation mark; ``<s>`` is put in front."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(recall.VOCABULARY)}, unk_token="<unk>"))
    word_digit_or_mark = Regex(r"[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(word_digit_or_mark, "isolated")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace(Regex("^"), " ")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", recall.BOS)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>",
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=-(-len(recall.VOCABULARY) // 64) * 64,
        hidden_size=192,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        attention_bias=True,
        tie_word_embeddings=True,
        bos_token_id=recall.BOS,
        eos_token_id=recall.EOS,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config)
    plant_induction_circuit(model)
    return model


@torch.no_grad()
def plant_induction_circuit(model: LlamaForCausalLM) -> None:
    """Starts the first two layers close to an induction circuit; training does the rest.

    Recall means to find an earlier occurrence of a word and to read what followed it. It takes two heads that are
    useless without each other, so from a random start it appears only after millions of tokens, if at all. Here KV head
    0 of layer 0 attends to the previous token and writes a projection of it to a subspace of its own; KV head 0 of
    layer 1 matches that against the same projection of the current token. Values, outputs, MLPs, the other heads, the
    third layer and all else are random.
    """
    config = model.config
    size, half, group = config.head_dim, config.head_dim // 2, config.num_attention_heads // config.num_key_value_heads
    first, second = (layer.self_attn for layer in model.model.layers[:2])
    basis = torch.linalg.qr(torch.randn(config.hidden_size, config.hidden_size))[0]
    word, previous = basis[:size], basis[-size:]
    model.model.embed_tokens.weight.mul_(5.0)
    # Biases alone make a head positional: with RoPE, q and k one position apart are in phase in the fastest pairs.
    amplitude = 30.0**0.5
    for pair in range(6):
        angle = ROPE_THETA ** (-pair / half)
        first.k_proj.bias[pair] = amplitude
        for head in range(group):
            first.q_proj.bias[head * size + pair] = amplitude * math.cos(angle)
            first.q_proj.bias[head * size + pair + half] = -amplitude * math.sin(angle)
    first.v_proj.weight[:size] = 0.1 * word
    first.o_proj.weight[:, : group * size] = 0.0
    first.o_proj.weight[:, :size] = 1.5 * previous.T
    # Only pairs that RoPE hardly turns within a few thousand tokens can compare what is far apart.
    slow = [i for i in range(size) if i % half >= 18]
    second.k_proj.weight[slow] += 1.3 * previous[: len(slow)]
    for head in range(group):
        second.q_proj.weight[[head * size + i for i in slow]] += 1.3 * word[: len(slow)]


def draw_batch(rng: np.random.Generator, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """``[batch, length]`` int64 token ids and a bool mask of the answer tokens."""
    samples = [
        recall.training_sample(rng, stage.length, stage.num_facts, stage.num_questions)
        for _ in range(TOKENS_PER_STEP // stage.length)
    ]
    tokens, is_answer = zip(*samples, strict=True)
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(is_answer))


def loss_and_accuracy(
    model: LlamaForCausalLM, tokens: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Training loss, and the share of answer tokens that the model would get right."""
    logits = model(tokens[:, :-1]).logits.float()
    targets, answer_targets = tokens[:, 1:], is_answer[:, 1:]
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    loss = losses[answer_targets].mean() + LANGUAGE_MODEL_LOSS_WEIGHT * losses.mean()
    correct = (logits.argmax(-1) == targets)[answer_targets]
    return loss, correct.float().mean()


def train(output: Path, seed: int, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.05)
    total_steps, step = sum(stage.steps for stage in STAGES), 0
    started = time.monotonic()
    (output / "stages").mkdir(parents=True, exist_ok=True)
    for index, stage in enumerate(STAGES):
        checkpoint = output / "stages" / f"{index}.pt"
        if checkpoint.exists():
            state = torch.load(checkpoint)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            step += stage.steps
            continue
        rng = np.random.default_rng((seed, index))
        for _ in range(stage.steps):
            warm = min(1.0, (step + 1) / WARMUP_STEPS)
            cosine = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / total_steps))
            for group in optimizer.param_groups:
                group["lr"] = PEAK_LEARNING_RATE * warm * cosine
            loss, accuracy = loss_and_accuracy(model, *draw_batch(rng, stage))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step % 25 == 0:
                minutes = (time.monotonic() - started) / 60
                print(
                    f"step {step}/{total_steps} length {stage.length} loss {loss.item():.4f} "
                    f"answer tokens {accuracy.item():.4f} minutes {minutes:.1f}",
                    flush=True,
                )
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint)
    model.to(torch.bfloat16).save_pretrained(output)
    build_tokenizer().save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    train(arguments.output, arguments.seed, arguments.threads)


if __name__ == "__main__":
    main()
