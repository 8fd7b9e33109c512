"""``vllm-kvmerge train-kvzap``: trains a model that predicts KVzip+'s scores from hidden states (KVzap)."""

from argparse import Namespace
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vllm_kvmerge.cli.common import CommandParser
from vllm_kvmerge.cli.scored_texts import (
    add_options,
    at_least,
    check_device,
    kvzip_scores,
    load_model,
    request_of,
    texts_of,
)
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig, fingerprint
from vllm_kvmerge.errors import CommandError

HELD_OUT = 0.05
"""Share of the tokens, the last ones, that modules are tested on."""


def run(argv: list[str]) -> int:
    """Trains and writes ``config.json`` and ``model.safetensors``, the format of the published models."""
    args = _arguments(argv)
    torch.manual_seed(args.seed)
    if args.texts is None and args.model != "demo":
        raise CommandError("--texts: needed for models other than demo")
    texts = list(texts_of(args))
    model, tokenizer = load_model(args.model, args.device)
    request = request_of(tokenizer)
    with TemporaryDirectory(dir=args.output) as work:  # hidden states of all layers may be more than memory holds
        scores = []
        for number, text in enumerate(texts, 1):
            seen, scored = kvzip_scores(model, tokenizer.encode(text)[: args.max_tokens], request)
            some = torch.randperm(seen.shape[1], device=args.device)[: args.tokens_per_text]
            for layer, states in enumerate(seen[:, some].cpu()):
                with (Path(work) / str(layer)).open("ab") as file:
                    file.write(states.view(torch.uint8).numpy().data)
            scores.append(scored[:, :, some].mT.cpu())
            print(f"\r{number} of {len(texts)} texts", end="", flush=True)
        print()
        config = SurrogateConfig(
            input_dim=seen.shape[2],
            output_dim=scored.shape[1],
            n_modules=len(seen),
            hidden_dim=args.hidden_dim or None,
            fingerprint=fingerprint(model),
        )
        files = (bytearray((Path(work) / str(layer)).read_bytes()) for layer in range(len(seen)))
        hidden = (torch.frombuffer(one, dtype=seen.dtype).view(-1, config.input_dim) for one in files)
        surrogate, explained = train(config, hidden, torch.cat(scores, 1), args)
    surrogate.save(args.output)
    by_layer = ", ".join(f"{share:.3f}" for share in explained)
    print(f"{args.output}: share of the variance explained of tokens held out, by layer: {by_layer}")
    return 0


def _arguments(argv: list[str]) -> Namespace:
    parser, count = CommandParser(prog="vllm-kvmerge train-kvzap"), at_least(1)
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    add_options(parser, num_texts=1000, max_tokens=1250)
    parser.add_argument(
        "--hidden-dim", type=at_least(0), default=512, metavar="N", help="of each layer's MLP; 0: linear layers"
    )
    parser.add_argument("--tokens-per-text", type=count, default=500, metavar="N", help="that are learnt from")
    parser.add_argument("--epochs", type=count, default=15, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=5e-3, metavar="X")
    args = parser.parse_args(argv)
    check_device(args)  # before all that takes long
    try:
        args.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CommandError(f"--output {args.output}: {error.strerror}") from None
    return args


def train(
    config: SurrogateConfig, hidden: Iterable[Tensor], scores: Tensor, args: Namespace
) -> tuple[Surrogate, list[float]]:
    """A module for each layer, fitted on ``args.device``, and the share of the variance of tokens held out that each
    explains. hidden: ``[n, hidden]`` of each layer. scores: ``[layers, n, H]`` float32."""
    layers = config.modules().to(args.device)
    num_learnt = scores.shape[1] - max(1, int(HELD_OUT * scores.shape[1]))
    explained = []
    for module, states, scored in zip(layers, hidden, scores, strict=True):
        x, y = states.float().to(args.device), scored.to(args.device)
        if isinstance(module, nn.Linear):
            _fit_linear(module, x[:num_learnt], y[:num_learnt])
        else:
            _fit(module, x[:num_learnt], y[:num_learnt], args)
        with torch.inference_mode():
            error = mse_loss(module(x[num_learnt:]), y[num_learnt:])
        explained.append(float(1 - error / y[num_learnt:].var(0, correction=0).mean()))
    return Surrogate(config, layers), explained


def _fit_linear(module: nn.Linear, x: Tensor, y: Tensor, ridge: float = 1.0) -> None:
    """Least squares with a ridge, as scikit-learn's ``Ridge``."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    centred = (x - mean_x).double()
    gram = centred.T @ centred + ridge * torch.eye(x.shape[1], dtype=torch.float64, device=x.device)
    weight = torch.linalg.solve(gram, centred.T @ (y - mean_y).double()).T.to(x.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(mean_y - weight @ mean_x)


def _fit(module: nn.Module, x: Tensor, y: Tensor, args: Namespace, batch_size: int = 512) -> None:
    steps = args.epochs * -(-len(x) // batch_size)
    optimizer = torch.optim.AdamW(module.parameters(), lr=args.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(args.epochs):
        for some in torch.randperm(len(x), device=x.device).split(batch_size):
            loss = mse_loss(module(x[some]), y[some])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            schedule.step()
