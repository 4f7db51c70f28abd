// Markdown of models as elements. Only what is named here becomes markup: HTML is shown as text, links lead only to http
// and https, and pictures are links, since loading one could send the conversation elsewhere in its address.
import { lexer } from "../vendor/marked.mjs";
import { Component, html } from "./lib.js";
import { Lines } from "./widgets.js";

const DEEPEST = 30;
const NAMED = { amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0" };

function plain(text) {
  return text.replace(/&(?:#(\d{1,7})|#x([0-9a-f]{1,6})|(\w{2,4}));/gi, (all, decimal, hex, name) => {
    const point = decimal ? Number(decimal) : hex ? parseInt(hex, 16) : 0;
    if (point) return point <= 0x10ffff ? String.fromCodePoint(point) : all;
    return Object.hasOwn(NAMED, name ?? "") ? NAMED[name] : all;
  });
}

function Link({ href, children }) {
  let address;
  try {
    address = new URL(href);
  } catch {
    return children;
  }
  if (!["http:", "https:"].includes(address.protocol)) return html`${children} <code>${href}</code>`;
  return html`<a href=${address.href} target="_blank" rel="noreferrer noopener">${children}</a>`;
}

const inside = (token, depth) => (token.tokens ? show(token.tokens, depth + 1) : plain(token.text ?? ""));

const SHOWN = {
  space: () => null,
  hr: () => html`<hr />`,
  br: () => html`<br />`,
  checkbox: (token) => (token.checked ? "☑ " : "☐ "),
  code: (token) => html`<${Lines} text=${token.text} label=${token.lang ?? ""} />`,
  codespan: (token) => html`<code>${plain(token.text)}</code>`,
  html: (token) => html`<span class="raw">${token.raw}</span>`,
  text: inside,
  escape: (token) => plain(token.text),
  paragraph: (token, depth) => html`<p dir="auto">${inside(token, depth)}</p>`,
  strong: (token, depth) => html`<strong>${inside(token, depth)}</strong>`,
  em: (token, depth) => html`<em>${inside(token, depth)}</em>`,
  del: (token, depth) => html`<del>${inside(token, depth)}</del>`,
  blockquote: (token, depth) => html`<blockquote dir="auto">${inside(token, depth)}</blockquote>`,
  link: (token, depth) => html`<${Link} href=${token.href}>${inside(token, depth)}<//>`,
  image: (token) => html`<${Link} href=${token.href}>${`picture: ${token.text || token.href}`}<//>`,
  heading: (token, depth) => html`<p dir="auto" class=${`heading h${token.depth}`}>${inside(token, depth)}</p>`,
  list: (token, depth) => {
    const items = token.items.map((item) => html`<li dir="auto">${inside(item, depth)}</li>`);
    return token.ordered ? html`<ol start=${Number(token.start) || 1}>${items}</ol>` : html`<ul>${items}</ul>`;
  },
  table: (token, depth) => {
    const cells = (row, tag) => row.map((cell) => html`<${tag}>${inside(cell, depth)}<//>`);
    return html`<div class="scroll" tabindex="0" role="region" aria-label="Table"><table dir="auto">
      <thead><tr>${cells(token.header, "th")}</tr></thead>
      <tbody>${token.rows.map((row) => html`<tr>${cells(row, "td")}</tr>`)}</tbody>
    </table></div>`;
  },
};

function show(tokens, depth) {
  if (depth > DEEPEST) return tokens.map((token) => token.raw);
  return tokens.map((token) => (Object.hasOwn(SHOWN, token.type) ? SHOWN[token.type](token, depth) : token.raw));
}

// Drawn again only when its text has changed: in a long streamed answer, only the last block.
class Block extends Component {
  shouldComponentUpdate(next) {
    return next.token.raw !== this.props.token.raw;
  }

  render({ token }) {
    return show([token], 0);
  }
}

export class Markdown extends Component {
  shouldComponentUpdate(next) {
    return next.text !== this.props.text;
  }

  render({ text }) {
    let tokens;
    try {
      tokens = lexer(text, { gfm: true, breaks: true });
    } catch {
      return html`<p dir="auto" class="raw">${text}</p>`; // nested too deep for the lexer
    }
    return html`<div class="markdown">${tokens.map((token, at) => html`<${Block} key=${at} token=${token} />`)}</div>`;
  }
}
