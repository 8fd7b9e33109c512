"""Agreement with the full cache beside the score of the task: ``python benchmarks/agreement.py URL``.

Asks a server (``vllm-kvmerge serve qwen2.5-coder-0.5b``) the prompts of configs/eval/agreement.yaml under each policy
and budget, with ``verify``. Prints the mean score, agreement and change of log p of each pair, and Spearman's rank
correlation of the score with either, over all pairs: does what an operator sees of answers without references rank
policies and budgets as their scores do?
"""

import argparse
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from report import save

from vllm_kvmerge.evaluation.backends import EndpointBackend
from vllm_kvmerge.evaluation.config import EndpointOptions, read_config
from vllm_kvmerge.evaluation.runner import draw_prompts
from vllm_kvmerge.evaluation.summary import print_table
from vllm_kvmerge.evaluation.tasks.base import Completion

CONFIG = Path(__file__).parents[1] / "configs/eval/agreement.yaml"
RESAMPLES = 2000


@dataclass(frozen=True)
class Pair:
    """score, agreeing, change: by prompt; the last two as in ``Verified``."""

    policy: str
    budget: float | int | None
    score: list[float]
    agreeing: list[float]
    change: list[float]


def ranks(values: np.ndarray) -> np.ndarray:
    """Equal values share the mean of their ranks."""
    return np.array([(np.sum(values < one) + np.sum(values <= one) - 1) / 2 for one in values])


def correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's, of means over samples. first, second: ``[pairs, samples]``."""
    return float(np.corrcoef(ranks(first.mean(1)), ranks(second.mean(1)))[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--samples", type=int, help="of each task; default: the configuration's")
    parser.add_argument("--output", type=Path, default=Path("build/agreement.json"))
    arguments = parser.parse_args()
    config = read_config(arguments.config, {"samples": arguments.samples} if arguments.samples else {})
    backend = EndpointBackend(None, EndpointOptions(url=arguments.url, timeout=1800.0, concurrency=32))
    prompts = [(entry, prompt) for entry in config.tasks for prompt in draw_prompts(config, entry, backend.tokenizer)]
    pairs = [(policy, budget) for policy in config.policies for budget in config.budgets_of(policy)]
    found = np.zeros((3, len(pairs), len(prompts)))
    pool = ThreadPoolExecutor(len(pairs))
    for place, (entry, prompt) in enumerate(prompts):
        body = {"prompt": prompt.token_ids, "max_tokens": prompt.sample.max_tokens, "temperature": 0}
        fields = [policy.compression(budget, prompt.context_tokens) | {"verify": True} for policy, budget in pairs]
        bodies = [body | {"kv_compression": field} for field in fields]
        for index, answer in enumerate(pool.map(lambda body: backend.post("/v1/completions", body), bodies)):
            verified = answer["usage"]["kv_compression"]["verified"]
            if verified["skipped"] is not None:
                raise SystemExit(f"not verified: {verified['skipped']}")
            score = entry.task.score(prompt.sample, Completion(answer["choices"][0]["text"]))
            found[:, index, place] = score, verified["agreeing"], verified["log_prob_change"]
        print(f"{place + 1} of {len(prompts)} prompts", flush=True)
    scores, agreeing, change = found
    rows = {
        f"{policy.label} {budget}": [f"{scores[i].mean():.2f}", f"{agreeing[i].mean():.3f}", f"{change[i].mean():+.3f}"]
        for i, (policy, budget) in enumerate(pairs)
    }
    print_table(f"{len(prompts)} prompts", ["score", "agreement", "change of log p"], rows, "policy")
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(prompts), size=len(prompts)) for _ in range(RESAMPLES)]
    said = {}
    for name, values in (("agreement", agreeing), ("change of log p", -change)):
        low, high = np.quantile([correlation(scores[:, one], values[:, one]) for one in drawn], (0.025, 0.975))
        said[name] = [f"{correlation(scores, values):.2f}", f"{low:.2f} to {high:.2f}"]
    print_table("Rank correlation with the score", ["over pairs", "95%, bootstrap over prompts"], said, "of")
    results = [
        Pair(policy.label, budget, *(values[i].tolist() for values in found))
        for i, (policy, budget) in enumerate(pairs)
    ]
    save(arguments.output, config.identity(), results)


if __name__ == "__main__":
    main()
