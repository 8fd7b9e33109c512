// The page: one prompt, two policies, two answers side by side; and the contexts that the server keeps.

import { ServerError, address, getJson, stream } from "./api.js";
import { Contexts } from "./contexts.js";
import { element } from "./dom.js";
import { FULL, PolicyForm } from "./form.js";
import { asCurl, toJson } from "./json.js";
import { Measurement, formatBytes, formatNumber, formatSeconds, formatVerified } from "./measure.js";
import { Plot } from "./plot.js";

const SIDES = [{ side: "a", letter: "A", policy: "full" }, { side: "b", letter: "B" }];
const ROUTES = { chat: "v1/chat/completions", completion: "v1/completions" };
const DEMO_MAX_TOKENS = 300;
const CHAT_MAX_TOKENS = 60;
const VIEWS = ["compare", "contexts"];

let rightAnswer = ""; // to the example prompt, while it is in its field

const byId = (id) => document.getElementById(id);
const request = byId("request");
const fields = request.elements;

/** One column: its form, its answer, what is measured of it. */
class Side {
  constructor({ side, letter, policy }, catalogue) {
    this.side = side;
    this.letter = letter;
    this.root = byId("side").content.cloneNode(true).firstElementChild;
    this.root.classList.add(side);
    this.root.setAttribute("aria-label", `Policy ${letter}`);
    this.answer = this.find(".answer");
    this.answer.setAttribute("aria-label", `Answer ${letter}`);
    this.find(".letter").textContent = letter;
    this.measurement = new Measurement();
    this.label = this.rightAnswer = "";
    this.form = new PolicyForm(this.find("form"), catalogue, policy, () => {
      this.find(".title").textContent = this.form?.label() ?? policy;
      this.showCurl();
    });
    this.find(".curl").addEventListener("toggle", () => this.showCurl());
    this.find(".title").textContent = this.form.label();
    this.showFigures();
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  body() {
    const content = fields.kind.value === "chat"
      ? { messages: [{ role: "user", content: fields.prompt.value }] }
      : { prompt: fields.prompt.value };
    const { max_tokens: maxTokens, temperature } = fields;
    const compression = this.form.value();
    if (fields.verify.checked && compression.policy !== FULL) compression.verify = true;
    return {
      model: fields.model.value,
      ...content,
      ...(maxTokens.value === "" ? {} : { max_tokens: Number(maxTokens.value) }),
      ...(temperature.value === "" ? {} : { temperature: Number(temperature.value) }),
      ...(fields.ignore_eos.checked ? { ignore_eos: true } : {}),
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true },
      kv_compression: compression,
      vllm_xargs: { kvmerge_usage: "stream" },
    };
  }

  showCurl() {
    const details = this.find(".curl");
    if (!details.open) return;
    const url = address(ROUTES[fields.kind.value]);
    details.querySelector("pre").textContent = asCurl(url, toJson(this.body(), 1), fields.key.value !== "");
  }

  /** Sends the request and follows its answer to the end; never throws. */
  async run(signal, onProgress) {
    this.measurement = new Measurement();
    this.label = `${this.letter} ${this.form.label()}`;
    this.rightAnswer = rightAnswer;
    this.answer.textContent = "";
    this.showError("");
    this.showState("running");
    this.showFigures();
    this.start = performance.now();
    try {
      for await (const chunk of stream(ROUTES[fields.kind.value], toJson(this.body()), fields.key.value, signal)) {
        this.measurement.note(chunk, this.elapsed);
        this.append(chunk.choices[0]);
        onProgress();
      }
      this.showState("done");
    } catch (error) {
      if (signal.aborted) {
        this.showState("stopped");
      } else {
        this.showError(error.message);
        this.showState(error instanceof ServerError ? `refused, HTTP ${error.status}` : "failed");
        if (error.status === 401) askForKey();
      }
    }
    onProgress();
  }

  append(choice) {
    const { answer } = this;
    const follows = answer.scrollHeight - answer.scrollTop - answer.clientHeight < 40;
    answer.append(choice?.text ?? choice?.delta?.content ?? "");
    if (follows) answer.scrollTop = answer.scrollHeight;
  }

  /** Whether the answer holds the example prompt's right one, or in a completion begins with it; "" where that is not known. */
  showVerdict(right) {
    const text = this.answer.textContent.trim();
    const isOver = fields.kind.value === "completion" ? text.length >= right.length : this.root.dataset.state === "done";
    const isRight = fields.kind.value === "completion" ? text.startsWith(right) : text.includes(right);
    const given = isRight ? right : text.slice(0, right.length);
    this.find(".verdict").textContent = !right || !(isRight || isOver) ? "" : `${isRight ? "✓" : "✗"} ${given}`;
  }

  get elapsed() {
    return (performance.now() - this.start) / 1000;
  }

  showState(text) {
    this.root.dataset.state = text;
    this.find(".state").textContent = text;
  }

  showError(message) {
    const place = this.find(".error");
    place.textContent = message;
    place.hidden = !message;
  }

  showFigures() {
    const { measurement } = this;
    const last = measurement.steps.at(-1);
    const figures = [
      ["KV cache", last && formatBytes(last.bytes)],
      ["peak", measurement.peakBytes && formatBytes(measurement.peakBytes)],
      ["entries / head", last && formatNumber(last.entries)],
      ["of tokens", last && formatNumber(last.tokens)],
      ["first token", measurement.firstToken && formatSeconds(measurement.firstToken)],
      ["tokens / s", measurement.meanRate && formatNumber(measurement.meanRate)],
    ];
    if (measurement.report?.external_bytes) {
      figures.push(["complete cache", formatBytes(measurement.report.external_bytes)], ["refreshes", `${measurement.report.refreshes}`]);
    }
    if (measurement.verified) figures.push(["verified", formatVerified(measurement.verified)]);
    this.find(".figures").replaceChildren(...figures.map(([name, value]) =>
      element("div", {}, [element("dt", {}, [name]), element("dd", { "data-figure": name }, [value || "–"])])));
    this.showEvents(measurement.compressions);
  }

  showEvents(events) {
    this.find(".events summary").textContent = `Compressions: ${events.length}`;
    // All of them again: the clocks' difference is known the better the longer the stream goes on.
    this.find(".events ol").replaceChildren(...events.map((event) => element("li", {}, [describe(event)])));
  }
}

const describe = ({ end, tokens, entries, bytes, before, refresh }) =>
  `${formatSeconds(end)}, ${formatNumber(tokens)} tokens${refresh ? ", refresh" : ""}: ${formatNumber(before.entries)} → ${formatNumber(entries)} ` +
  `entries, ${formatBytes(before.bytes)} → ${formatBytes(bytes)}`;

function bytesLine({ side, label, measurement }) {
  const markers = measurement.compressions.map((event) => ({
    seconds: event.end, from: event.before.bytes, to: event.bytes, title: `${label}, ${describe(event)}`,
  }));
  return { side, name: label, points: measurement.bytesLine, markers };
}

const rateLine = ({ side, label, measurement }) => ({ side, name: label, points: measurement.rates });

function summarise(sides) {
  if (!sides.every(({ measurement }) => measurement.report?.mean_bytes)) return "";
  const means = sides.map(({ measurement }) => measurement.report.mean_bytes);
  const texts = sides.map(({ label }, index) => `${label}: ${formatBytes(means[index])}`);
  return `Mean KV cache after the prompt: ${texts.join(", ")} (${formatNumber((100 * means[1]) / means[0])}%)`;
}

function askForKey() {
  byId("key-field").hidden = false;
  fields.key.focus();
}

function showPageError(error) {
  byId("page-error").textContent = error?.message ?? "";
  byId("page-error").hidden = !error;
}

/** The models that can be asked; those of a server with a key are known once it has been typed. */
async function loadModels() {
  try {
    const { data } = await getJson("v1/models", fields.key.value);
    fields.model.replaceChildren(...data.map(({ id }) => new Option(id)));
    showPageError(null);
  } catch (error) {
    if (error.status === 401) askForKey();
    showPageError(error);
  }
  byId("run").disabled = !fields.model.value;
}

/** Shows one of the views, and hides the others. */
function showView(name) {
  for (const view of VIEWS) {
    byId(view).hidden = view !== name;
    byId(`${view}-tab`).setAttribute("aria-selected", view === name);
  }
}

async function insertExample() {
  const { kind, prompt, answer } = await getJson("kvmerge/ui/example");
  fields.prompt.value = prompt;
  fields.prompt.scrollTop = fields.prompt.scrollHeight; // the question is at the end
  const isDemo = kind === "completion"; // whose answer comes first; the model goes on by itself
  fields.kind.value = kind;
  fields.max_tokens.value = isDemo ? DEMO_MAX_TOKENS : CHAT_MAX_TOKENS;
  fields.ignore_eos.checked = isDemo;
  showRightAnswer(answer, isDemo);
}

function showRightAnswer(answer, isDemo) {
  rightAnswer = answer;
  const after = isDemo ? " After that the model goes on by itself." : "";
  byId("expected").textContent = `The prompt's last words ask for one of its facts: ${answer}.${after}`;
  byId("expected").hidden = !answer;
}

async function start() {
  const [config, catalogue] = await Promise.all([getJson("kvmerge/ui/config"), getJson("kvmerge/policies")]);
  byId("server").textContent = `version ${config.version}${config.demo ? ", demo model" : ""}`;
  if (config.demo) fields.kind.value = "completion";
  const sides = SIDES.map((side) => new Side({ policy: catalogue.recommended.known, ...side }, catalogue));
  byId("sides").append(...sides.map(({ root }) => root));
  const policyForm = byId("side").content.querySelector("form").cloneNode(true);
  const contexts = new Contexts(byId("contexts"), policyForm, catalogue, fields);
  byId("compare-tab").addEventListener("click", () => showView("compare"));
  byId("contexts-tab").addEventListener("click", () => {
    showView("contexts");
    contexts.attempt(() => contexts.load());
  });
  const bytes = new Plot(byId("bytes-plot"), { label: "KV cache", format: formatBytes, steps: true, base: 1024 });
  const rates = new Plot(byId("rate-plot"), { label: "Tokens per second", format: formatNumber });

  let frame = 0;
  const draw = () => {
    frame = 0;
    for (const side of sides) {
      side.showFigures();
      side.showVerdict(side.rightAnswer);
    }
    const lines = [sides.map(bytesLine), sides.map(rateLine)];
    const end = Math.max(0, ...lines.flat().map(({ points }) => points.at(-1)?.[0] ?? 0));
    bytes.show(lines[0], end);
    rates.show(lines[1], end);
  };
  const drawSoon = () => {
    frame ||= requestAnimationFrame(draw);
  };

  let running = null;
  const run = async () => {
    if (running || byId("run").disabled || byId("compare").hidden) return;
    running = new AbortController();
    byId("run").disabled = true;
    byId("stop").disabled = false;
    byId("summary").textContent = "";
    await Promise.all(sides.map((side) => side.run(running.signal, drawSoon)));
    draw();
    byId("summary").textContent = summarise(sides);
    byId("run").disabled = false;
    byId("stop").disabled = true;
    running = null;
  };
  const stop = () => running?.abort();

  request.addEventListener("submit", (event) => {
    event.preventDefault();
    run();
  });
  request.addEventListener("input", () => {
    for (const side of sides) side.showCurl();
  });
  fields.prompt.addEventListener("input", () => showRightAnswer(""));
  fields.key.addEventListener("change", loadModels);
  byId("stop").addEventListener("click", stop);
  byId("example").addEventListener("click", () => insertExample().catch(showPageError));
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") stop();
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      run();
    }
  });
  await loadModels();
}

start().catch(showPageError);
