"""Texts that commands have a model read with Transformers, and KVzip's scores of their tokens."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor

from vllm_kvmerge.cli.common import check_folder, one_line
from vllm_kvmerge.demo import named
from vllm_kvmerge.demo.handbook import document
from vllm_kvmerge.engine.served_model import TokenizedModel
from vllm_kvmerge.errors import CommandError
from vllm_kvmerge.evaluation.config import read_config
from vllm_kvmerge.evaluation.runner import chat_frame
from vllm_kvmerge.policies.trackers import ReconstructionTracker

LEAST_SCORE = 1e-30
"""Below it are scores whose logarithm float32 cannot tell."""

SUFFIXES = ".md", ".py", ".rst", ".txt"
"""Of text files in a folder."""

CHARACTERS_PER_TOKEN = 5
"""At least as many as most texts have, so that they are long enough."""


class Line(BaseModel):
    """A line of --texts; other entries are ignored."""

    model_config = ConfigDict(strict=True)

    text: str


def add_options(parser: ArgumentParser, num_texts: int, max_tokens: int) -> None:
    """The model, and what it reads; the numbers are defaults."""
    count = at_least(1)
    parser.add_argument("model", help="folder or name on the hub, or the word demo")
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="PATH",
        help='.jsonl, a {"text": ...} per line; a folder, of whose text files stretches are drawn; or .yaml, a '
        "configuration of vllm-kvmerge eval, for its tasks' contexts; default: of the demo model, or a handbook in "
        "English",
    )
    parser.add_argument("--num-texts", type=count, default=num_texts, metavar="N", help="that are read at most")
    parser.add_argument(
        "--max-tokens", type=count, default=max_tokens, metavar="N", help="of a text, whose rest is cut off"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)


def check_device(args: Namespace) -> None:
    """Raises CommandError if there is no such device."""
    try:
        torch.empty(0, device=args.device)
    except (AssertionError, RuntimeError) as error:
        raise CommandError(f"--device {args.device}: {one_line(error)}") from None


def request_of(tokenizer: Any) -> list[int]:
    """Tokens that ask for a repetition."""
    prompts = ReconstructionTracker.model_defaults(TokenizedModel(lambda: tokenizer))
    return [*prompts["repeat_prompt"], *prompts["answer_prompt"]]


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise ArgumentTypeError(f"must be at least {least}, got {value}")
        return value

    return number


def texts_of(args: Namespace) -> Iterator[str]:
    if args.texts is None:
        if args.model != "demo":
            yield document()
            return
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


def load_model(name: str, device: str) -> tuple[Any, Any]:
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
def kvzip_scores(model: Any, context: list[int], request: list[int], normalized: bool = True) -> tuple[Tensor, Tensor]:
    """A context's hidden states, ``[layers, n, hidden]``, and the logarithms of its KVzip+ scores, ``[layers, H, n]``
    float32: max over queries t of the repetition and query heads g of a_gti ||W_O^g v_i|| / ||h_t||; of KVzip's, a_gti
    alone, unless ``normalized``.

    model: of Transformers. request: tokens between the context and its repetition.
    """
    length, seen, scores = len(context), [], []

    def observe(attention: Any, _: Any, given: dict[str, Any], output: tuple[Tensor, Tensor | None]) -> None:
        hidden, weights = given["hidden_states"][0], output[1]
        if weights is None:
            seen.append(hidden)
            return
        if not normalized:
            key = given["past_key_values"].layers[attention.layer_idx].keys
            scores.append(weights[0, :, :, :length].float().amax(1).unflatten(0, (key.shape[1], -1)).amax(1))
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
