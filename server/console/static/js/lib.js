// The libraries of the page, in one place.
import { h, render, Component } from "../vendor/preact.mjs";
import htm from "../vendor/htm.mjs";

export { signal, computed, effect, useSignal } from "../vendor/signals.mjs";
export { useEffect, useRef } from "../vendor/preact-hooks.mjs";
export { render, Component };
export const html = htm.bind(h);
