// Keys of others, for administrators: made, shown once, changed, rotated, ended.
import { base, get, me, post } from "./api.js";
import { html, useEffect, useSignal } from "./lib.js";
import { day, Dialog, Failure, Field, Lines, number, say, trying } from "./widgets.js";

const SCOPES = ["chat", "batch", "images", "audio", "embeddings", "models", "metrics", "admin"];
const LIMITS = ["requests_per_minute", "tokens_per_minute", "parallel_requests", "batch_items", "images_per_day"];
const FOR_ADMINS = ["metrics", "admin"];

export function Keys() {
  const keys = useSignal([]), tiers = useSignal([]), error = useSignal(null), edited = useSignal(null), shown = useSignal(null);
  const ended = useSignal(false), wanted = useSignal("");
  const read = () => get("v1/admin/keys").then((found) => (keys.value = found.data), (failure) => (error.value = failure));
  useEffect(() => {
    read();
    get("v1/admin/tiers").then((found) => (tiers.value = found.data), (failure) => (error.value = failure));
  }, []);
  const act = (path, body, done) => trying(async () => {
    const answer = await post(`v1/admin/keys/${path}`, body);
    if (answer.key) shown.value = answer;
    else say(done);
    await read();
  }, error);
  const now = new Date().toISOString();
  const over = (key) => key.revoked_at ?? (key.expires_at && key.expires_at < now ? key.expires_at : null);
  const found = keys.value.filter((key) => (ended.value || !over(key)) && `${key.name} ${key.public_id}`.toLowerCase().includes(wanted.value.toLowerCase()));
  return html`<h1>Keys</h1>
    <div class="row">
      <button type="button" class="main" onClick=${() => (edited.value = {})}>New key</button>
      <${Field} label="Find"><input type="search" value=${wanted.value} onInput=${(event) => (wanted.value = event.target.value)} /><//>
      <label><input type="checkbox" checked=${ended.value} onChange=${(event) => (ended.value = event.target.checked)} /> also ended ones</label>
    </div>
    <${Failure} error=${error.value} />
    <div class="scroll" tabindex="0" role="region" aria-label="Keys"><table>
      <thead><tr><th>Name</th><th>Tier</th><th>May</th><th>Ends</th><th>Last used</th><th><span class="hidden">Actions</span></th></tr></thead>
      <tbody>${found.map((key) => html`<tr key=${key.public_id} class=${over(key) ? "revoked" : ""}>
        <th scope="row"><span dir="auto">${key.name}</span><br /><code>${key.public_id}</code></th>
        <td>${key.tier}</td>
        <td>${key.scopes.join(", ")}${key.models && html`<br /><small>${key.models.join(", ")}</small>`}</td>
        <td>${key.revoked_at ? `revoked ${day(key.revoked_at)}` : day(key.expires_at) || "never"}</td>
        <td>${day(key.last_used_at) || "never"}</td>
        <td>${!key.revoked_at && html`<span class="row">
          <button type="button" class="small" aria-label=${`Change ${key.name}`} onClick=${() => (edited.value = key)}>Change</button>
          <button type="button" class="small" aria-label=${`Rotate ${key.name}`} onClick=${() => act(`${key.public_id}/rotate`, {})}>Rotate</button>
          <${Sure} text="Revoke" name=${key.name} own=${key.public_id === me.value?.public_id}
            act=${() => act(`${key.public_id}/revoke`, undefined, `${key.name} is revoked`)} />
        </span>`}</td>
      </tr>`)}</tbody>
    </table></div>
    <${Tiers} tiers=${tiers.value} />
    <${Dialog} title=${edited.value?.public_id ? "Change a key" : "New key"} open=${edited.value !== null} onClose=${() => (edited.value = null)}>
      <${Form} key=${edited.value?.public_id} old=${edited.value} tiers=${tiers.value}
        done=${(made) => ((edited.value = null), made.key && (shown.value = made), read())} />
    <//>
    <${Dialog} title="The key, shown once" open=${shown.value !== null} onClose=${() => (shown.value = null)}>
      ${shown.value && html`<p>Give it to <b dir="auto">${shown.value.name}</b> now: nobody can see it again. It is not kept in this browser.</p>
        <${Lines} label="Key" text=${shown.value.key} />
        <${Lines} label="With the address, for a message" text=${`${base}\n${shown.value.key}`} />`}
    <//>`;
}

// Asks for confirmation in the button itself.
function Sure({ text, name, own, act }) {
  const asked = useSignal(false);
  const click = () => {
    if (asked.value) act();
    asked.value = !asked.value;
  };
  const words = asked.value ? (own ? "Your own key: sure?" : "Sure?") : text;
  return html`<button type="button" class="small danger" aria-label=${`${words} ${name}`} onClick=${click}
    onBlur=${() => (asked.value = false)}>${words}</button>`;
}

function Form({ old, tiers, done }) {
  const fresh = !old?.public_id;
  const fields = useSignal({
    name: old?.name ?? "",
    tier: old?.tier ?? tiers[0]?.id ?? "",
    scopes: old?.scopes ?? SCOPES.filter((scope) => !FOR_ADMINS.includes(scope) && me.value.scopes.includes(scope)),
    models: old?.models ?? null,
    notes: old?.notes ?? "",
    expires: old?.expires_at?.slice(0, 10) ?? "",
    limits: Object.fromEntries(LIMITS.map((name) => [name, old?.limits?.[name] ?? ""])),
  });
  const error = useSignal(null);
  const set = (changes) => (fields.value = { ...fields.value, ...changes });
  const toggle = (list, one) => (list.includes(one) ? list.filter((other) => other !== one) : [...list, one]);
  const tier = tiers.find((one) => one.id === fields.value.tier);
  const save = (event) => {
    event.preventDefault();
    const { expires, limits, ...rest } = fields.value;
    const body = { ...rest, limits: Object.fromEntries(LIMITS.map((name) => [name, limits[name] === "" ? null : Number(limits[name])])) };
    const end = expires ? `${expires}T23:59:59Z` : null;
    trying(async () => {
      if (fresh) return done(await post("v1/admin/keys", { ...body, expires_at: end }));
      const answer = await get(`v1/admin/keys/${old.public_id}`, { method: "PATCH", body });
      if (expires !== (old.expires_at?.slice(0, 10) ?? "")) await post(`v1/admin/keys/${old.public_id}/expire`, { expires_at: end });
      done(answer);
    }, error);
  };
  const check = (label, checked, change) => html`<label key=${label}><input type="checkbox" checked=${checked} onChange=${change} /> ${label}</label>`;
  return html`<form onSubmit=${save}>
    <${Field} label="Name: whose it is, or what for"><input required maxlength="64" dir="auto" value=${fields.value.name}
      onInput=${(event) => set({ name: event.target.value })} /><//>
    <div class="row">
      <${Field} label="Tier"><select value=${fields.value.tier} onChange=${(event) => set({ tier: event.target.value, models: null })}>
        ${tiers.map((one) => html`<option key=${one.id}>${one.id}</option>`)}</select><//>
      <${Field} label="Last day (UTC)"><input type="date" value=${fields.value.expires} onInput=${(event) => set({ expires: event.target.value })} /><//>
    </div>
    <fieldset><legend>May</legend>${[...new Set([...SCOPES.filter((scope) => me.value.scopes.includes(scope)), ...fields.value.scopes])]
      .map((scope) => check(scope, fields.value.scopes.includes(scope), () => set({ scopes: toggle(fields.value.scopes, scope) })))}</fieldset>
    <fieldset><legend>Models (none: all of the tier)</legend>${(tier?.models ?? []).map((model) => check(model, fields.value.models?.includes(model),
      () => set({ models: ((list) => (list.length ? list : null))(toggle(fields.value.models ?? [], model)) })))}</fieldset>
    <details><summary>Limits of its own</summary><div class="row">${LIMITS.map((name) => html`<${Field} key=${name} label=${name.replaceAll("_", " ")}>
      <input type="number" min="0" placeholder=${tier?.[name] ?? "no limit"} value=${fields.value.limits[name]}
        onInput=${(event) => set({ limits: { ...fields.value.limits, [name]: event.target.value } })} /><//>`)}</div></details>
    <${Field} label="Notes, for administrators"><textarea rows="2" dir="auto" maxlength="1000" value=${fields.value.notes}
      onInput=${(event) => set({ notes: event.target.value })}></textarea><//>
    <button class="main">${fresh ? "Make the key" : "Save"}</button>
    <${Failure} error=${error.value} />
  </form>`;
}

function Tiers({ tiers }) {
  const limit = (value) => (value === null ? "no limit" : number(value));
  return html`<h2>Tiers</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Tiers"><table>
      <thead><tr><th>Tier</th><th>Models</th>
        ${[...LIMITS, "queue_share"].map((name) => html`<th key=${name} class="number">${name.replaceAll("_", " ")}</th>`)}</tr></thead>
      <tbody>${tiers.map((tier) => html`<tr key=${tier.id}><th scope="row">${tier.id}</th><td>${tier.models.join(", ")}</td>
        ${LIMITS.map((name) => html`<td key=${name} class="number">${limit(tier[name])}</td>`)}<td class="number">${tier.queue_share}</td></tr>`)}</tbody>
    </table></div>
    <p><small>Tiers are written in models.yaml; reload it under Status.</small></p>`;
}
