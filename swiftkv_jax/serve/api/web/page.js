// The page: what is shown of a conversation, and requests to the server.

const $ = (id) => document.getElementById(id);
const EXAMPLES = [
  "Write a Python function that returns the n most common words of a text file.",
  "Explain what a key/value cache is in three short paragraphs.",
  "Make a table of five sorting algorithms with their time and space complexity.",
];
const FIELDS = ["system", "temperature", "top_p", "max_tokens"];
const SAMPLING = { temperature: 0.2, top_p: 0.9 };  // where neither model nor server sets any
const COMPLETION_TOKENS = 256;  // where the model has no chat template and no number is set

let model = null, hasTemplate = true, sampling = {}, chat = newChat(), running = null, polling = null;

// The server

function headers() {
  const found = { "content-type": "application/json" };
  if ($("key").value) found.authorization = "Bearer " + $("key").value;
  return found;
}

async function post(path, body) {
  const signal = running.signal;
  const response = await fetch(root + path, { method: "POST", headers: headers(), body: JSON.stringify(body), signal });
  if (!response.ok) throw new Error(await failure(response));
  return response;
}

async function failure(response) {
  try { return (await response.json()).error.message; } catch { return "HTTP " + response.status; }
}

async function start() {
  try {
    // Not /ready: while the server starts, browsers would log each answer as an error.
    const { status, phase, done, total } = (await (await fetch(root + "/health")).json()).server;
    if (status === "starting") {
      hint(`The server is starting: ${phase}` + (total ? `, ${done} of ${total} programs` : ""));
      clearTimeout(polling);
      polling = setTimeout(start, 1000);
      return;
    }
    const response = await fetch(root + "/v1/models", { headers: headers() });
    if (response.status === 401) throw new Error("This server wants an API key: see Settings.");
    if (!response.ok) throw new Error(await failure(response));
    const card = (await response.json()).data[0];
    [model, hasTemplate] = [card.id, card.has_chat_template];
    sampling = Object.keys(card.default_sampling).length ? {} : SAMPLING;
    const shown = { temperature: 1, top_p: 1, ...card.default_sampling, ...sampling };
    for (const name of ["temperature", "top_p"]) $(name).placeholder = shown[name];
    $("model").textContent = document.title = model;
    $("system-row").hidden = !hasTemplate;
    if (!hasTemplate) $("max_tokens").placeholder = COMPLETION_TOKENS;
    show(chat);
  } catch (error) {
    $("model").textContent = "swiftkv-jax";
    if (!chat.messages.length) hint(error.message);
  }
}

// What a request asks for, beside its messages or prompt.
function parameters() {
  const body = { model, stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...sampling };
  for (const name of ["temperature", "top_p"]) if ($(name).value) body[name] = Number($(name).value);
  return body;
}

function promptOf(messages) {
  if (!hasTemplate) return { prompt: messages.at(-1).content };
  const sent = messages.map(({ role, content, reasoning }) => ({ role, content, ...(reasoning && { reasoning }) }));
  const system = $("system").value.trim();
  return { messages: system ? [{ role: "system", content: system }, ...sent] : sent };
}

// How many tokens fit after a prompt; at least 1, so that the server says what is too long.
async function room(prompt) {
  const found = await (await post("/tokenize", { model, ...prompt })).json();
  return Math.max(found.max_model_len - found.count, 1);
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the stream was cut");
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

// `first` and `last` are events with text: their times and the tokens until then.
function figures(began, first, last, usage, cut) {
  const cached = usage.prompt_tokens_details.cached_tokens;
  const rate = last.time > first.time ? (last.tokens - first.tokens) / (last.time - first.time) * 1000 : 0;
  return [
    `first token ${(first.time - began).toFixed(0)} ms`,
    `${usage.completion_tokens} tokens` + (rate ? `, ${rate.toFixed(0)} a second` : ""),
    `prompt ${usage.prompt_tokens}, of them ${cached} cached`,
    ...(cut ? ["stopped at max tokens"] : []),
  ].join(" · ");
}

// Answer the last message of the conversation.
async function ask() {
  const asked = chat, answer = { role: "assistant", content: "" }, shown = turn(answer);
  const began = performance.now(), paint = painter(answer, shown);
  let first = null, last = null, usage = null, reason = null;
  setRunning(new AbortController());
  try {
    const body = parameters(), prompt = promptOf(asked.messages);
    const wanted = Number($("max_tokens").value) || (hasTemplate ? 0 : COMPLETION_TOKENS);
    if (wanted) body.max_tokens = Math.min(wanted, await room(prompt));
    const response = await post(hasTemplate ? "/v1/chat/completions" : "/v1/completions", { ...body, ...prompt });
    for await (const event of events(response.body)) {
      for (const choice of event.choices) {
        const more = (hasTemplate ? choice.delta.content : choice.text) ?? "", inner = choice.delta?.reasoning ?? "";
        if (more || inner) {
          last = { time: performance.now(), tokens: event.usage.completion_tokens };
          first ??= last;
        }
        answer.content += more;
        if (inner) answer.reasoning = (answer.reasoning ?? "") + inner;
        reason = choice.finish_reason ?? reason;
      }
      usage = event.usage ?? usage;
      paint.soon();
    }
    const none = { time: performance.now(), tokens: 0 };
    answer.figures = figures(began, first ?? none, last ?? none, usage, reason === "length");
  } catch (error) {
    answer.figures = error.name === "AbortError" ? "stopped" : error.message;
    answer.failed = error.name !== "AbortError";
  } finally {
    setRunning(null);
    if (answer.content || answer.reasoning) asked.messages.push(answer);
    const kept = keepChat(asked);
    listChats();
    if (asked === chat) {
      if (!kept) answer.figures += " · not kept: the browser's storage is full or not allowed";
      paint.now();
      follow(tools);
    }
  }
}

// The conversation

function turn(message) {
  $("hint")?.remove();
  const content = element("div", [], { className: "text" });
  const thought = element("div", [], { className: "text plain" });
  const reasoning = element("details", [element("summary", ["Reasoning"]), thought], { hidden: true });
  const caption = element("div", [], { className: "figures", hidden: true });
  const box = element("div", [reasoning, content, caption], { className: "turn " + message.role });
  const shown = { box, content, reasoning, thought, caption };
  paintTurn(message, shown);
  $("log").append(box);
  $("log").scrollTop = $("log").scrollHeight;
  return shown;
}

function paintTurn(message, shown) {
  // A model without a chat template continues what is written, most likely code.
  shown.content.classList.toggle("plain", !hasTemplate);
  shown.content.classList.toggle("code", !hasTemplate);
  if (message.role === "user" || !hasTemplate) shown.content.textContent = message.content;
  else showMarkdown(shown.content, message.content);
  shown.thought.textContent = message.reasoning ?? "";
  shown.reasoning.hidden = !message.reasoning;
  shown.caption.textContent = message.figures ?? "";
  shown.caption.hidden = !message.figures;
  shown.caption.classList.toggle("error", Boolean(message.failed));
}

// Painting at most once a frame, however fast text comes.
function painter(message, shown) {
  let waiting = false;
  const now = () => {
    waiting = false;
    follow(() => paintTurn(message, shown));
  };
  const soon = () => {
    if (!waiting) requestAnimationFrame(now);
    waiting = true;
  };
  return { now, soon };
}

// `change` the log; stay at its end if the reader is there.
function follow(change) {
  const log = $("log"), atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

// Put under each message what can be done with it.
function tools() {
  document.querySelectorAll(".turn > .tools").forEach((row) => row.remove());
  const boxes = [...document.querySelectorAll(".turn")];
  boxes.forEach((box, at) => {
    const message = chat.messages[at], row = element("div", [], { className: "tools" });
    if (message) row.append(button("Copy", (self) => copy(message.content, self)));
    if (message?.role === "user") row.append(button("Edit", () => edit(box, at)));
    if (at === boxes.length - 1) row.append(button("Regenerate", regenerate));
    box.append(row);
  });
}

function regenerate() {
  if (running) return;
  while (chat.messages.length && chat.messages.at(-1).role !== "user") chat.messages.pop();
  show(chat);
  ask();
}

// Ask again from message `at`, changed; what followed it goes.
function edit(box, at) {
  if (running) return;
  const area = element("textarea", [], { value: chat.messages[at].content, rows: 4 });
  area.setAttribute("aria-label", "Edit message");
  const send = button("Send", () => {
    if (running || !area.value.trim()) return;
    chat.messages.length = at;
    chat.messages.push({ role: "user", content: area.value });
    show(chat);
    ask();
  });
  send.className = "main";
  const row = element("div", [button("Cancel", () => show(chat)), send], { className: "tools" });
  box.classList.add("editing");
  box.replaceChildren(area, row);
  area.focus();
}

function show(shown) {
  chat = shown;
  write(sessionStorage, SHOWN, chat.id);
  $("log").replaceChildren();
  if (chat.messages.length) {
    chat.messages.forEach(turn);
    follow(tools);
  } else if (model !== null) {
    welcome();
  }
  listChats();
}

function welcome() {
  hint(hasTemplate
    ? "Ask something. Figures of the speed stand under each answer."
    : "This model has no chat template: it continues what you write.");
  const texts = hasTemplate ? EXAMPLES : ["def read_lines(path):"];
  const buttons = texts.map((text) => button(text, () => say(text)));
  $("hint").append(element("div", buttons, { id: "examples" }));
}

function hint(text) {
  $("log").replaceChildren(element("div", [text], { id: "hint" }));
}

function listChats() {
  $("chats").replaceChildren(...storedChats().map((one) => {
    const open = button(titleOf(one), () => select(one));
    const remove = button("×", () => {
      if (!confirm(`Delete “${titleOf(one)}”?`)) return;
      deleteChat(one);
      if (one.id === chat.id) {
        chat.deleted = true;
        select(newChat());
      }
      listChats();
    });
    remove.className = "delete";
    remove.setAttribute("aria-label", "Delete");
    return element("div", [open, remove], { className: "chat" + (one.id === chat.id ? " shown" : "") });
  }));
}

function select(shown) {
  running?.abort();
  document.body.classList.remove("side");
  show(shown);
  $("input").focus();
}

// Ask `text` next. A question without an answer, after an error, makes room for it.
function say(text) {
  if (running) return;
  if (chat.messages.at(-1)?.role === "user") {
    chat.messages.pop();
    show(chat);
  }
  document.querySelectorAll(".turn > .tools").forEach((row) => row.remove());
  chat.messages.push({ role: "user", content: text });
  turn(chat.messages.at(-1));
  ask();
}

function setRunning(controller) {
  running = controller;
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("log").setAttribute("aria-busy", running !== null);
}

// Controls

function button(name, action) {
  const made = element("button", [name], { type: "button" });
  made.addEventListener("click", () => action(made));
  return made;
}

// Over plain HTTP, browsers have no `navigator.clipboard` but on localhost.
async function copy(text, self) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = element("textarea", [], { value: text });
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  self.textContent = "Copied";
  setTimeout(() => { self.textContent = "Copy"; }, 1500);
}

function keepSettings() {
  write(localStorage, SETTINGS, Object.fromEntries(FIELDS.map((name) => [name, $(name).value])));
  write(sessionStorage, SETTINGS, $("key").value);
}

function restoreSettings() {
  for (const [name, value] of Object.entries(read(localStorage, SETTINGS) ?? {})) {
    if (FIELDS.includes(name)) $(name).value = value;
  }
  $("key").value = read(sessionStorage, SETTINGS) ?? "";
}

if (matchMedia("(pointer: coarse)").matches) $("input").placeholder = "Message";  // no Shift+Enter
$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  if (model === null) await start();
  const text = hasTemplate ? $("input").value.trim() : $("input").value;
  if (model === null || !text.trim() || running) return;
  $("input").value = "";
  say(text);
});
$("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("form").requestSubmit();
  }
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", () => select(newChat()));
$("menu").addEventListener("click", () => document.body.classList.toggle("side"));
$("shade").addEventListener("click", () => document.body.classList.remove("side"));
$("open-settings").addEventListener("click", () => $("settings").showModal());
$("fields").addEventListener("submit", (event) => {
  event.preventDefault();
  $("settings").close();
});
$("settings").addEventListener("close", () => {
  keepSettings();
  if (model === null) start();
});
restoreSettings();
show(storedChats().find((one) => one.id === read(sessionStorage, SHOWN)) ?? chat);
start();
