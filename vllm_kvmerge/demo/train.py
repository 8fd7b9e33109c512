"""Trains the demo model from scratch: ``python -m vllm_kvmerge.demo.train --output DIR``.

One to two hours on one CPU core. Each finished stage leaves a checkpoint in DIR/stages, so that an interrupted run
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
PEAK_LEARNING_RATE = 2e-3
WARMUP_STEPS = 100
LANGUAGE_MODEL_LOSS_WEIGHT = 0.1
COPY_SHARE = 0.25
MAX_POSITIONS = 8_192

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
    Stage(128, 4, 8, 400),
    Stage(256, 8, 12, 300),
    Stage(512, 12, 16, 350),
    Stage(1_024, 16, 24, 350),
    Stage(2_048, 24, 32, 250),
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
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=recall.BOS,
        eos_token_id=recall.EOS,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


def draw_batch(rng: np.random.Generator, stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """``[batch, length]`` int64 token ids and a bool mask of the answer tokens."""
    num_samples = TOKENS_PER_STEP // stage.length
    num_copies = max(1, round(num_samples * COPY_SHARE))
    samples = [recall.copy_sample(rng, stage.length) for _ in range(num_copies)]
    samples += [
        recall.training_sample(rng, stage.length, stage.num_facts, stage.num_questions)
        for _ in range(num_samples - num_copies)
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
