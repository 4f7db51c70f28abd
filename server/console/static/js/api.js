// Talks to the server: the session, requests, and streams of events. The key itself is never kept here.
import { computed, signal } from "./lib.js";

const TOKEN = "hearth.session";
export const base = new URL(".", location.origin + location.pathname).href; // ends in a slash, also behind a proxy's path
export const me = signal(null); // the key that has signed in, as GET /v1/key shows it
export const isAdmin = computed(() => me.value?.scopes.includes("admin") ?? false);
let token = sessionStorage.getItem(TOKEN);

// A new tab asks the others for their half of the session; the cookie it has already.
const tabs = new BroadcastChannel("hearth");
tabs.onmessage = ({ data }) => {
  if (data === "token?" && token) tabs.postMessage({ token });
  if (data === "signed out") forget();
  if (data?.token && !token) keep(data.token);
};

function keep(value) {
  token = value;
  sessionStorage.setItem(TOKEN, value);
}

function forget() {
  token = null;
  me.value = null;
  sessionStorage.clear();
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
  if (answer.ok || path === "health/ready") return answer; // that one is 503 while a model loads
  const failure = await answer.json().catch(() => ({}));
  if (answer.status === 401 && token && path !== "console/session") forget();
  throw new ApiError(answer.status, failure.error, answer.headers.get("Retry-After"));
}

export const get = async (path, options) => (await send(path, options)).json();
export const post = (path, body) => get(path, { method: "POST", body });

// The events of a stream, parsed, without the last "[DONE]".
export async function* events(path, body, abort) {
  const answer = await send(path, { body, signal: abort });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
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
}

export async function signIn(body) {
  const answer = await post("console/session", body);
  keep(answer.token);
  me.value = answer.key;
}

export async function signOut() {
  await send("console/session", { method: "DELETE" }).catch(() => {});
  tabs.postMessage("signed out");
  forget();
}

export async function refreshMe() {
  me.value = await get("v1/key");
}

// A sign-in link, a session of this tab, or one of another tab. Nothing of the link stays in the address.
export async function start() {
  const once = /^#once=(.+)$/.exec(location.hash)?.[1];
  if (once) history.replaceState(null, "", location.pathname);
  if (once) return signIn({ once });
  if (!token) {
    tabs.postMessage("token?");
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
  if (token) await refreshMe();
}
