// Shows messages. An answer's Markdown comes from the server as HTML that holds no HTML of the model; everything else
// is set as text.

import { $, call } from "./chat_answer.js";

const PAUSE_MS = 60; // between two renderings of an answer that streams

export function element(tag, text = "", name = "") {
  const made = document.createElement(tag);
  made.textContent = text;
  if (name) made.className = name;
  return made;
}

export function button(text, act, name = "") {
  const made = element("button", text, name);
  made.type = "button";
  made.onclick = act;
  return made;
}

// Changes the log, and follows its end only where the reader was there.
export function change(act) {
  const log = $("log");
  const follows = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
  act();
  if (follows) log.scrollTop = log.scrollHeight;
}

export async function copy(text, from) {
  try { await navigator.clipboard.writeText(text); } catch { copyBySelection(text); } // plain HTTP has no clipboard API
  const label = from.textContent;
  from.textContent = "Copied";
  setTimeout(() => { from.textContent = label; }, 1500);
}

function copyBySelection(text) {
  const focused = document.activeElement;
  const area = element("textarea");
  area.value = text;
  document.body.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

class Markdown {
  #text = ""; #from = 0; #rendering = null;

  constructor(box) { this.box = box; }

  // Shows `text`, which is the earlier one and more; resolves when all of it is on show.
  async show(text) {
    this.#text = text;
    await (this.#rendering ??= this.#render());
  }

  async #render() {
    let shown;
    do {
      if (shown !== undefined) await new Promise((done) => setTimeout(done, PAUSE_MS));
      shown = this.#text;
      await this.#renderFrom(shown.slice(this.#from));
    } while (shown !== this.#text);
    this.#rendering = null; // at once: a text that comes later must not wait for this rendering
  }

  // All blocks but the last are final: the next call begins with that one.
  async #renderFrom(tail) {
    let blocks;
    try {
      blocks = (await (await call("chat/markdown", { method: "POST", body: JSON.stringify({ text: tail }) })).json()).blocks;
    } catch { // shown as it is
      const plain = element("div", tail, "block plain");
      change(() => { this.#last?.remove(); this.box.append(plain); });
      return;
    }
    const made = blocks.map(({ html }) => {
      const block = element("div", "", "block");
      block.append(...new DOMParser().parseFromString(html, "text/html").body.childNodes);
      return block;
    });
    change(() => { this.#last?.remove(); this.box.append(...made); });
    this.#from += tail.split("\n").slice(0, blocks.at(-1)?.line ?? 0).reduce((sum, line) => sum + line.length + 1, 0);
  }

  get #last() { return this.box.lastElementChild; }
}

// The element of an answer; `update` shows what its message holds by now, `end` also its notes and buttons.
export class AnswerView {
  #message; #thinking; #calls = []; #markdown;

  constructor(message) {
    this.#message = message;
    this.box = element("article", "", "assistant");
  }

  get text() { return this.#markdown?.box; }

  async update() {
    const { reasoning, tools, content } = this.#message;
    change(() => {
      if (reasoning) (this.#thinking ??= this.#folded("Thinking")).textContent = reasoning;
      tools.forEach((tool, index) => {
        const name = `Tool call: ${tool.function.name}`;
        (this.#calls[index] ??= this.#folded(name)).textContent = `${tool.function.name}(${tool.function.arguments})`;
      });
      if (content && !this.#markdown) this.#markdown = new Markdown(this.box.appendChild(element("div", "", "md")));
    });
    if (content) await this.#markdown.show(content.replace(/\r\n?/g, "\n"));
  }

  async end(regenerate) {
    await this.update();
    const foot = element("footer");
    const copied = button("Copy", () => copy(this.#message.content, copied));
    foot.append(...(this.#message.notes ?? []).map((note) => element("span", note)), copied, button("Regenerate", regenerate, "again"));
    change(() => this.box.append(foot));
  }

  #folded(title) {
    const details = this.box.appendChild(element("details"));
    details.append(element("summary", title), element("div", "", "plain"));
    return details.lastChild;
  }
}

const lostNote = (count) => `${count} large ${count === 1 ? "picture is" : "pictures are"} no longer in this browser.`;

// Small views of pictures. `removed` takes the number of one that the user removes.
export function pictureRow(urls, removed) {
  const row = element("div", "", "pictures");
  row.append(...urls.map((url, index) => {
    const box = element("figure");
    const image = element("img");
    Object.assign(image, { src: url, alt: `Picture ${index + 1}` });
    box.append(image);
    if (removed) {
      const remove = button("×", () => removed(index));
      remove.setAttribute("aria-label", `Remove picture ${index + 1}`);
      box.append(remove);
    }
    return box;
  }));
  return row;
}

// The element of a user's message. `edited` takes the new text.
export function userView(message, edited) {
  const box = element("article", "", "user");
  const copied = button("Copy", () => copy(message.content, copied));
  const foot = element("footer");
  foot.append(copied, button("Edit", () => edit(box, message, edited), "again"));
  if (message.pictures?.length) box.append(pictureRow(message.pictures));
  if (message.lost) box.append(element("p", lostNote(message.lost), "note"));
  if (message.content) box.append(element("div", message.content, "plain"));
  box.append(foot);
  return box;
}

export function edit(box, message, edited, text = message.content) {
  const area = element("textarea");
  area.value = text;
  area.setAttribute("aria-label", "Edited message");
  const cancel = button("Cancel", () => box.replaceWith(userView(message, edited)));
  const foot = element("footer");
  foot.append(button("Send again", () => { if (area.value.trim()) edited(area.value.trim()); }), cancel);
  box.classList.add("editing");
  box.replaceChildren(area, foot);
  area.focus();
}
