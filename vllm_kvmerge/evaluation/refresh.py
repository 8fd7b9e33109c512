"""What refreshes gain (KeepKV's periodic compression of the complete cache): ``vllm-kvmerge eval refresh``.

First the error of attention's output, ||o' - o|| / ||o||, o being full attention's, over the tokens after a prompt,
where the cache is made anew every so many tokens and where it never is. Queries, keys and values are those of the full
model, as for ``eval attention``; ``--output DIR`` draws it step by step.

Then a second question (``--samples 0`` leaves it out): prompts of the demo task that ask for one fact; some 200 tokens
later an engine is asked for another one, twice, with a refresh in between or without. A refresh cannot help the first
token of an answer that follows its question at once: the step that reads the question computes it.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_kvmerge.demo import documents
from vllm_kvmerge.demo.documents import DIGITS_PER_ANSWER
from vllm_kvmerge.demo.language import BOS, distinct_keys
from vllm_kvmerge.evaluation.options import (
    add_document_options,
    add_field_option,
    config_of,
    draw_documents,
    make_engine,
    parser_of,
    print_table,
    seed_of,
)
from vllm_kvmerge.evaluation.replay import Schedule, compressed_outputs, full_outputs, relative_error
from vllm_kvmerge.evaluation.trace import LayerTrace, trace_one_by_one
from vllm_kvmerge.request.parameters import FULL, CompressionConfig

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm import LLM

NEVER = "never"
BETWEEN = 200
"""Tokens from the first question to the second one."""

Errors = Mapping[str, NDArray[np.float64]]
"""``[steps]``, mean over documents and layers, by how often the cache is made anew."""


def main(argv: list[str] | None = None) -> None:
    parser = parser_of(__doc__, (0.2,))
    parser.prog = "vllm-kvmerge eval refresh"
    add_document_options(parser, documents=4, questions=18)
    parser.set_defaults(policies=["keepkv"])
    parser.add_argument("--queries", type=int, default=512, help="how many tokens after the prompt")
    parser.add_argument("--interval", type=int, default=16, help="tokens between compressions")
    parser.add_argument("--every", type=int, nargs="+", default=[16, 64, 256], help="tokens between refreshes")
    add_field_option(parser)
    parser.add_argument("--samples", type=int, default=40, help="prompts with a second question")
    parser.add_argument("--output", type=Path, metavar="DIR", help="draw the error step by step into this folder")
    arguments = parser.parse_args(argv)
    if wrong := [every for every in arguments.every if every % arguments.interval or not 0 < every < arguments.queries]:
        parser.error(f"--every {wrong[0]}: must be a multiple of the interval, {arguments.interval}, below --queries")
    arguments.dtype, seed = "float32", seed_of(arguments)
    schedule = Schedule(arguments.prompt, arguments.queries, arguments.interval, torch.float32)
    drawn = draw_documents(arguments, seed, arguments.prompt + arguments.queries)
    for budget in arguments.budget:
        for policy in arguments.policies:
            fields = {"policy": policy, "budget": budget, "interval": arguments.interval}
            spacing = {NEVER: None, **{f"every {every}": every for every in arguments.every}}
            configs = {
                name: config_of(parser, arguments, fields | {"refresh": every and {"every": every}})
                for name, every in spacing.items()
            }
            errors = step_errors(trace_one_by_one(arguments.model, drawn), configs, schedule)
            title = f"{policy}, budget {budget}: error of attention's output"
            _print_errors(f"{title}; {len(drawn)} documents, {arguments.prompt} tokens, seed {seed}", errors, spacing)
            if arguments.output is not None:
                arguments.output.mkdir(parents=True, exist_ok=True)
                print(draw(errors, title, arguments.output / f"refresh-{policy}-{budget}.svg"))
    if arguments.samples:
        _ask_twice(arguments, np.random.default_rng(seed))


def step_errors(
    traces: Iterable[list[LayerTrace]], configs: Mapping[str, CompressionConfig], schedule: Schedule
) -> Errors:
    """The error of each configuration at each step."""
    found: dict[str, list[NDArray[np.float64]]] = {name: [] for name in configs}
    for layers in traces:
        full = full_outputs(layers, schedule)
        for name, config in configs.items():
            parts = [
                torch.stack([relative_error(a.flatten(1), e.flatten(1)) for a, e in zip(actual, expected, strict=True)])
                for expected, (_, actual) in zip(full, compressed_outputs(layers, config, schedule), strict=True)
            ]
            found[name].append(torch.cat(parts, dim=1).mean(0).double().numpy())
    return {name: np.mean(errors, axis=0) for name, errors in found.items()}


def _print_errors(title: str, errors: Errors, spacing: Mapping[str, int | None]) -> None:
    """``spacing``: tokens between refreshes, by the same names."""
    quarters = {name: np.array_split(steps, 4) for name, steps in errors.items()}
    bounds = np.cumsum([0, *(len(part) for part in next(iter(quarters.values())))])
    columns = [f"steps {start + 1}-{end}" for start, end in zip(bounds, bounds[1:], strict=False)]
    rows = {name: [f"{part.mean():.3f}" for part in parts] for name, parts in quarters.items()}
    # The step after each refresh, and the same steps where there was none.
    shortest = min(every for every in spacing.values() if every)
    for name, steps in errors.items():
        rows[name].append(f"{steps[(spacing[name] or shortest) :: spacing[name] or shortest].mean():.3f}")
    print_table(title, [*columns, "after one"], rows, first="refresh")


def draw(errors: Errors, title: str, path: Path) -> Path:
    from matplotlib.figure import Figure

    from vllm_kvmerge.evaluation.instrument_plots import save

    figure = Figure((8, 4), layout="constrained")
    axis = figure.subplots()
    for name, steps in errors.items():
        axis.plot(steps, label=f"refresh {name}", linewidth=1)
    axis.set(xlabel="decoding step", ylabel="||o' - o|| / ||o||", ylim=(0, None), title=title)
    axis.legend(fontsize="x-small")
    return save(figure, path)


def second_question(
    rng: np.random.Generator, length: int, num_facts: int, between: int
) -> tuple[list[int], list[int], int]:
    """Token ids of a prompt that ends with a question, and of its continuation; the length of the latter's last answer.

    The continuation is the answer, text and another question up to ``between`` tokens, and that question again with its
    answer.
    """
    keys = distinct_keys(rng)
    facts = [documents.recall(rng, keys) for _ in range(num_facts)]
    first, second = (facts[index].questions[0] for index in rng.permutation(num_facts)[:2])
    body = documents.document(rng, length - 1 - len(first.ask), [fact.statements[0] for fact in facts])
    text = documents.document(rng, between - len(first.answer) - len(second.ask), [])
    continuation = [*first.answer, *text, *second.ask, *second.ask, *second.answer]
    return [BOS, *body, *first.ask], continuation, len(second.answer)


def second_answers(llm: "LLM", drawn: list[tuple[list[int], list[int], int]], fields: Mapping[str, object]) -> float:
    """Share of the second questions answered right in every digit; ``llm`` has ``ForcedContinuation``.

    fields: of ``kv_compression``.
    """
    from vllm_kvmerge.evaluation.continuation import forced

    params = [forced(continuation, fields) for _, continuation, _ in drawn]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt, *_ in drawn], params, use_tqdm=False)
    right = []
    for output, (_, continuation, num_answered) in zip(outputs, drawn, strict=True):
        ranks = [at[token].rank for at, token in zip(output.outputs[0].logprobs, continuation, strict=True)]
        right.append(all(rank == 1 for rank in ranks[-num_answered:][:DIGITS_PER_ANSWER]))
    return float(np.mean(right))


def _ask_twice(arguments: "Namespace", rng: np.random.Generator) -> None:
    from vllm_kvmerge.evaluation.continuation import ForcedContinuation

    drawn = [second_question(rng, arguments.prompt, arguments.facts, BETWEEN) for _ in range(arguments.samples)]
    llm = make_engine(arguments, arguments.prompt + 2 * BETWEEN, logits_processors=[ForcedContinuation])
    full = f"{second_answers(llm, drawn, {'policy': FULL}):.3f}"
    rows = {}
    for policy in arguments.policies:
        for every in (None, BETWEEN):
            name = f"{policy}, refreshed" if every else policy
            refresh = {"every": every} if every else None
            rows[name] = [
                f"{second_answers(llm, drawn, {'policy': policy, 'budget': budget, 'refresh': refresh}):.3f}"
                for budget in arguments.budget
            ]
    title = f"Second question, {BETWEEN} tokens after the first: share answered right of {len(drawn)} prompts of "
    title += f"{arguments.prompt} tokens with {arguments.facts} facts; full cache {full}"
    print_table(title, [f"budget {budget}" for budget in arguments.budget], rows)
