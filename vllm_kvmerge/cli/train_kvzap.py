"""``vllm-kvmerge train-kvzap``: trains a model that predicts KVzip+'s scores from hidden states (KVzap)."""

from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from vllm_kvmerge.cli.common import CommandParser, check_folder, one_line
from vllm_kvmerge.demo import named
from vllm_kvmerge.engine.served_model import TokenizedModel
from vllm_kvmerge.engine.surrogate import Surrogate, SurrogateConfig, fingerprint
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.runner import chat_frame
from vllm_kvmerge.policies.trackers import ReconstructionTracker

LEAST_SCORE = 1e-30
"""Below it are scores whose logarithm float32 cannot tell."""

HELD_OUT = 0.05
"""Share of the tokens, the last ones, that modules are tested on."""


SUFFIXES = ".md", ".py", ".rst", ".txt"
"""Of text files in a folder."""

CHARACTERS_PER_TOKEN = 5
"""At least as many as most texts have, so that they are long enough."""


class Line(BaseModel):
    """A line of --texts; other entries are ignored."""

    model_config = ConfigDict(strict=True)

    text: str


def run(argv: list[str]) -> int:
    """Trains and writes ``config.json`` and ``model.safetensors``, the format of the published models."""
    args = _arguments(argv)
    torch.manual_seed(args.seed)
    texts = list(_texts(args))
    model, tokenizer = _load(args.model, args.device)
    prompts = ReconstructionTracker.model_defaults(TokenizedModel(lambda: tokenizer))
    request = [*prompts["repeat_prompt"], *prompts["answer_prompt"]]
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
    parser, count = CommandParser(prog="vllm-kvmerge train-kvzap"), _at_least(1)
    parser.add_argument("model", help="folder or name on the hub, or the word demo")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER")
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="PATH",
        help='.jsonl, a {"text": ...} per line; a folder, of whose text files stretches are drawn; or .yaml, a '
        "configuration of vllm-kvmerge eval, for its tasks' contexts; default: of the demo model",
    )
    parser.add_argument(
        "--hidden-dim", type=_at_least(0), default=512, metavar="N", help="of each layer's MLP; 0: linear layers"
    )
    parser.add_argument("--num-texts", type=count, default=1000, metavar="N", help="that are read at most")
    parser.add_argument("--max-tokens", type=count, default=1250, metavar="N", help="of a text, whose rest is cut off")
    parser.add_argument("--tokens-per-text", type=count, default=500, metavar="N", help="that are learnt from")
    parser.add_argument("--epochs", type=count, default=15, metavar="N")
    parser.add_argument("--learning-rate", type=float, default=5e-3, metavar="X")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:  # before all that takes long
        args.output.mkdir(parents=True, exist_ok=True)
        torch.empty(0, device=args.device)
    except OSError as error:
        raise CommandError(f"--output {args.output}: {error.strerror}") from None
    except (AssertionError, RuntimeError) as error:
        raise CommandError(f"--device {args.device}: {one_line(error)}") from None
    return args


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def _texts(args: Namespace) -> Iterator[str]:
    if args.texts is None:
        if args.model != "demo":
            raise CommandError("--texts: needed for models other than demo")
        from vllm_kvmerge.demo.recall import draw_prompt

        rng = np.random.default_rng(args.seed)
        for _ in range(args.num_texts):
            yield draw_prompt(rng, args.max_tokens, 24).context
        return
    if args.texts.is_dir():
        yield from _stretches(args)
        return
    if args.texts.suffix in (".yaml", ".yml"):
        yield from _contexts(args)
        return
    try:
        with args.texts.open() as file:
            lines = list(islice(file, args.num_texts))
    except (OSError, ValueError) as error:
        raise CommandError(f"--texts {args.texts}: {one_line(error)}") from None
    if not lines:
        raise CommandError(f"--texts {args.texts}: holds no text")
    for number, line in enumerate(lines, 1):
        try:
            yield Line.model_validate_json(line).text
        except ValidationError as error:
            message = f'--texts {args.texts}: line {number} must be a {{"text": ...}} ({one_line(error)})'
            raise CommandError(message) from None


def _stretches(args: Namespace) -> Iterator[str]:
    """One of each file, from a random line on; short files are left out."""
    length = CHARACTERS_PER_TOKEN * args.max_tokens
    files = sorted(p for p in args.texts.rglob("*") if p.suffix in SUFFIXES and p.stat().st_size >= length)
    if not files:
        allowed = f"{', '.join(SUFFIXES)} of {length} bytes"
        raise CommandError(f"--texts {args.texts}: the folder holds no text long enough (allowed: {allowed} or more)")
    rng = np.random.default_rng(args.seed)
    for number in rng.permutation(len(files))[: args.num_texts]:
        text = files[number].read_text(errors="replace")
        start = int(rng.integers(max(1, len(text) - length)))
        yield text[text.rfind("\n", 0, start) + 1 :][:length]


def _contexts(args: Namespace) -> Iterator[str]:
    """Of the tasks' samples, in the order in which an evaluation takes them: the first of each task, the second, ..."""
    from transformers import AutoTokenizer

    config, tokenizer = read_config(args.texts, {}), AutoTokenizer.from_pretrained(named(args.model))
    before = {entry.label: chat_frame(tokenizer)[0] for entry in config.tasks if config.in_chat_template(entry)}
    drawn = [
        [before.get(entry.label, "") + (sample.context or sample.prompt) for sample in samples]
        for entry in config.tasks
        for samples in [entry.task.samples(config.samples_of(entry), config.seed, tokenizer)]
    ]
    texts = (text for row in zip_longest(*drawn) for text in row if text is not None)
    yield from islice(texts, args.num_texts)


def _load(name: str, device: str) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = named(name)
    check_folder(path)
    # Most CPUs take longer for what is shorter.
    dtype = torch.float32 if device == "cpu" and not torch.cpu._is_avx512_bf16_supported() else "auto"
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(device)
        return model, AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CommandError(f"{name}: {one_line(error)}") from None


@torch.inference_mode()
def kvzip_scores(model: Any, context: list[int], request: list[int]) -> tuple[Tensor, Tensor]:
    """A context's hidden states, ``[layers, n, hidden]``, and the logarithms of its KVzip+ scores, ``[layers, H, n]``
    float32: max over queries t of the repetition and query heads g of a_gti ||W_O^g v_i|| / ||h_t||.

    model: of Transformers. request: tokens between the context and its repetition.
    """
    length, seen, scores = len(context), [], []

    def observe(attention: Any, _: Any, given: dict[str, Any], output: tuple[Tensor, Tensor | None]) -> None:
        hidden, weights = given["hidden_states"][0], output[1]
        if weights is None:
            seen.append(hidden)
            return
        values = given["past_key_values"].layers[attention.layer_idx].values[0, :, :length].float()  # [H, n, d]
        weight = attention.o_proj.weight.float().unflatten(1, (len(values), -1, values.shape[2]))
        added = torch.einsum("hnd,ehgd->hgne", values, weight).norm(dim=-1)  # [H, G, n]
        given_by = weights[0, :, :, :length].float() / hidden.float().norm(dim=-1)[:, None]
        scores.append((given_by.amax(1).unflatten(0, added.shape[:2]) * added).amax(1))

    decoder, read = model.get_decoder(), None
    handles = [layer.self_attn.register_forward_hook(observe, with_kwargs=True) for layer in decoder.layers]
    try:
        for attention, tokens in ("sdpa", context), ("eager", [*request, *context]):  # the latter has weights to show
            model.set_attn_implementation(attention)
            ids = torch.tensor([tokens], device=model.device)
            read = decoder(ids, past_key_values=read, use_cache=True).past_key_values
    finally:
        for handle in handles:
            handle.remove()
    return torch.stack(seen), torch.stack(scores).clamp(min=LEAST_SCORE).log()


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
