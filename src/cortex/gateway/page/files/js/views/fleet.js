// Every node with its devices and models, live, and the orders that an operator may give.
import { bytes, count, deviceGroups, hue, percent, plural, rate, withoutName } from "../format.js";
import { html, useState } from "../html.js";
import { Jobs } from "../jobs.js";
import { Order } from "../orders.js";
import { Badge, Empty, Loading, Menu, MenuItem, Sparkline } from "../parts.js";
import { allNodes, hasFleet, history, node, nodeNames, second, waiting } from "../state.js";
import { Progress } from "./progress.js";

const STATES = {
  ready: "good", loading: "busy", downloading: "busy", unloading: "busy", asleep: "quiet", recovering: "warn", failed: "bad",
  unreachable: "bad", suspended: "quiet",
};
const PINNED = { operator: "Kept loaded by an operator", catalogue: "Kept loaded by models.toml" };
const ON_DEVICE = new Set(["loading", "ready", "unloading", "recovering"]);
const SHOWN_MODELS = 6;
const FILTER_FROM = 5;

export default function Fleet() {
  const [filter, setFilter] = useState("");
  const [order, setOrder] = useState(null);
  if (!hasFleet.value) return html`<h1>Fleet</h1><${Loading} what="the fleet" />`;
  const names = nodeNames.value.filter((name) => matches(name, filter.trim().toLowerCase()));
  return html`
    <header class="view-head">
      <h1>Fleet</h1>
      ${nodeNames.value.length >= FILTER_FROM && html`
        <input type="search" placeholder="Filter nodes and models" aria-label="Filter nodes and models" value=${filter}
          onInput=${(event) => setFilter(event.target.value)} />`}
    </header>
    <${Summary} />
    <${Legend} />
    <${Jobs} />
    ${nodeNames.value.length === 0 && html`
      <${Empty} title="No nodes yet">Add one to <code>cortex.toml</code> as <code>[[neurons]]</code>; it appears here by itself.<//>`}
    ${nodeNames.value.length > 0 && names.length === 0 && html`<${Empty} title="No node or model matches the filter" />`}
    <div class="nodes">${names.map((name) => html`<${NodeCard} key=${name} name=${name} onOrder=${setOrder} />`)}</div>
    ${order && html`<${Order} ...${order} onClose=${() => setOrder(null)} />`}`;
}

function matches(name, wanted) {
  if (!wanted || name.toLowerCase().includes(wanted)) return true;
  const here = node(name).value;
  return here?.models.some((model) => model.id.toLowerCase().includes(wanted)) ?? false;
}

function Summary() {
  second.value;
  const nodes = allNodes();
  const models = nodes.filter((each) => each.up).flatMap((each) => each.models);
  const devices = nodes.filter((each) => each.up).flatMap((each) => each.devices);
  const total = sum(devices, (device) => device.total_bytes);
  const used = total - sum(devices, (device) => device.free_bytes);
  const watts = sum(nodes, (each) => each.watts ?? 0), asleep = nodes.filter(isReserve).length;
  const down = nodes.filter((each) => !each.up && !isReserve(each)).length;
  const inQueue = sum(Object.values(waiting.value), (depth) => depth) + sum(models, (model) => model.load.waiting);
  const tiles = [
    ["Nodes", `${nodes.length - down - asleep} up${asleep ? `, ${asleep} asleep` : ""}${down ? `, ${down} down` : ""}`, down ? "bad-text" : ""],
    ["Memory", total ? `${bytes(used)} of ${bytes(total)}` : "–"],
    ["Models ready", count(models.filter((model) => model.state === "ready").length)],
    ["In flight", count(sum(models, inFlight))],
    ["Waiting", count(inQueue), inQueue ? "warn-text" : ""],
    ...(watts ? [["Power", `${Math.round(watts)} W`]] : []),
    ["Tokens/s", rate(sum(models, (model) => model.load.tokens_per_s))],
  ];
  return html`<dl class="tiles">${tiles.map(([name, value, kind]) => html`
    <div key=${name} ><dt>${name}</dt><dd class=${kind}>${value}</dd></div>`)}</dl>`;
}

/** What the parts of a bar mean, in the colour of a model that is shown. */
function Legend() {
  second.value;
  const shown = allNodes().flatMap((each) => each.models).find((model) => ON_DEVICE.has(model.state));
  const kinds = [["", "weights, a colour for each model"], ["kv", "KV cache"], ["changing", "loading or unloading"], ["foreign", "other programs"], ["free", "free"], ["free beyond", "free, but not for models"]];
  return html`<p class="legend dim hue-${hue(shown?.id ?? "")}" aria-hidden="true">${kinds.map(([kind, label]) => html`<span key=${label}><i class="part ${kind}"></i>${label}</span>`)}</p>`;
}

/** The gateway's own count is fresher; the node's also has requests of other gateways. */
const inFlight = (model) => Math.max(model.in_flight, model.load.running);

const sum = (values, of) => values.reduce((total, value) => total + (of(value) ?? 0), 0);

/** What waits for a slot of a model, by class where there is another than the default. */
function waitingFor(model) {
  const classes = Object.entries(model.load.waiting_by_class ?? {});
  const named = classes.some(([name]) => name !== "default") ? ` (${classes.map(([name, number]) => `${number} ${name}`).join(", ")})` : "";
  return `${model.load.waiting} waiting${named}`;
}

/** Whether a node sleeps, and is woken when it is needed. */
function isReserve(node) {
  return ["suspending", "asleep", "waking"].includes(node.sleep);
}

function NodeCard({ name, onOrder }) {
  const here = node(name).value;
  const [all, setAll] = useState(false);
  if (!here) return null;
  const models = all ? here.models : here.models.slice(0, SHOWN_MODELS);
  const status = isReserve(here) ? ["", here.sleep] : !here.up ? ["bad", here.sleep === "lost" ? "lost" : "down"] : here.draining ? ["warn", here.drained ? "drained" : "draining"] : ["good", "up"];
  return html`
    <article class="card node ${here.up ? "" : isReserve(here) ? "reserve" : "down"}" aria-label=${`Node ${name}`}>
      <header>
        <h2 title=${name}>${name}</h2>
        <${Badge} kind=${status[0]} title=${here.problem ?? ""}>${status[1]}<//>
        ${here.kind === "openai" && html`<${Badge} title="An OpenAI-compatible server; it loads and unloads nothing">foreign<//>`}
        <span class="grow"></span>
        ${here.kind === "neuron" && here.up && html`
          <${Menu} label=${`Actions for node ${name}`}>
            ${here.drained
              ? html`<${MenuItem} onClick=${() => onOrder({ kind: "undrain", node: name })}>Take requests again…<//>`
              : html`<${MenuItem} onClick=${() => onOrder({ kind: "drain", node: name })}>Drain…<//>`}
            ${here.cold_models.length > 0 && html`<${MenuItem} onClick=${() => onOrder({ kind: "load", node: name })}>Load a model…<//>`}
          <//>`}
      </header>
      ${here.problem && html`<p class=${isReserve(here) ? "dim" : "problem"}>${here.problem}</p>`}
      ${here.ceiling_bytes != null && html`<p class="dim">Models may take ${bytes(here.ceiling_bytes)} of this node (memory_mb).</p>`}
      ${here.devices.map((device) => html`<${Device} key=${device.index} device=${device} index=${here.devices.length > 1 ? `${device.index} · ` : ""} here=${here} />`)}
      <${Host} here=${here} />
      ${models.length > 0 && html`<ul class="models">
        ${models.map((model) => html`<${ModelRow} key=${model.id} here=${here} model=${model} onOrder=${onOrder} />`)}
      </ul>`}
      ${here.members.length > 0 && html`<ul class="models">
        ${here.members.map((member) => html`<${MemberRow} key=${member.id} member=${member} />`)}
      </ul>`}
      ${here.models.length > SHOWN_MODELS && html`
        <button class="ghost small" onClick=${() => setAll(!all)}>${all ? "Show fewer" : `Show all ${here.models.length} models`}</button>`}
      ${here.up && here.models.length + here.members.length === 0 && html`<p class="dim">No model is loaded here.</p>`}
      ${Object.entries({ ...here.absent_models, ...here.cold_reasons }).map(([id, reason]) => html`<p key=${id} class="problem">${id}: ${withoutName(id, reason)}</p>`)}
      <${ColdModels} here=${here} onOrder=${onOrder} />
    </article>`;
}

function ColdModels({ here, onOrder }) {
  const [open, setOpen] = useState(false);
  const names = here.cold_models.filter((id) => !here.members.some((member) => member.id === id));
  if (!names.length) return null;
  return html`
    <details class="cold" onToggle=${(event) => setOpen(event.target.open)}>
      <summary class="dim">${plural(names.length, "more model")}, not loaded</summary>
      ${open && html`<ul>${names.map((id) => html`
        <li key=${id}><span class="name" title=${id}>${id}</span>
          ${here.kind === "neuron" && here.up && html`<button class="small" onClick=${() => onOrder({ kind: "load", model: id, node: here.name })}>Load…</button>`}
        </li>`)}</ul>`}
    </details>`;
}

/** One device as a stacked bar: every model's weights and KV cache, extra replicas, other programs, free memory. */
function Device({ device, index, here }) {
  const parts = segments(device, here);
  const used = device.total_bytes - device.free_bytes + device.extra_replica_bytes;
  const label = parts.map((part) => `${part.label} ${bytes(part.size)}`).join(", ");
  return html`
    <div class="device">
      <div class="device-head">
        <span class="name" title=${device.name}>${index}${device.name}</span>
        <span class="dim facts">
          ${here.up && device.temperature_c != null && html`<span class=${device.temperature_c >= 85 ? "bad-text" : ""}>${Math.round(device.temperature_c)} °C</span>`}
          ${here.up && device.watts != null && html`<span title="What the device draws">${Math.round(device.watts)} W</span>`}
          ${here.up && device.utilisation != null && html`<span title="Utilisation">${percent(device.utilisation)} busy</span>`}
          ${device.kv_host_bytes > 0 && html`<span title="KV pages in the host's memory: conversations that continue them are not computed again">${bytes(device.kv_host_bytes)} of KV in RAM</span>`}
          ${device.ceiling_bytes != null && html`<span title="Models may take this much of the device (memory_mb)">models ≤ ${bytes(device.ceiling_bytes)}</span>`}
          <span>${bytes(used)} / ${bytes(device.total_bytes)}</span>
        </span>
      </div>
      <div class="bar ${here.up ? "" : "stale"}" role="img" aria-label=${`${device.name}: ${label}`}>
        ${parts.map((part) => html`
          <span key=${part.key} class="part ${part.kind}" title=${`${part.label}: ${bytes(part.size)}`}
            style=${{ width: `${((100 * part.size) / device.total_bytes).toFixed(2)}%` }}></span>`)}
      </div>
    </div>`;
}

/** The memory of the host that models may take: weights of loaded and of sleeping models, and KV pages. */
function Host({ here }) {
  const { host, models } = here;
  const held = models.filter((model) => model.host_bytes > 0);
  const asleep = held.filter((model) => model.state !== "ready");
  const parts = held.map((model) => ({
    key: model.id,
    kind: `hue-${hue(model.id)} ${model.state === "ready" ? "" : "kv"}`,
    size: model.host_bytes,
    label: model.state === "ready" ? `${model.id} weights` : `${model.id} asleep`,
  }));
  if (host?.kv_bytes) parts.push({ key: "kv pages", kind: "foreign", size: host.kv_bytes, label: "KV pages" });
  const used = sum(parts, (part) => part.size);
  const label = parts.map((part) => `${part.label} ${bytes(part.size)}`).join(", ");
  return html`
    ${host != null && host.budget_bytes > 0 && used > 0 && html`
      <div class="device">
        <div class="device-head">
          <span class="name" title="Memory of the host that models may take (limits.host_mb)">Host memory</span>
          <span class="dim facts">
            ${host.locked_bytes > 0 && html`<span title=${`At most ${bytes(host.locked_limit_bytes)}`}>${bytes(host.locked_bytes)} page-locked</span>`}
            <span>${bytes(used)} / ${bytes(host.budget_bytes)}</span>
          </span>
        </div>
        <div class="bar ${here.up ? "" : "stale"}" role="img" aria-label=${`Host memory: ${label}`}>
          ${parts.map((part) => html`
            <span key=${part.key} class="part ${part.kind}" title=${`${part.label}: ${bytes(part.size)}`}
              style=${{ width: `${Math.min(100, (100 * part.size) / host.budget_bytes).toFixed(2)}%` }}></span>`)}
        </div>
      </div>`}
    ${host?.shortage && html`<p class="problem">${host.shortage}</p>`}
    ${asleep.length > 0 && html`
      <div class="host"><span class="dim">Asleep in host memory</span>
        ${asleep.map((model) => html`<span key=${model.id} class="chip hue-${hue(model.id)}"><i></i>${model.id} · ${bytes(model.host_bytes)}</span>`)}
      </div>`}`;
}

/** What a model has on each of its devices, in bytes. */
function sizes(model) {
  const total = model.measured_bytes ?? model.estimate_bytes ?? 0;
  const { devices, device_bytes: measured } = model;
  return measured.length === devices.length ? measured : devices.map(() => total / devices.length);
}

const isEven = (values) => values.every((value) => value === values[0]);

/** What models and parts of models hold over all devices of a node. */
const heldBytes = ({ models, members }) =>
  sum([...models, ...members].filter((model) => ON_DEVICE.has(model.state)), (model) => sum(sizes(model), (each) => each));

function segments(device, here) {
  const { models, members } = here;
  const parts = [];
  for (const model of models) {
    const at = model.devices.indexOf(device.index);
    if (!ON_DEVICE.has(model.state) || at < 0) continue;
    const all = sizes(model);
    const size = all[at];
    const kv = Math.min(size, ((model.kv_bytes ?? 0) * size) / (sum(all, (each) => each) || 1));
    const colour = `hue-${hue(model.id)} ${model.state === "ready" ? "" : "changing"}`;
    const replica = model.replica_devices.find((each) => each.includes(device.index)) ?? model.devices;
    const ranks = replica.map((index) => all[model.devices.indexOf(index)]);
    const share = ranks.length < 2 ? "" : isEven(ranks) ? ` (1/${ranks.length} of it)` : " (a part of it)";
    const what = model.kv_bytes == null ? model.id : `${model.id} weights`;
    parts.push({ key: model.id, kind: colour, size: size - kv, label: what + share });
    if (kv) parts.push({ key: `${model.id} kv`, kind: `${colour} kv`, size: kv, label: `${model.id} KV cache${share}` });
  }
  for (const member of members) {
    const at = member.devices.indexOf(device.index);
    if (at < 0 || !ON_DEVICE.has(member.state)) continue;
    const label = `${member.id} (a part of it, ${member.nodes[0]} serves it)`;
    parts.push({ key: `${member.id} member`, kind: `hue-${hue(member.id)}`, size: sizes(member)[at], label });
  }
  if (device.extra_replica_bytes) {
    const extras = (model) => model.replica_devices.flat().filter((index) => !model.devices.includes(index));
    const all = models.filter((model) => extras(model).length > 0);
    const placed = all.filter((model) => extras(model).includes(device.index));
    const named = placed.length ? placed : all; // the devices of a CPU share its memory
    const label = `Extra replicas of ${named.map((model) => model.id).join(", ")} (count as free)`;
    parts.push({ key: "\nextra", kind: `extra hue-${hue(named[0]?.id ?? "")}`, size: device.extra_replica_bytes, label });
  }
  if (device.foreign_bytes) parts.push({ key: "\nother", kind: "foreign", size: device.foreign_bytes, label: "Other programs" });
  const taken = sum(parts, (part) => part.size);
  const free = Math.max(0, device.total_bytes - taken);
  const held = taken - (device.foreign_bytes ?? 0);
  const left = [device.ceiling_bytes == null ? free : device.ceiling_bytes - held, here.ceiling_bytes == null ? free : here.ceiling_bytes - heldBytes(here)];
  const usable = Math.min(free, ...left.map((each) => Math.max(0, each)));
  parts.push({ key: "\nfree", kind: "free", size: usable, label: "Free" });
  if (free > usable) parts.push({ key: "\nbeyond", kind: "free beyond", size: free - usable, label: "Free, but over the ceiling of models (memory_mb)" });
  return parts;
}

function ModelRow({ here, model, onOrder }) {
  const active = model.state === "ready";
  const order = (kind) => onOrder({ kind, model: model.id, node: here.name, status: model });
  return html`
    <li class="model">
      <div class="model-head">
        <span class="swatch hue-${hue(model.id)}" aria-hidden="true"></span>
        <span class="name" title=${model.id}>${model.id}</span>
        ${model.pinned && html`<${Badge} title=${PINNED[model.pinned_by]}>pinned<//>`}
        <${Badge} kind=${STATES[model.state]}>${model.state}<//>
        ${model.nodes.length > 0 && html`<${Badge} title=${`Runs on ${model.nodes.join(", ")}; ${model.nodes[0]} serves it`}>${model.nodes.length} nodes<//>`}
        ${active && model.replica_devices.length > 1 && html`<${Badge} title=${onDevices(model)}>${model.replica_devices.length} replicas<//>`}
        <span class="grow"></span>
        <${Size} model=${model} />
        ${here.kind === "neuron" && here.up && html`
          <${Menu} label=${`Actions for ${model.id} on ${here.name}`}>
            ${(model.state === "asleep" || model.state === "failed") && html`<${MenuItem} onClick=${() => order("load")}>${model.state === "asleep" ? "Wake…" : "Load again…"}<//>`}
            ${active && !model.pinned && html`<${MenuItem} onClick=${() => order("pin")}>Pin…<//>`}
            ${model.pinned_by === "operator" && html`<${MenuItem} onClick=${() => order("unpin")}>Unpin…<//>`}
            ${active && here.can_sleep && html`<${MenuItem} onClick=${() => order("sleep")}>Sleep…<//>`}
            <${MenuItem} danger onClick=${() => order("unload")}>${model.state === "failed" ? "Clear…" : "Unload…"}<//>
          <//>`}
      </div>
      ${active && html`
        <div class="numbers dim">
          <span>${inFlight(model)} in flight</span>
          ${model.load.waiting > 0 && html`<span class="warn-text">${waitingFor(model)}</span>`}
          ${model.kv_bytes > 0 && html`<span>KV ${percent(model.load.kv_used_fraction)} used</span>`}
          <${Rate} node=${here.name} model=${model} />
        </div>`}
      ${model.progress && html`<${Progress} progress=${model.progress} />`}
      ${model.log_lines.length > 0 && html`<p class="dim">${model.log_lines.at(-1)}</p>`}
      ${model.reason && html`<p class="reason">${model.reason}</p>`}
    </li>`;
}

/** Where its replicas are. The devices of the model itself do not include those of extra ones. */
function onDevices({ devices, replica_devices: replicas }) {
  const extra = replicas.filter((each) => !each.every((index) => devices.includes(index)));
  return `On devices ${deviceGroups(replicas)}.${extra.length ? ` Extra, in memory that counts as free: ${deviceGroups(extra)}.` : ""}`;
}

/** A member of a group that another node leads: the model is loaded and unloaded there. */
function MemberRow({ member }) {
  const title = `Rank ${member.rank} of ${member.nodes.length}; ${member.nodes[0]} serves the model`;
  return html`
    <li class="model">
      <div class="model-head">
        <span class="swatch hue-${hue(member.id)}" aria-hidden="true"></span>
        <span class="name" title=${member.id}>${member.id}</span>
        <${Badge} kind=${STATES[member.state]} title=${title}>part of ${member.nodes[0]}'s<//>
        <span class="grow"></span>
        <${Size} model=${member} />
      </div>
      ${member.progress && html`<${Progress} progress=${member.progress} />`}
      ${member.log_lines.length > 0 && html`<p class="dim">${member.log_lines.at(-1)}</p>`}
    </li>`;
}

/** On a device; of a model that is divided among devices, on each of them. */
function Size({ model }) {
  if (model.state === "asleep") return html`<span class="dim size">${bytes(model.host_bytes)}</span>`;
  const size = model.measured_bytes ?? model.estimate_bytes;
  const { devices } = model;
  if (model.host_bytes > 0 && model.state === "ready") return html`<span class="dim size" title="On the device, and weights in host memory">${bytes(size)} + ${bytes(model.host_bytes)}</span>`;
  if (size == null || devices.length < 2 || !ON_DEVICE.has(model.state)) return html`<span class="dim size">${bytes(size)}</span>`;
  const all = sizes(model);
  const text = isEven(all) ? `${all.length} × ${bytes(all[0])}` : all.map(bytes).join(" + ");
  return html`<span class="dim size" title=${`On devices ${devices.join(", ")}`}>${text}</span>`;
}

function Rate({ node: name, model }) {
  second.value;
  const values = history(name, model.id);
  if (!values.some((value) => value > 0)) return null;
  const now = `${rate(model.load.tokens_per_s)} tok/s`;
  return html`<span class="rate" title="Tokens per second over the last minute"><${Sparkline} values=${values} label=${now} />${now}</span>`;
}
