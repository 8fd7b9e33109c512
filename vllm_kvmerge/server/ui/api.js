// The server's routes, as this page uses them. The page is at ROOT/kvmerge/ui.

const ROOT = new URL("..", document.baseURI);

/** An answer other than 2xx, or an error event in a stream. The message is the server's own. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Absolute address of a route, such as "v1/models". */
export const address = (route) => new URL(route, ROOT).href;

export async function getJson(route, key = "") {
  const response = await fetch(address(route), { headers: authorization(key) });
  await check(response);
  return response.json();
}

/** The answer to a request with a body that is JSON text, or with none. */
export async function send(method, route, key, body) {
  const headers = { ...(body === undefined ? {} : { "Content-Type": "application/json" }), ...authorization(key) };
  const response = await fetch(address(route), { method, headers, body });
  await check(response);
  return response.json();
}

/** Posts a JSON text and yields the objects of the answer's events until the server says [DONE]. */
export async function* stream(route, body, key, signal) {
  const headers = { "Content-Type": "application/json", ...authorization(key) };
  const response = await fetch(address(route), { method: "POST", headers, body, signal });
  await check(response);
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(errorText(chunk), response.status);
    yield chunk;
  }
}

function authorization(key) {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

async function check(response) {
  if (response.ok) return;
  const text = await response.text();
  let message = text || response.statusText;
  try {
    message = errorText(JSON.parse(text)) ?? text;
  } catch { /* not JSON: shown as it is */ }
  throw new ServerError(message, response.status);
}

/** OpenAI's form of an error, vLLM's of a missing key, FastAPI's of anything else. */
function errorText(answer) {
  return answer.error?.message ?? (typeof answer.error === "string" ? answer.error : answer.detail);
}

/** The data of each server-sent event. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const lines = block.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
