// The catalogue: what every model is, where it is, where it fits; and files on the disks of nodes.
import { get, inPath, remove } from "../api.js";
import { bytes, compact, count, deviceGroups, money, plural, withoutName } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { Jobs, endedJobs } from "../jobs.js";
import { Explanation, Order } from "../orders.js";
import { Badge, Dialog, Empty, Loading, Problem, notify, useLoaded } from "../parts.js";
import { allNodes, events, session } from "../state.js";
import { Progress } from "./progress.js";
import { Pull } from "./pull.js";

const REFRESH_MS = 4000;
const RANK = ["ready", "loading", "downloading", "recovering", "unloading", "asleep", "failed", "suspended", "unreachable"];
const STARTING = ["loading", "downloading", "recovering"];
const KINDS = { ready: "good", loading: "busy", downloading: "busy", recovering: "warn", unloading: "busy", failed: "bad", unreachable: "bad" };

export default function Models() {
  const { value, error, reload } = useLoaded((signal) => get("v1/models?unlisted=true", { signal }), []);
  const [filter, setFilter] = useState("");
  const [order, setOrder] = useState(null);
  const [pulling, setPulling] = useState(false);
  const operator = session.value.operator;
  const latest = `${events.value[0]?.at ?? ""} ${endedJobs.value || ""}`.trim();
  useEffect(() => {
    // After a change in the fleet, and while something loads: the list costs the gateway more than the feed does.
    const busy = value?.data.some((model) => model.locations.some((place) => place.progress));
    if (!busy && !latest) return;
    const timer = setTimeout(reload, busy ? REFRESH_MS / 2 : REFRESH_MS);
    return () => clearTimeout(timer);
  }, [latest, value]);
  const all = value?.data ?? [];
  const models = all.filter((model) => !model.alias_of);
  const aliases = new Map();
  for (const alias of all) if (alias.alias_of) aliases.set(alias.alias_of, [...(aliases.get(alias.alias_of) ?? []), alias]);
  const wanted = filter.trim().toLowerCase();
  const shown = models.filter((model) => [model.id, ...(aliases.get(model.id) ?? []).map((each) => each.id)].some((name) => name.toLowerCase().includes(wanted)));
  return html`
    <header class="view-head">
      <h1>Models</h1>
      <div class="head-tools">
        <input type="search" placeholder="Filter models" aria-label="Filter models" value=${filter} onInput=${(event) => setFilter(event.target.value)} />
        ${operator && html`<button class="primary" onClick=${() => setPulling(true)}>Pull from the hub</button>`}
      </div>
    </header>
    ${error && html`<${Problem} error=${error} retry=${reload} />`}
    ${operator && html`<${Jobs} />`}
    ${operator && html`<${Disks} />`}
    ${!value && !error && html`<${Loading} what="the models" />`}
    ${value && models.length === 0 && html`<${Empty} title="No models yet">Nodes list the models that they can serve; add them to <code>models.toml</code> or pull one.<//>`}
    ${models.length > 0 && shown.length === 0 && html`<${Empty} title="No model matches the filter" />`}
    ${shown.length > 0 && html`<ul class="catalogue card">${shown.map((model) => html`
      <${Row} key=${model.id} model=${model} aliases=${aliases.get(model.id) ?? []} operator=${operator} onOrder=${setOrder} reload=${reload} />`)}</ul>`}
    ${order && html`<${Order} ...${order} onClose=${() => { setOrder(null); reload(); }} />`}
    ${pulling && html`<${Pull} onClose=${() => setPulling(false)} />`}`;
}

function Row({ model, aliases, operator, onOrder, reload }) {
  const [open, setOpen] = useState(false);
  const places = [...model.locations].sort((a, b) => RANK.indexOf(a.status) - RANK.indexOf(b.status));
  const first = places[0];
  const others = places.filter((place) => place.status === first?.status).length - 1;
  return html`
    <li>
      <div class="catalogue-head">
        <button class="link name" aria-expanded=${open} title=${model.id} onClick=${() => setOpen(!open)}>${model.id}</button>
        ${first ? html`<${Badge} kind=${KINDS[first.status] ?? ""}>${first.status}${others > 0 ? ` on ${others + 1} nodes` : ""}<//>` : html`<${Badge} kind=${model.failures ? "bad" : ""}>${model.failures ? "last load failed" : "not loaded"}<//>`}
        ${aliases.map((alias) => html`<span key=${alias.id} class="chip" title="Alias">${alias.id}</span>`)}
        <span class="grow"></span>
        <span class="row-tools">
          ${operator && !model.loaded && !STARTING.includes(first?.status) && html`
            <button class="small" onClick=${() => onOrder({ kind: "load", model: model.id })}>${first?.status === "asleep" ? "Wake…" : "Load…"}</button>`}
          ${model.capabilities.chat && html`<a class="button" href=${`#/playground?model=${encodeURIComponent(model.id)}`}>Chat</a>`}
        </span>
      </div>
      <p class="dim catalogue-facts">${facts(model).map((fact) => html`<span key=${fact}>${fact}</span>`)}
        ${model.feasible_on.length === 0 && html`<span class="bad-text">fits nowhere</span>`}</p>
      ${first?.progress && html`<${Progress} progress=${first.progress} />`}
      ${open && html`<${Detail} model=${model} operator=${operator} reload=${reload} />`}
    </li>`;
}

// A large fleet's listing names no more nodes than this.
const MOST_NAMED = 32;
const atLeast = (nodes) => (nodes < MOST_NAMED ? plural(nodes, "node") : `${nodes} or more nodes`);

function facts(model) {
  const can = Object.entries(model.capabilities).filter(([, has]) => has).map(([name]) => name);
  const { input, cached_input: cached, output } = model.cost;
  return [
    ...sizesOf(model).filter((size) => size.bytes).map((size) => `${bytes(size.bytes)}${size.quant ? ` ${size.quant}` : ""}`),
    model.max_model_len && `${compact(model.max_model_len)} context`,
    can.join(", "),
    (input || output) && `${money(input)} in, ${money(cached)} cached, ${money(output)} out per million`,
    model.feasible_on.length && `fits on ${atLeast(model.feasible_on.length)}`,
  ].filter(Boolean);
}

const sampling = (values) => Object.entries(values).map(([name, value]) => `${name.replaceAll("_", " ")} ${value}`).join(", ");

/** One size per quantisation: the largest that a node reports. */
function sizesOf(model) {
  const byQuant = new Map();
  for (const { quant, bytes: size } of model.sizes) byQuant.set(quant, Math.max(byQuant.get(quant) ?? 0, size ?? 0) || null);
  return [...byQuant].map(([quant, size]) => ({ quant, bytes: size }));
}

function Detail({ model, operator, reload }) {
  const { value, error } = useLoaded(async (signal) => (operator ? get(`fleet/explain/${inPath(model.id)}?origin=operator`, { signal }) : null), [model.id]);
  return html`
    <div class="model-detail">
      <p class="dim">${model.limit.context ? `Context ${count(model.limit.context)}${model.limit.full_context ? ` of ${count(model.limit.full_context)}` : ""} tokens${model.limit.full_context ? " (memory is the limit)" : ""}, of them at most ${count(model.limit.output)} of output. ` : ""}${model.sizes.map((size) => `${size.quant ?? (size.dtype ? "Unquantised" : "In memory")}: ${bytes(size.bytes)} on ${size.nodes.join(", ")}`).join(". ")}</p>
      ${Object.keys(model.sampling).length > 0 && html`<p class="dim">Samples with ${sampling(model.sampling)} where a request says nothing.</p>`}
      ${model.locations.filter((place) => place.replica_devices?.length > 1).map(({ node, replica_devices: replicas }) => html`<p key=${node} class="dim">${node}: ${replicas.length} replicas on devices ${deviceGroups(replicas)}</p>`)}
      ${model.locations.filter((place) => place.reason).map((place) => html`<p key=${place.node} class="problem">${place.node}: ${withoutName(model.id, place.reason)}</p>`)}
      ${Object.entries(model.failures ?? {}).filter(([node]) => !model.locations.some((place) => place.node === node)).map(([node, reason]) => html`<p key=${node} class="problem">${node}: ${withoutName(model.id, reason)}</p>`)}
      ${error && html`<${Problem} error=${error} />`}
      ${value && html`<${Explanation} decision=${value} />`}
      ${operator && html`<${Files} model=${model} reload=${reload} />`}
    </div>`;
}

/* --- files on disks */

function Disks() {
  const nodes = allNodes().filter((node) => node.disk);
  if (!nodes.length) return null;
  return html`
    <details class="disks card"><summary>Disks: ${bytes(nodes.reduce((total, node) => total + node.disk.models_bytes, 0))} of models on ${nodes.length === 1 ? "one node" : `${nodes.length} nodes`}</summary>
      <ul>${nodes.map(({ name, disk }) => html`
        <li key=${name}><span class="name" title=${name}>${name}</span>
          <meter min="0" max=${disk.total_bytes} high=${disk.total_bytes * 0.9} value=${disk.total_bytes - disk.free_bytes} aria-label="Disk used"></meter>
          <span class="dim">${bytes(disk.models_bytes)} models, ${bytes(disk.free_bytes)} of ${bytes(disk.total_bytes)} free</span></li>`)}</ul>
    </details>`;
}

function Files({ model, reload }) {
  const [asked, setAsked] = useState(null);
  const [error, setError] = useState(null);
  const kept = allNodes().map((node) => ({ node: node.name, disk_bytes: node.files?.[model.id] })).filter((file) => file.disk_bytes);
  if (!kept.length) return null;
  async function forget() {
    try {
      const { freed_bytes: freed } = await remove(`fleet/nodes/${encodeURIComponent(asked.node)}/files/${inPath(model.id)}`);
      notify(`${model.id}: ${freed == null ? "its files are" : `${bytes(freed)} are`} deleted from ${asked.node}.`);
      setAsked(null);
      reload();
    } catch (problem) {
      setError(problem);
    }
  }
  return html`
    <h3>On disk</h3>
    <ul class="files">${kept.map((file) => html`
      <li key=${file.node}><span>${file.node}</span><span class="dim">${bytes(file.disk_bytes)}</span><button class="small danger" onClick=${() => { setError(null); setAsked(file); }}>Delete…</button></li>`)}</ul>
    ${asked && html`
      <${Dialog} title=${`Delete ${model.id} from ${asked.node}`} onClose=${() => setAsked(null)}>
        <p>${bytes(asked.disk_bytes)} of disk become free. Loading it there again downloads it first.</p>
        ${error && html`<${Problem} error=${error} />`}
        <footer><button onClick=${() => setAsked(null)}>Cancel</button><button class="danger" onClick=${forget}>Delete</button></footer>
      <//>`}`;
}
