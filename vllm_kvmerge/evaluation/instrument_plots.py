"""Plots of an instrument's findings."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vllm_kvmerge.evaluation.instrument import END, PROMPT_END, Array, Findings, MergeMap

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_MAP_LAYERS, MAX_MAP_HEADS = 4, 4
"""Most layers, and heads of each, that a figure of merge maps shows, evenly spread."""

NAMES = {"error": "error", "kept": "attention kept", "represented": "attention represented"}


def draw_findings(
    folder: Path, suffix: str, title: str, variants: Mapping[str, Findings], num_prompt_tokens: int, interval: int
) -> list[Path]:
    """Figures of one policy and budget; variants: ``merged``, and ``dropped`` where there is something to merge."""
    figures = {"heads": heads(title, variants), "steps": steps(title, variants, num_prompt_tokens, interval)}
    merged = next(iter(variants.values()))
    figures["votes"] = votes(title, merged)
    for moment in (PROMPT_END, END):
        if merged.has_merged(moment):
            figures[f"merge-map-{moment.replace(' ', '-')}"] = merge_maps(f"{title}, {moment}", merged, moment)
    return [save(figure, folder / f"{name}.{suffix}") for name, figure in figures.items()]


def draw_overview(folder: Path, suffix: str, title: str, findings: Mapping[str, Findings], tag: str) -> list[Path]:
    """Figures of all policies at one budget: error step by step, and error against attention kept."""
    figures = {"policies-by-step": policies_by_step(title, findings), "error-by-mass": error_by_mass(title, findings)}
    return [save(figure, folder / f"{name}-{tag}.{suffix}") for name, figure in figures.items()]


def save(figure: "Figure", path: Path) -> Path:
    """Writes the figure; the same findings give the same bytes."""
    import matplotlib

    # The resolution of an SVG is that of its dense parts alone.
    options = {"metadata": {"Date": None}, "dpi": 80} if path.suffix == ".svg" else {"dpi": 150}
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvmerge"}):
        figure.savefig(path, **options)  # type: ignore[arg-type]
    return path


def heads(title: str, variants: Mapping[str, Findings]) -> "Figure":
    """Layer against query head, mean over steps and documents: error and attention kept, of each variant."""
    panels: list[tuple[str, Array, Findings, str]] = []
    for name, found in variants.items():
        panels.append((f"error, {name}", found.mean("error").mean(-1), found, "error"))
    for name, found in variants.items():
        for quantity in ("kept", "represented"):
            if quantity == "kept" or found.has_merged(PROMPT_END) or found.has_merged(END):
                label = f"{NAMES[quantity]}, {name}"
                panels.append((label, found.mean(quantity).mean(-1), found, "mass"))
    num_layers, num_heads = panels[0][1].shape
    width = max(2.6, 0.35 * num_heads)
    figure = _figure(width * len(panels) + 0.8, max(2.2, 0.35 * num_layers + 1.4))
    figure.suptitle(title)
    top = max(float(values.max()) for _, values, _, kind in panels if kind == "error")
    for axis, (label, values, found, kind) in zip(
        figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True
    ):
        limits, colours = ((0.0, max(top, 1e-9)), "magma_r") if kind == "error" else ((0.0, 1.0), "viridis")
        mesh = axis.pcolormesh(values, cmap=colours, vmin=limits[0], vmax=limits[1], edgecolors="white", linewidth=0.5)
        if values.size <= 64:
            for row, column in np.ndindex(values.shape):
                is_dark = mesh.norm(values[row, column]) > 0.5 if kind == "error" else values[row, column] < 0.5
                colour = "white" if is_dark else "black"
                axis.text(
                    column + 0.5,
                    row + 0.5,
                    f"{values[row, column]:.2f}",
                    ha="center",
                    va="center",
                    fontsize="x-small",
                    color=colour,
                )
        _ticks(axis, num_heads, found.layers)
        axis.set_title(label, fontsize="small")
        figure.colorbar(mesh, ax=axis, shrink=0.8)
    return figure


def _ticks(axis: "Axes", num_heads: int, layers: Sequence[int]) -> None:
    heads = range(0, num_heads, max(1, num_heads // 8))
    axis.set_xticks([head + 0.5 for head in heads], [str(head) for head in heads])
    rows = range(0, len(layers), max(1, len(layers) // 16))
    axis.set_yticks([row + 0.5 for row in rows], [str(layers[row]) for row in rows])
    axis.invert_yaxis()
    axis.set(xlabel="query head", ylabel="layer")


def steps(title: str, variants: Mapping[str, Findings], num_prompt_tokens: int, interval: int) -> "Figure":
    """Step by step, mean over documents and heads, one colour per layer: error, and the shares of attention."""
    figure = _figure(10, 3.6)
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    for (name, found), style in zip(variants.items(), ("-", "--"), strict=False):
        at = num_prompt_tokens + np.arange(found.mean("error").shape[-1])
        colours = _colours(len(found.layers))
        for row, (layer, colour) in enumerate(zip(found.layers, colours, strict=True)):
            left.plot(at, found.mean("layer_error")[row], style, color=colour, label=f"layer {layer}, {name}")
            right.plot(at, found.mean("kept")[row].mean(0), style, color=colour)
            if found.has_merged(PROMPT_END) or found.has_merged(END):
                right.plot(at, found.mean("represented")[row].mean(0), ":", color=colour)
    for axis in (left, right):
        for start in range(0, len(at), interval):  # where the cache was compressed
            axis.axvline(at[start] - 0.5, color="0.85", linewidth=0.8, zorder=0)
    left.set(xlabel="position of the query", ylabel="||o' - o|| / ||o||", ylim=(0, None), title="error, all heads")
    right.set(xlabel="position of the query", ylim=(0, 1.02), title="attention kept; dotted: represented")
    if len(next(iter(variants.values())).layers) <= 6:
        left.legend(fontsize="x-small")
    return figure


def votes(title: str, found: Findings) -> "Figure":
    """Histograms, layer by layer, of log votes and of the number of tokens that an entry consists of."""
    moments = list(found.log_votes)
    figure = _figure(5 * len(moments), 5.6)
    figure.suptitle(title)
    axes = figure.subplots(2, len(moments), squeeze=False)
    colours = _colours(len(found.layers))
    for column, moment in enumerate(moments):
        edges, counts = found.vote_histogram(moment)
        for (layer, row), colour in zip(counts.items(), colours, strict=True):
            axes[0, column].stairs(row, edges, color=colour, label=f"layer {layer}")
        axes[0, column].set(xlabel="log votes", ylabel="entries", yscale="symlog", title=moment)
        for (layer, tally), colour in zip(found.tokens_of_each[moment].items(), colours, strict=True):
            # The share of entries that consist of at least that many tokens.
            sizes = np.array(sorted(tally))
            numbers = np.array([tally[size] for size in sizes.tolist()])
            above = numbers[::-1].cumsum()[::-1] / numbers.sum()
            axes[1, column].step(sizes, above, where="post", marker=".", color=colour, label=f"layer {layer}")
        axes[1, column].set(xlabel="tokens in an entry", ylabel="share as large or larger", xscale="log", yscale="log")
    if len(found.layers) <= 8:
        axes[0, 0].legend(fontsize="x-small")
    return figure


def merge_maps(title: str, found: Findings, moment: str) -> "Figure":
    """For each layer and KV head: which token's value went into which entry (GRKV figure 1).

    Black bars below mark the tokens whose own entries stay. Colour: cosine similarity of the two tokens' keys; the
    weight where targets are nobody's own entry; signed weights where tokens are spread over many targets.
    """
    by_layer = found.maps[moment]
    layers = _spread(list(by_layer), MAX_MAP_LAYERS)
    heads = _spread(list(range(len(by_layer[layers[0]]))), MAX_MAP_HEADS)
    shown = [[by_layer[layer][head] for head in heads] for layer in layers]
    every = [one for row in shown for one in row]
    is_dense = any(one.is_dense for one in every)
    has_cosine = all(np.isfinite(one.similarity[one.weights != 0]).all() for one in every)
    figure = _figure(3.2 * len(heads) + 0.9, 3.0 * len(layers) + 0.5)
    figure.suptitle(title)
    axes = figure.subplots(len(layers), len(heads), squeeze=False, sharex=True, sharey=True)
    weights = np.concatenate([np.abs(one.weights).ravel() for one in every])
    # Of many weights the largest are few.
    limit = float(np.quantile(weights, 0.99)) if is_dense else 1.0
    colours = np.concatenate([_pair_colours(one, has_cosine) for one in every])
    low = min(0.5, np.floor(10 * colours.min(initial=1.0)) / 10) if has_cosine else 0.0
    image = None
    for row, layer in enumerate(layers):
        for column, head in enumerate(heads):
            axis, one = axes[row, column], shown[row][column]
            if one.tokens.size:
                image = _draw_dense(axis, one, limit) if is_dense else _draw_pairs(axis, one, has_cosine, low)
            axis.hlines(*_spans(one.retained), color="black", linewidth=5, transform=axis.get_xaxis_transform())
            axis.set_title(f"layer {layer}, KV head {head}", fontsize="small")
            if row == len(layers) - 1:
                axis.set_xlabel("position of the carrier")
            if column == 0:
                axis.set_ylabel("position of the token")
    label = "cosine similarity of keys" if has_cosine and not is_dense else "weight in the carrier's value"
    if image is not None:
        figure.colorbar(image, ax=axes, label=label, shrink=0.8)
    return figure


def _spans(positions: Array) -> tuple[list[float], list[float], list[float]]:
    """Height, first and last end of a bar for each run of neighbours among ``positions``, which ascend."""
    runs = np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)
    return [0.0] * len(runs), [run[0] - 0.5 for run in runs], [run[-1] + 0.5 for run in runs]


def _pair_colours(one: MergeMap, has_cosine: bool) -> Array:
    return (one.similarity if has_cosine else one.weights)[one.weights != 0]


def _draw_pairs(axis: "Axes", one: MergeMap, has_cosine: bool, low: float):  # type: ignore[no-untyped-def]
    row, column = np.nonzero(one.weights)
    colours = _pair_colours(one, has_cosine)
    return axis.scatter(
        one.targets[column], one.tokens[row], c=colours, s=5, cmap="viridis", vmin=low, vmax=1.0, rasterized=True
    )


def _draw_dense(axis: "Axes", one: MergeMap, limit: float):  # type: ignore[no-untyped-def]
    size = 1 + int(max(one.tokens.max(), one.targets.max(), one.retained.max()))
    image = np.full((size, size), np.nan, dtype=np.float32)
    image[one.tokens[:, None], one.targets] = one.weights
    extent = (-0.5, size - 0.5, -0.5, size - 0.5)
    return axis.imshow(
        image,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        origin="lower",
        extent=extent,
        aspect="auto",
        interpolation="nearest",
    )


def policies_by_step(title: str, findings: Mapping[str, Findings]) -> "Figure":
    """Error step by step, mean over documents and layers, a line per policy."""
    figure = _figure(8, 4 + 0.06 * len(findings))
    axis = figure.subplots()
    for (name, found), colour in zip(findings.items(), _colours(len(findings)), strict=True):
        axis.plot(found.mean("layer_error").mean(0), color=colour, label=name)
    axis.set(xlabel="decoding step", ylabel="||o' - o|| / ||o||", ylim=(0, None), title=title)
    axis.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def error_by_mass(title: str, findings: Mapping[str, Findings]) -> "Figure":
    """Error against the share of attention kept, a point per policy; a line leads to what is represented."""
    figure = _figure(7, 5)
    axis = figure.subplots()
    for (name, found), colour in zip(findings.items(), _colours(len(findings)), strict=True):
        summary = found.summary
        xs, y = (summary["kept"], summary["represented"]), summary["layer_error"]
        axis.plot(xs, (y, y), color=colour, linewidth=1)
        axis.plot(xs[0], y, "o", color=colour)
        axis.annotate(name, (xs[0], y), xytext=(3, 3), textcoords="offset points", fontsize="x-small")
    axis.set(xlabel="attention kept; line: up to what is represented", ylabel="||o' - o|| / ||o||", title=title)
    axis.set_ylim(0, 1.1 * max(found.summary["layer_error"] for found in findings.values()) + 1e-9)
    return figure


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(min(width, 40), min(height, 40)), layout="constrained")


def _colours(count: int):  # type: ignore[no-untyped-def]
    import matplotlib

    if count <= 10:
        return matplotlib.colormaps["tab10"].colors[:count]  # type: ignore[attr-defined]
    return matplotlib.colormaps["turbo"](np.linspace(0.05, 0.95, count))


def _spread(items: list[int], count: int) -> list[int]:
    """``count`` of the items, evenly spread from first to last."""
    if len(items) <= count:
        return items
    return [items[index] for index in np.linspace(0, len(items) - 1, count).round().astype(int)]
