// One response in the playground: what happens while it is awaited, reasoning, text, tool calls, and its statistics.
import { get, inPath } from "../api.js";
import { count, rate, seconds } from "../format.js";
import { html, useEffect, useMemo, useState } from "../html.js";
import { toHtml } from "../markdown.js";
import { CopyButton } from "../parts.js";
import { Progress } from "./progress.js";

const POLL_MS = 1000;
const ENDS = { length: "stopped at the token limit", content_filter: "stopped by a filter" };

export function Reply({ reply, isRunning, onRegenerate }) {
  return html`
    <article class="reply" aria-label=${`Response of ${reply.model}`}>
      <header><span class="name" title=${reply.model}>${reply.model}</span>${reply.node && html`<span class="dim">on ${reply.node}</span>`}</header>
      ${isRunning && reply.status === "waiting" && html`<${Waiting} reply=${reply} />`}
      ${reply.reasoning && html`
        <details class="reasoning"><summary>${isRunning && !reply.text ? "Thinking…" : "Thoughts"}</summary><p>${reply.reasoning}</p></details>`}
      ${reply.text && html`<${Markdown} text=${reply.text} />`}
      ${reply.calls.filter(Boolean).map((call, index) => html`
        <div key=${index} class="call"><span class="dim">Tool call</span> <code>${call.name}</code><pre>${pretty(call.arguments)}</pre></div>`)}
      ${reply.status === "failed" && html`<p class="problem" role="alert">${reply.error}</p>`}
      ${!isRunning && html`<footer>
        <${Numbers} reply=${reply} />
        <span class="grow"></span>
        ${reply.text && html`<${CopyButton} text=${reply.text} />`}
        ${onRegenerate && html`<button class="ghost small" onClick=${onRegenerate}>${reply.status === "failed" ? "Try again" : "Regenerate"}</button>`}
      </footer>`}
    </article>`;
}

function Markdown({ text }) {
  const content = useMemo(() => ({ __html: toHtml(text) }), [text]);
  return html`<div class="markdown" dangerouslySetInnerHTML=${content}></div>`;
}

function Numbers({ reply }) {
  const { usage } = reply;
  const facts = [];
  if (reply.status === "stopped") facts.push("stopped");
  if (ENDS[reply.finish]) facts.push(ENDS[reply.finish]);
  if (reply.ttft_s != null) facts.push(`first token ${seconds(reply.ttft_s)}`);
  if (reply.tokens_per_s != null) facts.push(`${rate(reply.tokens_per_s)} tok/s`);
  if (usage) {
    facts.push(`${count(usage.prompt_tokens)} in`);
    facts.push(`${count(usage.prompt_tokens_details?.cached_tokens ?? 0)} cached`);
    facts.push(`${count(usage.completion_tokens)} out`);
  }
  return html`<span class="dim facts-line">${facts.join(" · ")}</span>`;
}

/** What happens before the first token: asks where the model is and how far its load has come. */
function Waiting({ reply }) {
  const [places, setPlaces] = useState(null);
  const [elapsed, setElapsed] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    const look = async () => {
      setElapsed((Date.now() - reply.started) / 1000);
      try {
        setPlaces((await get(`v1/models/${inPath(reply.model)}`, { signal: controller.signal })).locations);
      } catch {
        // The request itself reports what is wrong; this is only about its wait.
      }
    };
    const timer = setInterval(look, POLL_MS);
    return () => {
      clearInterval(timer);
      controller.abort();
    };
  }, []);
  const starting = places?.find((place) => ["loading", "downloading", "recovering"].includes(place.status));
  const isReady = places?.some((place) => place.status === "ready");
  let what = "Waiting for the first token";
  if (starting) what = `${starting.status === "downloading" ? "Downloading" : "Loading"} on ${starting.node}`;
  else if (places && !isReady) what = "Waiting for room on a node";
  return html`
    <div class="waiting" role="status">
      <span class="dim">${what}${elapsed >= 1 ? ` · ${seconds(Math.floor(elapsed))}` : ""}</span>
      ${starting?.progress ? html`<${Progress} progress=${starting.progress} />` : html`<progress aria-label=${what}></progress>`}
    </div>`;
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
