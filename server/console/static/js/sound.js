// From sound to text: sends recordings and sound files to a model that transcribes.
import { ApiError, events, send } from "./api.js";
import { html, useEffect, useRef, useSignal } from "./lib.js";
import { Copy, Failure, Field, save } from "./widgets.js";

const KINDS = { webm: "audio/webm;codecs=opus", ogg: "audio/ogg;codecs=opus", m4a: "audio/mp4" };
const REFUSED = {
  NotAllowedError: "The browser refuses this page the microphone. Allow it beside the address, or choose a sound file.",
  NotFoundError: "This device has no microphone. Choose a sound file instead.",
  NotReadableError: "The microphone cannot be opened; another program may be using it. Choose a sound file instead.",
};
const NO_HTTPS = "Browsers allow the microphone only on pages with HTTPS and on the server's own machine (localhost). "
  + "Choose a sound file instead, or ask your administrator for HTTPS.";
// Languages that people here speak come first; a model that does not know one of these says so.
const LANGUAGES = ["am", "so", "sw", "ar", "en", "fr", "de", "es", "it", "pt", "tr", "hi", "zh"];
const NAMES = new Intl.DisplayNames(["en"], { type: "language" });

export const transcribing = (models) => (models ?? []).filter((model) => model.capabilities.includes("transcription"));

async function openMicrophone() {
  if (!isSecureContext) throw new Error(NO_HTTPS);
  if (!navigator.mediaDevices?.getUserMedia || !window.MediaRecorder) throw new Error("This browser cannot record sound. Choose a sound file instead.");
  try {
    return await navigator.mediaDevices.getUserMedia({ audio: true });
  } catch (error) {
    throw new Error(REFUSED[error.name] ?? REFUSED.NotReadableError);
  }
}

// Starts and stops a recording; `done` gets it as a file. Leaving the page discards it.
export function Record({ label, disabled, done, failed }) {
  const seconds = useSignal(null), busy = useSignal(false), recorder = useRef(null), left = useRef(false);
  const end = (stream, timer) => {
    clearInterval(timer);
    stream.getTracks().forEach((track) => track.stop());
  };
  useEffect(() => () => {
    left.current = true;
    recorder.current?.stop();
  }, []);
  const start = async () => {
    failed(null);
    busy.value = true;
    try {
      const stream = await openMicrophone();
      if (left.current) return end(stream);
      const kind = Object.keys(KINDS).find((one) => MediaRecorder.isTypeSupported(KINDS[one]));
      const made = (recorder.current = new MediaRecorder(stream, { mimeType: KINDS[kind], audioBitsPerSecond: 64000 }));
      const began = Date.now(), parts = [];
      const timer = setInterval(() => (seconds.value = Math.floor((Date.now() - began) / 1000)), 500);
      made.ondataavailable = (event) => parts.push(event.data);
      made.onstop = () => {
        end(stream, timer);
        recorder.current = null;
        if (left.current) return;
        seconds.value = null;
        done(new File(parts, `recording.${kind}`, { type: made.mimeType }));
      };
      made.start(1000);
      seconds.value = 0;
    } catch (error) {
      failed(error);
    }
    busy.value = false;
  };
  if (seconds.value === null) return html`<button key="start" type="button" disabled=${disabled || busy.value} onClick=${start}>${label}</button>`;
  const time = `${Math.floor(seconds.value / 60)}:${String(seconds.value % 60).padStart(2, "0")}`;
  return html`<button key="stop" type="button" class="main" onClick=${() => recorder.current.stop()}>
    Stop recording <span aria-hidden="true">${time}</span></button>`;
}

// Transcribes a file. `draw` gets the text each time that there is more of it.
export async function transcribe(file, { model, language, english }, draw, abort) {
  const form = formOf(file, { model, stream: "true", ...(language && !english ? { language } : {}) });
  let text = "", complete = false;
  for await (const event of events(pathOf(english), form, abort)) {
    complete = event.type === "transcript.text.done";
    text = complete ? event.text : text + (event.delta ?? "");
    draw?.(text);
  }
  if (!complete) throw new ApiError(0, { message: "The connection ended before the text did." });
  return text;
}

const pathOf = (english) => `v1/audio/${english ? "translations" : "transcriptions"}`;

function formOf(file, fields) {
  const form = new FormData();
  for (const [name, value] of Object.entries(fields)) form.append(name, value);
  form.append("file", file, file.name);
  return form;
}

export function Transcription({ models }) {
  const error = useSignal(null), sound = useSignal(null), text = useSignal(null), busy = useSignal(null), over = useSignal(false);
  const asked = useSignal({ model: "", language: "", english: false, form: "text" }), input = useRef();
  useEffect(() => () => {
    busy.value?.abort();
    if (sound.value) URL.revokeObjectURL(sound.value.url);
  }, []);
  const able = transcribing(models);
  if (!able.length) return null;
  const model = able.find((one) => one.id === asked.value.model) ?? able[0];
  const set = (name, value) => (asked.value = { ...asked.value, [name]: value });
  const start = async (file) => {
    if (busy.value) return;
    const { form, ...fields } = { ...asked.value, model: model.id };
    error.value = null;
    text.value = "";
    busy.value = new AbortController();
    try {
      const { signal } = busy.value;
      if (form === "text") await transcribe(file, fields, (more) => (text.value = more), signal);
      else text.value = await (await send(pathOf(fields.english), { body: formOf(file, { model: model.id, response_format: form }), signal })).text();
    } catch (failure) {
      if (failure.name !== "AbortError") error.value = failure;
      if (!text.value) text.value = null;
    }
    busy.value = null;
  };
  const take = (file) => {
    if (!file || busy.value) return;
    if (sound.value) URL.revokeObjectURL(sound.value.url);
    sound.value = { file, url: URL.createObjectURL(file) };
    start(file);
  };
  const dropped = (event) => {
    event.preventDefault();
    over.value = false;
    take(event.dataTransfer.files[0]);
  };
  const choice = (name, label, options) => html`<${Field} label=${label}><select value=${asked.value[name]}
    onChange=${(event) => set(name, event.target.value)}>
    ${options.map(([value, title]) => html`<option key=${value} value=${value}>${title}</option>`)}</select><//>`;
  return html`<section aria-label="Transcription" class=${`drop ${over.value ? "over" : ""}`} onDrop=${dropped}
    onDragOver=${(event) => (event.preventDefault(), (over.value = true))} onDragLeave=${() => (over.value = false)}>
    <h2>Transcription</h2>
    <p>Record something, or drop a sound file here: WAV, MP3, M4A, OGG, FLAC or WebM.</p>
    <div class="row">
      ${able.length > 1 && choice("model", "Model", able.map(({ id }) => [id, id]))}
      ${choice("language", "Spoken language", [["", "detected"], ...LANGUAGES.map((code) => [code, NAMES.of(code)])])}
      ${choice("form", "Result as", [["text", "text"], ["srt", "subtitles (SRT)"], ["vtt", "subtitles (VTT)"]])}
      ${model.capabilities.includes("translation") && html`<label><input type="checkbox" checked=${asked.value.english}
        onChange=${(event) => set("english", event.target.checked)} /> in English</label>`}
    </div>
    <div class="row">
      <${Record} label="Record" disabled=${Boolean(busy.value)} done=${take} failed=${(failure) => (error.value = failure)} />
      <button type="button" disabled=${Boolean(busy.value)} onClick=${() => input.current.click()}>Choose a file</button>
      <input type="file" ref=${input} class="hidden" accept="audio/*,video/webm,video/mp4,.opus,.flac" aria-label="Sound file" tabindex="-1"
        onChange=${(event) => (take(event.target.files[0]), (event.target.value = ""))} />
      ${sound.value && !busy.value && html`<button type="button" onClick=${() => start(sound.value.file)}>Again</button>`}
      ${busy.value && html`<button type="button" class="main" onClick=${() => busy.value.abort()}>Stop</button>`}
    </div>
    <${Failure} error=${error.value} />
    ${sound.value && html`<figure class="sound"><figcaption dir="auto">${sound.value.file.name}</figcaption>
      <audio controls src=${sound.value.url} aria-label=${`Sound: ${sound.value.file.name}`}></audio></figure>`}
    ${text.value !== null && html`<div class="transcript" role="log" aria-label="Transcript" aria-busy=${Boolean(busy.value)} tabindex="0">
      <p class="plain" dir="auto">${text.value}</p>
      ${busy.value && !text.value && html`<p class="wait">Listening</p>`}
      ${!busy.value && !text.value.trim() && html`<p>No speech was found in it.</p>`}
    </div>`}
    ${text.value && !busy.value && html`<div class="row"><${Copy} text=${text.value} />
      <button type="button" class="small" onClick=${() => save(`transcript.${ending(text.value)}`, text.value, "text/plain")}>Save</button></div>`}
  </section>`;
}

const ending = (text) => (text.startsWith("WEBVTT") ? "vtt" : /^1\n\d\d:.*-->/.test(text) ? "srt" : "txt");
