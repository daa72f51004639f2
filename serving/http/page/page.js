// Page of the server: sends an image to /v1/detect once, then filters and draws in the browser.
const element = (id) => document.getElementById(id);
const [canvas, threshold, instances, statusLine] =
  ["canvas", "threshold", "instances", "status"].map(element);
const context = canvas.getContext("2d");

// Limits of the longest side of the displayed canvas. Downloads have the size of the image.
const [MIN_SIDE, MAX_SIDE] = [800, 1600];
// Others are sent as JPEG: unlike the server, browsers ignore the EXIF orientation of WebP.
const SENT_TYPES = ["image/jpeg", "image/png"];

let token = "";
let model = null;
let pending = null; // AbortController of the current request
let image = null; // ImageBitmap
let found = null; // response of the server
let name = "image";
let hiddenClasses = new Set();
let highlighted = null;

async function request(path, options = {}) {
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  element("access").hidden &&= response.status !== 401;
  const body = await response.json().catch(() => ({}));
  throw new Error(body.error || `the server responded with status ${response.status}`);
}

function make(tag, properties, ...children) {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
}

function show(text, isError = false) {
  statusLine.textContent = text;
  statusLine.classList.toggle("error", isError);
}

async function describe() {
  model = await (await request("/v1/model")).json();
  const classes = model.categories.map((category) => category.name);
  const listed = classes.slice(0, 8).join(", ") + (classes.length > 8 ? ", …" : "");
  element("model").textContent = `${model.name}, ${classes.length} classes: ${listed}`;
  const samples = await (await request("/v1/samples")).json();
  element("samples").hidden = !samples.length;
  element("sample-list").replaceChildren(...(await Promise.all(samples.map(sampleButton))));
  element("access").hidden = true;
}

async function sampleButton(sample) {
  const blob = await (await request(`/v1/samples/${encodeURIComponent(sample)}`)).blob();
  const thumbnail = make("img", { src: URL.createObjectURL(blob), alt: sample });
  return make("button", { type: "button", onclick: () => detect(blob, sample) }, thumbnail);
}

async function toJpeg(bitmap) {
  const copy = new OffscreenCanvas(bitmap.width, bitmap.height);
  copy.getContext("2d").drawImage(bitmap, 0, 0);
  return copy.convertToBlob({ type: "image/jpeg", quality: 0.95 });
}

async function detect(blob, fileName) {
  if (!blob) return;
  pending?.abort();
  const own = (pending = new AbortController());
  show("Detecting");
  try {
    const bitmap = await createImageBitmap(blob).catch(() => {
      throw new Error(`${fileName} is not an image that this browser can read`);
    });
    const body = SENT_TYPES.includes(blob.type) ? blob : await toJpeg(bitmap);
    const start = performance.now();
    const options = { method: "POST", body, signal: own.signal };
    const response = await request("/v1/detect?mask_format=polygon", options);
    const result = await response.json();
    if (own.signal.aborted) return;
    present(bitmap, result, performance.now() - start, fileName);
  } catch (error) {
    if (own.signal.aborted) return;
    element("result").hidden = true; // it belongs to the previous image
    show(error.message, true);
  }
}

function present(bitmap, result, elapsed, fileName) {
  image?.close();
  [image, found, highlighted, hiddenClasses] = [bitmap, result, null, new Set()];
  name = fileName.replace(/\.[^.]*$/, "") || "image";
  for (const detection of found.detections) {
    detection.path = new Path2D();
    for (const polygon of detection.segmentation) {
      // Without `moveTo`, the path would continue from the previous polygon.
      detection.path.moveTo(polygon[0], polygon[1]);
      for (let i = 2; i < polygon.length; i += 2) detection.path.lineTo(polygon[i], polygon[i + 1]);
      detection.path.closePath();
    }
  }
  element("result").hidden = false;
  const side = Math.max(found.width, found.height);
  const scale = Math.min(MAX_SIDE, Math.max(MIN_SIDE, side)) / side;
  canvas.width = Math.max(1, Math.round(found.width * scale));
  canvas.height = Math.max(1, Math.round(found.height * scale));
  showTiming(found.timing, elapsed);
  update();
}

const colourOf = (label) => `hsl(${((label * 0.618034) % 1) * 360} 100% 57.5%)`; // as in PNGs
const atThreshold = () => found.detections.filter((d) => d.score >= Number(threshold.value));
const visible = () => atThreshold().filter((d) => !hiddenClasses.has(d.label));
const titleOf = (detection) => `${detection.class_name} ${detection.score.toFixed(2)}`;

function update() {
  element("minimum").textContent = Number(threshold.value).toFixed(2);
  if (!found) return;
  const shown = visible();
  if (!shown.includes(highlighted)) highlighted = null;
  listClasses();
  listInstances(shown);
  const lower = found.detections.length - atThreshold().length;
  const text = `${shown.length} of ${found.detections.length} detections shown`;
  show(lower ? `${text}; ${lower} are below the minimum score` : text);
  const counts = [...countsOf(shown)].map(([label, count]) => `${count} ${classOf(label)}`);
  canvas.setAttribute("aria-label", `${name} with ${counts.join(", ") || "no detections"}`);
  draw();
}

function countsOf(detections) {
  const counts = new Map();
  for (const { label } of detections) counts.set(label, (counts.get(label) || 0) + 1);
  return counts;
}

// Black or white, depending on the brightness of a colour as `#rrggbb`.
function inkOn(colour) {
  const [red, green, blue] = [1, 3, 5].map((i) => parseInt(colour.slice(i, i + 2), 16));
  return 0.299 * red + 0.587 * green + 0.114 * blue > 128 ? "#000" : "#fff";
}

const classOf = (label) => found.detections.find((d) => d.label === label).class_name;

function swatch(label) {
  const square = make("span", { className: "swatch" });
  square.style.background = colourOf(label);
  return square;
}

function listClasses() {
  const counts = countsOf(atThreshold());
  const labels = [...new Set(found.detections.map((d) => d.label))].sort((a, b) => a - b);
  const list = element("classes");
  if (list.dataset.labels !== `${name} ${labels}`) {
    // Only new results replace the boxes, so that they keep the focus.
    list.dataset.labels = `${name} ${labels}`;
    list.replaceChildren(...labels.map(classBox));
  }
  list.querySelectorAll("label").forEach((box, index) => {
    box.querySelector(".count").textContent = counts.get(labels[index]) || 0;
    box.querySelector("input").checked = !hiddenClasses.has(labels[index]);
  });
}

function classBox(label) {
  const onchange = (event) => {
    event.target.checked ? hiddenClasses.delete(label) : hiddenClasses.add(label);
    update();
  };
  const count = make("span", { className: "count" });
  const box = make("input", { type: "checkbox", onchange });
  return make("label", {}, box, swatch(label), classOf(label), count);
}

function listInstances(shown) {
  const items = shown.map((detection, index) => {
    const [onpointerenter, onclick] = [() => highlight(detection), () => highlight(detection)];
    const score = make("span", { className: "count" }, detection.score.toFixed(2));
    const properties = { id: `instance-${index}`, role: "option", onpointerenter, onclick };
    return make("li", properties, swatch(detection.label), detection.class_name, score);
  });
  instances.replaceChildren(...items);
  markInstance(shown);
}

function markInstance(shown) {
  const index = shown.indexOf(highlighted);
  [...instances.children].forEach((item, i) => item.setAttribute("aria-selected", i === index));
  if (index < 0) instances.removeAttribute("aria-activedescendant");
  else instances.setAttribute("aria-activedescendant", `instance-${index}`);
  element("caption").textContent = highlighted ? titleOf(highlighted) : "\u00a0";
}

function highlight(detection, scroll = false) {
  if (detection === highlighted) return;
  highlighted = detection;
  const shown = visible();
  markInstance(shown);
  if (scroll) instances.children[shown.indexOf(detection)]?.scrollIntoView({ block: "nearest" });
  draw();
}

function draw(target = context, width = canvas.width) {
  const scale = width / found.width;
  target.setTransform(scale, 0, 0, scale, 0, 0);
  target.clearRect(0, 0, found.width, found.height); // the image may be transparent
  target.drawImage(image, 0, 0, found.width, found.height);
  const side = Math.sqrt(found.width * found.height);
  target.lineWidth = Math.max(1 / scale, side / 400);
  target.font = `${Math.max(11 / scale, side / 45)}px system-ui, sans-serif`;
  target.textBaseline = "bottom";
  const shown = visible().reverse().filter((d) => d !== highlighted);
  for (const detection of highlighted ? [...shown, highlighted] : shown) {
    drawDetection(target, detection, highlighted && detection !== highlighted);
  }
}

function drawDetection(target, detection, isFaint) {
  const [left, top, right, bottom] = detection.box;
  target.fillStyle = target.strokeStyle = colourOf(detection.label);
  target.globalAlpha = isFaint ? 0.12 : detection === highlighted ? 0.65 : 0.45;
  target.fill(detection.path);
  target.globalAlpha = isFaint ? 0.3 : 1;
  target.stroke(detection.path);
  target.strokeRect(left, top, right - left, bottom - top);
  if (!isFaint) {
    const { width, fontBoundingBoxAscent: height } = target.measureText(titleOf(detection));
    const x = Math.max(0, Math.min(left, found.width - width));
    const y = Math.max(height * 1.2, top);
    target.fillRect(x, y - height * 1.2, width, height * 1.2);
    target.fillStyle = inkOn(target.fillStyle);
    target.fillText(titleOf(detection), x, y);
  }
  target.globalAlpha = 1;
}

function detectionAt(event) {
  const box = canvas.getBoundingClientRect();
  const x = ((event.clientX - box.left) / box.width) * found.width;
  const y = ((event.clientY - box.top) / box.height) * found.height;
  context.setTransform(1, 0, 0, 1, 0, 0);
  const area = ({ box: [left, top, right, bottom] }) => (right - left) * (bottom - top);
  const hit = visible().filter((d) => context.isPointInPath(d.path, x, y));
  return hit.sort((a, b) => area(a) - area(b))[0] || null;
}

function showTiming(timing, elapsed) {
  const stages = ["decode", "queue", "infer", "encode"].map((s) => [s, timing[`${s}_us`] / 1000]);
  const server = stages.reduce((sum, [, ms]) => sum + ms, 0);
  stages.push(["network and browser", Math.max(0, elapsed - server)], ["total", elapsed]);
  const rows = stages.map(([stage, ms]) => {
    const bar = make("div");
    bar.style.width = `${(100 * ms) / elapsed}%`;
    const value = make("td", {}, `${ms.toFixed(1)} ms`);
    const track = make("td", { className: "track" }, bar);
    return make("tr", {}, make("th", { scope: "row" }, stage), value, track);
  });
  element("timing").replaceChildren(...rows);
}

function save(blob, suffix) {
  const download = `${name}-detections.${suffix}`;
  const link = make("a", { href: URL.createObjectURL(blob), download });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

async function savePng() {
  const full = new OffscreenCanvas(found.width, found.height);
  draw(full.getContext("2d"), found.width);
  save(await full.convertToBlob({ type: "image/png" }), "png");
}

function saveJson() {
  const detections = visible().map(({ path, ...detection }) => detection);
  const result = { model: model?.name, ...found, minimum_score: Number(threshold.value), detections };
  save(new Blob([JSON.stringify(result, null, 1)], { type: "application/json" }), "json");
}

for (const input of [element("file"), element("photo")]) {
  input.addEventListener("change", () => {
    detect(input.files[0], input.files[0]?.name);
    input.value = ""; // so that the same file can be chosen again
  });
}
document.addEventListener("paste", (event) => {
  const [file] = event.clipboardData.files;
  if (file) detect(file, file.name);
});
const source = element("source");
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  source.classList.add("over");
});
document.addEventListener("dragleave", () => source.classList.remove("over"));
document.addEventListener("drop", (event) => {
  event.preventDefault();
  source.classList.remove("over");
  const [file] = event.dataTransfer.files;
  if (file) detect(file, file.name);
});
threshold.addEventListener("input", update);
for (const kind of ["pointermove", "pointerdown"]) {
  canvas.addEventListener(kind, (event) => highlight(detectionAt(event), true));
}
canvas.addEventListener("pointerleave", (event) => {
  if (event.pointerType === "mouse") highlight(null); // a finger's highlight stays
});
instances.addEventListener("keydown", (event) => {
  const shown = visible();
  const index = shown.indexOf(highlighted);
  const last = shown.length - 1;
  const next = { ArrowDown: Math.min(index + 1, last), ArrowUp: Math.max(index - 1, 0), Home: 0, End: last };
  if (event.key === "Escape") highlight(null);
  else if (event.key in next && shown.length) {
    event.preventDefault();
    highlight(shown[next[event.key]], true);
  }
});
element("save-png").addEventListener("click", savePng);
element("save-json").addEventListener("click", saveJson);
element("access").addEventListener("submit", (event) => {
  event.preventDefault();
  token = element("token").value.trim();
  describe().then(() => show(""), (error) => show(error.message, true));
});
describe().catch((error) => show(error.message, true));
