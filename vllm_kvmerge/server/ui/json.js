// JSON text of a request's body.

/** A number that must be written with a point: a budget of 1.0 is all of the prompt, one of 1 is a single entry. */
export class Share {
  constructor(value) {
    this.value = value;
  }

  get text() {
    return Number.isInteger(this.value) ? this.value.toFixed(1) : String(this.value);
  }
}

const MARK = "\u0000share:";

/** As JSON.stringify, with every Share as a number. */
export function toJson(value, indent) {
  const marked = JSON.stringify(value, (_, part) => (part instanceof Share ? MARK + part.text : part), indent);
  // Nobody types a NUL, so no text of the user's is taken for a share.
  return marked.replace(/"\\u0000share:([^"\\]*)"/g, "$1");
}

/** A command for a POSIX shell that sends the body. */
export function asCurl(url, body, needsKey) {
  const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
  const key = needsKey ? " -H \"Authorization: Bearer $API_KEY\"" : "";
  return `curl -N ${quote(url)} -H 'Content-Type: application/json'${key} -d ${quote(body)}`;
}
