// The models: what each is doing; for administrators also their memory, loading and unloading, and what to fetch.
import { events, get, isAdmin, me, post, send } from "./api.js";
import { chosen } from "./connect.js";
import { html, useSignal } from "./lib.js";
import { bytes, Failure, Field, number, pace, say, Table, trying, usePoll } from "./widgets.js";

const WORDS = { ready: "ready", loading: "loading", failed: "failed", sleeping: "asleep", unloaded: "not loaded" };
// Links to pages for a model: by capability, with the scope that it needs and the text of the link.
const PLACES = [["chat", "chat", "chat", "Chat"], ["image_generation", "images", "images", "Make images"],
  ["speech", "audio", "voices", "Speak"], ["transcription", "audio", "voices", "Transcribe"]];

export function Models({ models, failed }) {
  const error = useSignal(null);
  const troubled = models?.some((model) => ["loading", "failed"].includes(model.status));
  const path = isAdmin.value ? "v1/admin/status" : troubled ? "health/ready" : null; // has the progress of loads
  const status = usePoll(path, pace, error);
  const states = (path && status.value?.models) || {};
  const state = isAdmin.value ? Object.fromEntries(Object.values(states).map((one) => [one.id, one])) : states;
  const listed = (models ?? []).map((model) => {
    const { status, running, waiting } = { ...model, ...state[model.id] }; // the newer of the two wins
    return { ...model, status, running, waiting };
  });
  const ids = new Set(listed.map((model) => model.id));
  const replicas = status.value?.replicas ?? [];
  return html`<h1>Models</h1>
    <${Failure} error=${error.value ?? failed} />
    ${isAdmin.value && status.value?.models && html`<${Memory} status=${status.value} />`}
    ${replicas.length > 0 && html`<${Cluster} status=${status.value} />`}
    <ul class="cards">${listed.filter((model) => !ids.has(model.parent)).map((model) => html`<${Model} key=${model.id} model=${model}
      state=${state[model.id]} error=${error} engines=${enginesOf(model.id, state[model.id], replicas)}
      adapters=${listed.filter((one) => one.parent === model.id)} states=${state} />`)}</ul>
    ${isAdmin.value && html`<${Fetch} />`}`;
}

// Each engine of a model with several, or of one on several machines of a cluster.
function enginesOf(id, state, replicas) {
  if (!replicas.length) return state?.engines ?? [];
  return replicas.flatMap(({ node, status }) => status.models.filter((model) => model.id === id).flatMap((model) => {
    const whole = { ...model, gpu_bytes: model.memory.gpu_bytes, ram_bytes: model.memory.ram_bytes };
    return (model.engines.length ? model.engines : [whole]).map((engine) => ({ ...engine, node }));
  }));
}

function Engines({ name, engines }) {
  const memory = (one) => [one.gpus.length && `GPU ${one.gpus.join(", ")}`, one.gpu_bytes && bytes(one.gpu_bytes),
    one.ram_bytes && `RAM ${bytes(one.ram_bytes)}`].filter(Boolean).join(" · ");
  const rows = engines.map((one) => [one.node ? `${one.id} on ${one.node}` : one.id, WORDS[one.status], one.running, one.waiting,
    memory(one), one.restarts]);
  return html`<${Table} title=${`Engines of ${name}`} columns=${["Engine", "State", "Running", "Waiting", "Memory", "Restarts"]} rows=${rows} />`;
}

const Cluster = ({ status }) => html`<h2>Machines</h2>
  <${Table} title="Machines" columns=${["Machine", "State", "GPUs", "CPUs", "Memory"]} rows=${status.machines.map((one) =>
    [one.address, `${one.alive ? "here" : "left or died"}${one.head ? ", the head" : ""}`, one.gpus, one.cpus, bytes(one.memory_bytes)])} />
  <h2>Replicas</h2>
  <${Table} title="Replicas" columns=${["Machine", "Role", "State", "Requests", "Models", "Replica"]} rows=${status.replicas.map((one) =>
    [one.node, one.role, one.status.status, one.status.requests_running, one.status.models.map(({ id }) => id).join(", "), one.replica])} />`;

function Model({ model, state, states, engines, adapters, error }) {
  const busy = useSignal(false);
  const act = (what) => () => trying(async () => {
    await send(`v1/admin/models/${model.id}/${what}`, { method: "POST" });
    say(`${model.id}: ${what === "load" ? "loaded" : "leaves with its last answer"}`);
  }, error, busy);
  const left = state?.remaining_seconds, last = state?.last_minute;
  const facts = [
    model.demo && "a demo",
    model.context_length && `${number(model.context_length)} tokens of context`,
    model.sizes && model.sizes.join(", "),
    model.dimensions && `vectors of ${number(model.dimensions)} numbers`,
    model.max_input_tokens && `${number(model.max_input_tokens)} tokens of each text`,
    state?.served_with && `${state.served_with.source}: ${state.served_with.folder}`,
    state?.restarts && `${state.restarts} restarts`,
    model.parent && `an adapter of ${model.parent}`,
  ].filter(Boolean);
  const places = PLACES.filter(([capability, scope]) => model.capabilities.includes(capability) && me.value.scopes.includes(scope));
  const tries = ["embedding", "rerank"].some((one) => model.capabilities.includes(one)) && me.value.scopes.includes("embeddings");
  const sum = (name) => engines.reduce((all, one) => all + one[name], 0);
  const [running, waiting] = engines.some((one) => one.node) ? [sum("running"), sum("waiting")] : [model.running, model.waiting];
  return html`<li class="card">
    <h2>${model.id} <span class=${`state ${model.status}`}>${WORDS[model.status]}</span></h2>
    ${model.description && html`<p dir="auto">${model.description}</p>`}
    ${model.status === "loading" && state && html`<p>
      <progress max="1" value=${state.progress} aria-label=${`${model.id} is loading`}></progress>
      ${" "}${state.phase}${left ? `, about ${Math.ceil(left)} s left` : ""}</p>`}
    ${state?.reason && html`<p class="failure">${state.reason}</p>`}
    <p><small>${model.tier} · ${model.capabilities.join(", ")}${facts.map((fact) => ` · ${fact}`)}</small></p>
    <p><b>${running}</b> running, <b>${waiting}</b> waiting${last && html`;
      in the last minute ${number(last.answers)} answers${last.tokens_per_second ? `, ${number(last.tokens_per_second)} tokens/s` : ""}
      ${last.images ? `, ${last.images} images` : ""}`}
      ${state?.kv_cache_usage != null && html`; KV cache <meter min="0" max="1" value=${state.kv_cache_usage} aria-label="KV cache in use"></meter>
        ${" "}${Math.round(state.kv_cache_usage * 100)} %`}</p>
    ${engines.length > 0 && html`<${Engines} name=${model.id} engines=${engines} />`}
    ${adapters.length > 0 && html`<h3>Adapters</h3><ul>${adapters.map((one) => html`<li key=${one.id}>
      <b>${one.id}</b> (${one.tier})${one.description && html`: <span dir="auto">${one.description}</span>`}
      ${one.status === "failed" && html`<p class="failure">${states[one.id]?.reason ?? "failed"}</p>`}</li>`)}</ul>`}
    ${tries && html`<${Try} model=${model} />`}
    <p class="row">${places.map(([, , page, title]) => html`<a key=${title} href=${`#/${page}`}>${title}</a>`)}
      <a href="#/connect" onClick=${() => (chosen.value = model.id)}>Use it in a program</a></p>
    ${isAdmin.value && html`<div class="row">
      ${["unloaded", "sleeping", "failed"].includes(model.status) &&
      html`<button type="button" disabled=${busy.value} onClick=${act("load")}>Load</button>`}
      ${model.status === "ready" && html`<button type="button" disabled=${busy.value} onClick=${act("unload")}>Unload</button>`}
    </div>`}
  </li>`;
}

// Texts in the order in which they fit a question: by a model that ranks, or by the angle between vectors.
function Try({ model }) {
  const query = useSignal(""), texts = useSignal(""), found = useSignal(null), error = useSignal(null), busy = useSignal(false);
  const submit = (event) => {
    event.preventDefault();
    const documents = texts.value.split("\n").map((line) => line.trim()).filter(Boolean);
    trying(async () => {
      if (model.capabilities.includes("rerank")) {
        const { results } = await post("v1/rerank", { model: model.id, query: query.value, documents });
        found.value = results.map(({ index, relevance_score: score }) => [documents[index], score]);
      } else {
        const { data } = await post("v1/embeddings", { model: model.id, input: [query.value, ...documents] });
        const [asked, ...others] = data.map((one) => one.embedding);
        found.value = others.map((other, at) => [documents[at], cosine(asked, other)]).sort(([, one], [, other]) => other - one);
      }
    }, error, busy);
  };
  const input = (signal) => ({ value: signal.value, dir: "auto", required: true, onInput: (event) => (signal.value = event.target.value) });
  return html`<details><summary>Try it</summary><form onSubmit=${submit}>
    <${Field} label="Question"><input ...${input(query)} /><//>
    <${Field} label="Texts, one on each line"><textarea rows="3" ...${input(texts)}></textarea><//>
    <button disabled=${busy.value}>${busy.value ? "Comparing" : "Sort by relevance"}</button>
    <${Failure} error=${error.value} />
    <div role="status">${found.value && html`<ol>${found.value.map(([text, score], at) => html`<li key=${at}>
      <span dir="auto">${text}</span> <small>${score.toFixed(3)}</small></li>`)}</ol>`}</div>
  </form></details>`;
}

function cosine(one, other) {
  const dot = (a, b) => a.reduce((sum, value, at) => sum + value * b[at], 0);
  return dot(one, other) / Math.sqrt(dot(one, one) * dot(other, other));
}

// One bar per GPU, and one for RAM: who has how much. In a cluster for each machine, all of its replicas together.
function Memory({ status }) {
  const nodes = status.replicas.length ? Object.entries(Object.groupBy(status.replicas, (one) => one.node)) : [["", [{ status }]]];
  const devices = nodes.flatMap(([node, replicas]) => devicesOf(node && `${node}, `, replicas.map((one) => one.status)));
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

// The servers of one machine see the same GPUs, and each knows which processes are its own.
function devicesOf(node, all) {
  const models = new Map(all.flatMap((one) => one.gpus).flatMap((gpu) => gpu.holders).filter((one) => one.model).map((one) => [one.pid, one.model]));
  const gpus = new Map(all.flatMap((one) => one.gpus).map((gpu) => [gpu.index, gpu]));
  const [{ ram_total_bytes: total, ram_available_bytes: free }] = all;
  return [
    ...[...gpus.values()].map((gpu) => ({
      name: `${node}GPU ${gpu.index}: ${gpu.name}`,
      total: gpu.total_bytes,
      used: gpu.used_bytes,
      held: sums(gpu.holders.map((one) => [models.get(one.pid) ?? one.name, one.used_bytes ?? 0])),
    })),
    { name: `${node}RAM`, total, used: total - free, held: sums(all.flatMap((one) => one.models).map((one) => [one.id, one.memory.ram_bytes])) },
  ];
}

function sums(pairs) {
  const found = new Map();
  for (const [name, size] of pairs) if (size) found.set(name, (found.get(name) ?? 0) + size);
  return [...found];
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

// What the plan wants and is not here; a process of its own fetches it, and goes on when this page is left.
function Fetch() {
  const plan = useSignal(null), error = useSignal(null), lines = useSignal(null), busy = useSignal(false);
  const ask = () => trying(async () => {
    plan.value = null;
    plan.value = await get("v1/admin/plan");
  }, error, busy);
  const watch = (models) => trying(async () => {
    lines.value = [];
    for await (const event of events("v1/admin/weights/pull", { models })) {
      const text = event.type === "weights.done" ? (event.ok ? "Done. Reload the configuration under Status." : "It failed.") : event.text;
      lines.value = [...lines.value, text].slice(-200);
    }
  }, error);
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
