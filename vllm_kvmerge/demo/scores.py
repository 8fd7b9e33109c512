"""Scores of a demo model with its whole cache: ``python -m vllm_kvmerge.demo.scores [--model DIR]``.

Asks fresh questions of every kind at several lengths and prints, as a Markdown table, the share of answers that are
right in every token, and the nats per token of plain text. An answer is right if each of its tokens is the likeliest
after the right ones before it, which is what greedy decoding needs; so one forward pass per question will do. Needs
PyTorch and Transformers, and no vLLM.
"""

import argparse
import secrets
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import LlamaForCausalLM

from vllm_kvmerge.demo import model_path
from vllm_kvmerge.demo.documents import draw_prompt
from vllm_kvmerge.demo.language import BOS, ID, plain_text

TEXT = 256
"""Last tokens of a document of plain text whose loss counts."""


@dataclass(frozen=True)
class Setting:
    """Arguments of :func:`draw_prompt`."""

    label: str
    kind: str
    units: int
    distractors: int = 0
    options: dict[str, int] = field(default_factory=dict)


SETTINGS = (
    Setting("recall, 4 facts", "recall", 4),
    Setting("recall, 16 facts", "recall", 16),
    Setting("recall, 32 facts", "recall", 32),
    Setting("multikey, 4 of 16 facts", "multikey", 1, 12, {"asked": 4}),
    Setting("multivalue, 4 values, 4 keys", "multivalue", 4, 0, {"values": 4}),
    Setting("variables, 1 hop, 4 chains", "variables", 4, 0, {"hops": 1}),
    Setting("variables, 4 hops, 4 chains", "variables", 4, 0, {"hops": 4}),
    Setting("counting, 4 words", "counting", 1, 0, {"words": 4}),
    Setting("most, 4 words, margin 1", "most", 1, 0, {"words": 4, "margin": 1}),
    Setting("most, 4 words, margin 3", "most", 1, 0, {"words": 4, "margin": 3}),
    Setting("copying, 16 words, 4 spans", "copying", 4, 0, {"span": 16}),
    Setting("lists, period 4, 60 items", "lists", 1, 0, {"period": 4, "items": 60, "first": 1}),
)


@torch.no_grad()
def is_right(model: LlamaForCausalLM, prompt: str, answer: str) -> bool:
    """True if greedy decoding continues the prompt with the answer."""
    asked, wanted = ([ID[word] for word in text.split()] for text in (prompt, answer))
    tokens = torch.tensor([[BOS, *asked, *wanted]], device=model.device)
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=len(wanted)).logits[0]
    return bool((logits.argmax(-1) == tokens[0, -len(wanted) :]).all())


@torch.no_grad()
def text_loss(model: LlamaForCausalLM, rng: np.random.Generator, length: int) -> float:
    """Nats per token of the last ``TEXT`` tokens of a fresh document of ``length`` tokens."""
    tokens = torch.tensor([[BOS, *plain_text(rng, length - 1)]], device=model.device)
    logits = model(tokens[:, :-1], use_cache=False, logits_to_keep=TEXT).logits[0].float()
    return torch.nn.functional.cross_entropy(logits, tokens[0, -TEXT:]).item()


def share_right(model: LlamaForCausalLM, rng: np.random.Generator, setting: Setting, length: int, count: int) -> float:
    """Share of ``count`` answers that are right."""
    right = 0
    for _ in range(count):
        prompt = draw_prompt(rng, setting.kind, length, setting.units, setting.distractors, **setting.options)
        right += is_right(model, prompt.text, prompt.answer)
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model_path(), help="folder of the model (default: the one that ships)")
    parser.add_argument("--length", type=int, nargs="+", default=[512, 1024, 2048, 4096], help="tokens; several")
    parser.add_argument("--prompts", type=int, default=50, help="of every kind and length")
    parser.add_argument("--threads", type=int, default=1, help="for work on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one at each run, printed")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True)
    model = model.to(arguments.device).eval()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    rng = np.random.default_rng(seed)
    print(f"Right answers, full attention, {arguments.prompts} prompts each, float32, seed {seed}\n")
    print("| | " + " | ".join(f"{length:,} tokens" for length in arguments.length) + " |")
    print("|---" * (1 + len(arguments.length)) + "|")
    for setting in SETTINGS:
        shares = [share_right(model, rng, setting, length, arguments.prompts) for length in arguments.length]
        print(f"| {setting.label} | " + " | ".join(f"{share:.2f}" for share in shares) + " |", flush=True)
    losses = [np.mean([text_loss(model, rng, length) for _ in range(arguments.prompts)]) for length in arguments.length]
    print(f"| plain text, nats per token of the last {TEXT} | " + " | ".join(f"{loss:.2f}" for loss in losses) + " |")


if __name__ == "__main__":
    main()
