// The state of the server, for administrators: what was refused, warnings, changes, reload and doctor.
import { get, post } from "./api.js";
import { html, useSignal } from "./lib.js";
import { bytes, day, Failure, number, pace, Table, trying, usePoll } from "./widgets.js";

const table = (title, columns, rows) => html`<h2>${title}</h2>
  ${rows.length ? html`<${Table} title=${title} columns=${columns} rows=${rows} />` : html`<p>None.</p>`}`;

export function Status() {
  const error = useSignal(null);
  const status = usePoll("v1/admin/status", pace, error);
  const refused = usePoll("v1/admin/requests?refused=true&since=1h&limit=50", 10, error);
  const audit = usePoll("v1/admin/audit?limit=50", 10, error);
  const keys = usePoll("v1/admin/keys", 60, error);
  const name = (id) => keys.value?.data.find((key) => key.public_id === id)?.name ?? id ?? "";
  const now = status.value;
  return html`<h1>Status</h1>
    <${Failure} error=${error.value} />
    ${now && html`<dl>
      <dt>State</dt><dd>${now.status}${now.degraded ? `: ${now.degraded}` : ""}</dd>
      <dt>Version</dt><dd>${now.version}, since ${day(now.started_at)}</dd>
      <dt>Requests</dt><dd>${now.requests_running} running; in the last minute ${number(now.last_minute?.requests)},
        ${" "}${number(now.last_minute?.refused)} refused, ${number(now.last_minute?.failed)} failed</dd>
      <dt>Restarts and swaps</dt><dd>${now.models.reduce((sum, model) => sum + model.restarts, 0)} deaths of models, ${now.swaps} swaps</dd>
      <dt>RAM free</dt><dd>${bytes(now.ram_available_bytes)} of ${bytes(now.ram_total_bytes)}</dd>
      <dt>Folders</dt><dd>${now.paths.data_dir}<br />${now.paths.weights_dir}<br />${now.paths.models}</dd>
    </dl>`}
    <${Reload} />
    <${Doctor} />
    ${table("Refused or failed in the last hour", ["At", "Key", "Request", "Status", "Why", "Field"], (refused.value?.data ?? []).map((one) =>
      [day(one.at), name(one.key), `${one.method} ${one.route ?? one.path ?? ""}`, one.status, one.error_code, one.param ?? ""]))}
    ${table("Warnings of the server's log", ["At", "Level", "Message"], (now?.log ?? []).map((one) => [day(one.at), one.level, one.message]))}
    ${table("Changes", ["At", "By", "From", "What", "Of", "Detail"], (audit.value?.data ?? []).map((one) =>
      [day(one.at), name(one.actor), one.origin, one.action, name(one.object), detail(one.detail)]))}`;
}

const shown = (value) => (Array.isArray(value) ? value.join(", ") : value === null ? "none" : String(value));
const detail = (fields) => Object.entries(fields ?? {})
  .filter(([, value]) => value !== null && !(Array.isArray(value) && !value.length))
  .map(([field, value]) => `${field.replaceAll("_", " ")}: ${shown(value)}`).join("; ");

const RELOADED = { again: "503 until loaded again", later: "other memory at the next load" };

function Reload() {
  const found = useSignal(null), error = useSignal(null), busy = useSignal(false);
  const reload = () => trying(async () => {
    found.value = null;
    found.value = await post("v1/admin/reload", undefined);
  }, error, busy);
  const changes = found.value && [...["added", "changed", "removed", "again", "later"].map((what) => [RELOADED[what] ?? what, found.value[what]]),
    ...["added", "changed", "removed"].map((what) => [`voices ${what}`, found.value.voices[what]])].filter(([, names]) => names?.length);
  return html`<h2>Configuration</h2>
    <button type="button" disabled=${busy.value} onClick=${reload}>Read models.yaml and the voices again</button>
    ${error.value && html`<${Failure} error=${{ message: `Nothing was changed. ${error.value.message}` }} />`}
    ${changes && html`<div role="status">
      ${!changes.length && html`<p>Nothing has changed.</p>`}
      <ul>${changes.map(([what, names]) => html`<li key=${what}>${what}: ${names.join(", ")}</li>`)}</ul>
      ${found.value.warnings.map((warning) => html`<p key=${warning} class="failure">${warning}</p>`)}</div>`}`;
}

function Doctor() {
  const found = useSignal(null), error = useSignal(null), busy = useSignal(false);
  const look = () => trying(async () => {
    found.value = null;
    found.value = await get("v1/admin/doctor", { method: "POST" });
  }, error, busy);
  const all = found.value?.findings ?? [];
  return html`<h2>Doctor</h2>
    <button type="button" disabled=${busy.value} onClick=${look}>${busy.value ? "Looking" : "Look for problems"}</button>
    <${Failure} error=${error.value} />
    ${found.value && html`<div role="status"><p>${found.value.problem} problems, ${found.value.warning} warnings, ${found.value.ok} lines are well.</p>
      <ul class="found">${all.filter((one) => one.verdict !== "ok").map((one, at) => html`<li key=${at}>
        <b>${one.verdict}</b> ${one.area}: ${one.message}${one.remedy && html`<br /><small>${one.remedy}</small>`}</li>`)}</ul>
      <details><summary>What is well</summary><ul class="found">
        ${all.filter((one) => one.verdict === "ok").map((one, at) => html`<li key=${at}>${one.area}: ${one.message}</li>`)}
      </ul></details>
    </div>`}`;
}
