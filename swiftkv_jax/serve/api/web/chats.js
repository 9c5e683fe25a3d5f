// Conversations and settings in the browser's storage, one entry each, so that two tabs do not
// overwrite each other's. A message is {role, content, reasoning?, figures?}.

const root = location.pathname.replace(/\/$/, "");
const CHAT = `swiftkv${root}/chat/`;
const SHOWN = `swiftkv${root}/shown`;  // the conversation of this tab, which outlives a reload
const SETTINGS = `swiftkv${root}/settings`;

function read(storage, key) {
  try { return JSON.parse(storage.getItem(key)); } catch { return null; }
}

// Returns whether it was kept: storage can be full, or not allowed.
function write(storage, key, value) {
  try {
    storage.setItem(key, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

// The conversations, the latest first.
function storedChats() {
  try {
    const keys = Object.keys(localStorage).filter((key) => key.startsWith(CHAT));
    const found = keys.map((key) => read(localStorage, key)).filter((one) => one?.messages?.length);
    return found.sort((a, b) => b.changed - a.changed);
  } catch {
    return [];
  }
}

function newChat() {
  const random = crypto.getRandomValues(new Uint32Array(2));
  return { id: Date.now().toString(36) + random[0].toString(36) + random[1].toString(36), messages: [] };
}

function keepChat(chat) {
  if (chat.deleted) return true;
  chat.changed = Date.now();
  return write(localStorage, CHAT + chat.id, chat);
}

function deleteChat(chat) {
  localStorage.removeItem(CHAT + chat.id);
}

function titleOf(chat) {
  return chat.messages[0].content.trim().split("\n")[0].slice(0, 80) || "…";
}
