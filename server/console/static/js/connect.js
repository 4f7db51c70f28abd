// Lines to copy for other programs, with this server's address and a model. They come from docs/clients.md.
import { base, get } from "./api.js";
import { html, useEffect, useSignal } from "./lib.js";
import { Copy, Failure, Field } from "./widgets.js";

export function Lines({ text, label }) {
  return html`<figure class="code">
    <figcaption><span>${label}</span><${Copy} text=${text} /></figcaption>
    <pre tabindex="0" dir="ltr"><code>${text}</code></pre>
  </figure>`;
}

export function Connect({ models, failed }) {
  const clients = useSignal([]), chosen = useSignal(null), error = useSignal(null);
  useEffect(() => {
    get("console/clients.json").then((found) => (clients.value = found), (failure) => (error.value = failure));
  }, []);
  const chats = (models ?? []).filter((model) => model.capabilities.includes("chat"));
  const model = chats.find((one) => one.id === chosen.value) ?? chats[0];
  const filled = (text) => text
    .replaceAll("http://your-server:8000", base.slice(0, -1))
    .replaceAll("service-plus", model?.id ?? "service-plus")
    .replaceAll("32768", String(model?.context_length ?? 32768));
  const environment = `export HEARTH_URL=${base}v1\nexport HEARTH_KEY=hk_...   # your key\nexport HEARTH_MODEL=${model?.id ?? "..."}`;
  const curl = `curl $HEARTH_URL/chat/completions -H "Authorization: Bearer $HEARTH_KEY" \\
  -H 'Content-Type: application/json' \\
  -d '{"model": "${model?.id ?? "..."}", "messages": [{"role": "user", "content": "Hello!"}]}'`;
  return html`<h1>Connect a program</h1>
    <p>Every program that lets you enter a base address works. It needs three things: this address, your key, and the name of a model.</p>
    <${Failure} error=${error.value ?? failed} />
    <${Field} label="Model"><select value=${model?.id} onChange=${(event) => (chosen.value = event.target.value)}>
      ${chats.map((one) => html`<option key=${one.id}>${one.id}</option>`)}
    </select><//>
    <${Lines} label="In a terminal, first" text=${environment} />
    <${Lines} label="curl" text=${curl} />
    ${clients.value.map((client) => html`<details key=${client.name}>
      <summary>${client.name}</summary>
      ${client.how && html`<p>${client.how}</p>`}
      <${Lines} label=${client.language} text=${filled(client.code)} />
    </details>`)}`;
}
