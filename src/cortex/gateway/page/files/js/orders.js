// The confirmation before an operator's order: what it would do, what it would evict, and why.
import { get, inPath, post } from "./api.js";
import { bytes, plural } from "./format.js";
import { html, useEffect, useState } from "./html.js";
import { jobsChanged } from "./jobs.js";
import { Badge, Dialog, Loading, Problem, Prose, notify, useLoaded } from "./parts.js";
import { node, nodeNames } from "./state.js";

const TITLES = {
  load: "Load", unload: "Unload", sleep: "Put to sleep", pin: "Pin", unpin: "Unpin", drain: "Drain", undrain: "Take requests again",
};
const DONE = { unpin: "may be evicted again", drain: "takes no new requests", undrain: "takes requests again" };
const VERDICTS = {
  resident: "good", starting: "busy", asleep: "good", fits: "good", fits_soon: "good", fits_after_eviction: "warn", blocked: "warn",
  crowded: "warn", standby: "warn",
};

export function Order({ kind, model: given, node: nodeName, status, onClose }) {
  const [model, setModel] = useState(given);
  const [place, setPlace] = useState(nodeName ?? "");
  const [force, setForce] = useState(false);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const subject = kind.endsWith("drain") ? nodeName : model;

  async function give() {
    setBusy(true);
    setError(null);
    try {
      const { job } = await carryOut(kind, model, place || undefined, { force, unpin: Boolean(status?.pinned) });
      if (job) jobsChanged(job.id);
      else notify(`${subject} ${DONE[kind]}.`);
      onClose();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }

  const title = subject ? `${TITLES[kind]} ${subject}` : TITLES[kind];
  return html`
    <${Dialog} title=${title} onClose=${onClose} wide=${kind === "load"}>
      ${kind === "load" && html`<${LoadQuestion} model=${model} setModel=${given ? null : setModel} place=${place} setPlace=${setPlace} />`}
      ${(kind === "unload" || kind === "sleep") && html`<${UnloadQuestion} kind=${kind} status=${status} place=${nodeName} force=${force} setForce=${setForce} />`}
      ${kind === "pin" && html`<p>${model} stays loaded on ${nodeName}: nothing evicts it, and it does not expire.</p>`}
      ${kind === "unpin" && html`<p>${model} may be evicted from ${nodeName} again when its room is needed.</p>`}
      ${kind === "drain" && html`<${DrainQuestion} name=${nodeName} />`}
      ${kind === "undrain" && html`<p>${nodeName} takes new requests and loads again.</p>`}
      ${error && html`<${Problem} error=${error} />`}
      <footer>
        <button onClick=${onClose}>Cancel</button>
        <button class=${kind === "unload" ? "danger" : "primary"} disabled=${busy || !subject} onClick=${give}>
          ${busy ? "Working…" : TITLES[kind]}
        </button>
      </footer>
    <//>`;
}

/** The fleet shows how far the order is, so nothing waits for its end. */
function carryOut(kind, model, place, options) {
  if (kind === "drain" || kind === "undrain") return post(`fleet/nodes/${encodeURIComponent(place)}/${kind}`);
  const order = kind === "sleep" ? "unload" : kind;
  return post(`fleet/models/${inPath(model)}/${order}`, { node: place, wait: false, sleep: kind === "sleep", ...options });
}

function LoadQuestion({ model, setModel, place, setPlace }) {
  const here = place ? node(place).value : null;
  useEffect(() => {
    if (!model && setModel && here?.cold_models.length) setModel(here.cold_models[0]);
  }, []);
  const query = `origin=operator${place ? `&node=${encodeURIComponent(place)}` : ""}`;
  const { value, error } = useLoaded(
    async (signal) => model && { ...(await get(`fleet/explain/${inPath(model)}?${query}`, { signal })), key: `${model}\n${place}` },
    [model, place],
  );
  return html`
    <div class="fields">
      ${setModel && html`<label>Model
        <select value=${model} onChange=${(event) => setModel(event.target.value)}>
          ${here.cold_models.map((id) => html`<option key=${id}>${id}</option>`)}
        </select></label>`}
      <label>Node
        <select value=${place} onChange=${(event) => setPlace(event.target.value)}>
          <option value="">Wherever it fits best</option>
          ${nodeNames.value.map((name) => html`<option key=${name} value=${name}>${name}</option>`)}
        </select></label>
    </div>
    ${error && html`<${Problem} error=${error} />`}
    ${value?.key === `${model}\n${place}` ? html`<${Explanation} decision=${value} />` : !error && html`<${Loading} what="the decision" />`}`;
}

/** A decision: its outcome, what it evicts, and the verdict of every node. */
export function Explanation({ decision }) {
  return html`
    <div class="explanation">
      <p class="outcome"><strong><${Prose} text=${sentence(decision)} /></strong></p>
      ${decision.victims.length > 0 && html`
        <div class="victims" role="note"><strong>This evicts ${decision.victims.join(", ")}</strong>
          <ul>${occupants(decision).filter((each) => decision.victims.includes(each.model)).map((each) => html`
            <li key=${each.model}><span class="name">${each.model}</span> frees ${bytes(each.bytes)}${each.reason ? ` · ${each.reason}` : ""}</li>`)}</ul>
        </div>`}
      <div class="scroll"><table>
        <thead><tr><th>Node</th><th>Verdict</th><th class="number">Needs</th><th class="number">Has</th><th>Why</th></tr></thead>
        <tbody>${decision.nodes.map((each) => html`
          <tr key=${each.node}>
            <td>${each.node}</td>
            <td><${Badge} kind=${VERDICTS[each.verdict] ?? "bad"}>${each.verdict.replaceAll("_", " ")}<//></td>
            <td class="number">${bytes(each.need_bytes)}</td>
            <td class="number">${each.devices.length ? bytes(Math.max(...each.devices.map((device) => device.have_bytes))) : "–"}</td>
            <td class="why"><${Prose} text=${each.reason} /></td>
          </tr>`)}</tbody>
      </table></div>
    </div>`;
}

/** The outcome with a capital letter, unless it begins with the name of the model. */
export const sentence = ({ outcome, model }) => (outcome.startsWith(model) ? outcome : outcome[0].toUpperCase() + outcome.slice(1));

const occupants = (decision) => decision.nodes.find((each) => each.node === decision.node)?.occupants ?? [];

function UnloadQuestion({ kind, status, place, force, setForce }) {
  const running = Math.max(status?.in_flight ?? 0, status?.load.running ?? 0);
  const frees = bytes(status?.measured_bytes ?? status?.estimate_bytes);
  return html`
    <p>${kind === "sleep"
      ? `Its weights move to host memory on ${place} if there is room, and ${frees} of device memory become free. Waking is much faster than loading.`
      : `${frees} on ${place} become free. The next request for it loads it again from disk.`}</p>
    ${status?.pinned_by === "operator" && html`<p class="warn-text">It is pinned: this removes the pin.</p>`}
    ${status?.pinned_by === "catalogue" && html`<p class="warn-text">models.toml pins it: the gateway loads it again.</p>`}
    ${running > 0 && html`
      <p class="warn-text">${plural(running, "request")} ${running === 1 ? "runs" : "run"} on it now; the node waits for them.</p>
      <label class="check"><input type="checkbox" checked=${force} onChange=${(event) => setForce(event.target.checked)} /> End them at once</label>`}`;
}

function DrainQuestion({ name }) {
  const here = node(name).value;
  const running = here?.models.reduce((total, model) => total + model.in_flight, 0) ?? 0;
  return html`<p>${name} takes no new requests and no loads; other nodes serve them. ${running ? `${plural(running, "request")} in flight there may end.` : "No request is in flight there."} Its models stay loaded.</p>`;
}
