// Chat with one model, or with two side by side. A response goes on while another view is open.
import { baseUrl, get, put, remove } from "../api.js";
import { bodyFor, emptyReply, newConversation, readConversations, streamChat, writeConversations } from "../chat.js";
import { html, signal, useLayoutEffect, useRef, useState } from "../html.js";
import { CopyButton, Dialog, Empty, Menu, MenuItem, Problem, notify, useLoaded } from "../parts.js";
import { asClaudeCode, asCurl, asPython, shortened } from "../snippets.js";
import { session } from "../state.js";
import { Attached, ChoosePictures, Shown, attachedTo, receivesPictures, takeAttached } from "./pictures.js";
import { Reply } from "./reply.js";

const REDRAW_MS = 60;
const SAMPLING = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.1 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "Max tokens", { min: 1, step: 1 }], ["seed", "Seed", { step: 1 }],
];
const SNIPPETS = { curl: asCurl, Python: asPython, "environment for Claude Code": asClaudeCode };

const conversations = signal(null);
const current = signal(null);
const version = signal(0);
const running = new Map();
/* The stop switch of every reply that is being generated. */
let owner;
let timer = 0;

function redraw() {
  timer ||= setTimeout(() => {
    timer = 0;
    version.value += 1;
  }, REDRAW_MS);
}

const pathOf = (conversation) => `session/conversations/${encodeURIComponent(conversation.id)}`;

/** Where the gateway keeps conversations, this browser adds those of others, newest first. */
async function fetchConversations(who) {
  try {
    const { conversations: kept } = await get("session/conversations");
    if (owner !== who) return;
    const known = new Map(kept.filter((each) => Array.isArray(each?.turns)).map((each) => [each.id, each]));
    for (const each of conversations.value) {
      if (each === current.value || !(known.get(each.id)?.changed > each.changed)) known.set(each.id, each);
    }
    conversations.value = [...known.values()].sort((one, other) => other.changed - one.changed);
  } catch (problem) {
    notify(`Conversations of other browsers could not be loaded: ${problem.message}`, "bad");
  }
}

/** A reply may end while another conversation is open. */
function save(conversation) {
  conversation.changed = Date.now();
  if (session.value?.conversations) {
    put(pathOf(conversation), conversation).catch((problem) => notify(`The conversation stays in this browser: ${problem.message}`, "bad"));
  }
  conversations.value = [conversation, ...conversations.value.filter((each) => each !== conversation)];
  if (!writeConversations(session.value?.name, conversations.value)) {
    notify("This browser has no room for the conversation; it is lost when the page is closed.", "bad");
  }
}

function begin(models) {
  current.value = newConversation(models);
}

async function generate(conversation, index, column) {
  const turn = conversation.turns[index];
  const reply = emptyReply(conversation.models[column]);
  turn.replies[column] = reply;
  const controller = new AbortController();
  running.set(reply, controller);
  redraw();
  try {
    reply.started = Date.now();
    await streamChat(bodyFor(conversation, column, index), reply, controller.signal, () => {
      if (reply.text || reply.reasoning || reply.calls.length) reply.status = "writing";
      redraw();
    });
    reply.status = "done";
  } catch (problem) {
    reply.status = problem.name === "AbortError" ? "stopped" : "failed";
    if (reply.status === "failed") reply.error = problem.message;
  } finally {
    running.delete(reply);
    if (conversations.value?.includes(conversation)) save(conversation); // it may have been deleted
    redraw();
  }
}

function ask(text, pictures = []) {
  const conversation = current.value;
  conversation.title ||= text.trim().slice(0, 80) || "Picture";
  conversation.turns.push({ user: text, pictures, replies: [] });
  save(conversation);
  conversation.models.forEach((_, column) => generate(conversation, conversation.turns.length - 1, column));
}

function stop(conversation) {
  for (const turn of conversation.turns) {
    for (const reply of turn.replies) running.get(reply)?.abort();
  }
}

const isRunning = (conversation) => conversation.turns.some((turn) => turn.replies.some((reply) => running.has(reply)));

export default function Playground() {
  version.value;
  const { value: list, error, reload } = useLoaded((signal) => get("v1/models", { signal }), []);
  const who = session.value?.name ?? null;
  if (conversations.value === null || owner !== who) {
    owner = who;
    conversations.value = readConversations(who);
    current.value = null;
    if (session.value?.conversations) fetchConversations(who);
  }
  const models = (list?.data ?? []).filter((model) => model.capabilities.chat);
  useLayoutEffect(() => { // before the conversation that was open last is painted
    if (!list) return;
    const wanted = new URLSearchParams(location.hash.split("?")[1] ?? "").get("model");
    const start = models.find((each) => each.id === wanted) ?? models.find((each) => each.loaded && !each.alias_of) ?? models[0];
    if (!current.value || wanted) begin(start ? [start.id] : []);
    if (wanted) history.replaceState(null, "", "#/playground");  // asked once, not again with every new list
  }, [list]);
  if (error && !list) return html`<h1>Playground</h1><${Problem} error=${error} retry=${reload} />`;
  if (!list || !current.value) return html`<h1>Playground</h1><p class="dim loading">Loading…</p>`;
  if (!models.length) return html`<h1>Playground</h1><${Empty} title="No model to talk to">No node lists a chat model yet.<//>`;
  const conversation = current.value;
  return html`
    <div class="playground">
      <${History} models=${models} />
      <section class="chat" aria-label="Conversation" ...${receivesPictures(conversation)}>
        <${Head} conversation=${conversation} models=${models} reload=${reload} />
        <${Transcript} key=${conversation.id} conversation=${conversation} />
        <${Composer} key=${`composer ${conversation.id}`} conversation=${conversation} models=${models} />
      </section>
    </div>`;
}

function History({ models }) {
  const [open, setOpen] = useState(false);
  const drop = (event, each) => {
    event.stopPropagation();
    conversations.value = conversations.value.filter((other) => other !== each);
    stop(each);
    writeConversations(session.value?.name, conversations.value);
    if (session.value?.conversations) remove(pathOf(each)).catch(() => {});
    if (current.value === each) begin(each.models);
  };
  const choose = (each) => {
    current.value = each;
    setOpen(false);
  };
  return html`
    <aside class="history ${open ? "open" : ""}" aria-label="Conversations">
      <div class="history-head">
        <button class="ghost small history-toggle" aria-expanded=${open} onClick=${() => setOpen(!open)}>Conversations (${conversations.value.length})</button>
        <button class="small" onClick=${() => { begin(current.value?.models ?? [models[0].id]); setOpen(false); }}>New chat</button>
      </div>
      <ul>
        ${conversations.value.map((each) => html`
          <li key=${each.id} class=${each === current.value ? "current" : ""}>
            <button class="ghost title" aria-current=${each === current.value ? "true" : null} onClick=${() => choose(each)}>${each.title || "Untitled"}</button>
            <button class="ghost small delete" aria-label=${`Delete ${each.title || "Untitled"}`} onClick=${(event) => drop(event, each)}>✕</button>
          </li>`)}
      </ul>
      <p class="dim note">${session.value?.conversations ? "The gateway keeps conversations for all of your browsers." : "Conversations stay in this browser."}</p>
    </aside>`;
}

function Head({ conversation, models, reload }) {
  const [settings, setSettings] = useState(false);
  const [snippet, setSnippet] = useState(null);
  const change = (column, model) => {
    conversation.models[column] = model;
    redraw();
  };
  const compare = () => {
    if (conversation.models.length > 1) conversation.models.length = 1;
    else conversation.models.push((models.find((each) => each.loaded && each.id !== conversation.models[0]) ?? models.at(-1)).id);
    redraw();
  };
  const show = (name) => {
    const { turns } = conversation;
    const draft = turns.length ? conversation : { ...conversation, turns: [{ user: "Hello!", replies: [] }] };
    try {
      setSnippet([name, SNIPPETS[name](baseUrl(), shortened(bodyFor(draft, 0, draft.turns.length - 1)), !session.value.open)]);
    } catch (problem) {
      notify(problem.message, "bad");
    }
  };
  return html`
    <header class="chat-head">
      ${conversation.models.map((model, column) => html`
        <${ModelChoice} key=${column} label=${column ? "Second model" : "Model"} value=${model} models=${models} onFocus=${reload} onChange=${(id) => change(column, id)} />`)}
      <span class="grow"></span>
      <button class="small" aria-pressed=${conversation.models.length > 1} onClick=${compare}>Compare</button>
      <button class="small" aria-pressed=${settings} aria-expanded=${settings} onClick=${() => setSettings(!settings)}>Settings</button>
      <${Menu} text="Copy as">
        ${Object.keys(SNIPPETS).map((name) => html`<${MenuItem} key=${name} onClick=${() => show(name)}>${name[0].toUpperCase()}${name.slice(1)}<//>`)}
      <//>
    </header>
    ${settings && html`<${Settings} conversation=${conversation} models=${models} />`}
    ${snippet && html`
      <${Dialog} title=${`As ${snippet[0]}`} wide onClose=${() => setSnippet(null)}>
        <pre class="snippet">${snippet[1]}</pre>
        <footer><${CopyButton} text=${snippet[1]} small=${false} /><button class="primary" onClick=${() => setSnippet(null)}>Close</button></footer>
      <//>`}`;
}

function ModelChoice({ label, value, models, onChange, onFocus }) {
  const groups = [["Ready", (model) => model.loaded], ["Not loaded: the first message loads it", (model) => !model.loaded]];
  return html`
    <select class="model-choice" aria-label=${label} value=${value} onFocus=${onFocus} onChange=${(event) => onChange(event.target.value)}>
      ${!models.some((model) => model.id === value) && html`<option value=${value}>${value} (unknown)</option>`}
      ${groups.map(([title, belongs]) => models.some(belongs) && html`
        <optgroup key=${title} label=${title}>
          ${models.filter(belongs).map((model) => html`<option key=${model.id} value=${model.id}>${model.display_name}</option>`)}
        </optgroup>`)}
    </select>`;
}

function Settings({ conversation, models }) {
  const own = conversation.models.map((id) => models.find((model) => model.id === id)?.sampling ?? {});
  const placeholder = (name) => {
    const values = [...new Set(own.map((each) => each[name] ?? "none"))];
    return values.every((value) => value === "none") ? "Model's own" : `Model's own: ${values.join(", ")}`;
  };
  const set = (name) => (event) => {
    conversation.sampling[name] = event.target.value;
    redraw();
  };
  return html`
    <div class="settings card">
      <label>System prompt
        <textarea rows="3" value=${conversation.system} placeholder="None" onInput=${(event) => { conversation.system = event.target.value; redraw(); }}></textarea>
      </label>
      <div class="fields">
        ${SAMPLING.map(([name, label, limits]) => html`
          <label key=${name}>${label}
            <input type="number" ...${limits} value=${conversation.sampling[name]} placeholder=${placeholder(name)} onInput=${set(name)} />
          </label>`)}
      </div>
      <label>Tools, as a JSON list
        <textarea rows="3" class="mono" spellcheck=${false} value=${conversation.sampling.tools} onInput=${set("tools")}
          placeholder=${'[{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]'}></textarea>
      </label>
    </div>`;
}

function Transcript({ conversation }) {
  version.value;
  const element = useRef(null);
  const follows = useRef(true);
  useLayoutEffect(() => {
    if (follows.current) element.current.scrollTop = element.current.scrollHeight;
  });
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = element.current;
    follows.current = scrollHeight - scrollTop - clientHeight < 60;
  };
  const edit = (index, text) => {
    const { pictures } = conversation.turns[index];
    stop(conversation);
    conversation.turns.length = index;
    follows.current = true;
    ask(text, pictures);
  };
  const last = conversation.turns.length - 1;
  return html`
    <div class="transcript" ref=${element} onScroll=${scrolled} role="log" aria-busy=${isRunning(conversation)} tabindex="0">
      ${conversation.turns.length === 0 && html`
        <div class="hello"><p class="empty-title">Ask ${conversation.models.join(" and ")} something</p>
          <p class="dim">A model that is not loaded is loaded by the first message; you see its progress.</p></div>`}
      ${conversation.turns.map((turn, index) => html`
        <div key=${index} class="turn">
          <${Question} turn=${turn} onEdit=${(text) => edit(index, text)} />
          <div class="replies ${turn.replies.length > 1 ? "two" : ""}">
            ${turn.replies.map((reply, column) => html`
              <${Reply} key=${column} reply=${reply} isRunning=${running.has(reply)} version=${version.value}
                onRegenerate=${index === last ? () => generate(conversation, index, column) : null} />`)}
          </div>
        </div>`)}
    </div>`;
}

function Question({ turn, onEdit }) {
  const [draft, setDraft] = useState(null);
  if (draft === null) {
    return html`<div class="question"><${Shown} pictures=${turn.pictures} />${turn.user && html`<p>${turn.user}</p>`}<div class="tools">
      <button class="ghost small" onClick=${() => setDraft(turn.user)}>Edit</button><${CopyButton} text=${turn.user} /></div></div>`;
  }
  return html`
    <form class="question editing" onSubmit=${(event) => { event.preventDefault(); setDraft(null); onEdit(draft); }}>
      <textarea rows="3" aria-label="Edit the message" value=${draft} onInput=${(event) => setDraft(event.target.value)}></textarea>
      <div class="tools"><button type="button" class="small" onClick=${() => setDraft(null)}>Cancel</button>
        <button class="small primary" disabled=${!draft.trim()}>Send again</button></div>
    </form>`;
}

function Composer({ conversation, models }) {
  version.value;
  const [text, setText] = useState("");
  const element = useRef(null);
  const busy = isRunning(conversation);
  useLayoutEffect(() => element.current.focus({ preventScroll: true }), []); // later it would take the focus from another field
  const isEmpty = !text.trim() && !attachedTo(conversation).length;
  const send = (event) => {
    event?.preventDefault();
    if (busy || isEmpty) return;
    ask(text, takeAttached(conversation));
    setText("");
  };
  const onKeyDown = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
  };
  return html`
    <${Attached} conversation=${conversation} models=${models} />
    <form class="composer" onSubmit=${send}>
      <${ChoosePictures} conversation=${conversation} />
      <textarea ref=${element} rows="2" aria-label="Message" placeholder="Message (Enter sends, Shift+Enter starts a new line)" value=${text}
        onInput=${(event) => setText(event.target.value)} onKeyDown=${onKeyDown}></textarea>
      ${busy
        ? html`<button type="button" class="danger" onClick=${() => stop(conversation)}>Stop</button>`
        : html`<button class="primary" disabled=${isEmpty}>Send</button>`}
    </form>`;
}
