// The chat page: conversations over /v1/chat/completions, kept in the browser.

import { $, answer, call } from "./chat_answer.js";
import { colour } from "./chat_colours.js";
import * as store from "./chat_store.js";
import { listenForPictures, showPictures, takePictures } from "./chat_pictures.js";
import { AnswerView, button, change, copy, edit, element, userView } from "./chat_view.js";

const SETTINGS = ["system", "temperature", "top_p", "top_k", "min_p", "max_tokens"];
const TALES = "twofold-tales";
const EMULATED = "Uploads and evictions are real, the CPU computes, and GPU times are the cost model's. For real times restart "
  + "the server with --accelerator none (the CPU alone, at full speed) or, on a machine with an NVIDIA GPU, cuda. "
  + "With make run: make run ACCELERATOR=none.";

let current = store.fresh(); // the conversation on show
let running = null; // { conversation, stop } of the answer that streams

// ---- the conversation ------------------------------------------------------------------------------------------------

function show(conversation) {
  running?.stop();
  current = conversation;
  if (conversation.model && hasModel(conversation.model)) $("model").value = conversation.model;
  draw();
  listChats();
}

function draw() {
  const views = current.messages.map((message, index) => {
    if (message.role === "user") return userView(message, (text) => sendAgain(index, text));
    const view = new AnswerView(message);
    view.end(() => regenerate(index));
    return view.box;
  });
  $("log").replaceChildren(...(views.length ? views : [welcome()]));
  $("log").scrollTop = $("log").scrollHeight;
}

function welcome() {
  const box = element("div", "", "welcome");
  const name = $("model").value;
  box.append(element("strong", name || "Twofold"));
  if (name === TALES) {
    box.append(element("p", "A small demonstration model. It tells fairy tales."));
    const example = "Tell me the story of a clever fox.";
    box.append(button(example, () => ask(example)));
  } else box.append(element("p", "Ask anything. Enter sends, Shift+Enter begins a new line."));
  box.append(element("p", "Conversations are kept in this browser only."));
  return box;
}

function ask(text, pictures = []) {
  respond([...current.messages, { role: "user", content: text, ...(pictures.length && { pictures }) }], () => {
    $("prompt").value = [text, $("prompt").value].filter(Boolean).join("\n");
    showPictures(pictures);
    keepDraft();
  });
}

const regenerate = (index) => respond(current.messages.slice(0, index), () => {});

function sendAgain(index, text) {
  const { pictures } = current.messages[index];
  respond([...current.messages.slice(0, index), { role: "user", content: text, ...(pictures && { pictures }) }], () => {
    edit($("log").children[index], current.messages[index], (again) => sendAgain(index, again), text);
  });
}

// Answers `messages`, which replace those of the conversation. Where the server refuses, they stay as they were, and
// `refused` gives the typed text back.
async function respond(messages, refused) {
  if (running) return;
  const conversation = current, before = current.messages;
  const controller = new AbortController();
  const run = { conversation, stop: () => controller.abort() };
  const got = { role: "assistant", content: "", reasoning: "", tools: [], tokens: [], id: "", finish: "" };
  conversation.messages = messages;
  conversation.model = $("model").value;
  draw();
  const view = new AnswerView(got);
  $("log").append(view.box);
  $("log").scrollTop = $("log").scrollHeight;
  setRunning(run);
  const isShown = () => current === conversation;
  const began = () => got.content || got.reasoning || got.tools.length;
  let problem = null;
  try { await answer(messages, got, controller.signal, () => { view.update(); }); } catch (error) { problem = error; }
  if (began() || !problem) conversation.messages = began() ? [...messages, got] : messages;
  else conversation.messages = before;
  store.save(conversation);
  if (isShown()) {
    if (!began()) draw(); else await view.end(() => regenerate(messages.length));
    if (problem) {
      change(() => $("log").append(element("article", problem.message, "error")));
      if (!began()) refused();
      if (problem.status === 401) { fold("settings", "options", true); $("key").focus(); }
    }
    if ($("colours").checked && got.tokens.length && view.text) await colour(view, got);
  }
  if (running === run) setRunning(null);
  listChats();
}

function setRunning(run) {
  running = run;
  document.body.classList.toggle("running", run !== null);
  $("log").setAttribute("aria-busy", String(run !== null));
  $("send").textContent = run ? "Stop" : "Send";
  grow();
}

// ---- the list of conversations -----------------------------------------------------------------------------------------

function listChats() {
  const rows = store.list().map((each) => {
    const row = element("div");
    const isCurrent = each.id === current.id;
    const open = button(each.title, () => { fold("side", "chats", false); if (!isCurrent) show(each); }, "title");
    if (isCurrent) open.setAttribute("aria-current", "true");
    const remove = button("Delete", () => {
      store.remove(each.id);
      current.isRemoved = isCurrent; // its answer may still end
      if (isCurrent) show(store.fresh()); else listChats();
    });
    remove.setAttribute("aria-label", `Delete ${each.title}`);
    row.append(open, remove);
    return row;
  });
  $("side").replaceChildren(...(rows.length ? rows : [element("p", "No conversations yet.")]));
}

function fold(panel, opener, open = $(panel).hidden) {
  $(panel).hidden = !open;
  $(opener).setAttribute("aria-expanded", String(open));
}

// ---- the server --------------------------------------------------------------------------------------------------------

const hasModel = (name) => [...$("model").options].some((option) => option.value === name);

async function listModels() {
  const { data } = await (await call("v1/models")).json();
  const chosen = $("model").value || current.model;
  if (data.map(({ id }) => id).join() === [...$("model").options].map(({ value }) => value).join()) return;
  $("model").replaceChildren(...data.map(({ id, parent }) => new Option(parent ? `${id} (adapter of ${parent})` : id, id)));
  if (hasModel(chosen)) $("model").value = chosen;
}

async function refresh() {
  try {
    const health = await (await fetch("health")).json();
    if (health.status === "loading") {
      $("state").textContent = "loading the model …";
      setTimeout(refresh, 1000);
      return;
    }
    await listModels();
    const about = await (await call("chat/about")).json();
    $("state").replaceChildren(...stateOf(health, about));
    if (!current.messages.length) draw();
  } catch (error) {
    $("state").textContent = error.message;
    if (error.status === 401) fold("settings", "options", true);
  }
}

function stateOf({ accelerator, emulated, output_changes: changes }, { dashboard, dashboard_command: command }) {
  const found = [];
  if (accelerator) found.push(element("span", accelerator === "none" ? "all experts on the CPU" : `experts on ${accelerator} and the CPU`));
  if (emulated) {
    const details = element("details");
    details.append(element("summary", "times are emulated"), element("div", EMULATED));
    found.push(details);
  }
  found.push(...(changes ?? []).map((text) => element("span", text)));
  if (dashboard) {
    const link = element("a", dashboard);
    Object.assign(link, { href: dashboard, target: "_blank", rel: "noopener" });
    const [shown, start] = [element("span", "dashboard: "), element("details")];
    shown.append(link);
    start.append(element("summary", "start the dashboard"), element("div", command));
    found.push(shown, start);
  } else found.push(element("span", "no dashboard: the server runs without --telemetry-url"));
  return found;
}

// ---- what the user does ------------------------------------------------------------------------------------------------

function send() {
  const text = $("prompt").value.trim();
  if (running) return;
  const pictures = takePictures();
  if (!text && !pictures.length) return;
  $("prompt").value = "";
  keepDraft();
  ask(text, pictures);
}

function keepDraft() {
  try { sessionStorage.setItem("draft", $("prompt").value); } catch { /* forbidden by the browser */ }
  grow();
}

function grow() {
  $("prompt").style.height = "auto";
  $("prompt").style.height = `${$("prompt").scrollHeight + 2}px`;
}

function remembered(name) {
  try { return sessionStorage.getItem(name) ?? ""; } catch { return ""; }
}

function listen() {
  $("ask").addEventListener("submit", (event) => { event.preventDefault(); if (running) running.stop(); else send(); });
  $("settings").addEventListener("submit", (event) => event.preventDefault());
  $("prompt").addEventListener("input", keepDraft);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault(); // while an answer streams the text stays
    send();
  });
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.stop(); });
  listenForPictures();
  $("options").addEventListener("click", () => fold("settings", "options"));
  $("chats").addEventListener("click", () => { listChats(); fold("side", "chats"); });
  $("new").addEventListener("click", () => { show(store.fresh()); $("prompt").focus(); });
  $("log").addEventListener("click", ({ target }) => {
    if (target.matches(".code .copy")) copy(target.closest(".code").querySelector("code").textContent, target);
  });
  $("model").addEventListener("focus", () => { listModels().catch(() => {}); }); // adapters come and go while it runs
  $("model").addEventListener("change", () => { if (!current.messages.length) draw(); });
  $("key").addEventListener("change", () => {
    try { sessionStorage.setItem("key", $("key").value); } catch { /* forbidden by the browser */ }
    refresh();
  });
  $("settings").addEventListener("change", () => {
    store.saveSettings({ colours: $("colours").checked, ...Object.fromEntries(SETTINGS.map((id) => [id, $(id).value])) });
  });
}

const kept = store.settings();
for (const id of SETTINGS) $(id).value = kept[id] ?? "";
$("colours").checked = Boolean(kept.colours);
$("key").value = remembered("key");
$("prompt").value = remembered("draft");
grow();
listen();
draw();
refresh();
