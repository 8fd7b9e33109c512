"""``vllm-kvmerge train-kvzap``: trains a model that predicts KVzip+'s scores from hidden states (KVzap)."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vllm_kvmerge.cli.common import CommandParser
from vllm_kvmerge.demo import model_path
from vllm_kvmerge.errors import CommandError

REQUEST = "\n\nRepeat the previous context exactly."
LEAST_SCORE = 1e-30
"""Below it are scores whose logarithm float32 cannot tell."""

HELD_OUT = 0.05


def run(argv: list[str]) -> int:
    """Trains and writes ``config.json`` and ``model.safetensors``, the format of the published models."""
    parser = CommandParser(prog="vllm-kvmerge train-kvzap")
    parser.add_argument("model", help="folder or name on the hub, or the word demo")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--texts", type=Path, metavar="FILE", help='.jsonl, a {"text": ...} per line; left out: the demo model\'s texts'
    )
    parser.add_argument(
        "--hidden-dim", type=int, default=512, metavar="N", help="of each layer's MLP; 0: linear layers"
    )
    parser.add_argument("--num-texts", type=int, default=1000, metavar="N", help="that are read at most")
    parser.add_argument("--max-tokens", type=int, default=1250, metavar="N", help="of a text, whose rest is cut off")
    parser.add_argument("--tokens-per-text", type=int, default=500, metavar="N", help="that are learnt from")
    parser.add_argument("--epochs", type=int, default=15, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=5e-3, metavar="X")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = model_path() if args.model == "demo" else args.model
    dtype = torch.float32 if args.device == "cpu" else "auto"  # CPUs take long for what is shorter
    try:
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="eager", dtype=dtype).to(args.device)
        tokenizer = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CommandError(f"{args.model}: {error}") from None
    texts = list(_texts(args))
    hidden, scores = [], []
    for number, text in enumerate(texts, 1):
        tokens = tokenizer.encode(text)[: args.max_tokens]
        some = torch.randperm(len(tokens), device=args.device)[: args.tokens_per_text]
        seen, scored = kvzip_scores(model, tokens, _request(tokenizer))
        hidden.append(seen[:, some].cpu())
        scores.append(scored[:, :, some].mT.cpu())
        print(f"\r{number} of {len(texts)} texts", end="", flush=True)
    print()
    config, layers, errors = train(torch.cat(hidden, 1), torch.cat(scores, 1), args)
    from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig

    Surrogate(SurrogateConfig(**config), layers).save(args.output)
    explained = ", ".join(f"{one:.3f}" for one in errors)
    print(f"{args.output}: share of the variance explained of tokens held out, by layer: {explained}")
    return 0


def _texts(args: Any) -> Iterator[str]:
    if args.texts is None:
        if args.model != "demo":
            raise CommandError("--texts: needed for models other than demo")
        from vllm_kvmerge.demo.recall import draw_prompt

        rng = np.random.default_rng(args.seed)
        for _ in range(args.num_texts):
            yield draw_prompt(rng, args.max_tokens, 24).context
        return
    try:
        lines = args.texts.read_text().splitlines()[: args.num_texts]
        yield from (json.loads(line)["text"] for line in lines)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandError(f'--texts {args.texts}: must hold a {{"text": ...}} per line ({error})') from None


def _request(tokenizer: Any) -> list[int]:
    """Tokens that ask for the context again, in the chat template if there is one; none for a model without one."""
    if not tokenizer.chat_template:
        return []
    said = "what a user says"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": said}], tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer.encode(REQUEST + text.partition(said)[2], add_special_tokens=False))


@torch.inference_mode()
def kvzip_scores(model: Any, context: list[int], request: list[int]) -> tuple[Tensor, Tensor]:
    """A context's hidden states, ``[layers, n, hidden]``, and the logarithms of its KVzip+ scores, ``[layers, H, n]``
    float32: max over queries t of the repetition and query heads g of a_gti ||W_O^g v_i|| / ||h_t||.

    model: of Transformers, with eager attention.
    """
    length, seen = len(context), []
    handles = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(
                kwargs["hidden_states"][0] if "hidden_states" in kwargs else args[0][0]
            ),
            with_kwargs=True,
        )
        for layer in model.model.layers
    ]
    try:
        tokens = torch.tensor([[*context, *request, *context]], device=model.device)
        output = model.model(tokens, output_attentions=True, use_cache=True)
    finally:
        for handle in handles:
            handle.remove()
    scores = []
    for index, layer in enumerate(model.model.layers):
        values = output.past_key_values.layers[index].values[0, :, :length].float()  # [H, n, d]
        rows = (
            output.attentions[index][0, :, length:, :length].float()
            / seen[index][length:].float().norm(dim=-1)[:, None]
        )
        weight = layer.self_attn.o_proj.weight.float().unflatten(1, (len(values), -1, values.shape[2]))
        added = torch.einsum("hnd,ehgd->hgne", values, weight).norm(dim=-1)  # [H, G, n]
        scores.append((rows.amax(1).unflatten(0, (len(values), -1)) * added).amax(1))
    return torch.stack([one[:length] for one in seen]), torch.stack(scores).clamp(min=LEAST_SCORE).log()


def train(hidden: Tensor, scores: Tensor, args: Any) -> tuple[dict[str, Any], nn.ModuleList, list[float]]:
    """Fits a module for each layer. hidden: ``[layers, n, hidden]``. scores: ``[layers, n, H]``. Returns the model's
    configuration, its modules, and the share of the variance of tokens held out that each explains."""
    from vllm_kvmerge.engine.surrogate import SurrogateConfig

    num_layers, num_tokens, size = hidden.shape
    config = {
        "input_dim": size,
        "output_dim": scores.shape[2],
        "n_modules": num_layers,
        "hidden_dim": args.hidden_dim or None,
    }
    layers = SurrogateConfig(**config).modules().to(args.device)
    num_held = max(1, int(HELD_OUT * num_tokens))  # of the last texts
    explained = []
    for layer, module in enumerate(layers):
        x, y = hidden[layer].float().to(args.device), scores[layer].to(args.device)
        if isinstance(module, nn.Linear):
            _fit_linear(module, x[:-num_held], y[:-num_held])
        else:
            _fit(module, x[:-num_held], y[:-num_held], args)
        with torch.inference_mode():
            error = mse_loss(module(x[-num_held:]), y[-num_held:])
        explained.append(float(1 - error / y[-num_held:].var(0).mean()))
    return config, layers, explained


def _fit_linear(module: nn.Linear, x: Tensor, y: Tensor, ridge: float = 1.0) -> None:
    """Least squares with a ridge, as scikit-learn's ``Ridge``."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    centred = (x - mean_x).double()
    gram = centred.T @ centred + ridge * torch.eye(x.shape[1], dtype=torch.float64, device=x.device)
    weight = torch.linalg.solve(gram, centred.T @ (y - mean_y).double()).T.to(x.dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
        module.bias.copy_(mean_y - weight @ mean_x)


def _fit(module: nn.Module, x: Tensor, y: Tensor, args: Any, batch_size: int = 512) -> None:
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
