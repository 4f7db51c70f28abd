// What one's own key may do, and what is left of its limits.
import { me } from "./api.js";
import { html } from "./lib.js";
import { day, number, usePoll } from "./widgets.js";

const LIMITS = [
  ["requests_per_minute", "Requests a minute", "requests"],
  ["tokens_per_minute", "Tokens a minute", "tokens"],
  ["parallel_requests", "Requests at the same time", "parallel_requests"],
  ["images_per_day", "Images a day (UTC)", "images"],
  ["batch_items", "Items in a batch", null],
];

function Left({ limit, left }) {
  if (limit === null) return html`<td>no limit</td><td></td>`;
  if (left == null) return html`<td>${number(limit)}</td><td></td>`;
  return html`<td>${number(limit)}</td><td><meter min="0" max=${limit || 1} value=${left} aria-label="left"></meter> ${number(left)}</td>`;
}

export function MyKey() {
  const found = usePoll("v1/key", 5);
  const key = found.value ?? me.value;
  if (!key) return null;
  return html`<h1>My key</h1>
    <dl>
      <dt>Name</dt><dd dir="auto">${key.name}</dd>
      <dt>Public id</dt><dd><code>${key.public_id}</code></dd>
      <dt>Tier</dt><dd>${key.tier}</dd>
      <dt>May be used for</dt><dd>${key.scopes.join(", ")}</dd>
      <dt>Models</dt><dd>${key.models ? key.models.join(", ") : "all of its tier"}</dd>
      <dt>Expires</dt><dd>${key.expires_at ? day(key.expires_at) : "never"}</dd>
    </dl>
    <h2>Limits</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Limits"><table>
      <thead><tr><th>Limit</th><th>In force</th><th>Left now</th></tr></thead>
      <tbody>${LIMITS.map(([name, title, left]) => html`<tr key=${name}>
        <th scope="row">${title}</th><${Left} limit=${key.limits[name]} left=${left && key.left[left]} />
      </tr>`)}</tbody>
    </table></div>`;
}
