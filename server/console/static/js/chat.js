// Talking to a model: messages, what is sent, and how it is asked.
import { base, me } from "./api.js";
import * as kept from "./chats.js";
import { Component, html, signal, useEffect, useRef, useSignal } from "./lib.js";
import { Markdown } from "./markdown.js";
import { Record, transcribe, transcribing } from "./sound.js";
import { Copy, Failure, Field, trying } from "./widgets.js";

const problem = signal(null);

export function ChatList() {
  return html`<ul class="chats" aria-label="Chats">${kept.chats.value.map((chat) => html`<li key=${chat.id}>
    <button type="button" class="link" dir="auto" aria-current=${chat.id === kept.open.value ? "true" : undefined}
      onClick=${() => (kept.open.value = chat.id)}>${chat.title}</button>
    <button type="button" class="small" aria-label=${`Delete the chat ${chat.title}`} onClick=${() => kept.remove(chat.id)}>×</button>
  </li>`)}</ul>`;
}

export function Chat({ models, failed }) {
  const chat = kept.current();
  const able = (models ?? []).filter((model) => model.capabilities.includes("chat"));
  const model = able.find((one) => one.id === chat.settings.model) ?? able[0];
  const live = kept.live.value[chat.id];
  useEffect(() => {
    const escape = (event) => event.key === "Escape" && kept.live.value[kept.open.value]?.abort.abort();
    addEventListener("keydown", escape);
    return () => removeEventListener("keydown", escape);
  }, []);
  const ask = (messages, changes = {}) => {
    if (live || !model) return;
    problem.value = null;
    kept.change(chat.id, { ...changes, messages });
    kept.answer(chat.id, model.id);
  };
  return html`<div class="toolbar">
      <h1 class="hidden">Chat</h1>
      <select aria-label="Model" value=${model?.id} onChange=${(event) => set(chat, "model", event.target.value)}>
        ${able.map((one) => html`<option key=${one.id} value=${one.id}>
          ${one.id}${one.status === "ready" ? "" : ` (${one.status})`}
        </option>`)}
      </select>
      <button type="button" onClick=${kept.add}>New chat</button>
      <details class="more"><summary>Settings</summary><${Settings} chat=${chat} model=${model} /></details>
    </div>
    <${Messages} chat=${chat} live=${live} ask=${ask} />
    <${Failure} error=${problem.value ?? failed} />
    ${models && !able.length && html`<p>Your key may use no model that chats.</p>`}
    <${Composer} key=${chat.id} chat=${chat} live=${live} ask=${ask} ready=${Boolean(model) && !live}
      seeing=${model?.capabilities.includes("vision")} hears=${me.value.scopes.includes("audio") && transcribing(models)[0]?.id} />`;
}

const set = (chat, name, value) => kept.change(chat.id, { settings: { ...chat.settings, [name]: value } });

function Settings({ chat, model }) {
  const input = (name) => ({ value: chat.settings[name], onInput: (event) => set(chat, name, event.target.value) });
  const file = useRef();
  const curl = () => {
    try {
      const body = JSON.stringify(kept.bodyOf(chat, model?.id ?? ""), null, 1).replaceAll("'", "'\\''");
      const headers = `-H "Authorization: Bearer $HEARTH_KEY" -H 'Content-Type: application/json'`;
      return `curl ${base}v1/chat/completions ${headers} -d '${body}'`;
    } catch (error) {
      return error.message;
    }
  };
  const take = async (event) => {
    problem.value = null;
    await kept.importFrom(event.target.files[0]).catch((error) => (problem.value = error));
    event.target.value = ""; // so that the same file can be chosen again
  };
  return html`<div class="settings">
    <${Field} label="System prompt"><textarea rows="2" dir="auto" ...${input("system")}></textarea><//>
    <div class="row">
      <${Field} label="Temperature"><input type="number" min="0" max="2" step="0.1" placeholder="the model's" ...${input("temperature")} /><//>
      <${Field} label="Top p"><input type="number" min="0" max="1" step="0.05" placeholder="the model's" ...${input("top_p")} /><//>
      <${Field} label="Longest answer"><input type="number" min="1" placeholder="tokens" ...${input("max_tokens")} /><//>
      <${Field} label="Seed"><input type="number" placeholder="random" ...${input("seed")} /><//>
      <${Field} label="Reasoning"><select ...${input("reasoning_effort")}>
        <option value="">the model's</option>
        ${["none", "low", "medium", "high", "max"].map((effort) => html`<option key=${effort}>${effort}</option>`)}
      </select><//>
    </div>
    <${Field} label="Tools (JSON)" hint="A list as in the OpenAI convention. Calls are shown; you write what the tool would say.">
      <textarea rows="2" class="code" spellcheck="false" ...${input("tools")}></textarea>
    <//>
    <div class="row">
      <${Copy} text=${curl()} label="Copy as curl" />
      <button type="button" class="small" onClick=${kept.exportAll}>Export all chats</button>
      <button type="button" class="small" onClick=${() => file.current.click()}>Import</button>
      <input type="file" ref=${file} class="hidden" accept="application/json" aria-label="File of chats" tabindex="-1" onChange=${take} />
    </div>
    <p><small>Chats are kept in this tab alone, and not on the server.</small></p>
  </div>`;
}

function Messages({ chat, live, ask }) {
  const end = useRef(), follow = useRef(true);
  kept.pulse.value; // so it is drawn again with each frame of a stream
  useEffect(() => {
    if (follow.current) end.current.scrollTop = end.current.scrollHeight;
  });
  const scrolled = () => {
    follow.current = end.current.scrollHeight - end.current.scrollTop - end.current.clientHeight < 60;
  };
  const all = live ? [...chat.messages, live.message] : chat.messages; // where it stays once it is whole: drawn once
  const act = useRef({}).current; // always the same object, so that messages are not drawn again
  Object.assign(act, {
    edit: (at, text) => ask([...chat.messages.slice(0, at), { ...chat.messages[at], text }]),
    again: (at) => ask(chat.messages.slice(0, at)),
    result: (results) => ask([...chat.messages, ...results]),
  });
  const empty = !all.length;
  return html`<div class="messages" ref=${end} onScroll=${scrolled} tabindex="0" role="log" aria-label="Messages" aria-live="off">
    ${empty && html`<p class="empty">Ask something. Answers come from models on this server; nothing leaves it.</p>`}
    ${all.map((one, at) => html`<${Drawn} key=${`${chat.id}-${at}`} one=${one === live?.message ? { ...one } : one} at=${at} act=${act}
      busy=${Boolean(live)} streaming=${one === live?.message} last=${at === all.length - 1} />`)}
  </div>`;
}

class Drawn extends Component {
  shouldComponentUpdate(next) {
    return ["one", "busy", "last"].some((name) => next[name] !== this.props[name]);
  }

  render(props) {
    return html`<${Message} ...${props} />`;
  }
}

const focus = (element) => element?.focus();

function Message({ one, at, act, busy, streaming, last }) {
  const draft = useSignal(null);
  const button = (text, act) => html`<button type="button" class="small" disabled=${busy} onClick=${act}>${text}</button>`;
  if (draft.value !== null) {
    const close = () => {
      draft.value = null;
      focus(document.getElementById("message"));
    };
    const submit = (event) => {
      event.preventDefault();
      if (busy || !draft.value.trim()) return;
      act.edit(at, draft.value);
      close();
    };
    return html`<form class="message user" onSubmit=${submit}>
      <textarea rows="3" dir="auto" aria-label="Your message" ref=${focus} value=${draft.value}
        onInput=${(event) => (draft.value = event.target.value)}></textarea>
      <div class="row"><button class="main" disabled=${busy}>Send</button><button type="button" onClick=${close}>Cancel</button></div>
    </form>`;
  }
  const waits = streaming && !one.text && !one.calls.length;
  const who = { user: "You", assistant: "Model", tool: "Tool" }[one.role];
  return html`<article class=${`message ${one.role}`} aria-label=${who} aria-busy=${Boolean(streaming)}>
    ${one.pictures.map((url, at) => html`<img key=${at} src=${url} alt="Picture that was sent" />`)}
    ${one.reasoning && html`<details class="reasoning"><summary>Reasoning</summary><${Markdown} text=${one.reasoning} /></details>`}
    ${one.role === "assistant" ? one.text && html`<${Markdown} text=${one.text} />` : html`<p class="plain" dir="auto">${one.text}</p>`}
    ${one.calls.map((call, at) => html`<div class="call" key=${at}>
      <p>Calls <code>${call.name}</code></p><pre tabindex="0"><code>${pretty(call.arguments)}</code></pre>
    </div>`)}
    ${!streaming && one.calls.length > 0 && last && html`<${Results} calls=${one.calls} send=${act.result} />`}
    ${waits && html`<p class="wait">${one.reasoning ? "Thinking" : "Waiting for the first token"}</p>`}
    <${Failure} error=${one.error} />
    ${!streaming && html`<footer>
      ${one.stats && html`<small>${one.stats}</small>`}
      ${one.text && html`<${Copy} text=${one.text} />`}
      ${one.role === "user" && button("Edit", () => (draft.value = one.text))}
      ${one.role === "assistant" && button("Regenerate", () => act.again(at))}
    </footer>`}
  </article>`;
}

function pretty(json) {
  try {
    return JSON.stringify(JSON.parse(json), null, 2);
  } catch {
    return json;
  }
}

function Results({ calls, send }) {
  const texts = useSignal(calls.map(() => ""));
  const write = (at) => (event) => (texts.value = texts.value.with(at, event.target.value));
  const submit = (event) => {
    event.preventDefault();
    send(calls.map((call, at) => kept.message("tool", { text: texts.value[at], call: call.id })));
  };
  return html`<form onSubmit=${submit}>
    ${calls.map((call, at) => html`<${Field} key=${at} label=${`What ${call.name} says`}>
      <textarea rows="1" dir="auto" required value=${texts.value[at]} onInput=${write(at)}></textarea>
    <//>`)}
    <button>Send</button>
  </form>`;
}

function Composer({ chat, live, ask, ready, seeing, hears }) {
  const text = useSignal(""), pictures = useSignal([]), listening = useSignal(false), file = useRef(), area = useRef();
  const dictated = async (sound) => {
    await trying(async () => {
      const said = await transcribe(sound, { model: hears });
      if (!said) throw new Error("No speech was found in the recording.");
      text.value = `${text.value}${text.value && !/\s$/.test(text.value) ? " " : ""}${said}`;
    }, problem, listening);
    area.current?.focus();
  };
  const take = async (files) => {
    const images = [...files].filter((one) => ["image/png", "image/jpeg", "image/webp"].includes(one.type));
    if (files.length && !seeing) return (problem.value = new Error("This model does not see pictures. Choose one that does."));
    if (images.length < files.length) problem.value = new Error("Only pictures can be sent: PNG, JPEG or WebP.");
    pictures.value = [...pictures.value, ...(await Promise.all(images.map(asDataUrl)))];
  };
  const submit = (event) => {
    event.preventDefault();
    if (!ready || (!text.value.trim() && !pictures.value.length)) return;
    const title = chat.messages.length ? chat.title : text.value.trim().slice(0, 60) || "Picture";
    ask([...chat.messages, kept.message("user", { text: text.value, pictures: pictures.value })], { title });
    text.value = "";
    pictures.value = [];
  };
  const typed = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  };
  useEffect(() => {
    const dropped = (event) => take(event.dataTransfer.files); // anywhere on the page
    addEventListener("drop", dropped);
    return () => removeEventListener("drop", dropped);
  }, [seeing]);
  const drop = (at) => (pictures.value = pictures.value.toSpliced(at, 1));
  return html`<form class="composer" onSubmit=${submit}>
    ${pictures.value.map((url, at) => html`<span class="picture" key=${at}><img src=${url} alt="Picture to send" />
      <button type="button" class="small" aria-label="Remove the picture" onClick=${() => drop(at)}>×</button></span>`)}
    <textarea id="message" rows="2" dir="auto" ref=${area} aria-label="Message" placeholder=${listening.value ? "Listening" : "Message"} autofocus
      value=${text.value} onKeyDown=${typed}
      onInput=${(event) => (text.value = event.target.value)} onPaste=${(event) => take(event.clipboardData.files)}></textarea>
    <div class="row">
      ${seeing && html`<button type="button" onClick=${() => file.current.click()}>Picture</button>
        <input type="file" ref=${file} class="hidden" multiple accept="image/png,image/jpeg,image/webp"
          aria-label="Pictures" tabindex="-1" onChange=${(event) => (take(event.target.files), (event.target.value = ""))} />`}
      ${hears && html`<${Record} label="Dictate" disabled=${listening.value} done=${dictated} failed=${(error) => (problem.value = error)} />`}
      ${live
        ? html`<button key="stop" type="button" class="main" onClick=${() => live.abort.abort()}>Stop</button>`
        : html`<button key="send" class="main" disabled=${!ready}>Send</button>`}
    </div>
  </form>`;
}

function asDataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
