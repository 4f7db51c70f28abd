// Lines to copy for other programs, with this server's address and a model. They come from docs/clients.md.
import { base, get } from "./api.js";
import { html, signal, useEffect, useSignal } from "./lib.js";
import { Failure, Field, Lines } from "./widgets.js";

// Requests by capability; the first that the model has is shown.
const JSON_TYPE = "-H 'Content-Type: application/json' \\\n  -d";
const REQUESTS = {
  chat: ["chat/completions", `${JSON_TYPE} '{"model": "MODEL", "messages": [{"role": "user", "content": "Hello!"}]}'`],
  embedding: ["embeddings", `${JSON_TYPE} '{"model": "MODEL", "input": ["A first text.", "A second one."]}'`],
  rerank: ["rerank", `${JSON_TYPE} '{"model": "MODEL", "query": "Where is the key?", "documents": ["It is on the table.", "It rains."]}'`],
  transcription: ["audio/transcriptions", "\\\n  -F model=MODEL -F file=@meeting.mp3"],
  speech: ["audio/speech", `${JSON_TYPE} '{"model": "MODEL", "voice": "emma", "input": "Hello!"}' -o hello.mp3`],
  image_generation: ["images/generations", `${JSON_TYPE} '{"model": "MODEL", "prompt": "a red circle", "size": "512x512", "response_format": "url"}'`],
};
const CALLS = {
  embedding: 'vectors = client.embeddings.create(model="MODEL", input=["A first text.", "A second one."])\nprint(len(vectors.data[0].embedding))',
  transcription: 'print(client.audio.transcriptions.create(model="MODEL", file=open("meeting.mp3", "rb")).text)',
  speech: 'client.audio.speech.create(model="MODEL", voice="emma", input="Hello!").write_to_file("hello.mp3")',
  image_generation: 'made = client.images.generate(model="MODEL", prompt="a red circle", size="512x512")\nprint(made.data[0].url)',
};
const CLIENT = 'import os\nfrom openai import OpenAI\n\nclient = OpenAI(base_url=os.environ["HEARTH_URL"], api_key=os.environ["HEARTH_KEY"])\n';
export const chosen = signal(null); // a model; other pages choose one too

export function Connect({ models, failed }) {
  const clients = useSignal([]), error = useSignal(null);
  useEffect(() => {
    get("console/clients.json").then((found) => (clients.value = found), (failure) => (error.value = failure));
  }, []);
  const all = models ?? [];
  const model = all.find((one) => one.id === chosen.value) ?? all[0];
  const kind = Object.keys(REQUESTS).find((one) => model?.capabilities.includes(one)) ?? "chat";
  const filled = (text) => text
    .replaceAll("http://your-server:8000", base.slice(0, -1))
    .replaceAll("service-plus", model?.id ?? "service-plus")
    .replaceAll("32768", String(model?.context_length ?? 32768));
  const environment = `export HEARTH_URL=${base}v1\nexport HEARTH_KEY=hk_...   # your key\nexport HEARTH_MODEL=${model?.id ?? "..."}`;
  const [path, rest] = REQUESTS[kind];
  const named = (text) => text.replace("MODEL", () => model?.id ?? "...");
  const curl = `curl $HEARTH_URL/${path} -H "Authorization: Bearer $HEARTH_KEY" ${named(rest)}`;
  return html`<h1>Connect a program</h1>
    <p>Every program that lets you enter a base address works. It needs three things: this address, your key, and the name of a model.</p>
    <${Failure} error=${error.value ?? failed} />
    <${Field} label="Model"><select value=${model?.id} onChange=${(event) => (chosen.value = event.target.value)}>
      ${all.map((one) => html`<option key=${one.id}>${one.id}</option>`)}
    </select><//>
    <${Lines} label="In a terminal, first" text=${environment} />
    <${Lines} label="curl" text=${curl} />
    ${CALLS[kind] && html`<${Lines} label="openai, Python" text=${CLIENT + named(CALLS[kind])} />`}
    ${kind === "chat" && clients.value.map((client) => html`<details key=${client.name}>
      <summary>${client.name}</summary>
      ${client.how && html`<p>${client.how}</p>`}
      <${Lines} label=${client.language} text=${filled(client.code)} />
    </details>`)}`;
}
