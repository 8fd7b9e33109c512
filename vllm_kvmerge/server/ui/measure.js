// What is measured of one answer while it streams.

// Seconds over which tokens per second are averaged, and how many there must be: tokens arrive in bursts.
const RATE_WINDOW = 1;
const RATE_MIN_WINDOW = 0.25;

export class Measurement {
  constructor() {
    this.reported = []; // {start, end, tokens, entries, bytes, before?}, as the server reports them
    this.lag = Infinity; // seconds from sending the request until the server's clock for it began, at most
    this.arrivals = []; // [seconds since the request was sent, tokens of the answer so far]
    this.rates = []; // [seconds, tokens per second]
    this.report = null; // the server's, at the end
    this.verified = null; // the answer, compared with the full cache
  }

  /** chunk: an event of the stream. seconds: since the request was sent. */
  note(chunk, seconds) {
    const { steps = [], ...report } = chunk.kv_transfer_params?.kvmerge ?? {};
    this.reported.push(...steps);
    if (steps.length) this.lag = Math.min(this.lag, Math.max(0, seconds - steps.at(-1).end));
    if ("mean_bytes" in report) this.report = report;
    this.verified = chunk.usage?.kv_compression?.verified ?? this.verified;
    const tokens = chunk.usage?.completion_tokens;
    if (tokens && tokens !== this.numTokens) this.noteTokens(seconds, tokens);
  }

  noteTokens(seconds, tokens) {
    const earlier = this.arrivals.findLast(([time]) => time <= seconds - RATE_WINDOW) ?? this.arrivals[0];
    this.arrivals.push([seconds, tokens]);
    if (earlier && seconds >= earlier[0] + RATE_MIN_WINDOW) this.rates.push([seconds, (tokens - earlier[1]) / (seconds - earlier[0])]);
  }

  /** The steps by this page's clock, which tokens are measured by. */
  get steps() {
    return this.reported.map((step) => ({ ...step, start: step.start + this.lag, end: step.end + this.lag }));
  }

  get numTokens() {
    return this.arrivals.at(-1)?.[1] ?? 0;
  }

  get firstToken() {
    return this.arrivals[0]?.[0];
  }

  /** Tokens per second after the first. */
  get meanRate() {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    return first && last[0] > first[0] ? (last[1] - first[1]) / (last[0] - first[0]) : undefined;
  }

  get compressions() {
    return this.steps.filter((step) => step.before);
  }

  get peakBytes() {
    const sizes = this.steps.map((step) => Math.max(step.bytes, step.before?.bytes ?? 0));
    return this.report?.peak_bytes ?? (sizes.length ? Math.max(...sizes) : undefined);
  }

  /** [seconds, bytes]. A step holds its largest size until it ends, where its compression is a fall at one time. */
  get bytesLine() {
    const points = this.steps.flatMap(({ start, end, bytes, before }) => [[start, before?.bytes ?? bytes], [end, bytes]]);
    let latest = 0; // a step may be scheduled before the last one has ended
    return points.map(([seconds, bytes]) => [latest = Math.max(latest, seconds), bytes]);
  }
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function formatBytes(bytes) {
  const power = bytes > 0 ? Math.min(UNITS.length - 1, Math.floor(Math.log2(bytes) / 10)) : 0;
  return `${formatNumber(bytes / 1024 ** power)} ${UNITS[power]}`;
}

/** Three digits, thousands apart. */
export const formatNumber = (value) =>
  value.toLocaleString("en", value >= 100 ? { maximumFractionDigits: 0 } : { maximumSignificantDigits: 3 });

const CHANGE = { minimumFractionDigits: 3, maximumFractionDigits: 3, signDisplay: "exceptZero" };

/** "97% as the full cache, ...", of usage.kv_compression.verified. */
export function formatVerified({ skipped, agreeing, first_difference: first, log_prob_change: change }) {
  if (skipped) return `skipped: ${skipped}`;
  return [
    agreeing === null ? "" : `${formatNumber(100 * agreeing)}% as the full cache`,
    first === null ? "" : `first difference at token ${first + 1}`,
    change === null ? "" : `log p ${change.toLocaleString("en", CHANGE)}`,
  ].filter(Boolean).join(", ");
}

export const formatSeconds = (seconds) => `${seconds.toFixed(2)} s`;
