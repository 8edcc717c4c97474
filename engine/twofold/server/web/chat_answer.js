// Talks with the server: plain calls, and an answer that streams.

export const $ = (id) => document.getElementById(id);

const SAMPLING = ["temperature", "top_p", "top_k", "min_p", "max_tokens"];

export async function call(path, options = {}) {
  const key = $("key").value.trim();
  const headers = { "content-type": "application/json", ...(key && { authorization: `Bearer ${key}` }) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try { message = JSON.parse(text).error.message; } catch { /* not JSON: shown as it is */ }
  throw Object.assign(new Error(message || `the server answered ${answer.status}`), { status: answer.status });
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

// A stored message as the API takes it.
function wire({ role, content, tools, pictures }) {
  const parts = (pictures ?? []).map((url) => ({ type: "image_url", image_url: { url } }));
  if (parts.length && content) parts.push({ type: "text", text: content });
  return { role, content: parts.length ? parts : content || null, ...(tools?.length && { tool_calls: tools }) };
}

function requestBody(messages) {
  const system = $("system").value.trim();
  const set = SAMPLING.filter((id) => $(id).value !== "" && $(id).checkValidity());
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages.map(wire)],
    stream: true,
    stream_options: { include_usage: true },
    ...Object.fromEntries(set.map((id) => [id, Number($(id).value)])),
    ...($("colours").checked && { logprobs: true }),
  };
}

// Streams the answer to `messages` into `got`, a message, and calls `changed` after each piece.
// Throws what the server refuses; an answer that was stopped ends without an error.
export async function answer(messages, got, signal, changed) {
  const began = performance.now();
  let first = 0, usage = null;
  try {
    const reply = await call("v1/chat/completions", { method: "POST", body: JSON.stringify(requestBody(messages)), signal });
    for await (const event of events(reply.body)) {
      got.id = event.id ?? got.id;
      usage = event.usage ?? usage;
      const choice = event.choices?.[0];
      if (!choice) continue;
      const delta = choice.delta ?? {};
      const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
      got.reasoning += reasoning;
      got.content += delta.content ?? "";
      if (reasoning || delta.content) first ||= performance.now();
      for (const part of delta.tool_calls ?? []) {
        const tool = (got.tools[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
        tool.id = part.id ?? tool.id;
        tool.function.name += part.function?.name ?? "";
        tool.function.arguments += part.function?.arguments ?? "";
      }
      got.tokens.push(...(choice.logprobs?.content ?? []).map((each) => each.token));
      got.finish = choice.finish_reason ?? got.finish;
      changed();
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    got.finish = "stopped";
  }
  got.notes = notes(got, usage, began, first);
}

function notes(got, usage, began, first) {
  const found = [];
  const count = usage?.completion_tokens;
  const seconds = (performance.now() - first) / 1000;
  if (first) found.push(`first token ${((first - began) / 1000).toFixed(2)} s`);
  if (count > 1) found.push(`${count} tokens, ${((count - 1) / seconds).toFixed(1)} per second`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) found.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  if (got.finish === "length") found.push("cut at the longest answer");
  if (got.finish === "stopped") found.push("stopped");
  return found;
}
