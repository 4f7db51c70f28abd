// A picture that images are made from: cut to the requested size, and painted over where it may change.
import { html, useEffect, useRef, useSignal } from "./lib.js";
import { Field } from "./widgets.js";

export async function read(blob) {
  try {
    return await createImageBitmap(blob);
  } catch {
    throw new Error("The browser cannot read this file as a picture.");
  }
}

// The largest part in the middle with that shape, as the server cuts it.
function draw(canvas, bitmap) {
  const { width, height } = canvas, scale = Math.max(width / bitmap.width, height / bitmap.height);
  const [wide, high] = [width / scale, height / scale];
  const brush = canvas.getContext("2d");
  brush.imageSmoothingQuality = "high";
  brush.clearRect(0, 0, width, height);
  brush.drawImage(bitmap, (bitmap.width - wide) / 2, (bitmap.height - high) / 2, wide, high, 0, 0, width, height);
}

const file = (canvas) => new Promise((resolve) => canvas.toBlob(resolve, "image/png"));

// Opaque where nothing was painted: what is transparent may change.
function inverse(painted) {
  const mask = document.createElement("canvas");
  Object.assign(mask, { width: painted.width, height: painted.height });
  const brush = mask.getContext("2d");
  brush.fillRect(0, 0, mask.width, mask.height);
  brush.globalCompositeOperation = "destination-out";
  brush.drawImage(painted, 0, 0);
  return mask;
}

// `files` is a reference that gets a function: it returns the picture and, if something was painted, its mask.
export function Picture({ bitmap, size, files, remove }) {
  const under = useRef(), over = useRef(), cursor = useRef(), last = useRef(null);
  const width = useSignal("12"), rubber = useSignal(false), painted = useSignal(false);
  const [wide, high] = size.split("x").map(Number);
  useEffect(() => {
    draw(under.current, bitmap);
    clear();
  }, [bitmap, size]);
  files.current = async () => ({ image: await file(under.current), mask: painted.value ? await file(inverse(over.current)) : null });
  const clear = () => {
    over.current.getContext("2d").clearRect(0, 0, wide, high);
    painted.value = false;
    last.current = null;
  };
  const line = (x, y) => {
    const brush = over.current.getContext("2d");
    const from = last.current ?? { x, y };
    Object.assign(brush, { lineWidth: (Number(width.value) / 100) * wide, lineCap: "round", lineJoin: "round", strokeStyle: "#f60" });
    brush.globalCompositeOperation = rubber.value ? "destination-out" : "source-over";
    brush.beginPath();
    brush.moveTo(from.x, from.y);
    brush.lineTo(x, y);
    brush.stroke();
    last.current = { x, y };
    painted.value ||= !rubber.value;
  };
  const at = (event) => [(event.offsetX / over.current.clientWidth) * wide, (event.offsetY / over.current.clientHeight) * high];
  const down = (event) => {
    over.current.setPointerCapture(event.pointerId);
    last.current = null;
    line(...at(event));
  };
  const moved = (event) => event.buttons && line(...at(event));
  return html`<div class="picture-to-change">
    <div class="canvas">
      <canvas ref=${under} width=${wide} height=${high} role="img" aria-label="What images are made from"></canvas>
      <canvas ref=${over} width=${wide} height=${high} tabindex="0" role="application" onPointerDown=${down} onPointerMove=${moved} onKeyDown=${byKey()}
        aria-label="What may change: paint with the pointer, or move with the arrow keys and paint with Space"></canvas>
      <span ref=${cursor} class="cursor" hidden></span>
    </div>
    <div class="row">
      <${Field} label="Brush"><input type="range" min="2" max="40" value=${width.value} onInput=${(event) => (width.value = event.target.value)} /><//>
      <label><input type="checkbox" checked=${rubber.value} onChange=${(event) => (rubber.value = event.target.checked)} /> erase</label>
      <button type="button" class="small" disabled=${!painted.value} onClick=${clear}>Clear</button>
      <button type="button" class="small" onClick=${remove}>Remove the picture</button>
    </div>
    <p><small>${painted.value ? "Only what is painted changes." : "Paint over what may change. Without paint, all of it may."}</small></p>
  </div>`;

  // Without a pointer: arrow keys move a cursor, Space paints under it, and with Shift they draw a line.
  function byKey() {
    return (event) => {
      const step = wide / 32, by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowUp: [0, -step], ArrowDown: [0, step] }[event.key];
      if (!by && event.key !== " ") return;
      event.preventDefault();
      const { x, y } = last.current ?? { x: wide / 2, y: high / 2 };
      const to = { x: Math.min(wide, Math.max(0, x + (by?.[0] ?? 0))), y: Math.min(high, Math.max(0, y + (by?.[1] ?? 0))) };
      if (!by || event.shiftKey) line(to.x, to.y);
      last.current = to;
      const mark = cursor.current;
      mark.hidden = false;
      mark.style.left = `${(to.x / wide) * 100}%`;
      mark.style.top = `${(to.y / high) * 100}%`;
    };
  }
}
