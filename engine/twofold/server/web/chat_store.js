// Conversations and settings, kept in this browser only: one entry of localStorage per conversation, so that two
// tabs do not overwrite each other. Without localStorage they last as long as the page.

const PREFIX = "twofold/chat/";
const SETTINGS = "twofold/settings";
const MAX_PICTURE_CHARS = 1_500_000; // of one conversation
const memory = new Map();

function read(key) {
  try { return JSON.parse(localStorage.getItem(key) ?? "null") ?? memory.get(key) ?? null; } catch { return memory.get(key) ?? null; }
}

function write(key, value) {
  memory.set(key, value);
  for (;;) {
    try { localStorage.setItem(key, JSON.stringify(value)); return; } catch (error) {
      const oldest = list().filter((each) => PREFIX + each.id !== key).at(-1);
      if (error.name !== "QuotaExceededError" || !oldest) return;
      remove(oldest.id); // the browser's space is full
    }
  }
}

export function list() {
  const keys = new Set(memory.keys());
  try { Object.keys(localStorage).forEach((key) => keys.add(key)); } catch { /* forbidden by the browser */ }
  const found = [...keys].filter((key) => key.startsWith(PREFIX)).map(read).filter((each) => Array.isArray(each?.messages));
  return found.sort((a, b) => b.updated - a.updated);
}

export function fresh() {
  const id = `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
  return { id, title: "", model: "", updated: 0, messages: [] };
}

export function save(conversation) {
  if (conversation.isRemoved) return;
  if (!conversation.messages.length) { remove(conversation.id); return; }
  conversation.title = conversation.messages[0].content.trim().replace(/\s+/g, " ").slice(0, 80) || "Picture";
  conversation.updated = Date.now();
  // The tokens serve the colours of an answer on show and are large.
  const messages = conversation.messages.map((each) => ({ ...each, tokens: undefined }));
  write(PREFIX + conversation.id, { ...conversation, messages: withoutLargePictures(messages) });
}

// Pictures stay in this tab's conversation; the browser's few MB keep those of small size.
function withoutLargePictures(messages) {
  let room = MAX_PICTURE_CHARS;
  return messages.map((each) => {
    if (!each.pictures) return each;
    const kept = each.pictures.filter((url) => { room -= url.length; return room >= 0; });
    return { ...each, pictures: kept, lost: (each.lost ?? 0) + each.pictures.length - kept.length };
  });
}

export function remove(id) {
  memory.delete(PREFIX + id);
  try { localStorage.removeItem(PREFIX + id); } catch { /* forbidden by the browser */ }
}

export const settings = () => read(SETTINGS) ?? {};
export const saveSettings = (values) => write(SETTINGS, values);
