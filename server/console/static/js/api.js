// Talks to the server: the session, requests, and streams of events. The key itself is never kept here.
import { computed, signal } from "./lib.js";

const TOKEN = "hearth.session";
export const base = new URL(".", location.origin + location.pathname).href; // ends in a slash, also behind a proxy's path
export const me = signal(null); // the key that has signed in, as GET /v1/key shows it
export const isAdmin = computed(() => me.value?.scopes.includes("admin") ?? false);
export const ended = signal(null); // why a session has ended
let token = sessionStorage.getItem(TOKEN);
export let leaving = false;
let heard = 0; // when the server last accepted this session

// A new tab asks the others for their half of the session; it already has the cookie. Signing in replaces that cookie,
// so all tabs have to change with it.
const tabs = new BroadcastChannel("hearth");
let arrived = () => refreshMe().catch(() => {});
tabs.onmessage = ({ data }) => {
  if (data === "token?" && token) tabs.postMessage({ token });
  if (data === "signed out") leave();
  if (data?.token && (data.fresh || !token)) {
    keep(data.token);
    arrived();
  }
};

function keep(value) {
  token = value;
  sessionStorage.setItem(TOKEN, value);
}

// Chats stay in the tab: after the end of a key one can go on with another.
function forget() {
  token = null;
  me.value = null;
  sessionStorage.removeItem(TOKEN);
  ended.value = new Error("Your session has ended: it was too old, or its key has expired or was revoked. "
    + "Sign in again; the chats of this tab are still here.");
}

// Nothing of it stays for the next user.
function leave() {
  leaving = true;
  sessionStorage.clear();
  location.reload();
}

export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    this.param = error?.param ?? null;
    this.retryAfter = retryAfter;
  }
}

export async function send(path, { method, body, signal: abort } = {}) {
  const headers = token ? { "X-Hearth-Session": token } : {};
  if (body instanceof FormData) method ??= "POST";
  else if (body !== undefined) {
    headers["Content-Type"] = "application/json";
    method ??= "POST";
    body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(base + path, { method, headers, body, signal: abort, credentials: "same-origin" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The server cannot be reached. Is it running?" });
  }
  if (answer.ok && token) heard = performance.now();
  if (answer.ok || path === "health/ready") return answer; // that one is 503 while a model loads
  const failure = await answer.json().catch(() => ({}));
  if (answer.status === 401 && token && path !== "console/session") forget();
  throw new ApiError(answer.status, failure.error, answer.headers.get("Retry-After"));
}

export const get = async (path, options) => (await send(path, options)).json();
export const post = (path, body) => get(path, { method: "POST", body });

// The events of a stream, parsed, without the last "[DONE]". Ending it early ends the request.
export async function* events(path, body, abort) {
  const answer = await send(path, { body, signal: abort });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").find((line) => line.startsWith("data: "))?.slice(6);
        if (data && data !== "[DONE]") {
          const event = JSON.parse(data);
          if (event.error) throw new ApiError(500, event.error);
          yield event;
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { message: "The connection was lost before the answer was complete." });
  }
}

// Seconds since the server last accepted this session.
export const sinceHeard = () => (performance.now() - heard) / 1000;

export async function signIn(body) {
  const answer = await post("console/session", body);
  keep(answer.token);
  tabs.postMessage({ token: answer.token, fresh: true });
  ended.value = null;
  me.value = answer.key;
}

export async function signOut() {
  await send("console/session", { method: "DELETE" }).catch(() => {});
  tabs.postMessage("signed out");
  leave();
}

export async function refreshMe() {
  me.value = await get("v1/key");
  ended.value = null;
}

// A sign-in link, a session of this tab, or one of another tab. Nothing of the link stays in the address.
export async function start() {
  const once = /^#once=(.+)$/.exec(location.hash)?.[1];
  if (once) history.replaceState(null, "", location.pathname);
  if (once) return signIn({ once });
  if (!token) {
    const later = arrived;
    tabs.postMessage("token?");
    await new Promise((resolve) => ((arrived = resolve), setTimeout(resolve, 200)));
    arrived = later;
  }
  if (token) await refreshMe();
}
