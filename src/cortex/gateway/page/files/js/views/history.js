// The last hour or day: traffic of this gateway, and what models held of each device.
import { get } from "../api.js";
import { bytes, compact, hue, seconds } from "../format.js";
import { html, useEffect, useMemo, useState } from "../html.js";
import { Empty, Loading, Problem, useLoaded } from "../parts.js";
import { TimePlot } from "../time_plot.js";

const WINDOWS = [["hour", "Hour", 10_000], ["day", "Day", 60_000]];
const SHOWN_DEVICES = 12;

export default function History() {
  const [window, setWindow] = useState("hour");
  const { value, error, reload } = useLoaded((signal) => get(`fleet/history?window=${window}`, { signal }), [window]);
  useEffect(() => {
    const every = WINDOWS.find(([id]) => id === window)[2];
    const timer = setInterval(() => document.hidden || reload(), every);
    return () => clearInterval(timer);
  }, [window]);
  const shown = value?.window === window ? value : null;
  return html`
    <header class="view-head">
      <h1>History</h1>
      <div class="head-tools"><div class="segmented" role="group" aria-label="Window">${WINDOWS.map(([id, title]) => html`
        <button key=${id} aria-pressed=${id === window} onClick=${() => setWindow(id)}>${title}</button>`)}</div></div>
    </header>
    ${error && html`<${Problem} error=${error} retry=${reload} />`}
    ${!shown && !error && html`<${Loading} what="the history" />`}
    ${shown && html`<${Traffic} history=${shown} /><${Devices} history=${shown} />`}`;
}

const GIB = 2 ** 30;
const COUNTS = [1, 2, 5].flatMap((digit) => [1, 10, 100, 1000, 10_000].map((scale) => digit * scale)).sort((one, other) => one - other);
const SIZES = Array.from({ length: 14 }, (_, power) => GIB * 2 ** (power - 3));

const PLOTS = [
  ["Tokens per second", [["Completion", "completion_tokens_per_s", "--hue-0"], ["Prompt", "prompt_tokens_per_s", "--hue-1"]], compact, {}],
  ["Time to the first token", [["p50", "first_token_p50_s", "--hue-0"], ["p95", "first_token_p95_s", "--hue-1"]], seconds, { points: true }],
  ["Waiting requests", [["Most at a time", "waiting", "--hue-0"]], compact, { steps: true, increments: COUNTS }],
  ["Loads and evictions", [["Loads", "loads", "--hue-0"], ["Evictions", "evictions", "--hue-1"]], compact, { steps: true, increments: COUNTS }],
];

function Traffic({ history }) {
  return html`<div class="history-grid">${PLOTS.map(([title, lines, format, form]) => html`
    <section class="card plot-card" key=${title}><h2>${title}</h2>
      <${TimePlot} times=${history.times} format=${format} ...${form} label=${title}
        series=${lines.map(([label, name, colour]) => ({ label, colour, values: history[name] }))} /></section>`)}</div>`;
}

function Devices({ history }) {
  const [filter, setFilter] = useState("");
  const [all, setAll] = useState(false);
  const found = history.devices.filter((device) => device.node.toLowerCase().includes(filter.trim().toLowerCase()));
  const shown = all ? found : found.slice(0, SHOWN_DEVICES);
  if (history.devices.length === 0) return html`<${Empty} title="No device has reported yet">Memory is plotted once a node with devices is up.<//>`;
  return html`
    <header class="view-head"><h2>Memory by model</h2>
      <div class="head-tools"><label><span class="visually-hidden">Node</span>
        <input type="search" placeholder="Node" value=${filter} onInput=${(event) => setFilter(event.target.value)} /></label></div></header>
    ${found.length === 0 && html`<${Empty} title="No such node" />`}
    <div class="history-grid">${shown.map((device) => html`<${Device} key=${`${device.node}/${device.device}`} device=${device} times=${history.times} />`)}</div>
    ${found.length > shown.length && html`<button onClick=${() => setAll(true)}>Show all ${found.length} devices</button>`}`;
}

function Device({ device, times }) {
  const series = useMemo(() => stacked(device, times), [device, times]);
  const title = `${device.node}, device ${device.device}`;
  return html`
    <section class="card plot-card"><h2>${title} <span class="dim">${bytes(device.total_bytes)}</span></h2>
      <${TimePlot} times=${times} series=${series} format=${bytes} most=${device.total_bytes} increments=${SIZES} steps=${true} stack=${true} label=${`Memory by model: ${title}`} /></section>`;
}

/** One series per model: what it held at the end of each step; null before anything was known. */
function stacked(device, times) {
  const models = [...new Set(device.changes.flatMap((change) => Object.keys(change.models)))].sort();
  let next = 0;
  let current = null;
  const step = times.length > 1 ? times[1] - times[0] : 1;
  const held = times.map((time) => {
    while (next < device.changes.length && device.changes[next].at < time + step) current = device.changes[next++].models;
    return current;
  });
  return models.map((model) => ({ label: model, colour: `--hue-${hue(model)}`, values: held.map((each) => (each ? each[model] ?? 0 : null)) }));
}
