// The live view: asks for the state once a second while the page is looked at, and draws the difference.

import { headers, wantKey } from "./chat.js";

const element = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PERIOD_MS = 1000;
let before = null;

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let at = 0;
  while (count >= 1000 && at < units.length - 1) {
    count /= 1000;
    at += 1;
  }
  return `${count < 10 && at ? count.toFixed(1) : count.toFixed(0)} ${units[at]}`;
}

const share = (part, whole) => (whole > 0 ? `${((100 * part) / whole).toFixed(0)} %` : "–");

function figures(model, last, seconds) {
  const now = model.experts;
  const was = last?.experts ?? now;
  const since = (name) => now[name] - was[name];
  const tokens = model.tokens - (last?.tokens ?? model.tokens);
  const rate = (count, unit) => (last ? `${bytes(count / seconds)}/s` : unit);
  return [
    ["Speed", last ? `${(tokens / seconds).toFixed(1)} tokens/s` : "–"],
    ["Answers", `${model.lanes.filter((lane) => lane.busy).length} of ${model.lanes.length}`],
    ["Waiting", String(model.queued)],
    ["KV", share(model.kv_tokens, model.kv_size)],
    ["Residency", share(model.residency, 1)],
    ["Hit rate now", share(since("hits"), since("requests"))],
    ["Hit rate", share(now.hits, now.requests)],
    ["Link", rate(since("uploaded_bytes") + since("staged_bytes"), "–")],
    ["Wasted", rate(since("wasted_bytes"), "–")],
    ["Stall", tokens > 0 ? `${(since("stall_ns") / 1e6 / tokens).toFixed(1)} ms/token` : "–"],
    ["Recall", share(now.true_predicted, now.true_experts)],
    ["Mode", model.mode],
  ];
}

function bar(className, x, y, width, height) {
  const rect = document.createElementNS(SVG, "rect");
  rect.setAttribute("class", className);
  for (const [name, value] of Object.entries({ x, y, width: Math.max(0, width), height })) {
    rect.setAttribute(name, value);
  }
  return rect;
}

function layerRow(layer, most) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 100 12");
  svg.setAttribute("preserveAspectRatio", "none");
  const scale = most > 0 ? 100 / most : 0;
  svg.append(
    bar("resident", 0, 0, (100 * layer.slots) / layer.n_expert, 5),
    bar("hit", 0, 1.5, 100 * (layer.hit_rate ?? 0), 2),
    bar("demand", 0, 7, layer.demand * scale, 4),
    bar("foreseen", layer.demand * scale, 7, layer.predicted * scale, 4),
  );
  const name = document.createElement("span");
  name.textContent = layer.block;
  const rate = document.createElement("span");
  rate.textContent = layer.hit_rate === null ? "–" : `${(100 * layer.hit_rate).toFixed(0)} %`;
  return [name, svg, rate];
}

function draw(state) {
  const select = element("model");
  if (select.options.length !== state.served.length) {
    select.replaceChildren(...state.served.map((name) => new Option(name, name)));
    select.hidden = state.served.length < 2;
  }
  const chosen = state.models.find((each) => each.name === select.value) ?? state.models[0];
  if (state.loading !== null) {
    element("summary").textContent = `Loading: ${(100 * state.loading).toFixed(0)} %`;
  }
  if (!chosen) {
    if (state.loading === null) element("summary").textContent = "No model is loaded; a question loads one.";
    element("figures").replaceChildren();
    element("layers").replaceChildren();
    return;
  }
  const now = performance.now();
  const last = before?.model.name === chosen.name ? before : null;
  element("about").textContent = `${chosen.name} · ${chosen.architecture} ${chosen.quantization} · ${chosen.exactness}`;
  element("summary").textContent = chosen.layers.length
    ? `${chosen.n_expert} experts per layer, ${chosen.n_expert_used} per token; ${share(chosen.residency, 1)} have a slot (${bytes(chosen.experts.bank_bytes)}).`
    : chosen.n_expert
      ? "All experts are resident: nothing is uploaded."
      : "This model has no experts.";
  element("figures").replaceChildren(
    ...figures(chosen, last?.model, last ? (now - last.at) / 1000 : 1).map(([name, value]) => {
      const pair = document.createElement("div");
      const term = document.createElement("dt");
      const told = document.createElement("dd");
      term.textContent = name;
      told.textContent = value;
      pair.append(term, told);
      return pair;
    }),
  );
  const most = Math.max(0, ...chosen.layers.map((layer) => layer.demand + layer.predicted));
  element("layers").replaceChildren(...chosen.layers.flatMap((layer) => layerRow(layer, most)));
  before = { model: chosen, at: now };
}

async function look() {
  if (!document.hidden) {
    try {
      const response = await fetch("/page/state", { headers: headers() });
      if (response.status === 401) {
        wantKey();
        element("summary").textContent = "The server asks for an API key.";
      } else if (response.ok) draw(await response.json());
    } catch {
      element("summary").textContent = "The server does not answer.";
    }
  }
  setTimeout(look, PERIOD_MS);
}

look();
