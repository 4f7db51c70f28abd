// Speech: the voices by language, their speech to hear and to save; and transcription of recordings.
import { get, send } from "./api.js";
import { html, useEffect, useSignal } from "./lib.js";
import { Transcription } from "./sound.js";
import { Failure, Field, trying } from "./widgets.js";

const NAMES = new Intl.DisplayNames(["en"], { type: "language" });
// A greeting in each shipped language, as a first text.
const GREETINGS = { am: "ሰላም ለዓለም።", ti: "ሰላም ንዓለም።", so: "Salaan adduunka.", om: "Akkam jirtu.", en: "Hello, world." };

export function Voices({ models: served }) {
  const error = useSignal(null), text = useSignal(""), language = useSignal(null), chosen = useSignal(null);
  const speed = useSignal("1"), format = useSignal("mp3"), sound = useSignal(null), busy = useSignal(false);
  const found = useSignal(null);
  useEffect(() => {
    const ask = async () => {
      const { data: models } = await get("v1/audio/models");
      const lists = await Promise.all(models.map(({ id }) => get(`v1/audio/voices?model=${encodeURIComponent(id)}`)));
      found.value = lists.flatMap((list, at) => list.voices.map((voice) => ({ ...voice, servedBy: models[at].id })));
    };
    ask().catch((failure) => (error.value = failure));
    return () => sound.value && URL.revokeObjectURL(sound.value.url);
  }, []);
  const voices = (found.value ?? []).filter((voice) => voice.available);
  const languages = [...new Set(voices.map((voice) => voice.language))];
  const spoken = language.value ?? languages[0];
  const able = voices.filter((voice) => voice.language === spoken);
  const voice = able.find((one) => one.id === chosen.value) ?? able[0];
  const speak = (event) => {
    event.preventDefault();
    const input = text.value || GREETINGS[spoken] || "Hello, world.";
    const body = { model: voice.servedBy, voice: voice.id, input, speed: Number(speed.value), response_format: format.value };
    trying(async () => {
      const came = await (await send("v1/audio/speech", { body })).blob();
      if (sound.value) URL.revokeObjectURL(sound.value.url);
      sound.value = { url: URL.createObjectURL(came), name: `${voice.id}.${format.value}`, said: input };
    }, error, busy);
  };
  return html`<h1>Voices</h1>
    <form onSubmit=${speak}>
      <div class="row">
        <${Field} label="Language"><select value=${spoken} onChange=${(event) => (language.value = event.target.value)}>
          ${languages.map((code) => html`<option key=${code} value=${code}>${NAMES.of(code)}</option>`)}
        </select><//>
        <${Field} label="Voice"><select value=${voice?.id} onChange=${(event) => (chosen.value = event.target.value)}>
          ${able.map((one) => html`<option key=${one.id} value=${one.id}>${one.name} (${one.gender}${one.demo ? ", demo" : ""})</option>`)}
        </select><//>
        <${Field} label="Speed"><input type="number" min="0.25" max="4" step="0.05" required value=${speed.value}
          onInput=${(event) => (speed.value = event.target.value)} /><//>
        <${Field} label="File"><select value=${format.value} onChange=${(event) => (format.value = event.target.value)}>
          ${["mp3", "wav", "flac", "opus"].map((one) => html`<option key=${one}>${one}</option>`)}
        </select><//>
      </div>
      <${Field} label="What it says"><textarea rows="4" dir="auto" lang=${spoken} maxlength="4096" placeholder=${GREETINGS[spoken]}
        value=${text.value} onInput=${(event) => (text.value = event.target.value)}></textarea><//>
      <button class="main" disabled=${!voice || busy.value}>${busy.value ? "Speaking" : "Speak"}</button>
      <${Failure} error=${error.value} />
    </form>
    ${voice && html`<p><small dir="auto">${[voice.description, voice.quality, voice.licence].filter(Boolean).join(", ")}</small></p>`}
    ${sound.value && html`<figure class="sound" key=${sound.value.url}>
      <figcaption dir="auto">${sound.value.said}</figcaption>
      <audio controls autoplay src=${sound.value.url} aria-label=${sound.value.said}></audio>
      <a href=${sound.value.url} download=${sound.value.name}>Save ${sound.value.name}</a>
    </figure>`}
    ${found.value && !voices.length && html`<p>Your key may use no model that speaks, or none has a voice.</p>`}
    <${Transcription} models=${served} />`;
}
