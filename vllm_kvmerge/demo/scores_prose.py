"""Loss of a prose model on held-out pages: ``python -m vllm_kvmerge.demo.scores_prose --model DIR --held-out FILE``.

Reads windows of ``--length`` tokens, none across two pages, and prints nats per token by place in the window, as a
Markdown table: with all that came before in the window, and with no more than the last ``NEAR`` tokens. Where the
former is less, the model uses what is further away; the mean of the difference comes with its interval. FILE is what
``python -m vllm_kvmerge.demo.prose`` writes. Needs PyTorch and Transformers, and no vLLM.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

NEAR = 512
RESAMPLES = 20_000


def windows_of(
    texts: list[str], tokenizer: PreTrainedTokenizerFast, length: int, count: int
) -> tuple[torch.Tensor, np.ndarray]:
    """``[at most count, length]`` int64: ``<s>`` and a page's next tokens; and ``[the same]`` int64: the window's page.

    Of all windows of all pages, which lie side by side, ``count`` at equal distances. What is left of a page is not
    read.

    Raises:
        ValueError: no page is so long.
    """
    windows: list[list[int]] = []
    pages: list[int] = []
    for page, text in enumerate(texts):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for start in range(0, len(ids) - length + 2, length - 1):
            windows.append([tokenizer.bos_token_id, *ids[start : start + length - 1]])
            pages.append(page)
    if not windows:
        raise ValueError(f"length: no page has {length} tokens")
    chosen = np.linspace(0, len(windows) - 1, min(count, len(windows))).round().astype(int)
    return torch.tensor(windows)[chosen], np.array(pages)[chosen]


@torch.no_grad()
def losses_of(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """``[batch, length - 1]`` float32, nats: of each token but the first, with all that comes before it."""
    losses = []
    for window in tokens:
        logits = model(window[None, :-1], use_cache=False).logits[0].float()
        losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    return torch.stack(losses)


def near_losses_of(model: LlamaForCausalLM, tokens: torch.Tensor, near: int = NEAR) -> torch.Tensor:
    """The same with at most ``near`` and at least half as many tokens before it, where there are so many.

    Each part begins with ``<s>``, as all that the model has read did.
    """
    losses = losses_of(model, tokens[:, : near + 1])
    half = near // 2
    for start in range(near + 1, tokens.shape[1], half):
        part = torch.cat([tokens[:, :1], tokens[:, start - half : start + half]], dim=1)
        losses = torch.cat([losses, losses_of(model, part)[:, half:]], dim=1)
    return losses


def interval_of(values: np.ndarray, pages: np.ndarray) -> tuple[float, float]:
    """95% interval of the mean of all windows' values, ``[windows]``: bootstrap over pages, whose windows are alike."""
    by_page = [values[pages == page] for page in np.unique(pages)]
    sums, counts = (np.array([measure(part) for part in by_page]) for measure in (np.sum, len))
    drawn = np.random.default_rng(0).integers(0, len(by_page), (RESAMPLES, len(by_page)))
    low, high = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1), [2.5, 97.5])
    return float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--held-out", type=Path, required=True, help="JSON lines with a text each")
    parser.add_argument("--length", type=int, default=4_000, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=64, help="how many, at most")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = LlamaForCausalLM.from_pretrained(arguments.model, dtype=torch.float32, local_files_only=True).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.model, local_files_only=True)
    texts = [json.loads(line)["text"] for line in arguments.held_out.read_text(encoding="utf-8").splitlines()]
    tokens, pages = windows_of(texts, tokenizer, arguments.length, arguments.windows)
    losses, near = losses_of(model, tokens), near_losses_of(model, tokens)
    num_pages = len(np.unique(pages))
    print(f"Nats per token, {len(tokens)} windows of {tokens.shape[1]} tokens of {num_pages} pages, float32\n")
    print(f"| place in the window | all before | last {NEAR // 2} to {NEAR} |\n|---|---|---|")
    ends = [256, *range(512, tokens.shape[1], 512), tokens.shape[1] - 1]
    for start, end in zip([0, *ends], ends, strict=False):
        print(f"| {start:,} to {end:,} | {losses[:, start:end].mean():.3f} | {near[:, start:end].mean():.3f} |")
    print(f"| all | {losses.mean():.3f} | {near.mean():.3f} |")
    if tokens.shape[1] > NEAR + 1:
        gain = (near - losses)[:, NEAR:].mean(1).double().numpy()
        low, high = interval_of(gain, pages)
        print(f"\nAfter the first {NEAR}, all before instead of the last {NEAR // 2} to {NEAR} gains")
        print(f"{gain.mean():+.3f} nats per token, 95% interval {low:+.3f} to {high:+.3f} (bootstrap over pages)")


if __name__ == "__main__":
    main()
