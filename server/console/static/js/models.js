// The models: what each is doing, and for administrators who has which memory, loading and unloading, and what to fetch.
import { events, get, isAdmin, send } from "./api.js";
import { html, useSignal } from "./lib.js";
import { bytes, Failure, number, pace, say, usePoll } from "./widgets.js";

const WORDS = { ready: "ready", loading: "loading", failed: "failed", sleeping: "asleep", unloaded: "not loaded" };

export function Models({ models, failed }) {
  const error = useSignal(null);
  const status = usePoll(isAdmin.value ? "v1/admin/status" : "health/ready", pace, error);
  const states = status.value?.models ?? {};
  const state = isAdmin.value ? Object.fromEntries(Object.values(states).map((one) => [one.id, one])) : states;
  return html`<h1>Models</h1>
    <${Failure} error=${error.value ?? failed} />
    ${isAdmin.value && status.value?.models && html`<${Memory} status=${status.value} />`}
    <ul class="cards">${(models ?? []).map((model) => html`<${Model} key=${model.id} model=${model}
      state=${state[model.id]} failed=${(failure) => (error.value = failure)} />`)}</ul>
    ${isAdmin.value && html`<${Fetch} />`}`;
}

function Model({ model, state, failed }) {
  const busy = useSignal(false);
  const act = (what) => async () => {
    busy.value = true;
    try {
      await send(`v1/admin/models/${model.id}/${what}`, { method: "POST" });
      say(`${model.id}: ${what === "load" ? "loaded" : "leaves with its last answer"}`);
    } catch (failure) {
      failed(failure);
    }
    busy.value = false;
  };
  const left = state?.remaining_seconds, last = state?.last_minute;
  const facts = [
    model.demo && "a demo",
    model.context_length && `${number(model.context_length)} tokens of context`,
    model.sizes && model.sizes.join(", "),
    model.dimensions && `vectors of ${number(model.dimensions)} numbers`,
    model.max_input_tokens && `${number(model.max_input_tokens)} tokens of each text`,
    state?.served_with && `${state.served_with.source}: ${state.served_with.folder}`,
    state?.restarts && `${state.restarts} restarts`,
  ].filter(Boolean);
  return html`<li class="card">
    <h2>${model.id} <span class=${`state ${model.status}`}>${WORDS[model.status]}</span></h2>
    ${model.description && html`<p dir="auto">${model.description}</p>`}
    ${model.status === "loading" && state && html`<p>
      <progress max="1" value=${state.progress} aria-label=${`${model.id} is loading`}></progress>
      ${" "}${state.phase}${left ? `, about ${Math.ceil(left)} s left` : ""}</p>`}
    ${state?.reason && html`<p class="failure">${state.reason}</p>`}
    <p><small>${model.tier} · ${model.capabilities.join(", ")}${facts.map((fact) => ` · ${fact}`)}</small></p>
    <p><b>${model.running}</b> running, <b>${model.waiting}</b> waiting${last && html`;
      in the last minute ${number(last.answers)} answers, ${number(last.tokens_per_second)} tokens/s${last.images ? `, ${last.images} images` : ""}`}
      ${state?.kv_cache_usage != null && html`; KV cache <meter min="0" max="1" value=${state.kv_cache_usage} aria-label="KV cache in use"></meter>
        ${" "}${Math.round(state.kv_cache_usage * 100)} %`}</p>
    ${isAdmin.value && html`<div class="row">
      ${["unloaded", "sleeping", "failed"].includes(model.status) &&
      html`<button type="button" disabled=${busy.value} onClick=${act("load")}>Load</button>`}
      ${model.status === "ready" && html`<button type="button" disabled=${busy.value} onClick=${act("unload")}>Unload</button>`}
    </div>`}
  </li>`;
}

// One bar per GPU, and one for RAM: who has how much.
function Memory({ status }) {
  const devices = status.gpus.map((gpu) => {
    const held = new Map();
    for (const one of gpu.holders) {
      const name = one.model ?? one.name;
      held.set(name, (held.get(name) ?? 0) + (one.used_bytes ?? 0));
    }
    return { name: `GPU ${gpu.index}: ${gpu.name}`, total: gpu.total_bytes, held: [...held], used: gpu.used_bytes };
  });
  const inRam = status.models.filter((model) => model.memory.ram_bytes).map((model) => [model.id, model.memory.ram_bytes]);
  const usedRam = status.ram_total_bytes - status.ram_available_bytes;
  devices.push({ name: "RAM", total: status.ram_total_bytes, held: inRam, used: usedRam });
  return html`<section aria-label="Memory">${devices.map((device) => {
    const known = device.held.reduce((sum, [, size]) => sum + size, 0);
    const parts = [...device.held, ["others", Math.max(0, device.used - known)]];
    return html`<div key=${device.name} class="memory">
      <h2>${device.name} <small>${bytes(device.used)} of ${bytes(device.total)}</small></h2>
      <svg viewBox="0 0 1000 20" preserveAspectRatio="none" role="img"
        aria-label=${parts.map(([name, size]) => `${name}: ${bytes(size)}`).join(", ")}>${bars(parts, device.total)}</svg>
      <ul class="legend">${parts.map(([name, size], at) => html`<li key=${name} class=${`c${tone(name, at)}`}>${name} ${bytes(size)}</li>`)}</ul>
    </div>`;
  })}
  ${status.no_gpus && html`<p><small>No GPUs: ${status.no_gpus}</small></p>`}</section>`;
}

const tone = (name, at) => (name === "others" ? 5 : (at % 4) + 1);

function bars(parts, total) {
  let from = 0;
  return parts.map(([name, size], at) => {
    const width = (size / total) * 1000;
    from += width;
    return html`<rect key=${name} class=${`c${tone(name, at)}`} x=${from - width} y="0" width=${Math.max(width, 0)} height="20" />`;
  });
}

// What the plan would have and is not here; fetched by a process of its own, which goes on when this page is left.
function Fetch() {
  const plan = useSignal(null), error = useSignal(null), lines = useSignal(null), busy = useSignal(false);
  const ask = async () => {
    busy.value = true;
    error.value = null;
    plan.value = await get("v1/admin/plan").catch((failure) => ((error.value = failure), null));
    busy.value = false;
  };
  const watch = async (models) => {
    lines.value = [];
    error.value = null;
    try {
      for await (const event of events("v1/admin/weights/pull", { models })) {
        const text = event.type === "weights.done" ? (event.ok ? "Done. Reload the configuration under Status." : "It failed.") : event.text;
        lines.value = [...lines.value, text].slice(-200);
      }
    } catch (failure) {
      error.value = failure;
    }
  };
  const missing = plan.value?.not_here ?? [];
  return html`<h2>Weights</h2>
    <button type="button" disabled=${busy.value} onClick=${ask}>${busy.value ? "Looking" : "What would fit this machine?"}</button>
    <${Failure} error=${error.value} />
    ${plan.value && !missing.length && html`<p>Everything that the plan wants is here, or it wants the demos.</p>`}
    ${missing.length > 0 && html`<ul>${missing.map((one) => html`<li key=${one.model}>${one.model}: ${one.folder}, about ${bytes(one.about_bytes)}
      ${one.repository ? ` from ${one.repository}` : ", to be put there by hand"}
      ${one.repository && html` <button type="button" class="small" onClick=${() => watch([one.folder])}>Fetch</button>`}</li>`)}</ul>
      <p><small>Fetching makes this server call a model hub.</small></p>`}
    ${lines.value && html`<pre class="log" tabindex="0" role="log"><code>${lines.value.join("\n") || "Starting"}</code></pre>
      <button type="button" class="small" onClick=${() => send("v1/admin/weights/pull", { method: "DELETE" })}>Stop fetching</button>`}`;
}
