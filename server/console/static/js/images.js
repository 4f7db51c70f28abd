// Making images: progress and previews while they come, and a gallery that stays in this browser for as long as the links work.
import { events } from "./api.js";
import { html, signal, useEffect, useSignal } from "./lib.js";
import { Failure, Field } from "./widgets.js";

const gallery = signal([]); // {id, prompt, seed, size, model, url, expires}, the newest first
const running = signal(null); // {abort, items: [{step, steps, preview}]}

// IndexedDB keeps addresses and prompts, not pictures: the server deletes those after a day.
const database = new Promise((resolve, reject) => {
  const asked = indexedDB.open("hearth", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("images", { keyPath: "id" });
  asked.onsuccess = () => resolve(asked.result);
  asked.onerror = () => reject(asked.error);
});
database.catch(() => {}); // a private window may have none

async function inStore(act) {
  const store = (await database).transaction("images", "readwrite").objectStore("images");
  return new Promise((resolve, reject) => {
    const asked = act(store);
    asked.onsuccess = () => resolve(asked.result);
    asked.onerror = () => reject(asked.error);
  });
}

async function restore() {
  const all = await inStore((store) => store.getAll()).catch(() => []);
  const now = Date.now() / 1000;
  const old = all.filter((image) => image.expires <= now);
  for (const image of old) inStore((store) => store.delete(image.id));
  gallery.value = all.filter((image) => image.expires > now).sort((one, other) => other.id - one.id);
}

function forget(image) {
  gallery.value = gallery.value.filter((one) => one.id !== image.id);
  inStore((store) => store.delete(image.id)).catch(() => {});
}

// Links may name another address of this server than the page has: what follows it is the same.
const local = (url) => {
  const { pathname, search } = new URL(url);
  return `${pathname.slice(pathname.indexOf("/v1/") + 1)}${search}`;
};

async function make(asked) {
  const abort = new AbortController();
  running.value = { abort, items: Array.from({ length: asked.n }, () => ({ step: 0, steps: 0, preview: null })) };
  const change = (at, changes) => {
    const items = running.value.items.with(at, { ...running.value.items[at], ...changes });
    running.value = { ...running.value, items };
  };
  const body = { ...asked, response_format: "url", stream: true, partial_images: 2, stream_options: { include_progress: true } };
  try {
    for await (const event of events("v1/images/generations", body, abort.signal)) {
      if (event.type.endsWith(".progress")) change(event.index, { step: event.step, steps: event.steps });
      if (event.type.endsWith(".partial_image")) change(event.index, { preview: `data:image/png;base64,${event.b64_json}` });
      if (event.type.endsWith(".completed")) {
        const { prompt, model, size } = asked;
        const id = Date.now() + event.index / 10;
        const image = { id, prompt, model, size, seed: event.seed, url: local(event.url), expires: event.expires_at };
        change(event.index, { done: true });
        gallery.value = [image, ...gallery.value];
        inStore((store) => store.put(image)).catch(() => {});
      }
    }
  } finally {
    running.value = null;
  }
}

export function Images({ models, failed }) {
  const error = useSignal(null);
  const asked = useSignal({ prompt: "", model: "", size: "512x512", n: "1", seed: "", quality: "standard", negative_prompt: "" });
  useEffect(() => void restore(), []);
  const able = (models ?? []).filter((model) => model.capabilities.includes("image_generation"));
  const model = able.find((one) => one.id === asked.value.model) ?? able[0];
  const input = (name) => ({ value: asked.value[name], onInput: (event) => (asked.value = { ...asked.value, [name]: event.target.value }) });
  const start = async (fields) => {
    error.value = null;
    const { prompt, size, n, seed, quality, negative_prompt: negative } = { ...asked.value, ...fields };
    try {
      const optional = { ...(seed === "" ? {} : { seed: Number(seed) }), ...(negative ? { negative_prompt: negative } : {}) };
      await make({ model: fields?.model ?? model.id, prompt, size, n: Number(n), quality, ...optional });
    } catch (failure) {
      if (failure.name !== "AbortError") error.value = failure;
    }
  };
  const submit = (event) => {
    event.preventDefault();
    start();
  };
  const again = (image) => start({ prompt: image.prompt, size: image.size, model: image.model, n: "1", seed: "" });
  return html`<h1>Images</h1>
    <form onSubmit=${submit}>
      <${Field} label="What it shows"><textarea rows="2" dir="auto" required maxlength="1000" ...${input("prompt")}></textarea><//>
      <div class="row">
        <${Field} label="Model"><select ...${input("model")} value=${model?.id}>
          ${able.map((one) => html`<option key=${one.id}>${one.id}</option>`)}</select><//>
        <${Field} label="Size"><select ...${input("size")}>${(model?.sizes ?? []).map((size) => html`<option key=${size}>${size}</option>`)}</select><//>
        <${Field} label="How many"><input type="number" min="1" max="4" required ...${input("n")} /><//>
        <${Field} label="Seed"><input type="number" min="0" placeholder="random" ...${input("seed")} /><//>
        <${Field} label="Quality"><select ...${input("quality")}><option>standard</option><option>hd</option></select><//>
      </div>
      <${Field} label="What it does not show"><input dir="auto" maxlength="1000" ...${input("negative_prompt")} /><//>
      ${running.value
        ? html`<button key="stop" type="button" class="main" onClick=${() => running.value.abort.abort()}>Stop</button>`
        : html`<button key="make" class="main" disabled=${!model}>Make</button>`}
      <${Failure} error=${error.value ?? failed} />
    </form>
    ${running.value && html`<div class="gallery" aria-live="polite">${running.value.items.map((item, at) => !item.done && html`<figure key=${at}>
      ${item.preview ? html`<img src=${item.preview} alt="Preview" />` : html`<p class="wait">Waiting for its turn</p>`}
      <progress max=${item.steps || 1} value=${item.step} aria-label=${`Image ${at + 1}`}></progress>
    </figure>`)}</div>`}
    <div class="gallery">${gallery.value.map((image) => html`<figure key=${image.id}>
      <a href=${image.url} target="_blank"><img src=${image.url} alt=${image.prompt} loading="lazy" /></a>
      <figcaption><span dir="auto">${image.prompt}</span><br /><small>${image.size}, seed ${image.seed}</small>
        <span class="row">
          <button type="button" class="small" disabled=${Boolean(running.value)} onClick=${() => again(image)}>Another</button>
          <button type="button" class="small" onClick=${() => (asked.value = { ...asked.value, ...image, seed: String(image.seed) })}>Use seed</button>
          <a class="small" href=${image.url} download=${`hearth-${image.seed}.png`}>Save</a>
          <button type="button" class="small" aria-label="Remove from the list" onClick=${() => forget(image)}>×</button>
        </span>
      </figcaption>
    </figure>`)}</div>
    ${!gallery.value.length && !running.value && html`<p class="empty">Images are listed here, in this browser, for as long as the server keeps them.</p>`}`;
}
