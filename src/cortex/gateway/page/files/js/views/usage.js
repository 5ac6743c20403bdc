// Tokens, requests and cost by day, key, group and model; and the keys and groups themselves.
import { get, inPath, patch, post, remove, request } from "../api.js";
import { compact, count, money } from "../format.js";
import { html, useMemo, useState } from "../html.js";
import { Badge, CopyButton, Dialog, Empty, Loading, Menu, MenuItem, Problem, notify, useLoaded } from "../parts.js";
import { StackedBars } from "../plot.js";
import { session } from "../state.js";

const CLASSES = "idle|flex|default|priority";
const DAY_S = 86400;
const SPANS = [7, 30, 90];

export default function Usage() {
  const [span, setSpan] = useState(30);
  const operator = session.value.operator;
  const until = useMemo(() => Math.floor(Date.now() / 1000) + 60, [span]);
  const query = `since=${until - span * DAY_S}&until=${until}`;
  const read = async (signal) => {
    const groups = ["day", "model", "key", "group", ...(operator ? ["key-model"] : [])];
    const found = await Promise.all(groups.map((by) => get(`fleet/usage?by=${by}&${query}`, { signal })));
    return Object.fromEntries(groups.map((by, index) => [by, found[index]]));
  };
  const { value, error, reload } = useLoaded(read, [span]);
  return html`
    <header class="view-head">
      <h1>${operator ? "Usage" : "Your usage"}</h1>
      <div class="head-tools">
        <div class="segmented" role="group" aria-label="Span">${SPANS.map((days) => html`
          <button key=${days} aria-pressed=${days === span} onClick=${() => setSpan(days)}>${days} days</button>`)}</div>
        ${value?.day.is_recorded && html`<${CsvMenu} query=${query} />`}
      </div>
    </header>
    ${error && html`<${Problem} error=${error} retry=${reload} />`}
    ${!value && !error && html`<${Loading} what="usage" />`}
    ${value && (value.day.is_recorded ? html`<${Recorded} usage=${value} until=${until} span=${span} />` : html`
      <${Empty} title="Usage is recorded once there are keys">Make the first one on the gateway's host, in the file that the gateway reads: <code>cortex keys add NAME --operator --config cortex.toml</code><//>`)}
    ${value?.day.is_recorded && html`<${Keys} />`}`;
}

function CsvMenu({ query }) {
  const download = async (by) => {
    try {
      const data = await (await request("GET", `fleet/usage.csv?by=${by}&${query}`)).blob();
      const link = document.createElement("a");
      link.href = URL.createObjectURL(data);
      link.download = `cortex-usage-by-${by}.csv`;
      link.click();
      URL.revokeObjectURL(link.href);
    } catch (problem) {
      notify(problem.message, "bad");
    }
  };
  return html`<${Menu} text="CSV">${["day", "model", "key", "group", "key-model"].map((by) => html`<${MenuItem} key=${by} onClick=${() => download(by)}>By ${by.replace("-", " and ")}<//>`)}<//>`;
}

const sum = (rows, name) => rows.reduce((total, row) => total + row[name], 0);

function Recorded({ usage, until, span }) {
  const rows = usage.day.rows;
  const cost = sum(rows, "cost"), energy = sum(rows, "energy_wh");
  const tiles = [
    ["Requests", count(sum(rows, "requests"))], ["Prompt tokens", compact(sum(rows, "prompt_tokens"))],
    ["of them cached", compact(sum(rows, "cached_tokens"))], ["Completion tokens", compact(sum(rows, "completion_tokens"))],
    ...(energy ? [["Energy", energyText(energy)]] : []),
    ...(cost ? [["Cost", money(cost)]] : []),
  ];
  const plotted = useMemo(() => byDay(rows, until, span), [usage]);
  return html`
    <dl class="tiles">${tiles.map(([name, text]) => html`<div key=${name}><dt>${name}</dt><dd>${text}</dd></div>`)}</dl>
    ${rows.length === 0
      ? html`<${Empty} title="No usage in this time" />`
      : html`<section class="card plot-card"><h2>Tokens by day</h2><${StackedBars} days=${plotted.days} series=${plotted.series} /></section>
        <div class="two-tables">
          <${Table} title="By model" rows=${usage.model.rows} />
          ${session.value.operator && html`<${Table} title="By key" rows=${usage.key.rows} />`}
          ${session.value.operator && usage.group.rows.some((row) => row.id) && html`<${Table} title="By group" rows=${usage.group.rows} />`}
        </div>
        ${session.value.operator && html`<${Matrix} rows=${usage["key-model"].rows} />`}`}`;
}

function byDay(rows, until, span) {
  const known = new Map(rows.map((row) => [row.name, row]));
  const last = Math.floor(until / DAY_S) * DAY_S;
  const days = Array.from({ length: span }, (_, index) => last - (span - 1 - index) * DAY_S);
  const of = (part) => days.map((unix) => {
    const row = known.get(new Date(unix * 1000).toISOString().slice(0, 10));
    return row ? part(row) : 0;
  });
  return {
    days,
    series: [
      { label: "Completion", values: of((row) => row.completion_tokens), colour: "--hue-0" },
      { label: "Prompt, new", values: of((row) => row.prompt_tokens - row.cached_tokens), colour: "--hue-1" },
      { label: "Prompt, cached", values: of((row) => row.cached_tokens), colour: "--foreign" },
    ],
  };
}

/** Watt hours for people. */
function energyText(wattHours) {
  return wattHours >= 1000 ? `${(wattHours / 1000).toFixed(2)} kWh` : `${wattHours.toFixed(wattHours < 1 ? 3 : 1)} Wh`;
}

function Table({ title, rows }) {
  const hasCost = rows.some((row) => row.cost), hasEnergy = rows.some((row) => row.energy_wh);
  return html`
    <section class="card"><h2 class="card-title">${title}</h2><div class="scroll"><table>
      <thead><tr><th>Name</th><th class="number">Requests</th><th class="number">In</th><th class="number">Cached</th><th class="number">Out</th>${hasEnergy && html`<th class="number">Energy</th>`}${hasCost && html`<th class="number">Cost</th>`}</tr></thead>
      <tbody>${rows.map((row) => html`
        <tr key=${row.id ?? row.name}><td class="name-cell" title=${row.name}>${row.name}</td><td class="number">${count(row.requests)}</td>
          <td class="number" title=${count(row.prompt_tokens)}>${compact(row.prompt_tokens)}</td><td class="number" title=${count(row.cached_tokens)}>${compact(row.cached_tokens)}</td>
          <td class="number" title=${count(row.completion_tokens)}>${compact(row.completion_tokens)}</td>${hasEnergy && html`<td class="number">${energyText(row.energy_wh)}</td>`}${hasCost && html`<td class="number">${money(row.cost)}</td>`}</tr>`)}</tbody>
    </table></div></section>`;
}

const SHOWN = {
  Tokens: [(row) => row.prompt_tokens + row.completion_tokens, compact],
  Requests: [(row) => row.requests, count],
  Cost: [(row) => row.cost, money],
};

/** Every model of every key; both in the order of their totals, or the keys in that of one model. */
function Matrix({ rows }) {
  const [shown, setShown] = useState("Tokens");
  const [by, setBy] = useState("");
  const [of, text] = SHOWN[shown];
  const keys = new Map(), models = new Map();
  for (const row of rows) {
    const key = keys.get(row.id) ?? { id: row.id, name: row.name, cells: new Map(), total: 0 };
    keys.set(row.id, key);
    key.cells.set(row.model, row);
    key.total += of(row);
    models.set(row.model, (models.get(row.model) ?? 0) + of(row));
  }
  const columns = [...models.keys()].sort((a, b) => models.get(b) - models.get(a));
  const rank = (key) => (models.has(by) ? (key.cells.has(by) ? of(key.cells.get(by)) : -1) : key.total);
  const sorted = [...keys.values()].sort((a, b) => rank(b) - rank(a));
  const total = [...models.values()].reduce((before, value) => before + value, 0);
  const about = (row) => `${row.name}, ${row.model}: ${count(row.requests)} requests, ${count(row.prompt_tokens)} in, of them ${count(row.cached_tokens)} cached, ${count(row.completion_tokens)} out${row.cost ? `, cost ${money(row.cost)}` : ""}`;
  const head = (model, name) => html`<th key=${model} class="number" aria-sort=${by === model ? "descending" : null}><button class="link" title=${name} onClick=${() => setBy(model)}>${name}</button></th>`;
  return html`
    <section class="card" aria-labelledby="by-key-and-model">
      <header class="card-head"><h2 id="by-key-and-model">By key and model</h2>
        <div class="segmented" role="group" aria-label="Show">${Object.keys(SHOWN).filter((name) => name !== "Cost" || sum(rows, "cost")).map((name) => html`
          <button key=${name} class="small" aria-pressed=${name === shown} onClick=${() => setShown(name)}>${name}</button>`)}</div></header>
      <div class="matrix" tabindex="0"><table>
        <thead><tr><th>Key</th>${head("", "Total")}${columns.map((model) => head(model, model))}</tr></thead>
        <tbody>${sorted.map((key) => html`
          <tr key=${key.id}><th scope="row" class="name-cell" title=${`${key.name} (${key.id})`}>${key.name}</th><td class="number total">${text(key.total)}</td>
            ${columns.map((model) => html`<td key=${model} class="number" title=${key.cells.has(model) ? about(key.cells.get(model)) : null}>${key.cells.has(model) && text(of(key.cells.get(model)))}</td>`)}</tr>`)}</tbody>
        <tfoot><tr><th scope="row">Total</th><td class="number total">${text(total)}</td>${columns.map((model) => html`<td key=${model} class="number">${text(models.get(model))}</td>`)}</tr></tfoot>
      </table></div>
    </section>`;
}

/* --- keys */

function Keys() {
  const { value, error, reload } = useLoaded((signal) => get("keys", { signal }), []);
  const [dialog, setDialog] = useState(null);
  const done = () => {
    setDialog(null);
    reload();
  };
  if (error && !value) return html`<${Problem} error=${error} retry=${reload} />`;
  if (!value) return html`<${Loading} what="the keys" />`;
  const mayEdit = value.is_operator && !value.is_open;
  return html`
    <section class="card">
      <header class="card-head"><h2>${value.is_operator ? "Keys" : "Your key"}</h2>
        ${mayEdit && html`<button class="small primary" onClick=${() => setDialog({ kind: "make", what: "key" })}>Make a key</button>`}</header>
      <div class="scroll"><table>
        <thead><tr><th>Name</th><th>Models</th><th class="number">Requests/min</th><th>Window left</th><th>Balance left</th><th>Expires</th><th></th></tr></thead>
        <tbody>${value.keys.map((key) => html`
          <tr key=${key.id}>
            <td class="nowrap">${key.name} ${key.operator && html`<${Badge}>operator<//>`} ${key.source === "file" && html`<${Badge}>file<//>`} ${key.group && html`<${Badge}>${key.group}<//>`}<div class="dim mono small-text">ck-${key.id}-…</div></td>
            <td>${key.models.length ? key.models.join(", ") : html`<span class="dim">all</span>`}</td>
            <td class="number">${key.requests_per_min ?? html`<span class="dim">no limit</span>`}</td>
            <td><${Limits} tokens=${[key.window_left_tokens, key.window_tokens]} cost=${[key.window_left_cost, key.window_cost]} per=${key.window_s} /></td>
            <td><${Limits} tokens=${[key.balance_left_tokens, key.balance_tokens]} cost=${[key.balance_left_cost, key.balance_cost]} /></td>
            <td class="nowrap">${key.is_expired ? html`<${Badge} kind="bad">expired<//>` : (key.expires ?? html`<span class="dim">never</span>`)}</td>
            <td>${mayEdit && key.source !== "file" && html`<${Menu} label=${`Actions for key ${key.name}`}>
              <${MenuItem} onClick=${() => setDialog({ kind: "change", what: "key", info: key })}>Limits and expiry…<//>
              <${MenuItem} danger onClick=${() => setDialog({ kind: "remove", what: "key", info: key })}>Revoke…<//>
            <//>`}</td>
          </tr>`)}</tbody>
      </table></div>
      ${mayEdit && value.keys.some((key) => key.source === "file") && html`<p class="dim card-note">Keys and groups marked “file” are in the configuration file of the gateway and are changed there.</p>`}
    </section>
    ${(mayEdit || value.groups.length > 0) && html`<${Groups} groups=${value.groups} mayEdit=${mayEdit} setDialog=${setDialog} />`}
    ${dialog?.kind === "remove" && html`<${Remove} what=${dialog.what} info=${dialog.info} onDone=${done} onClose=${() => setDialog(null)} />`}
    ${(dialog?.kind === "make" || dialog?.kind === "change") && html`<${LimitsForm} what=${dialog.what} info=${dialog.info} onDone=${reload} onClose=${() => setDialog(null)} />`}`;
}

function Groups({ groups, mayEdit, setDialog }) {
  return html`
    <section class="card">
      <header class="card-head"><h2>Groups</h2>
        ${mayEdit && html`<button class="small" onClick=${() => setDialog({ kind: "make", what: "group" })}>Make a group</button>`}</header>
      ${groups.length === 0 ? html`<p class="dim card-note">The keys of a group share its limits, in addition to their own.</p>` : html`<div class="scroll"><table>
        <thead><tr><th>Name</th><th>Keys</th><th>Models</th><th class="number">Requests/min</th><th class="number">Spent</th><th>Window left</th><th>Balance left</th><th></th></tr></thead>
        <tbody>${groups.map((group) => html`
          <tr key=${group.name}>
            <td class="nowrap">${group.name} ${group.source === "file" && html`<${Badge}>file<//>`}</td>
            <td title=${group.keys.join(", ")}>${count(group.keys.length)}</td>
            <td>${group.models.length ? group.models.join(", ") : html`<span class="dim">all</span>`}</td>
            <td class="number">${group.requests_per_min ?? html`<span class="dim">no limit</span>`}</td>
            <td class="number" title=${count(group.spent_tokens)}>${compact(group.spent_tokens)}</td>
            <td><${Limits} tokens=${[group.window_left_tokens, group.window_tokens]} cost=${[group.window_left_cost, group.window_cost]} per=${group.window_s} /></td>
            <td><${Limits} tokens=${[group.balance_left_tokens, group.balance_tokens]} cost=${[group.balance_left_cost, group.balance_cost]} /></td>
            <td>${mayEdit && group.source !== "file" && html`<${Menu} label=${`Actions for group ${group.name}`}>
              <${MenuItem} onClick=${() => setDialog({ kind: "change", what: "group", info: group })}>Limits…<//>
              <${MenuItem} danger onClick=${() => setDialog({ kind: "remove", what: "group", info: group })}>Remove…<//>
            <//>`}</td>
          </tr>`)}</tbody>
      </table></div>`}
    </section>`;
}

function Limits({ tokens, cost, per }) {
  if (tokens[1] == null && cost[1] == null) return html`<span class="dim">no limit</span>`;
  const hours = per ? ` in ${per % 3600 ? `${per / 60} min` : `${per / 3600} h`}` : "";
  const left = (label, [value, of], text) => of != null && html`<div class="left"><meter min="0" max=${of || 1} low=${of * 0.1} optimum=${of} value=${value} aria-label=${label}></meter><span class="nowrap">${text(value)} of ${text(of)}${hours}</span></div>`;
  return html`${left("Tokens left", tokens, compact)}${left("Cost left", cost, money)}`;
}

function Remove({ what, info, onDone, onClose }) {
  const [error, setError] = useState(null);
  const isKey = what === "key";
  const verb = isKey ? "Revoke" : "Remove";
  const act = () => remove(`${what}s/${inPath(info.id ?? info.name)}`).then(() => { notify(`${info.name} is ${verb.toLowerCase()}d.`); onDone(); }, setError);
  return html`
    <${Dialog} title=${`${verb} ${info.name}`} onClose=${onClose}>
      <p>${isKey ? "Requests with this key are rejected from now on, at every gateway." : "Its limits end. No key may be in it."} Its recorded usage stays. This cannot be undone.</p>
      ${error && html`<${Problem} error=${error} />`}
      <footer><button onClick=${onClose}>Cancel</button><button class="danger" onClick=${act}>${verb}</button></footer>
    <//>`;
}

const number = (text) => (text.trim() === "" ? null : Number(text));

function LimitsForm({ what, info, onDone, onClose }) {
  const isNew = !info;
  const isKey = what === "key";
  const text = (name) => String(info?.[name] ?? "");
  const before = {
    name: text("name"), models: info?.models.join(", ") ?? "", group: text("group"), requests_per_min: text("requests_per_min"),
    window_tokens: text("window_tokens"), window_cost: text("window_cost"), window_h: String((info?.window_s ?? DAY_S) / 3600),
    request_class: text("request_class"), highest_class: text("highest_class"),
    balance_tokens: text("balance_tokens"), balance_cost: text("balance_cost"), expires: info?.expires?.slice(0, 10) ?? "", operator: info?.operator ?? false,
  };
  const [fields, setFields] = useState(before);
  const [error, setError] = useState(null);
  const [made, setMade] = useState(null);
  const set = (name) => (event) => setFields({ ...fields, [name]: event.target.type === "checkbox" ? event.target.checked : event.target.value });
  const field = (name, label, more = {}) => html`<label>${label}<input value=${fields[name]} onInput=${set(name)} ...${more} /></label>`;
  async function submit(event) {
    event.preventDefault();
    const given = (fields) => ({
      models: fields.models.split(",").map((text) => text.trim()).filter(Boolean), requests_per_min: number(fields.requests_per_min),
      window_tokens: number(fields.window_tokens), window_cost: number(fields.window_cost), window_s: Math.round((number(fields.window_h) ?? 24) * 3600),
      balance_tokens: number(fields.balance_tokens), balance_cost: number(fields.balance_cost),
      request_class: fields.request_class.trim() || null, highest_class: fields.highest_class.trim() || null,
      ...(isKey ? { group: fields.group.trim() || null, expires: fields.expires || null, operator: fields.operator } : {}),
    });
    // Only what was changed: the models that are shown may be those of its group.
    const old = given(before);
    const isChanged = ([name, value]) => isNew || JSON.stringify(value) !== JSON.stringify(old[name]);
    const values = Object.fromEntries(Object.entries(given(fields)).filter(isChanged));
    try {
      const found = isNew ? await post(`${what}s`, { name: fields.name.trim(), ...values }) : await patch(`${what}s/${inPath(info.id ?? info.name)}`, values);
      onDone();
      if (isNew && isKey) setMade(found.key);
      else onClose();
    } catch (problem) {
      setError(problem);
    }
  }
  if (made) {
    return html`
      <${Dialog} title=${`The key of ${fields.name}`} onClose=${onClose}>
        <p>This is the only time that it is shown. Store it now.</p>
        <pre class="snippet made-key">${made}</pre>
        <footer><${CopyButton} text=${made} small=${false} /><button class="primary" onClick=${onClose}>Done</button></footer>
      <//>`;
  }
  return html`
    <${Dialog} title=${isNew ? `Make a ${what}` : `Limits of ${info.name}`} onClose=${onClose}>
      <form onSubmit=${submit}>
        ${isNew && html`<div class="fields">${field("name", isKey ? "Name of its owner" : "Name", { required: true, maxlength: 100 })}</div>`}
        <div class="fields">${field("models", "Models, separated by commas; * matches anything", { placeholder: "All" })}</div>
        <div class="fields">
          ${isKey && field("group", "Group, whose models and budget it shares", { placeholder: "None" })}
          ${field("requests_per_min", "Requests per minute", { type: "number", min: 1, placeholder: "No limit" })}
        </div>
        <div class="fields">
          ${field("request_class", "Class of its requests: idle, flex, default or priority", { placeholder: "default", pattern: CLASSES })}
          ${field("highest_class", "Highest class that they can ask for", { placeholder: "No limit", pattern: CLASSES })}
        </div>
        <div class="fields">
          ${field("window_tokens", "Tokens per window", { type: "number", min: 0, placeholder: "No limit" })}
          ${field("window_cost", "Cost per window", { type: "number", min: 0, step: "any", placeholder: "No limit" })}
        </div>
        <div class="fields">
          ${field("balance_tokens", "Tokens in its whole life", { type: "number", min: 0, placeholder: "No limit" })}
          ${field("balance_cost", "Cost in its whole life", { type: "number", min: 0, step: "any", placeholder: "No limit" })}
        </div>
        <div class="fields">
          ${field("window_h", "Window in hours", { type: "number", min: 0.05, step: "any" })}
          ${isKey && field("expires", "Expires at the start of", { type: "date" })}
        </div>
        ${isKey && html`<label class="check"><input type="checkbox" checked=${fields.operator} onChange=${set("operator")} /> Operator: may also change the fleet and keys</label>`}
        ${error && html`<${Problem} error=${error} />`}
        <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary">${isNew ? `Make the ${what}` : "Save"}</button></footer>
      </form>
    <//>`;
}
