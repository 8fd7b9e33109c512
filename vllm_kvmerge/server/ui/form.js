// The form of a policy, made from what GET /kvmerge/policies says.

import { Share } from "./json.js";
import { element } from "./dom.js";

export const FULL = "full";
const HANDLED = ["policy", "budget", "context_tokens", "refresh", "verify"];
const DEFAULT_BUDGETS = { share: 20, entries: 256 };

export class PolicyForm {
  /**
   * form: the element. catalogue: the answer of GET /kvmerge/policies. onChange: called after every change.
   */
  constructor(form, catalogue, policy, onChange) {
    this.form = form;
    this.catalogue = catalogue;
    this.onChange = onChange;
    const { elements } = form;
    elements.policy.append(...catalogue.presets.map(({ name }) => new Option(name, name, false, name === policy)));
    elements.policy.addEventListener("change", () => this.showPolicy());
    elements.unit.addEventListener("change", () => {
      elements.budget.value = DEFAULT_BUDGETS[elements.unit.value];
    });
    form.addEventListener("input", () => this.changed());
    form.addEventListener("change", () => this.changed());
    form.addEventListener("submit", (event) => event.preventDefault());
    this.showPolicy();
    this.changed();
  }

  get preset() {
    return this.catalogue.presets.find(({ name }) => name === this.form.elements.policy.value);
  }

  /** What to send as kv_compression: what differs from the policy's own values, as it was typed. */
  value() {
    const { policy, budget, unit, context_tokens: context, refresh } = this.form.elements;
    if (policy.value === FULL) return { policy: FULL };
    const value = { policy: policy.value };
    if (budget.value !== "") {
      value.budget = unit.value === "share" ? new Share(Number(budget.value) / 100) : Number(budget.value);
    }
    if (context && context.value !== "") value.context_tokens = Number(context.value);
    if (refresh && refresh.value !== "") value.refresh = { every: Number(refresh.value) };
    return { ...value, ...this.overrides() };
  }

  /** "keepkv 20%": short enough for a legend. */
  label() {
    const { policy, budget, unit } = this.form.elements;
    if (policy.value === FULL || budget.value === "") return policy.value;
    return `${policy.value} ${budget.value}${unit.value === "share" ? "%" : " entries"}`;
  }

  overrides() {
    const entries = this.widgets.map((widget) => [widget.name, widget.read(), widget.default]);
    return Object.fromEntries(
      entries
        .filter(([, value, own]) => value !== undefined && JSON.stringify(value) !== JSON.stringify(own))
        .map(([name, value]) => [name, value]),
    );
  }

  changed() {
    const changed = Object.entries(this.overrides()).map(([name, value]) => `${name} = ${JSON.stringify(value)}`);
    this.form.querySelector(".changed").textContent = changed.join(", ");
    this.onChange();
  }

  /** Builds the form of another policy. */
  showPolicy() {
    const { preset } = this;
    this.form.querySelector(".source").textContent = preset.source;
    for (const part of this.form.querySelectorAll(".tunable")) part.hidden = preset.name === FULL;
    this.chosen = { ...preset.parts };
    this.showFields();
  }

  /** The fields of this policy with the parts that are chosen now; values that still fit are kept. */
  showFields() {
    const kept = new Map((this.widgets ?? []).map((widget) => [widget.name, widget]));
    const samePolicy = this.shownPolicy === this.preset.name;
    this.shownPolicy = this.preset.name;
    this.widgets = this.fields().map((field) => {
      const former = kept.get(field.name);
      return samePolicy && former?.default === field.default ? former : makeWidget(field);
    });
    for (const widget of this.widgets.filter(({ name }) => name in this.chosen)) {
      widget.input.onchange = () => {
        this.chosen[widget.name] = widget.input.value;
        this.showFields();
        this.widgets.find(({ name }) => name === widget.name).input.focus();
      };
    }
    this.form.querySelector(".fields").replaceChildren(...this.widgets.map(({ root }) => root));
  }

  /** {name, schema, default, description} of each field: those of all policies, then those of the chosen parts. */
  fields() {
    const { preset, catalogue } = this;
    if (preset.name === FULL) return [];
    const { schema } = catalogue;
    const definition = schema.$defs[schema.discriminator.mapping[preset.name].split("/").pop()];
    const partFields = new Set();
    const chosenFields = Object.entries(this.chosen).flatMap(([kind, name]) => {
      for (const { fields } of catalogue.parts[kind]) for (const field of fields) partFields.add(field.name);
      return catalogue.parts[kind].find((part) => part.name === name).fields;
    });
    const common = Object.entries(definition.properties)
      .filter(([name]) => !HANDLED.includes(name) && !partFields.has(name))
      .map(([name, property]) => ({ name, schema: property, default: property.default, description: property.description }));
    return [...common, ...chosenFields.map((field) => ({ ...field, default: this.defaultOf(field) }))];
  }

  /** A field's default under this policy: the policy's where it has one of its own, else that of the part. */
  defaultOf(field) {
    const { preset, catalogue } = this;
    const ownFields = Object.entries(preset.parts).flatMap(([kind, name]) =>
      catalogue.parts[kind].find((part) => part.name === name).fields);
    const own = ownFields.find(({ name }) => name === field.name);
    return own && preset.defaults[field.name] !== own.default ? preset.defaults[field.name] : field.default;
  }
}

let numHints = 0;

/** {name, default, root, input, read()}; read gives undefined where nothing was said. */
function makeWidget(field) {
  const choices = (field.schema.anyOf ?? [field.schema]).filter(({ type }) => type !== "null");
  const [only] = choices;
  const title = `${field.description}${field.type ? ` (${field.type})` : ""}`;
  const widget = { name: field.name, default: field.default };
  const summary = field.description.split(/(?<=\.) /)[0];
  const hint = element("small", { id: `hint-${numHints++}` }, [summary]);
  if (choices.length === 1 && only.enum) {
    widget.input = element("select", {}, only.enum.map((value) => new Option(value, value, false, value === field.default)));
    widget.read = () => widget.input.value;
  } else if (choices.length === 1 && only.type === "boolean") {
    widget.input = element("select", {}, ["true", "false"].map((value) => new Option(value, value, false, value === String(field.default))));
    widget.read = () => widget.input.value === "true";
  } else {
    const isNumber = choices.length === 1 && ["integer", "number"].includes(only.type);
    const example = field.schema.examples?.[0];
    const placeholder = example === undefined ? "default" : JSON.stringify(example);
    widget.input = element("input", { type: isNumber ? "number" : "text", placeholder });
    if (isNumber) widget.input.step = "any";
    widget.input.value = typeof field.default === "object" && field.default ? JSON.stringify(field.default) : field.default ?? "";
    widget.read = () => readText(widget.input.value, choices).value;
    widget.input.addEventListener("input", () => {
      const { error } = readText(widget.input.value, choices);
      widget.input.setAttribute("aria-invalid", error !== undefined);
      hint.textContent = error ?? summary;
    });
  }
  widget.input.name = field.name;
  widget.input.setAttribute("aria-describedby", hint.id);
  widget.root = element("div", { title }, [
    element("label", {}, [element("span", {}, [field.name]), widget.input]), hint,
  ]);
  return widget;
}

/**
 * {value, error} of what was typed into a field that takes one of these schemas; no value where nothing was said.
 *
 * Lists and objects are typed as JSON, and so may be texts; other text stands for itself where a field takes text.
 * Numbers become numbers. What is none of that is sent as it is: the server says what is wrong with it.
 */
export function readText(text, choices) {
  const value = text.trim();
  const takes = (...types) => choices.some(({ type, $ref }) => types.includes($ref ? "object" : type));
  if (value === "") return {};
  if (!takes("array", "object")) return { value: Number.isNaN(Number(value)) ? value : Number(value) };
  try {
    const parsed = JSON.parse(value);
    if (["object", "string"].includes(typeof parsed)) return { value: parsed };
  } catch {
    // Text, or a mistake.
  }
  return takes("string") ? { value } : { value, error: "This is not a JSON list or object." };
}
