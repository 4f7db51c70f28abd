// Making images of a text or a picture: progress and previews while they are made, and a gallery that stays in this
// browser as long as the links work.
import { events, me } from "./api.js";
import { html, signal, useEffect, useRef, useSignal } from "./lib.js";
import { Picture, read } from "./picture.js";
import { Failure, Field } from "./widgets.js";

const gallery = signal([]); // {id, owner, prompt, seed, size, model, edit, url, expires}, newest first
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
  const own = all.filter((image) => image.expires > now && image.owner === me.value?.public_id);
  gallery.value = own.sort((one, other) => other.id - one.id);
}

function forget(image) {
  gallery.value = gallery.value.filter((one) => one.id !== image.id);
  inStore((store) => store.delete(image.id)).catch(() => {});
}

// Links may have another address of this server than the page; the rest is the same.
const local = (url) => {
  const { pathname, search } = new URL(url);
  return `${pathname.slice(pathname.indexOf("/v1/") + 1)}${search}`;
};

// A request with a picture is a form; the field of its options has the name that client libraries give it.
function formOf({ stream_options: options, ...fields }, { image, mask }) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("stream_options[include_progress]", options.include_progress);
  form.append("image", image, "image.png");
  if (mask) form.append("mask", mask, "mask.png");
  return form;
}

// `files`: the picture that it starts from. With a prompt it is edited, without one varied.
async function make(asked, files) {
  const abort = new AbortController();
  running.value = { abort, items: Array.from({ length: asked.n }, () => ({ step: 0, steps: 0, preview: null })) };
  const change = (at, changes) => {
    const items = running.value.items.with(at, { ...running.value.items[at], ...changes });
    running.value = { ...running.value, items };
  };
  const body = { ...asked, response_format: "url", stream: true, partial_images: 2, stream_options: { include_progress: true } };
  const path = files ? (asked.prompt ? "edits" : "variations") : "generations";
  let left = asked.n;
  try {
    for await (const event of events(`v1/images/${path}`, files ? formOf(body, files) : body, abort.signal)) {
      if (event.type.endsWith(".progress")) change(event.index, { step: event.step, steps: event.steps });
      if (event.type.endsWith(".partial_image")) change(event.index, { preview: `data:image/png;base64,${event.b64_json}` });
      if (event.type.endsWith(".completed")) {
        const { prompt, model, size } = asked;
        const id = Date.now() + event.index / 10, from = { id, owner: me.value?.public_id, edit: Boolean(files) };
        const image = { ...from, prompt: prompt ?? "A variation", model, size, seed: event.seed, url: local(event.url), expires: event.expires_at };
        left -= 1;
        change(event.index, { done: true });
        gallery.value = [image, ...gallery.value];
        inStore((store) => store.put(image)).catch(() => {});
      }
    }
    if (left) throw new Error("The connection ended before all images were made.");
  } finally {
    running.value = null;
  }
}

export function Images({ models, failed }) {
  const error = useSignal(null), from = useSignal(null), strength = useSignal(""), files = useRef(), input = useRef(), form = useRef();
  const asked = useSignal({ prompt: "", model: "", size: "512x512", n: "1", seed: "", quality: "standard", negative_prompt: "" });
  useEffect(() => void restore(), []);
  const able = (models ?? []).filter((model) => model.capabilities.includes("image_generation"));
  const model = able.find((one) => one.id === asked.value.model) ?? able[0];
  const edits = model && (model.capabilities.includes("image_editing") || model.status !== "ready"); // known once it is loaded
  const without = model && (model.capabilities.includes("negative_prompt") || model.status !== "ready");
  const field = (name) => ({ value: asked.value[name], onInput: (event) => (asked.value = { ...asked.value, [name]: event.target.value }) });
  const start = async (fields, picture) => {
    error.value = null;
    const { prompt, size, n, seed, quality, negative_prompt: negative } = { ...asked.value, ...fields };
    const body = { model: fields?.model ?? model.id, size, n: Number(n), quality };
    if (seed !== "") body.seed = Number(seed);
    if (prompt) Object.assign(body, { prompt, ...(negative && without ? { negative_prompt: negative } : {}) });
    if (picture && strength.value) body.strength = strength.value;
    try {
      await make(body, picture && !prompt ? { image: picture.image } : picture);
    } catch (failure) {
      if (failure.name !== "AbortError") error.value = failure;
    }
  };
  const submit = async (event) => {
    event.preventDefault();
    start({}, from.value && (await files.current()));
  };
  const vary = async () => form.current.reportValidity() && start({ prompt: "" }, await files.current());
  const take = async (blob) => {
    if (!blob) return;
    error.value = null;
    from.value = await read(blob).catch((failure) => ((error.value = failure), from.value));
  };
  const edit = async (image) => {
    const answer = await fetch(image.url).catch(() => null);
    if (!answer?.ok) return (error.value = new Error("The server does not keep this image any more."));
    asked.value = { ...asked.value, size: image.size };
    await take(await answer.blob());
    form.current.scrollIntoView({ block: "start" });
  };
  const dropped = (event) => edits && take(event.dataTransfer.files[0]);
  const again = (image) => start({ prompt: image.prompt, size: image.size, model: image.model, n: "1", seed: "" });
  const busy = Boolean(running.value);
  return html`<h1>Images</h1>
    <form ref=${form} onSubmit=${submit} onDrop=${dropped} onPaste=${(event) => edits && take(event.clipboardData.files[0])}>
      <${Field} label=${from.value ? "What it shows when it is done" : "What it shows"}>
        <textarea rows="2" dir="auto" required=${!from.value} maxlength="1000" ...${field("prompt")}></textarea><//>
      ${edits && from.value && html`<${Picture} bitmap=${from.value} size=${asked.value.size} files=${files} remove=${() => (from.value = null)} />`}
      <div class="row">
        <${Field} label="Model"><select ...${field("model")} value=${model?.id}>
          ${able.map((one) => html`<option key=${one.id}>${one.id}</option>`)}</select><//>
        <${Field} label="Size"><select ...${field("size")}>${(model?.sizes ?? []).map((size) => html`<option key=${size}>${size}</option>`)}</select><//>
        <${Field} label="How many"><input type="number" min="1" max="4" required ...${field("n")} /><//>
        <${Field} label="Seed"><input type="number" min="0" placeholder="random" ...${field("seed")} /><//>
        <${Field} label="Quality"><select ...${field("quality")}><option>standard</option><option>hd</option></select><//>
        ${from.value && html`<${Field} label="Strength"><input type="number" min="0.05" max="1" step="0.05" placeholder="the model's"
          value=${strength.value} onInput=${(event) => (strength.value = event.target.value)} /><//>`}
      </div>
      ${without && html`<${Field} label="What it does not show"><input dir="auto" maxlength="1000" ...${field("negative_prompt")} /><//>`}
      <div class="row">
        ${busy
          ? html`<button key="stop" type="button" class="main" onClick=${() => running.value.abort.abort()}>Stop</button>`
          : html`<button key="make" class="main" disabled=${!model || (from.value && !asked.value.prompt.trim())}>${from.value ? "Edit" : "Make"}</button>`}
        ${from.value && html`<button type="button" disabled=${busy} onClick=${vary}>Variations</button>`}
        ${edits && html`<button type="button" onClick=${() => input.current.click()}>${from.value ? "Another picture" : "Start from a picture"}</button>
          <input type="file" ref=${input} class="hidden" accept="image/*" aria-label="Picture to start from" tabindex="-1"
            onChange=${(event) => (take(event.target.files[0]), (event.target.value = ""))} />`}
      </div>
      <${Failure} error=${error.value ?? failed} />
    </form>
    ${busy && html`<div class="gallery" aria-live="polite">${running.value.items.map((item, at) => !item.done && html`<figure key=${at}>
      ${item.preview ? html`<img src=${item.preview} alt="Preview" />` : html`<p class="wait">Waiting for its turn</p>`}
      <progress max=${item.steps || 1} value=${item.step} aria-label=${`Image ${at + 1}`}></progress>
    </figure>`)}</div>`}
    <div class="gallery">${gallery.value.map((image) => html`<figure key=${image.id}>
      <a href=${image.url} target="_blank"><img src=${image.url} alt=${image.prompt} loading="lazy" /></a>
      <figcaption><span dir="auto">${image.prompt}</span><br /><small>${image.size}, seed ${image.seed}${image.edit && ", of a picture"}</small>
        <span class="row">
          ${!image.edit && html`<button type="button" class="small" disabled=${busy} onClick=${() => again(image)}>Another</button>
            <button type="button" class="small" onClick=${() => (asked.value = { ...asked.value, ...image, seed: String(image.seed) })}>Use seed</button>`}
          ${edits && html`<button type="button" class="small" onClick=${() => edit(image)}>Edit</button>`}
          <a class="small" href=${image.url} download=${`hearth-${image.seed}.png`}>Save</a>
          <button type="button" class="small" aria-label="Remove from the list" onClick=${() => forget(image)}>×</button>
        </span>
      </figcaption>
    </figure>`)}</div>
    ${!gallery.value.length && !busy && html`<p class="empty">Images are listed here, in this browser, for as long as the server keeps them.</p>`}`;
}
