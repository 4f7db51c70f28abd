// The frame: who is signed in, which page is open (behind the # of the address), and the way to the others.
import { ended, isAdmin, me, signOut, sinceHeard, start } from "./api.js";
import { Batches } from "./batches.js";
import { Chat, ChatList } from "./chat.js";
import { Connect } from "./connect.js";
import { Images } from "./images.js";
import { Keys } from "./keys.js";
import { Models } from "./models.js";
import { MyKey } from "./mykey.js";
import { SignIn } from "./signin.js";
import { Status } from "./status.js";
import { Usage } from "./usage.js";
import { Voices } from "./voices.js";
import { effect, html, render, signal, useSignal } from "./lib.js";
import { pace, Said, usePoll } from "./widgets.js";

const may = (scope) => () => me.value.scopes.includes(scope);
const PAGES = {
  chat: { title: "Chat", page: Chat, shown: may("chat"), below: ChatList },
  images: { title: "Images", page: Images, shown: may("images") },
  voices: { title: "Voices", page: Voices, shown: may("audio") },
  batches: { title: "Batches", page: Batches, shown: may("batch") },
  models: { title: "Models", page: Models, shown: may("models") },
  usage: { title: "Usage", page: Usage, shown: () => true },
  connect: { title: "Connect", page: Connect, shown: () => true },
  key: { title: "My key", page: MyKey, shown: () => true },
  keys: { title: "Keys", page: Keys, shown: () => isAdmin.value },
  status: { title: "Status", page: Status, shown: () => isAdmin.value },
};
const UNLISTED = new Error("This key lacks the scope `models`: the page cannot know which models there are.");
const place = signal(location.hash.slice(2));
const menu = signal(false), started = signal(false), problem = signal(null);

addEventListener("hashchange", () => {
  place.value = location.hash.slice(2);
  menu.value = false;
});

// A file that is dropped beside its place would replace the page.
for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());

const Nav = ({ open, offered }) => html`<nav aria-label="Pages" id="menu" class=${menu.value ? "open" : ""}>
  <ul>${offered.map((name) => html`<li key=${name}>
    <a href=${`#/${name}`} aria-current=${open === name ? "page" : undefined}>${PAGES[name].title}</a>
    ${open === name && PAGES[name].below && html`<${PAGES[name].below} />`}
  </li>`)}</ul>
  <footer>
    <p dir="auto" title=${me.value.name}>${me.value.name}</p>
    <button type="button" class="small" onClick=${signOut}>Sign out</button>
    <a href="docs" target="_blank">API</a>
  </footer>
</nav>`;

function App() {
  if (!started.value) return null;
  return me.value ? html`<${Frame} />` : html`<${SignIn} problem=${ended.value ?? problem.value} />`;
}

// Every page asks for the models, and thereby notices that a key has ended, unless another request was answered
// meanwhile, like the next message of a chat. Administrators see on the page of models what each is doing from the
// status, and ask for the list only now and then.
function Frame() {
  const failed = useSignal(null);
  const shown = () => place.value === "models";
  const later = (age) => (shown() ? (isAdmin.value ? 30 - age : 0) : 5 - sinceHeard());
  const lists = may("models")();
  const models = usePoll(lists ? "v1/models" : "v1/key", (found) => (shown() ? pace(found) : 5), failed, later);
  const offered = Object.keys(PAGES).filter((name) => PAGES[name].shown());
  const open = offered.includes(place.value) ? place.value : offered[0];
  const { page, title } = PAGES[open];
  return html`<div class="frame">
    <a class="skip" href="#main" onClick=${skip}>Skip to content</a>
    <header class="bar">
      <button type="button" class="menu small" aria-expanded=${menu.value} aria-controls="menu"
        onClick=${() => (menu.value = !menu.value)}>Menu</button>
      <img src="console/icon.svg" alt="" width="24" height="24" /> <strong>Hearth</strong>
    </header>
    <${Nav} open=${open} offered=${offered} />
    <main id="main" tabindex="-1" class=${open} aria-label=${title}><${page} key=${open}
      models=${models.value?.data} failed=${failed.value ?? (lists ? null : UNLISTED)} /></main>
    <${Said} />
  </div>`;
}

function skip(event) {
  event.preventDefault();
  document.getElementById("main").focus();
}

effect(() => {
  const title = me.value && PAGES[place.value]?.title;
  document.title = title ? `${title} · Hearth` : "Hearth";
});
render(html`<${App} />`, document.getElementById("app"));
start().catch((error) => (problem.value = error)).finally(() => (started.value = true));
