// One streamed response, and the conversations that this browser keeps.
import { ApiError, request } from "./api.js";

/**
 * Streams a chat completion into `reply`, calling `changed` after every part. Resolves when the response is complete;
 * throws ApiError, or AbortError when `signal` stopped it. What had arrived stays in `reply`.
 */
export async function streamChat(body, reply, signal, changed) {
  const started = performance.now();
  const payload = { ...body, stream: true, stream_options: { include_usage: true } };
  const response = await request("POST", "v1/chat/completions", payload, { signal });
  reply.node = response.headers.get("x-cortex-node");
  let first = null;
  let last = started;
  let isComplete = false;
  for await (const data of frames(response.body)) {
    if (data === "[DONE]") {
      isComplete = true;
      break;
    }
    const part = JSON.parse(data);
    if (part.error) throw new ApiError(part.error.message, part.error.status ?? 500, part.error.code);
    if (part.usage) reply.usage = part.usage;
    const choice = part.choices?.[0];
    if (choice && add(reply, choice)) {
      last = performance.now();
      first ??= last;
      reply.ttft_s = (first - started) / 1000;
    }
    reply.duration_s = (last - (first ?? started)) / 1000;
    changed();
  }
  if (!isComplete) throw interrupted();
  const generated = reply.usage?.completion_tokens ?? 0;
  reply.tokens_per_s = generated > 1 && reply.duration_s > 0 ? (generated - 1) / reply.duration_s : null;
  changed();
}

const interrupted = () => new ApiError("The connection to the gateway was lost before the response was complete. Try again.", 0);

/** Adds a delta to the reply; returns whether it had anything that was generated. */
function add(reply, choice) {
  const delta = choice.delta ?? {};
  if (choice.finish_reason) reply.finish = choice.finish_reason;
  const thought = delta.reasoning_content ?? delta.reasoning;
  if (thought) reply.reasoning += thought;
  if (delta.content) reply.text += delta.content;
  for (const call of delta.tool_calls ?? []) {
    const known = (reply.calls[call.index] ??= { id: call.id, name: "", arguments: "" });
    known.name += call.function?.name ?? "";
    known.arguments += call.function?.arguments ?? "";
  }
  return Boolean(thought || delta.content || delta.tool_calls?.length);
}

async function* frames(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  for (const reader = stream.getReader(); ; ) {
    const { value, done } = await reader.read().catch((problem) => {
      throw problem.name === "AbortError" ? problem : interrupted();
    });
    if (done) return;
    rest += decoder.decode(value, { stream: true });
    const blocks = rest.split(/\r?\n\r?\n/);
    rest = blocks.pop();
    for (const block of blocks) {
      const data = block.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

export const emptyReply = (model) => ({ model, text: "", reasoning: "", calls: [], status: "waiting" });

/** The messages that a model sees: the turns before and the question of `last`. */
export function messagesFor(conversation, column, last) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  for (const turn of conversation.turns.slice(0, last + 1)) {
    messages.push({ role: "user", content: contentOf(turn) });
    const reply = turn.replies[column];
    if (turn !== conversation.turns[last] && reply?.text) messages.push({ role: "assistant", content: reply.text });
  }
  return messages;
}

/** Pictures come first, as models are trained. One that the browser could not keep is left out. */
function contentOf(turn) {
  const pictures = (turn.pictures ?? []).filter((picture) => picture.url);
  if (!pictures.length) return turn.user;
  const parts = pictures.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  return turn.user.trim() ? [...parts, { type: "text", text: turn.user }] : parts;
}

/** The body of a request, with only those settings that were changed. Throws when the tools are not JSON. */
export function bodyFor(conversation, column, last) {
  const { temperature, top_p: topP, max_tokens: most, seed, tools } = conversation.sampling;
  const body = { model: conversation.models[column], messages: messagesFor(conversation, column, last) };
  for (const [name, value] of Object.entries({ temperature, top_p: topP, max_tokens: most, seed })) {
    if (value !== "" && value != null) body[name] = Number(value);
  }
  if (tools?.trim()) {
    try {
      body.tools = JSON.parse(tools);
    } catch (problem) {
      throw new ApiError(`The tools are not valid JSON: ${problem.message}`, 0);
    }
  }
  return body;
}

/* --- conversations, in this browser only, separate for each name that signs in */

const KEPT = 60;
const storageKey = (who) => `cortex.conversations.${who ?? "open"}`;

export function readConversations(who) {
  try {
    const found = JSON.parse(localStorage.getItem(storageKey(who)) ?? "[]");
    return Array.isArray(found) ? found.filter((each) => Array.isArray(each?.turns)) : [];
  } catch {
    return [];
  }
}

/**
 * Returns whether there was room. Where there is none, pictures are left out first, those of older conversations before
 * those of the newest; then the oldest conversations.
 */
export function writeConversations(who, conversations) {
  let kept = conversations.filter((each) => each.turns.length).slice(0, KEPT);
  for (const first of [Infinity, 1, 0]) {
    if (wrote(who, kept.map((each, index) => (index < first ? each : withoutPictures(each))))) return true;
  }
  while (kept.length > 1) {
    kept = kept.slice(0, Math.ceil(kept.length / 2));
    if (wrote(who, kept.map(withoutPictures))) return true;
  }
  return false;
}

function wrote(who, conversations) {
  try {
    localStorage.setItem(storageKey(who), JSON.stringify(conversations));
    return true;
  } catch {
    return false;
  }
}

const withoutPictures = (conversation) => ({
  ...conversation,
  turns: conversation.turns.map((turn) => (turn.pictures?.length ? { ...turn, pictures: turn.pictures.map(({ name }) => ({ name })) } : turn)),
});

export const newConversation = (models) => ({
  id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`,
  title: "", changed: Date.now(), models, system: "", turns: [],
  sampling: { temperature: "", top_p: "", max_tokens: "", seed: "", tools: "" },
});
