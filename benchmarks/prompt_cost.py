"""What compressing a prompt costs, beside a request without a policy: ``python benchmarks/prompt_cost.py MODEL``.

Time to the second token, before which the prompt has been compressed, of one request at a time, each with a new prompt
of random tokens; cases take turns. A policy's ratios are to the plain request of the same turn. Printed: medians, and
the ratios' medians with their ranges.
"""

import argparse
from time import perf_counter

import numpy as np
from report import Spread
from rich.progress import track
from vllm_side import plugin_engine

from vllm_kvmerge import compression
from vllm_kvmerge.demo import head_budgets_path, named


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, or a name that vllm-kvmerge serve knows")
    parser.add_argument("--length", type=int, default=2000)
    parser.add_argument("--budget", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--policies", nargs="+", default=["snapkv", "expected_attention", "calibrated", "kvzip_once", "kvzip"]
    )
    parser.add_argument("--kvzap", help="folder of the model's KVzap model, for --policies kvzap")
    arguments = parser.parse_args()
    own = {"kvzap": arguments.kvzap, "head_budgets": head_budgets_path(arguments.model)}
    engine = plugin_engine(
        named(arguments.model),
        1 << 30,
        2 * arguments.length + 256,
        load_format="auto",
        skip_tokenizer_init=False,
        dtype="bfloat16",
        additional_config={"kvmerge": {"max_compaction_seconds": 600, **own}},
    )
    from vllm import SamplingParams

    rng = np.random.default_rng(0)

    def seconds(policy: str | None) -> float:
        extra = None if policy is None else compression(policy, budget=arguments.budget, decode="grow")
        prompt = {"prompt_token_ids": rng.integers(1000, 30000, arguments.length).tolist()}
        begun = perf_counter()
        engine.generate(
            [prompt], SamplingParams(max_tokens=2, ignore_eos=True, temperature=0, extra_args=extra), use_tqdm=False
        )
        return perf_counter() - begun

    cases = [None, *arguments.policies]
    for case in cases:
        seconds(case)
    taken = [[seconds(case) for case in cases] for _ in track(range(arguments.repeats), "turns")]
    for place, case in enumerate(cases):
        own = Spread.of([turn[place] for turn in taken])
        print(f"{case or 'plain'}: {own.median:.2f} s,", Spread.of([turn[place] / turn[0] for turn in taken]))


if __name__ == "__main__":
    main()
