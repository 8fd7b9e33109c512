"""``vllm-kvmerge calibrate``: measures which share of a budget each head of a model needs."""

from argparse import Namespace
from pathlib import Path

import torch

from vllm_kvmerge.cli.common import CommandParser
from vllm_kvmerge.cli.scored_texts import add_options, check_device, kvzip_scores, load_model, request_of, texts_of
from vllm_kvmerge.engine.support import FULL_TYPES
from vllm_kvmerge.engine.surrogate import fingerprint
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.policies.head_budgets import HeadBudgets, measured_shares


def run(argv: list[str]) -> int:
    """Writes the file that ``vllm-kvmerge serve --head-budgets`` takes."""
    args = _arguments(argv)
    texts = list(texts_of(args))
    model, tokenizer = load_model(args.model, args.device)
    layers = range(len(model.get_decoder().layers))
    types = getattr(model.config.get_text_config(), "layer_types", None)
    full = [layer for layer in layers if types is None or types[layer] in FULL_TYPES]  # others are not compressed
    request, found = request_of(tokenizer), []
    for number, text in enumerate(texts, 1):
        _, scores = kvzip_scores(model, tokenizer.encode(text)[: args.max_tokens], request, normalized=False)
        found.append(measured_shares(scores[full].exp().cpu()))
        print(f"\r{number} of {len(texts)} texts", end="", flush=True)
    print()
    shares = torch.ones(scores.shape[:2], dtype=torch.float64)
    shares[full] = torch.stack(found).mean(0)
    budgets = HeadBudgets(fingerprint=fingerprint(model), shares=shares.numpy().round(3).tolist())
    args.output.write_text(budgets.model_dump_json() + "\n")
    print(args.output)
    return 0


def _arguments(argv: list[str]) -> Namespace:
    parser = CommandParser(prog="vllm-kvmerge calibrate")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE")
    add_options(parser, num_texts=8, max_tokens=2000)
    args = parser.parse_args(argv)
    check_device(args)
    try:  # before all that takes long
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.touch()
    except OSError as error:
        raise CommandError(f"--output {args.output}: {error.strerror}") from None
    return args
