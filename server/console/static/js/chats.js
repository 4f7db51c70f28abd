// The chats of this tab: kept in its sessionStorage, never on the server. Requests to the model, and its answers.
import { ApiError, events, leaving } from "./api.js";
import { signal } from "./lib.js";
import { save, say } from "./widgets.js";

const KEPT = "hearth.chats";
export const SETTINGS = { model: "", system: "", temperature: "", top_p: "", max_tokens: "", seed: "", reasoning_effort: "", tools: "" };
export const chats = signal(restored());
export const open = signal(chats.value[0].id);
export const live = signal({}); // answers that come in, one for each chat at most: {message, abort} by the chat's id
export const pulse = signal(0); // grows with every frame that has more of an answer

function fresh(settings = SETTINGS) {
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "New chat", settings: { ...settings }, messages: [] };
}

function restored() {
  try {
    const kept = JSON.parse(sessionStorage.getItem(KEPT));
    if (kept.length) return kept.map(checked);
  } catch {
    // none were kept, or by another release
  }
  return [fresh()];
}

export const current = () => chats.value.find((chat) => chat.id === open.value) ?? chats.value[0];

export function change(id, changes) {
  chats.value = chats.value.map((chat) => (chat.id === id ? { ...chat, ...changes } : chat));
  keep();
}

addEventListener("pagehide", () => !leaving && keep()); // also the parts of incomplete answers

function keep() {
  const all = chats.value.map((chat) => {
    const came = live.value[chat.id]?.message;
    return came ? { ...chat, messages: [...chat.messages, { ...came, stats: "stopped" }] } : chat;
  });
  try {
    sessionStorage.setItem(KEPT, JSON.stringify(all));
  } catch {
    const small = (key, value) => (key === "pictures" ? [] : value); // there is room for some MB
    try {
      sessionStorage.setItem(KEPT, JSON.stringify(all, small));
    } catch {
      say("These chats are too long to be kept when the page is loaded again. Export them.");
    }
  }
}

export function add() {
  const made = fresh(current().settings);
  chats.value = [made, ...chats.value];
  open.value = made.id;
  keep();
}

export function remove(id) {
  live.value[id]?.abort.abort();
  chats.value = chats.value.filter((chat) => chat.id !== id);
  if (!chats.value.length) chats.value = [fresh()];
  if (open.value === id) open.value = chats.value[0].id;
  keep();
}

export const exportAll = () => save("hearth-chats.json", JSON.stringify({ chats: chats.value }, null, 1), "application/json");

export async function importFrom(file) {
  const found = await file.text().then(JSON.parse).catch(() => null);
  if (!Array.isArray(found?.chats) || !found.chats.length) {
    throw new Error("There are no chats in this file. Choose one that “Export all chats” has saved.");
  }
  chats.value = [...found.chats.map((chat) => ({ ...checked(chat), id: fresh().id })), ...chats.value];
  say(`Chats added: ${found.chats.length}.`);
  open.value = chats.value[0].id;
  keep();
}

// A file may hold anything: what does not have our form is left out, and every text is a string.
function checked(chat) {
  const text = (value) => (typeof value === "string" ? value : "");
  const settings = Object.fromEntries(Object.keys(SETTINGS).map((name) => [name, text(chat?.settings?.[name])]));
  const list = (value) => (Array.isArray(value) ? value.filter((one) => one) : []);
  const call = (it) => ({ id: text(it.id), name: text(it.name), arguments: text(it.arguments) });
  const messages = list(chat?.messages).map((one) => ({
    role: ["user", "assistant", "tool"].includes(one.role) ? one.role : "user",
    text: text(one.text),
    pictures: list(one.pictures).filter((it) => /^data:image\/(png|jpeg|webp);/.test(it)),
    reasoning: text(one.reasoning),
    calls: list(one.calls).map(call),
    call: text(one.call),
    stats: text(one.stats),
    error: text(one.error),
  }));
  return { id: text(chat?.id) || fresh().id, title: text(chat?.title) || "Chat", settings, messages };
}

const EMPTY = { text: "", pictures: [], reasoning: "", calls: [], call: "", stats: "", error: "" };
export const message = (role, fields) => ({ role, ...EMPTY, ...fields });

function wire(one) {
  if (one.role === "tool") return { role: "tool", tool_call_id: one.call, content: one.text };
  if (one.role === "assistant") {
    const calls = one.calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
    return { role: "assistant", content: one.text || (calls.length ? null : ""), ...(calls.length ? { tool_calls: calls } : {}) };
  }
  if (!one.pictures.length) return { role: "user", content: one.text };
  const pictures = one.pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role: "user", content: [...pictures, ...(one.text ? [{ type: "text", text: one.text }] : [])] };
}

// The body of the request for the next answer. Throws if a setting is not a number, or the tools are not JSON.
export function bodyOf(chat, model) {
  const body = { model, messages: [] };
  if (chat.settings.system) body.messages.push({ role: "system", content: chat.settings.system });
  body.messages.push(...chat.messages.filter((one) => !one.error || one.text).map(wire));
  for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
    if (chat.settings[name] === "") continue;
    body[name] = Number(chat.settings[name]);
    if (Number.isNaN(body[name])) throw new Error(`${name} must be a number.`);
  }
  if (chat.settings.reasoning_effort) body.reasoning_effort = chat.settings.reasoning_effort;
  if (chat.settings.tools.trim()) {
    try {
      body.tools = JSON.parse(chat.settings.tools);
    } catch {
      throw new Error("The tools must be JSON: a list of functions.");
    }
  }
  return body;
}

export async function answer(id, model) {
  const chat = chats.value.find((one) => one.id === id);
  const came = message("assistant", { calls: [] }), abort = new AbortController();
  const began = performance.now();
  let first = null, usage = null, finish = null, asked = false;
  const draw = () => {
    if (!asked) requestAnimationFrame(() => ((asked = false), pulse.value++));
    asked = true;
  };
  live.value = { ...live.value, [id]: { message: came, abort } };
  try {
    const body = { ...bodyOf(chat, model), stream: true, stream_options: { include_usage: true } };
    for await (const event of events("v1/chat/completions", body, abort.signal)) {
      usage = event.usage ?? usage;
      const [choice] = event.choices;
      if (!choice) continue;
      finish = choice.finish_reason ?? finish;
      const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
      if (content || reasoning || calls) first ??= performance.now();
      came.text += content ?? "";
      came.reasoning += reasoning ?? "";
      for (const call of calls ?? []) {
        const known = (came.calls[call.index] ??= { id: "", name: "", arguments: "" });
        known.id ||= call.id ?? "";
        known.name ||= call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      draw();
    }
    if (!finish) throw new ApiError(0, { message: "The connection ended before the answer did." });
  } catch (error) {
    if (error.name === "AbortError") finish = "stopped";
    else came.error = error.message;
  }
  came.stats = summary(usage, began, first, finish);
  const { [id]: _, ...others } = live.value;
  live.value = others;
  const now = chats.value.find((one) => one.id === id);
  if (now && (came.text || came.reasoning || came.calls.length || came.error)) change(id, { messages: [...now.messages, came] });
}

function summary(usage, began, first, finish) {
  const parts = [];
  if (usage && first) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (seconds > 0.01) parts.push(`${(usage.completion_tokens / seconds).toFixed(0)} tokens/s`); // else it came in one piece
    parts.push(`first after ${((first - began) / 1000).toFixed(2)} s`, `prompt ${usage.prompt_tokens} tokens`);
  }
  if (finish === "length") parts.push("cut: the longest answer allowed");
  if (finish === "stopped") parts.push("stopped");
  return parts.join(" · ");
}
