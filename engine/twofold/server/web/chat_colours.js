// Colours the tokens of an answer by where their experts ran, in the rendered text.

import { call } from "./chat_answer.js";
import { element } from "./chat_view.js";

export async function colour(view, got) {
  const foot = view.box.querySelector("footer");
  const found = answerTokens(got.content, got.tokens);
  if (!found) { foot.append(element("span", "no colours: this answer's tokens do not join to its text")); return; }
  let placed;
  try { placed = await placements(got.id); } catch (error) { foot.append(element("span", `no colours: ${error.message}`)); return; }
  const look = looks(placed);
  paint(view.text, got.content, found.tokens.map((token, index) => ({ token, ...look(placed.tokens[found.from + index]) })));
  foot.append(element("span", placed.accelerator === "none" ? "darker: slower than the median token" : "darker: more experts were not in VRAM"));
}

// The answer's tokens lie between those of thinking and the end token.
function answerTokens(content, tokens) {
  const begin = tokens.join("").lastIndexOf(content);
  const starts = [0];
  for (const token of tokens) starts.push(starts.at(-1) + token.length);
  const from = starts.lastIndexOf(begin), to = starts.indexOf(begin + content.length, from);
  return begin < 0 || from < 0 || to < 0 ? null : { from, tokens: tokens.slice(from, to) };
}

async function placements(id) {
  for (let attempt = 0; ; attempt++) { // telemetry writes a few times a second
    await new Promise((done) => setTimeout(done, 300));
    try { return await (await call(`chat/placement/${encodeURIComponent(id)}`)).json(); } catch (error) {
      if (attempt === 5) throw error;
    }
  }
}

// A function from a token's placement to its share of colour and its tooltip.
function looks({ accelerator, emulated, tokens }) {
  const onCpuOnly = accelerator === "none";
  const times = tokens.filter(Boolean).map((each) => each.step_us).sort((a, b) => a - b);
  const median = times[times.length >> 1] || 1;
  return (place) => {
    if (!place) return { share: 0, title: "" };
    const { hit, cpu, fetched, step_us: time } = place;
    const routed = hit + cpu + fetched;
    const share = onCpuOnly ? Math.max(0, time / median - 1) / 2 : routed ? (cpu + fetched) / routed : 0;
    const where = onCpuOnly ? "all experts on the CPU" : `${hit} in VRAM, ${cpu} on the CPU, ${fetched} uploaded`;
    const took = time === null ? "" : `, step ${(time / 1000).toFixed(2)} ms${emulated ? " (emulated)" : ""}`;
    return { share: Math.min(0.85, 0.85 * share), title: where + took };
  };
}

// Each line of the rendered text is found in the Markdown it came from, after the line before; its tokens are those of
// that place. A line that Markdown changed, by an entity or an escape, keeps its looks.
function paint(box, source, tokens) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT, (node) =>
    node.parentElement.closest(".bar") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT);
  const nodes = [];
  while (walker.nextNode()) nodes.push(walker.currentNode);
  let at = 0, index = 0, start = 0; // token `index` begins at `start` of the source
  for (const node of nodes) {
    const parts = node.data.split(/(\n)/).map((line) => {
      const from = line.trim() ? source.indexOf(line, at) : -1;
      if (from < 0) return document.createTextNode(line);
      at = from + line.length;
      const spans = document.createDocumentFragment();
      for (let done = from; done < at;) {
        while (start + tokens[index].token.length <= done) start += tokens[index++].token.length;
        const end = Math.min(at, start + tokens[index].token.length);
        const span = element("span", source.slice(done, end), "token");
        span.style.setProperty("--share", tokens[index].share.toFixed(2));
        span.title = tokens[index].title;
        spans.append(span);
        done = end;
      }
      return spans;
    });
    node.replaceWith(...parts);
  }
}
