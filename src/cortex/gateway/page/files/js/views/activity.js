// The latest requests, live, and the decisions of the gateway as a timeline.
import { follow, get, remove } from "../api.js";
import { clock, compact, count, dayAndClock, rate, seconds } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { Explanation, sentence } from "../orders.js";
import { Badge, CopyButton, Dialog, Empty, Loading, Problem, notify, useLoaded } from "../parts.js";
import { events, session } from "../state.js";
import { Batches } from "./batches.js";
import { Running } from "./running.js";

const KEPT = 300;
const REDRAW_MS = 250;
const APIS = {
  "/v1/chat/completions": "chat", "/v1/messages/count_tokens": "count tokens", "/v1/responses/input_tokens": "count tokens",
};
const apiOf = (path) => APIS[path] ?? path.replace("/v1/", "");
const WORDS = {
  node_drained: "is drained", node_undrained: "takes requests again", node_suspected: "a request failed there", node_up: "is up", node_down: "is down", node_suspending: "goes to sleep", node_asleep: "sleeps", node_waking: "is woken", node_woken: "is awake again", node_not_suspended: "did not go to sleep", node_lost: "did not come back", load_started: "begins to load", model_loaded: "is loaded",
  load_failed: "load failed", load_cancelled: "load was cancelled", unload_started: "begins to unload", model_asleep: "is asleep", model_unloaded: "is unloaded",
  unload_failed: "unload failed", workers_recycled: "workers were replaced", recycle_failed: "workers could not be replaced",
};

export default function Activity() {
  const [tab, setTab] = useState("requests");
  const operator = session.value.operator;
  return html`
    <header class="view-head">
      <h1>Activity</h1>
      <div class="segmented" role="group" aria-label="What to show">
        ${["requests", ...(operator ? ["decisions"] : []), "batches"].map((name) => html`
          <button key=${name} aria-pressed=${tab === name} onClick=${() => setTab(name)}>${name[0].toUpperCase()}${name.slice(1)}</button>`)}
      </div>
    </header>
    ${tab === "requests" && html`<${Requests} operator=${operator} />`}
    ${tab === "decisions" && html`<${Decisions} />`}
    ${tab === "batches" && html`<${Batches} operator=${operator} />`}`;
}

function Requests({ operator }) {
  const [filter, setFilter] = useState({ model: "", key: "", status: "" });
  const [rows, setRows] = useState(null);
  const [error, setError] = useState(null);
  const [chosen, setChosen] = useState(null);
  const [days, setDays] = useState(0); // 0: the latest, live
  const [loggedDays, setLoggedDays] = useState(0);
  const query = new URLSearchParams(Object.entries(filter).map(([name, value]) => [name, value.trim()]).filter(([, value]) => value)).toString();
  useEffect(() => {
    let newest = 0;
    const controller = new AbortController();
    const add = (fresh) => {
      const unseen = fresh.filter((row) => row.number > newest);
      newest = Math.max(newest, ...unseen.map((row) => row.number));
      setRows((before) => [...unseen, ...(before ?? [])].slice(0, KEPT));
    };
    let ended = [], timer = 0; // hundreds may end within a second
    const addSoon = (row) => {
      ended.unshift(row);
      timer ||= setTimeout(() => {
        add(ended);
        [ended, timer] = [[], 0];
      }, REDRAW_MS);
    };
    const load = async () => {
      try {
        const page = days
          ? await get(`fleet/activity?limit=1000&since=${Math.floor(Date.now() / 1000 - days * 86400)}&${query}`, { signal: controller.signal })
          : await get(`fleet/activity?limit=${KEPT}&after=${newest}&${query}`, { signal: controller.signal });
        if (days) setRows(page.requests);
        else {
          add(page.requests);
          setLoggedDays(page.log_retention_days);
        }
        setError(null);
      } catch (problem) {
        if (problem.name !== "AbortError") setError(problem);
      }
    };
    setRows(null);
    // After every connection: what ended while there was none.
    const stop = days ? () => {} : follow(`fleet/activity/events?${query}`, { request: addSoon }, (state) => state === "live" && load());
    load();
    return () => {
      controller.abort();
      stop();
      clearTimeout(timer);
    };
  }, [query, days]);
  const set = (name) => (event) => setFilter({ ...filter, [name]: event.target.value });
  return html`
    <div class="filters">
      <input type="search" placeholder="Model or pattern*" aria-label="Model" value=${filter.model} onInput=${set("model")} />
      ${operator && !session.value.open && html`<input type="search" placeholder="Key" aria-label="Key" value=${filter.key} onInput=${set("key")} />`}
      <select aria-label="Status" value=${filter.status} onChange=${set("status")}>
        <option value="">Every status</option><option value="ok">Complete</option><option value="error">Errors</option>
      </select>
      ${loggedDays > 0 && html`<select aria-label="Time" value=${days} onChange=${(event) => setDays(Number(event.target.value))}>
        <option value="0">Latest, live</option>
        ${[1, 7, 30].filter((each) => each === 1 || each <= loggedDays).map((each) => html`<option key=${each} value=${each}>${each === 1 ? "Last day" : `Last ${each} days`}</option>`)}
      </select>`}
    </div>
    <${Running} operator=${operator} />
    ${error && html`<${Problem} error=${error} />`}
    ${!rows && !error && html`<${Loading} what="the latest requests" />`}
    ${rows?.length === 0 && html`<${Empty} title=${query ? "No request matches the filter" : "No requests yet"}>${query ? "" : "They appear here as they end, from every client."}<//>`}
    ${rows?.length > 0 && html`<div class="card scroll"><table class="requests">
      <thead><tr>
        <th>Time</th><th>Status</th><th>Model</th>${operator && html`<th>Node</th><th>Key</th>`}<th>API</th>
        <th class="number">Queue</th><th class="number">Load</th><th class="number" title="Time to first token">TTFT</th><th class="number">Total</th><th class="number">tok/s</th>
        <th class="number">In</th><th class="number">Cached</th><th class="number">Out</th>
      </tr></thead>
      <tbody>${rows.map((row) => html`<${Row} key=${`${row.number} ${row.id}`} row=${row} operator=${operator} dated=${days > 0} onChoose=${() => setChosen(row)} />`)}</tbody>
    </table></div>`}
    ${chosen && html`<${Detail} row=${chosen} onClose=${() => setChosen(null)} onForgotten=${() => {
      setRows(rows.filter((row) => row.number !== chosen.number));
      setChosen(null);
    }} />`}`;
}

const statusKind = (row) => (row.status >= 400 || row.error ? "bad" : row.outcome === "complete" ? "good" : "warn");
const statusText = (row) => ((row.status >= 400 && row.outcome !== "cancelled") || row.outcome === "complete" ? String(row.status) : words(row.outcome));
const pools = (row) => /embed|rerank|score/.test(row.path); // vectors and scores, no text
const words = (outcome) => outcome.replaceAll("_", " ");

function Row({ row, operator, onChoose, dated }) {
  return html`
    <tr class="choosable" onClick=${onChoose}>
      <td class="nowrap"><button class="link" onClick=${onChoose} aria-label=${`Request at ${clock(row.time)} in full`}>${(dated ? dayAndClock : clock)(row.time)}</button></td>
      <td><${Badge} kind=${statusKind(row)} title=${row.error ?? row.outcome}>${statusText(row)}<//></td>
      <td class="name-cell" title=${row.model}>${row.model || "–"}</td>
      ${operator && html`<td class="name-cell narrow" title=${row.reason ?? ""}>${row.node || "–"}</td><td class="name-cell narrow">${row.key}</td>`}
      <td class="nowrap">${apiOf(row.path)}</td>
      <td class="number">${row.queue_s >= 0.001 ? seconds(row.queue_s) : "–"}</td>
      <td class="number">${row.load_s >= 0.001 ? seconds(row.load_s) : "–"}</td>
      <td class="number">${seconds(row.ttft_s)}</td>
      <td class="number">${seconds(row.duration_s)}</td>
      <td class="number">${rate(row.tokens_per_s)}</td>
      <td class="number">${compact(row.prompt_tokens)}</td>
      <td class="number">${compact(row.cached_tokens)}</td>
      <td class="number">${compact(row.completion_tokens)}</td>
    </tr>`;
}

function Detail({ row, onClose, onForgotten }) {
  const forget = () => remove(`fleet/activity/${encodeURIComponent(row.id)}`).then(onForgotten, (problem) => notify(problem.message, "bad"));
  const { value, error } = useLoaded((signal) => get(`fleet/activity/${encodeURIComponent(row.id)}`, { signal }), [row.id]);
  const full = value ?? row;
  const facts = [
    ["Time", dayAndClock(full.time)], ["Status", `${full.status}, ${words(full.outcome)}`], ["Model", full.model], ["Node", full.node], ["Why this node", full.reason],
    ["Key", full.key], ["Path", full.path], ["Attempts", full.attempts > 1 && full.attempts], ["In the queue", full.queue_s >= 0.001 && seconds(full.queue_s)], ["Waiting for a load", full.load_s >= 0.001 && seconds(full.load_s)],
    ["First token after", seconds(full.ttft_s)], ["Total", seconds(full.duration_s)], ["Tokens per second", rate(full.tokens_per_s)],
    ["Prompt tokens", pools(full) ? count(full.prompt_tokens) : `${count(full.prompt_tokens)}, of them ${count(full.cached_tokens)} from the prefix cache`],
    ["Dimensions", full.dimensions != null && count(full.dimensions)],
    ["Completion tokens", pools(full) ? null : full.reasoning_tokens ? `${count(full.completion_tokens)}, of them ${count(full.reasoning_tokens)} thoughts` : count(full.completion_tokens)],
    ["Draft tokens", full.drafted_tokens > 0 && `${count(full.drafted_tokens)}, of them ${count(full.accepted_draft_tokens)} accepted`],
    ["Error", full.error], ["Message", full.error_message],
  ];
  return html`
    <${Dialog} title="Request" wide onClose=${onClose}>
      <p class="mono request-id">${full.id} <${CopyButton} text=${full.id} /></p>
      <dl class="facts-list">${facts.filter(([, text]) => text != null && text !== "" && text !== false).map(([name, text]) => html`
        <div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
      ${error && html`<${Problem} error=${error} />`}
      ${value?.capture && html`
        <h3>Captured request, ${count(value.capture.request_bytes)} bytes</h3><pre class="snippet">${value.capture.request}</pre>
        ${value.capture.response_end && html`<h3>End of the response</h3><pre class="snippet">${value.capture.response_end}</pre>`}
        ${session.value.operator && html`<footer><button class="danger" onClick=${forget}>Forget this request</button></footer>`}`}
    <//>`;
}

function Decisions() {
  const { value, error, reload } = useLoaded((signal) => get("fleet/decisions", { signal }), []);
  const [chosen, setChosen] = useState(null);
  if (error && !value) return html`<${Problem} error=${error} retry=${reload} />`;
  if (!value) return html`<${Loading} what="the decisions" />`;
  const nameOf = (event) => [event.at, event.kind, event.model, event.node].join(" ");
  const seen = new Set(events.value.map(nameOf));
  const known = [...value.decisions.map((each) => ({ kind: "decision", ...each })), ...value.events];
  const all = [...events.value, ...known.filter((each) => !seen.has(nameOf(each)))].sort((a, b) => b.at - a.at);
  if (!all.length) return html`<${Empty} title="No decisions yet">The first request for a model, a load or an eviction appears here.<//>`;
  return html`
    <ol class="timeline card">${all.map((event, index) => html`
      <li key=${`${event.at} ${event.kind} ${event.model ?? event.node} ${index}`} class=${kindOf(event)}>
        <time class="dim">${clock(event.at)}</time>
        <div>${event.kind === "decision"
          ? html`<button class="link" onClick=${() => setChosen(event)}>${sentence(event)}</button>`
          : html`<span>${[event.model ?? event.node, WORDS[event.kind] ?? event.kind.replaceAll("_", " "), event.model && `on ${event.node}`].filter(Boolean).join(" ")}</span>
            ${event.for_model && html`<span class="dim"> to make room for ${event.for_model}</span>`}
            ${event.why && html`<span class="dim">: ${event.why}</span>`}`}
        </div>
      </li>`)}</ol>
    ${chosen && html`<${Dialog} title=${`Decision for ${chosen.model}`} wide onClose=${() => setChosen(null)}><${Explanation} decision=${chosen} /><//>`}`;
}

function kindOf(event) {
  if (event.kind === "decision") return { reject: "bad", wait: "warn" }[event.action] ?? (event.victims.length ? "warn" : "plain");
  if (event.kind.endsWith("failed") || event.kind === "node_down") return "bad";
  return ["model_loaded", "node_up"].includes(event.kind) ? "good" : "plain";
}
