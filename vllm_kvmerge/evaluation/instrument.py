"""Effects of compression on attention, in numbers: for each layer, head and decoding step.

``measure`` looks at one document; ``Findings`` adds up documents and says everything as JSON.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import normalize

from vllm_kvmerge.evaluation.merge_map import Ledger, Provenance, RecordedPolicy
from vllm_kvmerge.evaluation.replay import Schedule, compressed_outputs, relative_error
from vllm_kvmerge.evaluation.trace import LayerTrace
from vllm_kvmerge.request.parameters import CompressionConfig

PROMPT_END, END = "prompt end", "end"
"""Moments at which the cache is recorded: after the first compression, and after the last one."""

MAX_TARGETS = 8
"""Targets that are listed for each merged token, those of largest weight."""

MOST = 0.9
"""Share of attention whose entries are counted."""

QUANTITIES = ("error", "kept", "represented")

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Measurement:
    """One document on one compressed cache. ``L`` layers were looked at, ``S`` decoding steps; ``N`` query heads.

    layer_error: ``[L, S]``, relative error over all heads. error: ``[L, N, S]``, of each query head alone. kept:
    ``[L, N, S]``, the share of the full cache's attention that goes to tokens whose own entry is still there.
    represented: the same for tokens of whose value a live entry holds a part. snapshots: what each layer's entries
    consist of, at ``PROMPT_END`` and, if there was another compression, at ``END``. residual: see ``Mixture``; the
    largest.
    """

    layer_error: Tensor
    error: Tensor
    kept: Tensor
    represented: Tensor
    snapshots: dict[str, dict[int, Provenance]]
    residual: float


def measure(
    full: list[list[Tensor]],
    layers: list[LayerTrace],
    config: CompressionConfig,
    schedule: Schedule,
    looked_at: Sequence[int],
) -> Measurement:
    """full: ``full_outputs`` of the same layers. looked_at: numbers of the layers to look at."""
    ledger = Ledger(looked_at, layers[0].keys.shape[1])
    ledger.extend(schedule.num_prompt_tokens)
    recorded = config.model_copy(update={"policy": RecordedPolicy.of(config.policy, ledger.record)})
    snapshots: dict[str, dict[int, Provenance]] = {}
    columns: dict[str, list[Tensor]] = {name: [] for name in ("layer_error", *QUANTITIES)}
    # The pairs must be asked for one by one: compression goes on with the next.
    for expected, (new, actual) in zip(full, compressed_outputs(layers, recorded, schedule), strict=True):
        snapshots.setdefault(PROMPT_END, ledger.snapshot())
        ledger.extend(new.stop)
        pairs = [(actual[layer], expected[layer]) for layer in looked_at]
        columns["layer_error"].append(torch.stack([relative_error(a.flatten(1), e.flatten(1)) for a, e in pairs]))
        columns["error"].append(torch.stack([relative_error(a, e).T for a, e in pairs]))
        masses = [
            _masses(full_probabilities(layers[layer], new, schedule.dtype), ledger.layers[layer]) for layer in looked_at
        ]
        for name, values in zip(("kept", "represented"), zip(*masses, strict=True), strict=True):
            columns[name].append(torch.stack(values))
    if config.decode == "bounded":
        snapshots[END] = ledger.snapshot()
    return Measurement(
        **{name: torch.cat(parts, dim=-1) for name, parts in columns.items()},
        snapshots=snapshots,
        residual=ledger.residual,
    )


def full_probabilities(layer: LayerTrace, new: slice, dtype: torch.dtype) -> Tensor:
    """``[H * G, q, new.stop]`` float32: attention of these tokens' queries on the full cache (of ``dtype``)."""
    queries = layer.queries[new].to(dtype).float().transpose(0, 1)
    keys = layer.keys[: new.stop].to(dtype).float().transpose(0, 1)
    logits = layer.scale * (queries @ keys.repeat_interleave(len(queries) // len(keys), 0).transpose(1, 2))
    hidden = torch.ones(logits.shape[1:], dtype=torch.bool).triu_(new.start + 1)
    return logits.masked_fill_(hidden, -torch.inf).softmax(-1)


def attention_spread(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """How many entries attention goes to, from ``full_probabilities``, ``[H * G, q]`` twice: its entropy (float32,
    nats), and how many entries hold ``MOST`` of it at least (int64)."""
    ordered = probabilities.sort(-1, descending=True).values
    return torch.special.entr(ordered).sum(-1), 1 + (ordered.cumsum(-1) < MOST).sum(-1)


def _masses(probabilities: Tensor, provenance: Provenance) -> tuple[Tensor, Tensor]:
    """``[H * G, q]`` twice: attention on tokens that survive, and on those that are represented."""

    def share(tokens: Tensor) -> Tensor:
        groups = len(probabilities) // len(tokens)
        weights = tokens.float().repeat_interleave(groups, 0)
        return (probabilities @ weights.unsqueeze(-1)).squeeze(-1)

    return share(provenance.survives), share(provenance.is_represented)


@dataclass(frozen=True)
class MergeMap:
    """Merges in one KV head: ``m`` tokens whose own entry is gone, ``c`` targets that took them in.

    tokens: ``[m]``, positions of the tokens that have a part in a target. targets: ``[c]``, positions of the entries
    that have taken some in: of the token whose own entry it is, or of the newest one in it. retained: positions of all
    tokens that survive. weights: ``[m, c]``, of each token's value in each target's. similarity: ``[m, c]``, cosine of
    the token's key and that of the token whose entry the target is; NaN where it is nobody's.
    """

    tokens: Array
    targets: Array
    retained: Array
    weights: Array
    similarity: Array

    @classmethod
    def of(cls, provenance: Provenance, head: int, keys: Tensor) -> "MergeMap":
        """keys: ``[T, H, d]``, all tokens'."""
        shares, origins = provenance.shares[head], provenance.origins[head]
        gone = ~provenance.survives[head]
        given = (shares != 0) & gone
        # In order of position, so that a map reads like the text.
        position = torch.where(origins >= 0, origins, provenance.positions[head])
        targets = given.any(1).nonzero().squeeze(1)
        targets = targets[position[targets].argsort()]
        tokens = given.any(0).nonzero().squeeze(1)
        directions = normalize(keys[:, head], dim=-1)
        similarity = directions[tokens] @ directions[origins[targets].clamp(min=0)].T
        similarity = similarity.masked_fill(origins[targets] < 0, torch.nan)
        return cls(
            tokens.numpy(),
            position[targets].numpy(),
            (~gone).nonzero().squeeze(1).numpy(),
            shares[targets][:, tokens].T.double().numpy(),
            similarity.double().numpy(),
        )

    @property
    def is_dense(self) -> bool:
        """True if some token went into more targets than are listed."""
        return self.tokens.size > 0 and int((self.weights != 0).sum(1).max()) > MAX_TARGETS

    @property
    def num_pairs(self) -> int:
        return int((self.weights != 0).sum())

    def pairs(self) -> list[list[float | int | None]]:
        """[token, target, weight, similarity], for each token at most ``MAX_TARGETS``, the largest weight first."""
        rows: list[list[float | int | None]] = []
        order = np.argsort(-np.abs(self.weights), axis=1, kind="stable")[:, :MAX_TARGETS]
        for row, columns in enumerate(order):
            for column in columns:
                weight, similarity = self.weights[row, column], self.similarity[row, column]
                if weight != 0:
                    cosine = None if np.isnan(similarity) else _short(similarity)
                    rows.append([int(self.tokens[row]), int(self.targets[column]), _short(weight), cosine])
        return rows

    def as_json(self) -> dict[str, Any]:
        return {
            "retained": self.retained.tolist(),
            "num_merged_tokens": len(self.tokens),
            "num_carriers": len(self.targets),
            "num_pairs": self.num_pairs,
            "pairs": self.pairs(),
        }


@dataclass
class Findings:
    """All documents under one policy, budget and merger. Merge maps are the first document's.

    layers: numbers of the layers looked at.
    """

    layers: list[int]
    measurements: dict[str, list[Array]] = field(default_factory=dict)
    log_votes: dict[str, dict[int, list[Array]]] = field(default_factory=dict)
    tokens_of_each: dict[str, dict[int, Counter[int]]] = field(default_factory=dict)
    maps: dict[str, dict[int, list[MergeMap]]] = field(default_factory=dict)
    residual: float = 0.0

    def add(self, measurement: Measurement, document: list[LayerTrace]) -> None:
        is_first = not self.measurements
        for name in ("layer_error", *QUANTITIES):
            self.measurements.setdefault(name, []).append(getattr(measurement, name).double().numpy())
        self.residual = max(self.residual, measurement.residual)
        for moment, snapshot in measurement.snapshots.items():
            for layer, provenance in snapshot.items():
                live = provenance.is_live
                votes = self.log_votes.setdefault(moment, {}).setdefault(layer, [])
                votes.append(provenance.log_votes[live].double().numpy())
                counts = self.tokens_of_each.setdefault(moment, {}).setdefault(layer, Counter())
                counts.update(provenance.num_tokens_of_each[live].tolist())
                if is_first:
                    heads = range(len(live))
                    maps = [MergeMap.of(provenance, head, document[layer].keys) for head in heads]
                    self.maps.setdefault(moment, {})[layer] = maps

    def mean(self, name: str) -> Array:
        """Over documents: ``[L, S]`` for ``layer_error``, ``[L, N, S]`` for the others."""
        return np.mean(self.measurements[name], axis=0)

    def deviation(self, name: str) -> Array:
        """Standard deviation over documents, of the same shape."""
        return np.std(self.measurements[name], axis=0)

    @property
    def summary(self) -> dict[str, float]:
        """One number each: over documents, layers, heads and steps."""
        return {name: _short(self.mean(name).mean()) for name in ("layer_error", *QUANTITIES)}

    def has_merged(self, moment: str) -> bool:
        """True if that moment's maps show any merge."""
        return any(one.tokens.size for maps in self.maps.get(moment, {}).values() for one in maps)

    def vote_histogram(self, moment: str, num_bins: int = 24) -> tuple[Array, dict[int, Array]]:
        """Edges, the same for all layers, and how many entries each layer has between them."""
        by_layer = {layer: np.concatenate(parts) for layer, parts in self.log_votes[moment].items()}
        every = np.concatenate(list(by_layer.values()))
        low, high = min(0.0, float(every.min())), max(0.0, float(every.max()))
        edges = np.linspace(low, high, num_bins + 1) if high > low else np.linspace(-0.5, 0.5, num_bins + 1)
        return edges, {layer: np.histogram(votes, edges)[0] for layer, votes in by_layer.items()}

    def as_json(self) -> dict[str, Any]:
        result: dict[str, Any] = {"summary": self.summary, "residual": self.residual, "layers": self.layers}
        for name in ("layer_error", *QUANTITIES):
            result[name] = {"mean": _shortened(self.mean(name)), "std": _shortened(self.deviation(name))}
        result["cache"] = {
            moment: {
                "log_votes": self._votes_as_json(moment),
                "tokens_per_entry": {
                    layer: dict(sorted(counts.items())) for layer, counts in self.tokens_of_each[moment].items()
                },
                "merge_map": {layer: [one.as_json() for one in maps] for layer, maps in self.maps[moment].items()},
            }
            for moment in self.log_votes
        }
        return result

    def _votes_as_json(self, moment: str) -> dict[str, Any]:
        edges, counts = self.vote_histogram(moment)
        return {"edges": _shortened(edges), "counts": {layer: row.tolist() for layer, row in counts.items()}}


def _short(value: float) -> float:
    """Five significant digits."""
    return float(f"{value:.5g}")


def _shortened(array: Array) -> Any:
    return [_short(value) for value in array] if array.ndim == 1 else [_shortened(part) for part in array]
