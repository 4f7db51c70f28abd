// Usage by day, model, kind of request or key: a chart, a table, and CSV.
import { get, isAdmin } from "./api.js";
import { html, useEffect, useSignal } from "./lib.js";
import { Failure, Field, number, save } from "./widgets.js";

const MEASURES = {
  tokens: ["Tokens", (row) => row.prompt_tokens + row.completion_tokens],
  requests: ["Requests", (row) => row.requests],
  images: ["Images", (row) => row.images],
  audio_seconds: ["Seconds of speech", (row) => Math.round(row.audio_seconds)],
};
const COLUMNS = ["requests", "prompt_tokens", "completion_tokens", "cached_tokens", "images", "audio_seconds", "errors", "aborted"];

export function Usage() {
  const since = useSignal("30d"), by = useSignal("model"), measure = useSignal("tokens");
  const rows = useSignal(null), names = useSignal({}), error = useSignal(null);
  useEffect(() => {
    const abort = new AbortController();
    const failed = (failure) => failure.name !== "AbortError" && (error.value = failure);
    get(`v1/usage?since=${since.value}&by=day,${by.value}`, abort).then((found) => (rows.value = found.data), failed);
    if (isAdmin.value && by.value === "key")
      get("v1/admin/keys", abort).then((found) => (names.value = Object.fromEntries(found.data.map((key) => [key.public_id, key.name]))), failed);
    return () => abort.abort();
  }, [since.value, by.value]);
  const label = (row) => (by.value === "key" ? (names.value[row.key] ?? row.key) : row[by.value]) ?? "";
  const csv = () => {
    const cell = (value) => `"${String(value ?? "").replace(/^[=+@\t\r-]/, "'$&").replaceAll('"', '""')}"`; // no formulas
    const head = ["day", by.value, ...(by.value === "key" ? ["name"] : []), ...COLUMNS];
    const lines = rows.value.map((row) => [row.start.slice(0, 10), row[by.value], ...(by.value === "key" ? [label(row)] : [])]
      .map(cell).concat(COLUMNS.map((name) => row[name])).join(","));
    save("hearth-usage.csv", [head.join(","), ...lines].join("\r\n"), "text/csv");
  };
  const choice = (signal, options, title) => html`<${Field} label=${title}><select value=${signal.value}
    onChange=${(event) => (signal.value = event.target.value)}>
    ${options.map(([value, text]) => html`<option key=${value} value=${value}>${text}</option>`)}</select><//>`;
  return html`<h1>Usage</h1>
    <div class="row">
      ${choice(since, [["7d", "7 days"], ["30d", "30 days"], ["90d", "90 days"], ["365d", "a year"]], "Since")}
      ${choice(by, [["model", "model"], ["kind", "kind of request"], ...(isAdmin.value ? [["key", "key"]] : [])], "By")}
      ${choice(measure, Object.entries(MEASURES).map(([name, [title]]) => [name, title]), "Chart of")}
      <p><button type="button" disabled=${!rows.value?.length} onClick=${csv}>Save as CSV</button></p>
    </div>
    <${Failure} error=${error.value} />
    ${rows.value?.length === 0 && html`<p class="empty">Nothing was used in this time.</p>`}
    ${rows.value?.length > 0 && html`
      <${Chart} rows=${rows.value} label=${label} days=${parseInt(since.value)} title=${MEASURES[measure.value][0]} of=${MEASURES[measure.value][1]} />
      <${Sums} rows=${rows.value} label=${label} by=${by.value} />`}`;
}

// Bars of days, in parts. As SVG: it scales, follows the colours of the page, and screen readers can read it.
function Chart({ rows, label, days, title, of }) {
  const parts = [...new Set(rows.map(label))].sort();
  const today = Math.floor(Date.now() / 86400000);
  const first = Math.max(today - days, Math.min(...rows.map((row) => Math.floor(Date.parse(row.start) / 86400000))) - 1);
  const count = today - first;
  const sums = new Map();
  for (const row of rows) {
    const at = `${Math.floor(Date.parse(row.start) / 86400000)} ${label(row)}`;
    sums.set(at, (sums.get(at) ?? 0) + of(row));
  }
  const stacks = Array.from({ length: count }, (_, at) => parts.map((part) => sums.get(`${first + 1 + at} ${part}`) ?? 0));
  const most = Math.max(1, ...stacks.map((stack) => stack.reduce((sum, one) => sum + one, 0)));
  const name = (at) => new Date((first + 1 + at) * 86400000).toISOString().slice(0, 10);
  const wide = 900 / count;
  const bar = (stack, at) => {
    let top = 200;
    return html`<g key=${at}><title>${name(at)}: ${number(stack.reduce((sum, one) => sum + one, 0))}</title>${stack.map((value, part) => {
      const high = (value / most) * 190;
      top -= high;
      return html`<rect key=${part} class=${`c${(part % 5) + 1}`} x=${90 + at * wide + wide * 0.1} y=${top} width=${wide * 0.8} height=${high} />`;
    })}</g>`;
  };
  return html`<figure class="chart">
    <svg viewBox="0 0 1000 230" role="img" aria-label=${`${title} by day; the table below has the sums`}>
      <line x1="90" y1="200" x2="990" y2="200" /><text x="80" y="16" text-anchor="end">${number(most)}</text>
      <text x="80" y="204" text-anchor="end">0</text><text x="90" y="224">${name(0)}</text>
      ${count > 1 && html`<text x="990" y="224" text-anchor="end">${name(count - 1)}</text>`}
      ${stacks.map(bar)}
    </svg>
    <figcaption><ul class="legend">${parts.map((part, at) => html`<li key=${part} class=${`c${(at % 5) + 1}`} dir="auto">${part}</li>`)}</ul></figcaption>
  </figure>`;
}

function Sums({ rows, label, by }) {
  const sums = new Map();
  for (const row of rows) {
    const sum = sums.get(label(row)) ?? Object.fromEntries(COLUMNS.map((name) => [name, 0]));
    for (const name of COLUMNS) sum[name] += row[name];
    sums.set(label(row), sum);
  }
  const cells = (sum) => COLUMNS.map((name) => html`<td key=${name} class="number">${number(Math.round(sum[name]))}</td>`);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Sums"><table>
    <thead><tr><th>${by}</th>${COLUMNS.map((name) => html`<th key=${name} class="number">${name.replaceAll("_", " ")}</th>`)}</tr></thead>
    <tbody>${[...sums].sort().map(([name, sum]) => html`<tr key=${name}><th scope="row" dir="auto">${name}</th>${cells(sum)}</tr>`)}</tbody>
  </table></div>`;
}
