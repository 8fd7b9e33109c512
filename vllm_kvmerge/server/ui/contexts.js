// The tab of the contexts that the server keeps: the form that creates one, the list, and questions to one of them.

import { getJson, send, stream } from "./api.js";
import { element } from "./dom.js";
import { PolicyForm } from "./form.js";
import { toJson } from "./json.js";
import { formatBytes, formatNumber } from "./measure.js";

const ROUTE = "v1/kvmerge/contexts";

export class Contexts {
  /**
   * root: the tab. policyForm: a form as PolicyForm takes it. catalogue: the answer of GET /kvmerge/policies.
   * fields: those of the whole page, with the API key.
   */
  constructor(root, policyForm, catalogue, fields) {
    this.root = root;
    this.fields = fields;
    this.asked = null; // the context that a question goes to
    this.creation = this.find("form.creation");
    this.question = this.find("form.question");
    // A context is all there is to it, and its complete cache is gone with the request that creates it.
    for (const name of ["context_tokens", "refresh"]) policyForm.elements[name].closest("label").remove();
    this.find(".place-of-policy").replaceWith(policyForm);
    this.policy = new PolicyForm(policyForm, catalogue, catalogue.recommended.later, () => {});
    this.creation.addEventListener("submit", (event) => this.submitted(event, () => this.create()));
    this.question.addEventListener("submit", (event) => this.submitted(event, () => this.ask()));
    this.find(".reload").addEventListener("click", () => this.attempt(() => this.load()));
  }

  find(selector) {
    return this.root.querySelector(selector);
  }

  get key() {
    return this.fields.key.value;
  }

  submitted(event, action) {
    event.preventDefault();
    return this.attempt(action);
  }

  /** Runs an action with all buttons out of reach, and shows why it failed. */
  async attempt(action) {
    const buttons = [...this.root.querySelectorAll("button:enabled")];
    for (const button of buttons) button.disabled = true;
    this.showError("");
    try {
      await action();
    } catch (error) {
      this.showError(error.message);
    }
    for (const button of buttons) button.disabled = false;
    this.showAsked(this.asked);
  }

  showError(message) {
    this.find(".error").textContent = message;
    this.find(".error").hidden = !message;
  }

  async create() {
    const { text, ttl } = this.creation.elements;
    const body = {
      model: this.fields.model.value,
      prompt: text.value,
      kv_compression: this.policy.value(),
      ...(ttl.value === "" ? {} : { ttl: Number(ttl.value) }),
    };
    const created = await send("POST", ROUTE, this.key, toJson(body));
    await this.load();
    this.showAsked(created);
  }

  async load() {
    const { data } = await getJson(ROUTE, this.key);
    this.find("tbody").replaceChildren(...data.map((one) => this.row(one)));
    this.find(".none").hidden = data.length > 0;
    this.showAsked(data.find(({ id }) => id === this.asked?.id) ?? null);
  }

  row(context) {
    const ask = element("button", { type: "button" }, ["Ask"]);
    ask.addEventListener("click", () => {
      this.showAsked(context);
      this.question.elements.question.focus();
    });
    const remove = element("button", { type: "button" }, ["Delete"]);
    remove.addEventListener("click", () => this.attempt(async () => {
      await send("DELETE", `${ROUTE}/${encodeURIComponent(context.id)}`, this.key);
      await this.load();
    }));
    const expiry = context.expires_at === null ? "never" : new Date(context.expires_at * 1000).toLocaleString();
    const cells = [
      context.id, context.model, context.messages === null ? "prompt" : `${context.messages} messages`,
      formatNumber(context.tokens), formatNumber(context.entries), formatBytes(context.bytes), expiry,
      context.saved ? "yes" : "no",
    ].map((text) => element("td", {}, [text]));
    return element("tr", { "data-id": context.id }, [...cells, element("td", { class: "actions" }, [ask, remove])]);
  }

  showAsked(context) {
    this.asked = context;
    this.find(".asked").textContent = context?.id ?? "choose one above";
    this.find(".ask").disabled = context === null;
  }

  async ask() {
    const { question, max_tokens: maxTokens } = this.question.elements;
    const { id, model, messages } = this.asked;
    const isPrompt = messages === null;
    const body = {
      model,
      ...(isPrompt ? { prompt: question.value } : { messages: [{ role: "user", content: question.value }] }),
      max_tokens: Number(maxTokens.value),
      temperature: 0,
      stream: true,
      kv_compression: { context: id },
    };
    const answer = this.find(".answer");
    answer.textContent = "";
    const route = isPrompt ? "v1/completions" : "v1/chat/completions";
    for await (const { choices: [choice] } of stream(route, toJson(body), this.key)) {
      answer.append(choice?.text ?? choice?.delta?.content ?? "");
    }
  }
}
