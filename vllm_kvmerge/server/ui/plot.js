// A plot of lines over time, as SVG.

import { formatNumber } from "./measure.js";
import { element, svg } from "./dom.js";

const MARGIN = { left: 62, right: 10, top: 14, bottom: 24 };
const NUM_TICKS = 4;

export class Plot {
  /**
   * figure: where it goes, with an element of class "readout". label: what is plotted. format: a value as text.
   * steps: whether values hold until the next one. base: ticks are multiples of powers of it (10, or 1024 for bytes).
   */
  constructor(figure, { label, format, steps = false, base = 10 }) {
    Object.assign(this, { label, format, steps, base, lines: [], end: 0, cursor: null });
    this.svg = svg("svg", { class: "plot", role: "img", "aria-label": label });
    this.readout = figure.querySelector(".readout");
    this.legend = figure.querySelector(".legend");
    figure.append(this.svg);
    this.svg.addEventListener("pointermove", (event) => {
      this.cursor = event.clientX - this.svg.getBoundingClientRect().left;
      this.draw();
    });
    this.svg.addEventListener("pointerleave", () => {
      this.cursor = null;
      this.draw();
    });
    new ResizeObserver(() => this.draw()).observe(this.svg);
  }

  /**
   * lines: {name, side ("a" or "b"), points: [[seconds, value]], markers: [{seconds, from, to, title}]}.
   * end: of the time axis, in seconds.
   */
  show(lines, end) {
    Object.assign(this, { lines, end });
    this.legend.replaceChildren(...lines.map(({ name, side }) => element("span", { class: side }, [name])));
    this.draw();
  }

  draw() {
    const { width, height } = this.svg.getBoundingClientRect();
    if (!width) return;
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const drawn = this.lines.filter(({ points }) => points.length);
    const xEnd = Math.max(0.1, this.end);
    const xTick = tickSize(xEnd, 10);
    const yTop = Math.max(0, ...drawn.flatMap(({ points }) => points.map(([, value]) => value)));
    const yTick = tickSize(yTop || 1, this.base);
    const yEnd = Math.max(yTick, Math.ceil(yTop / yTick) * yTick);
    const x = (seconds) => MARGIN.left + (seconds / xEnd) * (right - MARGIN.left);
    const y = (value) => bottom - (value / yEnd) * (bottom - MARGIN.top);

    const axes = [];
    for (let value = 0; value <= yEnd + yTick / 2; value += yTick) {
      axes.push(svg("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(value), y2: y(value) }));
      if (yTop) axes.push(text(MARGIN.left - 6, y(value) + 4, this.format(value), "end"));
    }
    for (let seconds = 0; drawn.length && seconds <= xEnd + 1e-9; seconds += xTick) {
      axes.push(text(x(seconds), bottom + 16, `${formatNumber(seconds)} s`, seconds ? "middle" : "start"));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren(...axes, ...drawn.flatMap((line) => this.drawLine(line, x, y)));
    this.svg.setAttribute("aria-label", this.describe(drawn));
    this.showCursor(drawn, x, (right - MARGIN.left) / xEnd, bottom);
  }

  drawLine({ side, points, markers = [] }, x, y) {
    const [first, ...others] = points;
    let path = `M${x(first[0])} ${y(first[1])}`;
    for (const [seconds, value] of others) path += this.steps ? `H${x(seconds)}V${y(value)}` : `L${x(seconds)} ${y(value)}`;
    const shapes = markers.map(({ seconds, from, to, title }) =>
      svg("g", { class: side }, [
        svg("title", {}, [title]),
        svg("line", { class: "fall", x1: x(seconds), x2: x(seconds), y1: y(from), y2: y(to) }),
        svg("path", { class: "marker", d: `M${x(seconds)} ${y(to)}l-5 -8h10z` }),
      ]));
    return [svg("path", { class: `line ${side}`, d: path }), ...shapes];
  }

  /** The line under the pointer, and the values there as text. */
  showCursor(drawn, x, scale, bottom) {
    const seconds = this.cursor === null ? null : (this.cursor - MARGIN.left) / scale;
    if (seconds === null || seconds < 0 || !drawn.length) {
      this.readout.textContent = "";
      return;
    }
    const values = drawn.map(({ name, points }) => {
      const point = points.findLast(([time]) => time <= seconds);
      return `${name} ${point ? this.format(point[1]) : "–"}`;
    });
    this.readout.textContent = `${seconds.toFixed(2)} s: ${values.join(", ")}`;
    this.svg.append(svg("line", { class: "cursor", x1: x(seconds), x2: x(seconds), y1: MARGIN.top, y2: bottom }));
  }

  describe(drawn) {
    const ends = drawn.map(({ name, points }) => `${name} ${this.format(points.at(-1)[1])}`);
    return [this.label, ...ends].join("; ");
  }
}

function text(x, y, content, anchor) {
  return svg("text", { x, y, "text-anchor": anchor }, [content]);
}

/** 1, 2 or 5 times a power of ten (of two, for bytes), so that about NUM_TICKS of them reach the top. */
function tickSize(top, base) {
  const rough = top / NUM_TICKS;
  if (base === 1024) return 2 ** Math.ceil(Math.log2(rough));
  const power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
}
