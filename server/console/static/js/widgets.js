// Small parts that several pages share.
import { get } from "./api.js";
import { html, signal, useEffect, useRef, useSignal } from "./lib.js";

const said = signal(""); // read out by screen readers, shown at the bottom for a moment
let quiet;

export function say(text) {
  said.value = text;
  clearTimeout(quiet);
  quiet = setTimeout(() => (said.value = ""), 4000);
}

export const Said = () => html`<div class="said" role="status" aria-live="polite">${said.value && html`<p>${said.value}</p>`}</div>`;

export function Failure({ error }) {
  const text = error && (error.message ?? String(error));
  return html`<div role="alert">${text && html`<p class="failure" dir="auto">${text}</p>`}</div>`;
}

// Waits for `act`, with `busy` on meanwhile; a failure is in `error`.
export async function trying(act, error, busy = {}) {
  busy.value = true;
  error.value = null;
  try {
    await act();
  } catch (failure) {
    error.value = failure;
  }
  busy.value = false;
}

export const Table = ({ title, columns, rows }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
  <thead><tr>${columns.map((column) => html`<th key=${column}>${column}</th>`)}</tr></thead>
  <tbody>${rows.map((row, at) => html`<tr key=${at}>${row.map((cell, place) => html`<td key=${place} dir="auto">${cell}</td>`)}</tr>`)}</tbody>
</table></div>`;

export function Lines({ text, label }) {
  return html`<figure class="code">
    <figcaption><span>${label}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0" dir="ltr"><code>${text}</code></pre>
  </figure>`;
}

export function Copy({ text, label = "Copy" }) {
  const done = useSignal(false);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text);
    } catch {
      copyByHand(text); // the clipboard works only with HTTPS and on localhost
    }
    done.value = true;
    setTimeout(() => (done.value = false), 1500);
  };
  return html`<button type="button" class="small" onClick=${copy}>${done.value ? "Copied" : label}</button>`;
}

function copyByHand(text) {
  const area = document.createElement("textarea");
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
}

export function Field({ label, hint, children }) {
  return html`<label class="field"><span>${label}</span>${children}${hint && html`<small>${hint}</small>`}</label>`;
}

export function Dialog({ title, open, onClose, children }) {
  const element = useRef();
  useEffect(() => {
    if (open && !element.current.open) element.current.showModal();
    if (!open && element.current.open) element.current.close();
  }, [open]);
  return html`<dialog ref=${element} onClose=${onClose} aria-label=${title}>
    ${open && html`<header><h2>${title}</h2><button type="button" class="small" onClick=${onClose}>Close</button></header>${children}`}
  </dialog>`;
}

// Asks again and again, except while the tab is hidden or `path` is null. Returns a signal, null until the first answer.
// `seconds` may be a function of the last answer; 0: asks once. `later` gets the seconds since the last answer, and
// returns how long not to ask again; it is called every 5 s, as the page may change.
export function usePoll(path, seconds, failed, later) {
  const found = useSignal(null);
  useEffect(() => {
    if (!path) return;
    let timer, answered, ended = false;
    const abort = new AbortController();
    const ask = async () => {
      clearTimeout(timer);
      const rest = found.value && !failed?.value ? (later?.((performance.now() - answered) / 1000) ?? 0) : 0;
      if (rest > 0.1) return (timer = setTimeout(ask, Math.min(rest, 5) * 1000));
      if (!document.hidden) {
        try {
          found.value = await get(path, { signal: abort.signal });
          answered = performance.now();
          if (failed?.value) failed.value = null;
        } catch (error) {
          if (failed && error.name !== "AbortError") failed.value = error;
        }
      }
      const pause = typeof seconds === "function" ? seconds(found.value) : seconds;
      if (!ended && !document.hidden && pause) timer = setTimeout(ask, pause * 1000);
    };
    const seen = () => !document.hidden && ask();
    document.addEventListener("visibilitychange", seen);
    ask();
    return () => {
      ended = true;
      clearTimeout(timer);
      abort.abort();
      document.removeEventListener("visibilitychange", seen);
    };
  }, [path]);
  return found;
}

// How often the state of models is asked for: often while one of them works.
export function pace(found) {
  const models = Object.values(found?.data ?? found?.models ?? {});
  return models.some((model) => model.running || model.waiting || model.status === "loading") ? 2 : 5;
}

export function save(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

export const number = (value) => (value ?? 0).toLocaleString("en");
export const bytes = (value) => (value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`);
export const day = (iso) => (iso ? new Date(iso).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" }) : "");
