// Chat over /v1/chat/completions: streams, stops, folds thinking and tool calls, colours tokens by placement.
// Text of the model is set as textContent only, so no answer can run as HTML.

const $ = (id) => document.getElementById(id);
const messages = [];
let running = null; // AbortController of the answer that streams

const headers = () => {
  const key = $("key").value.trim();
  return { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
};

async function call(path, options = {}) {
  const answer = await fetch(path, { ...options, headers: headers() });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try { message = JSON.parse(text).error.message; } catch { /* not JSON: shown as it is */ }
  if (answer.status === 401) { showSettings(true); $("key").focus(); }
  throw new Error(message || `the server answered ${answer.status}`);
}

function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

function folded(parent, title) {
  const box = element("details");
  box.append(element("summary", title), element("div"));
  parent.append(box);
  return box.lastChild;
}

function showSettings(open) {
  $("settings").hidden = !open;
  $("options").setAttribute("aria-expanded", String(open));
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const lines = rest.split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

function requestBody() {
  const system = $("system").value.trim();
  const number = (id) => ($(id).value === "" ? {} : { [id]: Number($(id).value) });
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    stream: true,
    stream_options: { include_usage: true },
    ...number("temperature"),
    ...number("max_tokens"),
    ...($("colours").checked && { logprobs: true }),
  };
}

async function answer() {
  running = new AbortController();
  const began = performance.now();
  const box = element("article", "", "assistant");
  $("log").append(box);
  const got = { id: "", content: "", reasoning: "", tools: [], tokens: [], usage: null, first: 0, finish: "" };
  let text, thinking;
  const reply = await call("v1/chat/completions", {
    method: "POST", body: JSON.stringify(requestBody()), signal: running.signal,
  });
  try {
    for await (const event of events(reply.body)) {
      got.id = event.id ?? got.id;
      got.usage = event.usage ?? got.usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      if (!got.first && (delta.content || reasoning)) got.first = performance.now();
      if (reasoning) {
        thinking ??= folded(box, "Thinking");
        thinking.textContent = got.reasoning += reasoning;
      }
      if (delta.content) {
        text ??= box.appendChild(element("div"));
        text.textContent = got.content += delta.content;
      }
      for (const part of delta.tool_calls ?? []) {
        const tool = (got.tools[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
        tool.id = part.id ?? tool.id;
        tool.function.name += part.function?.name ?? "";
        tool.function.arguments += part.function?.arguments ?? "";
        tool.box ??= folded(box, "Tool call");
        tool.box.textContent = `${tool.function.name}(${tool.function.arguments})`;
      }
      got.tokens.push(...(choice.logprobs?.content ?? []).map((each) => each.token));
      got.finish = choice.finish_reason ?? got.finish;
      $("log").scrollTop = $("log").scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    got.finish = "stopped";
  } finally {
    const tools = got.tools.map(({ box: _, ...tool }) => tool);
    if (got.content || tools.length) {
      messages.push({ role: "assistant", content: got.content || null, ...(tools.length && { tool_calls: tools }) });
    }
  }
  note(box, got, began);
  if ($("colours").checked && text && got.tokens.length) await colour(text, box, got);
}

function note(box, got, began) {
  const foot = element("footer");
  const seconds = (performance.now() - (got.first || began)) / 1000;
  const count = got.usage?.completion_tokens;
  if (got.first) foot.append(element("span", `first token ${((got.first - began) / 1000).toFixed(2)} s`));
  if (count > 1) foot.append(element("span", `${count} tokens, ${((count - 1) / seconds).toFixed(1)} per second`));
  const cached = got.usage?.prompt_tokens_details?.cached_tokens;
  if (cached) foot.append(element("span", `${cached} of ${got.usage.prompt_tokens} prompt tokens cached`));
  if (got.finish === "length") foot.append(element("span", "cut at the longest answer"));
  if (got.finish === "stopped") foot.append(element("span", "stopped"));
  const copy = element("button", "Copy");
  copy.type = "button";
  copy.onclick = () => navigator.clipboard.writeText(got.content);
  foot.append(copy);
  box.append(foot);
}

// The answer's text lies between the tokens of thinking and the end token.
function spans(content, tokens) {
  const begin = tokens.join("").lastIndexOf(content);
  const starts = [0];
  for (const token of tokens) starts.push(starts.at(-1) + token.length);
  const from = starts.lastIndexOf(begin), to = starts.indexOf(begin + content.length, from);
  return begin < 0 || from < 0 || to < 0 ? null : { from, tokens: tokens.slice(from, to) };
}

async function placements(id) {
  for (let attempt = 0; attempt < 6; attempt++) { // telemetry writes a few times a second
    await new Promise((done) => setTimeout(done, 300));
    try { return await (await call(`chat/placement/${encodeURIComponent(id)}`)).json(); } catch (error) {
      if (attempt === 5) throw error;
    }
  }
}

async function colour(text, box, got) {
  const foot = box.querySelector("footer");
  const found = spans(got.content, got.tokens);
  if (!found) { foot.append(element("span", "colours need one text per token; this answer's tokens do not join to its text")); return; }
  let placed;
  try { placed = await placements(got.id); } catch (error) { foot.append(element("span", `no colours: ${error.message}`)); return; }
  const all = placed.tokens;
  const onCpuOnly = placed.accelerator === "none";
  const times = all.filter(Boolean).map((each) => each.step_us).sort((a, b) => a - b);
  const median = times[times.length >> 1] || 1;
  text.textContent = "";
  found.tokens.forEach((token, index) => {
    const place = all[found.from + index];
    const span = element("span", token, "token");
    if (place) {
      const routed = place.hit + place.cpu + place.fetched;
      const share = onCpuOnly ? Math.max(0, place.step_us / median - 1) / 2 : routed ? (place.cpu + place.fetched) / routed : 0;
      span.style.setProperty("--share", Math.min(0.85, 0.85 * share).toFixed(2));
      const time = place.step_us === null ? "" : `, step ${(place.step_us / 1000).toFixed(2)} ms${placed.emulated ? " (emulated)" : ""}`;
      span.title = onCpuOnly ? `all experts on the CPU${time}` : `${place.hit} in VRAM, ${place.cpu} on the CPU, ${place.fetched} uploaded${time}`;
    }
    text.append(span);
  });
  foot.append(element("span", onCpuOnly ? "darker: slower than the median token" : "darker: more experts were not in VRAM"));
}

async function send(event) {
  event.preventDefault();
  if (running) { running.abort(); return; }
  const content = $("prompt").value.trim();
  if (!content) return;
  messages.push({ role: "user", content });
  $("log").append(element("article", content, "user"));
  $("prompt").value = "";
  grow();
  $("send").textContent = "Stop";
  try { await answer(); } catch (error) {
    if (error.name !== "AbortError") $("log").append(element("article", error.message, "error"));
    document.querySelectorAll("article.assistant:empty").forEach((empty) => empty.remove());
  } finally {
    running = null;
    $("send").textContent = "Send";
    $("prompt").focus();
  }
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

async function refresh() {
  try {
    const health = await (await fetch("health")).json();
    const loading = health.status === "loading";
    $("state").textContent = loading ? "loading the model …" : health.accelerator ? `experts: ${health.accelerator}` : "";
    if (loading) { setTimeout(refresh, 1000); return; }
    const models = await (await call("v1/models")).json();
    $("model").replaceChildren(...models.data.map((model) => new Option(model.id, model.id)));
  } catch (error) { $("state").textContent = error.message; }
}

$("ask").addEventListener("submit", send);
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("prompt").addEventListener("input", grow);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("options").addEventListener("click", () => showSettings($("settings").hidden));
$("new").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("log").replaceChildren();
  $("prompt").focus();
});
$("key").value = sessionStorage.getItem("key") ?? "";
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); refresh(); });
refresh();
