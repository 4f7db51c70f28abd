// Signing in with a key, which goes to the server once and is not kept.
import { signIn } from "./api.js";
import { html, useSignal } from "./lib.js";
import { Failure, Field, trying } from "./widgets.js";

export function SignIn({ problem }) {
  const key = useSignal(""), error = useSignal(null), busy = useSignal(false);
  const submit = (event) => {
    event.preventDefault();
    trying(() => signIn({ key: key.value }), error, busy);
  };
  return html`<main class="sign-in">
    <h1><img src="console/icon.svg" alt="" width="40" height="40" /> Hearth</h1>
    <p>Chat, images and voices on models that run here.</p>
    <form onSubmit=${submit}>
      <${Field} label="Your key" hint="It begins with hk_ and is not kept in this browser.">
        <input type="password" autocomplete="current-password" required autofocus spellcheck="false"
          value=${key.value} onInput=${(event) => (key.value = event.target.value)} />
      <//>
      <button class="main" disabled=${busy.value}>Sign in</button>
      <${Failure} error=${error.value ?? problem} />
    </form>
    <details><summary>Where do I get a key?</summary>
      <p>From the administrator of this server, who makes one in this page under “Keys”, or on the machine itself:</p>
      <pre tabindex="0"><code>hearth keys create --name me --tier standard</code></pre>
      <p>The first start of the server prints one, and a link that signs in without it.</p>
    </details>
  </main>`;
}
