// File batches of one's own key: progress, files, and cancelling. Programs make them (docs/batches.md).
import { post, send } from "./api.js";
import { html, useSignal } from "./lib.js";
import { day, Failure, number, save, usePoll } from "./widgets.js";

const UNFINISHED = ["validating", "in_progress", "finalizing", "cancelling"];
const pace = (found) => (found?.data.some((one) => UNFINISHED.includes(one.status)) ? 2 : 10);

export function Batches() {
  const error = useSignal(null);
  const found = usePoll("v1/batches?limit=50", pace, error);
  const all = found.value?.data ?? [];
  const doing = (act) => () => act().catch((failure) => (error.value = failure));
  return html`<h1>Batches</h1>
    <${Failure} error=${error.value} />
    <ul class="cards">${all.map((one) => html`<${Batch} key=${one.id} one=${one} doing=${doing} />`)}</ul>
    ${found.value && !all.length && html`<p>Your key has no batches. A batch is a file with a request in each line, answered when
      nothing more urgent is asked: <code>hearth batches run FILE</code>, or <code>client.batches.create(...)</code>.</p>`}`;
}

function Batch({ one, doing }) {
  const { total, completed, failed } = one.request_counts;
  const facts = [one.endpoint, one.model, `made ${day(one.created_at * 1000)}`, `ends by ${day(one.expires_at * 1000)}`];
  const cancel = () => post(`v1/batches/${one.id}/cancel`);
  const fetch = (id, name) => async () => save(name, await (await send(`v1/files/${id}/content`)).blob(), "application/jsonl");
  const files = [["Answers", one.output_file_id, "output"], ["Errors", one.error_file_id, "errors"]].filter(([, id]) => id);
  return html`<li class="card">
    <h2><code>${one.id}</code> <span class=${`state ${one.status === "completed" ? "ready" : one.status}`}>${one.status.replace("_", " ")}</span></h2>
    <p><progress max=${total || 1} value=${completed + failed} aria-label=${`How much of ${one.id} is done`}></progress>
      ${" "}${number(completed + failed)} of ${number(total)} lines${failed > 0 && `, ${number(failed)} of them errors`}</p>
    <p><small>${facts.filter(Boolean).join(" · ")}</small></p>
    ${Object.entries(one.metadata ?? {}).map(([name, text]) => html`<p key=${name} dir="auto"><small>${name}: ${text}</small></p>`)}
    ${(one.errors?.data ?? []).slice(0, 5).map((wrong, at) => html`<p key=${at} class="failure">${wrong.line && `Line ${wrong.line}: `}${wrong.message}</p>`)}
    <div class="row">
      ${files.map(([title, id, kind]) => html`<button key=${kind} type="button" class="small"
        onClick=${doing(fetch(id, `${one.id}_${kind}.jsonl`))}>${title}</button>`)}
      ${["validating", "in_progress"].includes(one.status) && html`<button type="button" class="small" onClick=${doing(cancel)}>Cancel</button>`}
    </div>
  </li>`;
}
