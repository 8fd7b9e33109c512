"""Options, engine and printed table that the evaluation commands share."""

import argparse
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_kvmerge import demo
from vllm_kvmerge.demo import recall
from vllm_kvmerge.evaluation.trace import model_type_of
from vllm_kvmerge.policies import PRESETS, load_plugins
from vllm_kvmerge.policies.base import ServedModel
from vllm_kvmerge.request.parameters import FULL, CompressionConfig, CompressionError, parse_compression

if TYPE_CHECKING:
    from vllm import LLM


def parse_budget(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def parser_of(
    description: str | None, budgets: Sequence[int | float], others: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """A parser with the options that every evaluation has. ``others``: policies, besides all presets, by default."""
    load_plugins()
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=demo.model_path(), help="folder of the model (default: the one that ships)")
    parser.add_argument(
        "--budget",
        type=parse_budget,
        nargs="+",
        default=list(budgets),
        help="entries (integer) or share of the prompt; several",
    )
    parser.add_argument(
        "--policies", nargs="+", default=[*others, *sorted(PRESETS)], choices=["full", *sorted(PRESETS)], metavar="P"
    )
    parser.add_argument("--seed", type=int, default=None, help="default: a new one at each run, printed")
    return parser


def add_field_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="further fields of kv_compression for every policy, such as merger=kvmerger",
    )


def config_of(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace, fields: Mapping[str, Any]
) -> CompressionConfig:
    """``kv_compression`` with these fields and those of ``--set``, for the model; ends the program if that is wrong, or
    cannot be replayed."""
    if fields["policy"] == FULL:
        parser.error(f"policy {FULL!r} is what the others are compared with")
    value = dict(fields)
    for text in arguments.set:
        name, separator, given = text.partition("=")
        if not separator:
            parser.error(f"--set {text}: must be FIELD=VALUE")
        value[name] = _json_or_text(given)
    try:
        config = parse_compression(value)
    except CompressionError as error:
        parser.error(str(error))
    assert config is not None
    if config.policy.tracker.repeats_context:
        parser.error(f"policy {config.name!r} has a model repeat the context, and none runs while traces are replayed")
    if config.policy.tracker.predicts_scores:
        parser.error(f"policy {config.name!r} reads hidden states, which traces do not have")
    if config.positions == "cache":
        parser.error("--set positions: traces have queries and keys that were turned by the text's")
    return config.for_model(ServedModel(model_type_of(arguments.model)))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_document_options(parser: argparse.ArgumentParser, documents: int, questions: int) -> None:
    """Options of evaluations that read documents of the demo task, with these defaults."""
    parser.add_argument("--documents", type=int, default=documents, help="how many documents")
    parser.add_argument("--prompt", type=int, default=768, help="tokens of the prompt")
    parser.add_argument("--facts", type=int, default=16, help="facts per document")
    parser.add_argument(
        "--questions", type=int, default=questions, help="questions at the end of a document, with answers"
    )


def draw_documents(arguments: argparse.Namespace, seed: int, length: int) -> list[list[int]]:
    """Token ids of fresh documents of ``length`` tokens, as ``add_document_options`` has it."""
    rng = np.random.default_rng(seed)
    return [
        recall.training_sample(rng, length, arguments.facts, arguments.questions)[0].tolist()
        for _ in range(arguments.documents)
    ]


def seed_of(arguments: argparse.Namespace) -> int:
    return secrets.randbelow(2**31) if arguments.seed is None else arguments.seed


def make_engine(arguments: argparse.Namespace, max_model_len: int, **overrides: object) -> "LLM":
    """An engine of our own with the model that ``arguments`` name."""
    from vllm import LLM

    from vllm_kvmerge import kvmerge_engine_args

    settings = {
        "model": arguments.model,
        "dtype": arguments.dtype,
        "enforce_eager": True,
        "max_model_len": max_model_len,
        "kv_cache_memory_bytes": 256 << 20,
    }
    return LLM(**kvmerge_engine_args(**(settings | overrides)))


def print_table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]], first: str = "policy") -> None:
    """Prints a Markdown table, one row per name, however wide it gets."""
    table = Table(box=box.MARKDOWN)
    table.add_column(first, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, cells in rows.items():
        table.add_row(name, *cells)
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, console.measure(table, options=console.options.update(width=1000)).maximum)
    console.print(f"{title}\n")
    console.print(table, crop=False)
