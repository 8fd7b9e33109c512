"""LESS (Dong et al., arXiv:2402.09398) beside eviction and merging at equal bytes, with Transformers in place of vLLM.

    python benchmarks/less.py train --texts FOLDER
    python benchmarks/less.py compare --texts FOLDER

``train`` fits the feature maps of each layer, for two rules of eviction, to stretches of texts in the folder;
``compare`` reads other files. A prompt is compressed at its end, and the answer, the text after it, stays as it is.
Loss: -ln p per token of the answer. A state of R rows in float32 takes the bytes of R + 1 entries in bfloat16, so the
rule keeps as many fewer beside it. Results in the same file stay, as ``earlier``.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from papers_scores import pairs
from report import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, pad, scaled_dot_product_attention

from vllm_kvmerge.cli.train_kvzap import _load, _texts
from vllm_kvmerge.demo.recall import training_sample
from vllm_kvmerge.evaluation.summary import bootstrap_interval, print_table
from vllm_kvmerge.policies import CompressionContext, CompressionPolicy, CompressionResult, Entries, Merger, Queries
from vllm_kvmerge.policies.mergers import DropMerger, ResidualMerger, ZipMerger
from vllm_kvmerge.policies.selectors import HeavyHitter, WindowTopK
from vllm_kvmerge.policies.trackers import SumTracker

RULES = {"h2o": HeavyHitter(num_sink_tokens=0), "snapkv": WindowTopK()}
MERGERS: dict[str, dict[str, Merger]] = {
    "h2o": {"eviction": DropMerger()},
    "snapkv": {"eviction": DropMerger(), "residual": ResidualMerger(), "zip": ZipMerger()},
}
WINDOW = 32
"""Newest queries of the prompt, by which ``snapkv`` and ``zip`` score; ``h2o`` scores by all."""

RATE = 5e-3
"""Of learning; it falls to 0 along a cosine."""

HELD_OUT = 8
"""One of so many training stretches is not learnt from."""


def attention(queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of ``w`` queries to ``n`` entries, the last ``w`` of which are their own tokens: the output,
    ``[H, G, w, d]``, and the logarithm of its denominator, ``[H, G, w, 1]``.

    queries: ``[H, G, w, d]``, keys, values: ``[H, n, d]``, bias of the logits: ``[H, n]``.
    """
    window = queries.shape[2]
    logits = (queries.flatten(1, 2) @ keys.mT).mul_(scale).unflatten(1, queries.shape[1:3]) + bias[:, None, None]
    logits[..., -window:] += torch.full((window, window), -torch.inf).triu(1)
    norm = logits.logsumexp(-1, keepdim=True)
    return ((logits - norm).exp().flatten(1, 2) @ values).view_as(queries), norm


def with_residue(out: Tensor, norm: Tensor, features: Tensor, state: Tensor) -> Tensor:
    """(exp(norm) out + phi H) / (exp(norm) + phi z). out, norm: of ``attention``. features: phi, ``[H, G, w, R]``.
    state: H with z as its last column, ``[H, R, d + 1]``."""
    added = features @ state.unsqueeze(1)
    total = torch.logaddexp(norm, added[..., -1:].clamp(min=1e-6).log())
    return out * (norm - total).exp() + added[..., :-1] * (-total).exp()


class FeatureMaps(nn.Module):
    """Of one layer: an MLP of two layers for each query head and each KV head, whose keys have a third."""

    def __init__(self, num_heads: int, group: int, size: int, rank: int, hidden: int) -> None:
        super().__init__()

        def matrices(*shape: int) -> nn.Parameter:
            bound = (6 / sum(shape[-2:])) ** 0.5
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))

        self.queries = nn.ParameterList([matrices(num_heads, group, *s) for s in ((size, hidden), (hidden, rank))])
        self.keys = nn.ParameterList([matrices(num_heads, *s) for s in ((size, hidden), (hidden, rank), (rank, rank))])
        self.scales = nn.ParameterList([nn.Parameter(torch.full((num_heads, 1, rank), 1e-4)) for _ in range(2)])

    def features(self, queries: Tensor) -> Tensor:
        """phi, ``[H, G, w, R]``, of ``[H, G, w, d]``."""
        first, second = self.queries
        with torch.autocast("cpu", torch.bfloat16):
            mapped = gelu(gelu(queries @ first) @ second)
        return mapped.float().abs()

    def state(self, keys: Tensor, values: Tensor) -> Tensor:
        """``[H, R, d + 1]``: the sums of psi v and of psi over evicted entries, ``[H, n, d]``."""
        first, second, third = self.keys
        with torch.autocast("cpu", torch.bfloat16):
            mapped = gelu(gelu(keys @ first) @ second)
        mapped = self.scales[0].abs() * mapped.float()
        mapped = (mapped + mapped @ third * self.scales[1]).abs()
        return mapped.mT @ pad(values, (0, 1), value=1.0)


def state_cost(rank: int, size: int) -> int:
    """Entries of head size ``size``, in bfloat16, that take the bytes of a state of ``rank`` rows in float32."""
    return -(-rank * (size + 1) // size)


@dataclass
class Window:
    """A stretch of text as all layers see it, with full attention, in the model's dtype; ``rows`` are layers x H.

    keys, values: ``[rows, n, d]``. queries: ``[rows, G, m, d]``, those of the answer and the ``WINDOW`` before it.
    outputs: ``[rows, G, w, d]``, attention's, of the answer. scores: by rule, of the prompt's entries, ``[rows, p]``
    float32. loss: of the answer.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    outputs: Tensor
    scores: dict[str, Tensor]
    loss: float

    def compressed(self, rule: str, merger: Merger, budget: int) -> CompressionResult:
        """The prompt's, of all rows."""
        num_rows, length = self.scores[rule].shape
        keys, values = (plane[:, :length].float() for plane in (self.keys, self.values))
        positions, blank = torch.arange(length).expand(num_rows, -1), torch.zeros(num_rows, length)
        entries = Entries(keys, values, blank, self.scores[rule], blank, positions)
        policy = CompressionPolicy(tracker=SumTracker(), selector=RULES[rule], merger=merger)
        queries, scale = Queries(self.queries[:, :, :WINDOW], positions[:, -WINDOW:]), keys.shape[2] ** -0.5
        context = CompressionContext.of_layer(entries, budget, length, True, scale=scale, queries=queries)
        return policy.compress(entries, context)

    def parts(self, rows: slice, kept: Tensor) -> list[list[Tensor]]:
        """Keys and values of some rows' entries that are ``kept`` (``[rows, c]`` int64), and of the prompt's others."""
        is_kept = torch.zeros(len(kept), self.scores["h2o"].shape[1]).scatter_(1, kept, 1.0)
        gone = (is_kept == 0).nonzero()[:, 1].view(len(kept), -1)
        planes = [plane[rows].float() for plane in (self.keys, self.values)]
        return [[p.gather(1, some[..., None].expand(-1, -1, p.shape[2])) for p in planes] for some in (kept, gone)]


@dataclass
class Front:
    """What a layer attends to of a compressed prompt: entries, as in ``Entries``, and perhaps a state."""

    keys: Tensor
    values: Tensor
    log_votes: Tensor
    maps: FeatureMaps | None = None
    state: Tensor | None = None


class Model:
    """A model of Transformers whose attention is ours: it reads everything and is recorded, or reads fronts."""

    def __init__(self, name: str, prompt: int) -> None:
        from transformers import AttentionInterface

        self.model, self.tokenizer = _load(name, "cpu")
        self.prompt, self.fronts, self.seen = prompt, list[Front](), list[Any]()
        AttentionInterface.register("less", self._attend)
        self.model.config._attn_implementation = "less"
        self.project = [layer.self_attn.o_proj.weight.detach().float() for layer in self.model.model.layers]
        heads = self.model.config.num_key_value_heads
        self.rows = [slice(start, start + heads) for start in range(0, heads * len(self.project), heads)]

    def _attend(
        self, module: Any, queries: Tensor, keys: Tensor, values: Tensor, mask: object, scaling: float, **_: object
    ) -> tuple[Tensor, None]:
        grouped, length = queries[0].unflatten(0, (keys.shape[1], -1)), self.prompt
        if self.fronts:
            front = self.fronts[module.layer_idx]
            both = [torch.cat([a, b[0].float()], 1) for a, b in ((front.keys, keys), (front.values, values))]
            out, norm = attention(grouped.float(), *both, pad(front.log_votes, (0, keys.shape[2])), scaling)
            if front.maps is not None and front.state is not None:
                out = with_residue(out, norm, front.maps.features(grouped.float()), front.state)
            return out.flatten(0, 1)[None].transpose(1, 2).to(queries.dtype), None
        out = scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scaling, enable_gqa=True)
        positions, blank = torch.arange(length).expand(len(grouped), -1), torch.zeros(len(grouped), length)
        entries = Entries(keys[0, :, :length].float(), values[0, :, :length], blank, blank, blank, positions)
        scores = [
            entries.fused_attention(grouped[:, :, start:length].float(), positions[:, start:], scaling, "sum")
            for start in (0, length - WINDOW)
        ]
        answer = out[0].view_as(queries[0]).unflatten(0, (len(grouped), -1))[:, :, length:]
        self.seen.append((keys[0], values[0], grouped[:, :, length - WINDOW :], answer, *scores))
        return out.transpose(1, 2), None

    def read(self, ids: Tensor) -> Window:
        """ids: ``[n + 1]``."""
        self.seen = []
        loss = self.loss(ids, [])
        *planes, every, newest = (torch.cat(plane) for plane in zip(*self.seen, strict=True))
        return Window(*planes, {"h2o": every, "snapkv": newest}, loss)

    @torch.inference_mode()
    def loss(self, ids: Tensor, fronts: list[Front]) -> float:
        """Of the answer, read after the ``fronts``, of each layer, or with the whole prompt if there are none."""
        self.fronts, start, last = fronts, self.prompt if fronts else 0, len(ids) - 1 - self.prompt
        positions = torch.arange(start, len(ids) - 1)[None]
        output = self.model(ids[None, start:-1], position_ids=positions, use_cache=False, logits_to_keep=last)
        return float(cross_entropy(output.logits[0].float(), ids[-last:]))


@dataclass
class Example:
    """A stretch as one layer sees it: keys and values that were evicted, the answer's queries, what ``attention`` to
    the others gives them, and full attention's output."""

    keys: Tensor
    values: Tensor
    queries: Tensor
    out: Tensor
    norm: Tensor
    target: Tensor

    @classmethod
    def of(cls, window: Window, rows: slice, kept: Tensor) -> "Example":
        """kept: ``[rows, c]`` int64."""
        queries, target = window.queries[rows, :, WINDOW:].float(), window.outputs[rows].float()
        own = [plane[rows, -target.shape[2] :].float() for plane in (window.keys, window.values)]
        stayed, gone = window.parts(rows, kept)
        keys, values = (torch.cat(planes, 1) for planes in zip(stayed, own, strict=True))
        out, norm = attention(queries, keys, values, torch.zeros(keys.shape[:2]), keys.shape[2] ** -0.5)
        return cls(*gone, queries, out, norm, target)

    def predicted(self, maps: FeatureMaps) -> Tensor:
        return with_residue(self.out, self.norm, maps.features(self.queries), maps.state(self.keys, self.values))

    def error(self, out: Tensor, project: Tensor) -> Tensor:
        """Mean square of what ``out`` lacks of the target, after the output projection, ``[hidden, H G d]``."""
        return ((out - self.target).flatten(0, 1).transpose(0, 1).flatten(1) @ project.T).square().mean()


def fit(maps: FeatureMaps, examples: Sequence[Example], project: Tensor, epochs: int) -> None:
    unit = torch.stack([one.error(one.out, project) for one in examples]).mean()
    optimizer = torch.optim.Adam(maps.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(examples))
    for _ in range(epochs):
        for number in torch.randperm(len(examples)).tolist():
            loss = examples[number].error(examples[number].predicted(maps), project) / unit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()


@dataclass(frozen=True)
class Case:
    """losses: of each text, in nats per token."""

    name: str
    losses: list[float]


def stretches(model: Model, args: argparse.Namespace) -> Iterator[Tensor]:
    """Token ids of texts in the folder; without one, facts, and questions about them as answer."""
    length = args.prompt + args.answer + 1
    if args.texts is None:
        rng = np.random.default_rng(0)
        while True:
            ids, _ = training_sample(rng, length, args.prompt // 40, args.answer // 7)
            yield torch.from_numpy(ids)
    drawn = argparse.Namespace(**vars(args), seed=0, max_tokens=length + 64, num_texts=1_000_000)
    texts = (torch.tensor(model.tokenizer.encode(text)[:length]) for text in _texts(drawn))
    yield from (ids for ids in texts if len(ids) == length)


def train(model: Model, texts: list[Tensor], args: argparse.Namespace) -> None:
    """Writes the maps of all layers for each rule and share, and prints what they leave of eviction's error."""
    args.kernels.mkdir(parents=True, exist_ok=True)
    windows = [model.read(ids) for ids in texts]
    _, group, _, size = windows[0].queries.shape
    for rule, share in product(RULES, args.shares):
        budget = round(share * args.prompt) - state_cost(args.rank, size)
        kept = [window.compressed(rule, DropMerger(), budget).update.kept for window in windows]
        trained, shares = [], []
        for rows, project in zip(model.rows, model.project, strict=True):
            examples = [Example.of(window, rows, one[rows]) for window, one in zip(windows, kept, strict=True)]
            num_held = len(examples) // HELD_OUT
            maps = FeatureMaps(rows.stop - rows.start, group, size, args.rank, args.hidden)
            fit(maps, examples[num_held:], project, args.epochs)
            with torch.no_grad():
                errors = [[one.error(out, project) for out in (one.predicted(maps), one.out)] for one in examples]
            left = [np.sum(part, 0) for part in (errors[num_held:], errors[:num_held])]
            shares.append([after / before for after, before in left])
            trained.append(maps)
        torch.save(trained, args.kernels / f"{args.model}-{rule}-{share}.pt")
        learnt, held = np.median(shares, 0)
        print(f"{rule} {share}: error left, median of layers: {learnt:.2f}, of texts held out: {held:.2f}", flush=True)


@torch.inference_mode()
def compare(model: Model, texts: list[Tensor], args: argparse.Namespace) -> dict[str, list[float]]:
    """Losses of each text by method."""
    cells, losses, windows = list(product(RULES, args.shares)), dict[str, list[float]](full=[]), []
    for ids in texts:
        windows.append(window := model.read(ids))
        losses["full"].append(window.loss)
        for rule, share, name in ((*cell, name) for cell in cells for name in MERGERS[cell[0]]):
            entries = window.compressed(rule, MERGERS[rule][name], round(share * args.prompt)).entries
            planes = entries.keys, entries.values, entries.log_votes
            fronts = [Front(*(plane[rows] for plane in planes)) for rows in model.rows]
            losses.setdefault(f"{rule} {share} {name}", []).append(model.loss(ids, fronts))
        print(f"{len(windows)} of {len(texts)} texts", flush=True)
    for rule, share in cells:
        trained = torch.load(args.kernels / f"{args.model}-{rule}-{share}.pt", weights_only=False)
        budget = round(share * args.prompt) - state_cost(args.rank, windows[0].keys.shape[2])
        for ids, window in zip(texts, windows, strict=True):
            kept, fronts = window.compressed(rule, DropMerger(), budget).update.kept, []
            for rows, maps in zip(model.rows, trained, strict=True):
                stayed, gone = window.parts(rows, kept[rows])
                fronts.append(Front(*stayed, torch.zeros(kept[rows].shape), maps, maps.state(*gone)))
            losses.setdefault(f"{rule} {share} LESS", []).append(model.loss(ids, fronts))
    return losses


def show(losses: dict[str, list[float]], args: argparse.Namespace) -> None:
    shown = {}
    for name, some in losses.items():
        change = [one - full for one, full in zip(some, losses["full"], strict=True)]
        low, high = bootstrap_interval(change)
        shown[name] = [f"{mean(some):.3f}", f"{mean(change):+.3f}", f"{low:+.3f} to {high:+.3f}"]
    print_table(f"Loss, {args.count} texts", ["loss", "change from full", "95% interval"], shown)
    cells = [(f"{rule} {share}", MERGERS[rule]) for rule, share in product(RULES, args.shares)]
    less = [(f"{cell} LESS", f"{cell} {name}") for cell, mergers in cells for name in mergers]
    pairs("Loss (less is better)", [losses], less)
    earlier = []
    if args.output.exists():
        last = json.loads(args.output.read_text())
        earlier = [*last.pop("earlier", []), last]
    save(args.output, vars(args), [Case(name, some) for name, some in losses.items()], earlier=earlier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["train", "compare"])
    parser.add_argument("--model", default="smollm2", help="demo, or a name that serve knows")
    parser.add_argument("--texts", type=Path, help="a folder; default: the demo model's facts and questions")
    parser.add_argument("--count", type=int, default=24, help="stretches of text")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.25, 0.125], help="of the prompt's entries")
    for name, default in (("prompt", 1024), ("answer", 256), ("rank", 8), ("hidden", 128), ("epochs", 10)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kernels", type=Path, default=Path("build/less"), help="folder of what is trained")
    parser.add_argument("--output", type=Path, default=Path("build/less.json"))
    args = parser.parse_args()
    torch.manual_seed(0)
    model = Model(args.model, args.prompt)
    both = list(islice(stretches(model, args), 2 * args.count))
    if args.step == "train":
        train(model, both[1::2], args)
    else:
        show(compare(model, both[::2], args), args)


if __name__ == "__main__":
    main()
