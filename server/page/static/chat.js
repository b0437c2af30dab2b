// The chat: one conversation, kept in this tab. Text from the model only ever becomes text nodes.

const element = (id) => document.getElementById(id);
const turns = element("turns");
const question = element("question");
const messages = [];
let running = null;

export function headers() {
  const key = sessionStorage.getItem("key");
  return key ? { Authorization: `Bearer ${key}` } : {};
}

export function wantKey() {
  element("key").hidden = false;
}

function make(tag, className, text = "") {
  const made = document.createElement(tag);
  made.className = className;
  made.textContent = text;
  return made;
}

function show(who, text = "") {
  const item = make("li", who);
  item.append(make("div", "who", who === "user" ? "You" : "Model"));
  const body = make("div", "text", text);
  item.append(body);
  turns.append(item);
  item.scrollIntoView({ block: "end" });
  return { item, body };
}

// Fenced code becomes <pre>, everything else stays as it was written.
function render(body, text) {
  body.replaceChildren();
  text.split(/^```[^\n]*\n?/m).forEach((part, i) => {
    if (part) body.append(i % 2 ? make("pre", "", part.replace(/\n$/, "")) : document.createTextNode(part));
  });
}

// The events of a stream, parsed; comments and [DONE] left out.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

function cost(timings) {
  const experts = timings.experts ?? {};
  const parts = [`${timings.predicted_n} tokens`, `${timings.predicted_per_second.toFixed(1)} tokens/s`];
  if (timings.cache_n) parts.push(`${timings.cache_n} prompt tokens reused`);
  if (experts.requests) parts.push(`hit rate ${(100 * experts.hit_rate).toFixed(0)} %`);
  if (experts.exactness && experts.exactness !== "exact") parts.push(`${experts.mode}: ${experts.exactness}`);
  return parts.join(", ");
}

async function answer() {
  const { item, body } = show("assistant");
  const told = make("div", "cost");
  item.append(told);
  let text = "";
  let thought = null;
  running = new AbortController();
  element("stop").disabled = false;
  element("send").disabled = true;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST",
      signal: running.signal,
      headers: { "Content-Type": "application/json", ...headers() },
      body: JSON.stringify({
        model: element("model").value || undefined,
        messages,
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) {
      if (response.status === 401) wantKey();
      const refusal = await response.json().catch(() => ({}));
      throw new Error(refusal.error?.message ?? `status ${response.status}`);
    }
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const delta = event.choices?.[0]?.delta ?? {};
      if (delta.reasoning_content) {
        if (!thought) {
          thought = make("details", "");
          thought.append(make("summary", "", "Reasoning"), document.createTextNode(""));
          item.insertBefore(thought, body);
        }
        thought.lastChild.data += delta.reasoning_content;
      }
      if (delta.content) {
        text += delta.content;
        render(body, text);
      }
      if (event.timings) told.textContent = cost(event.timings);
      turns.scrollTop = turns.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") item.append(make("div", "error", error.message));
  }
  if (text) messages.push({ role: "assistant", content: text });
  else messages.pop();
  running = null;
  element("stop").disabled = true;
  element("send").disabled = false;
}

element("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = question.value.trim();
  if (!text || running) return;
  question.value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});

question.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    element("ask").requestSubmit();
  }
});

element("stop").addEventListener("click", () => running?.abort());

element("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  turns.replaceChildren();
  question.focus();
});

element("key").addEventListener("click", () => {
  const key = prompt("API key of this server");
  if (key !== null) sessionStorage.setItem("key", key.trim());
});
