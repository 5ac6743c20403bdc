// The requests that run now, each with a way to end it.
import { get, inPath, remove } from "../api.js";
import { plural, seconds } from "../format.js";
import { html, useEffect, useState } from "../html.js";
import { Badge, notify } from "../parts.js";

const POLL_MS = 1500;
const PHASES = { wait: "waits", prefill: "reads the prompt", decode: "generates" };

export function Running({ operator }) {
  const [rows, setRows] = useState([]);
  useEffect(() => {
    let timer = 0;
    const controller = new AbortController();
    const look = async () => {
      try {
        if (!document.hidden) setRows((await get("fleet/activity/running", { signal: controller.signal })).requests);
      } catch {
        // The list below says what is wrong.
      }
      if (!controller.signal.aborted) timer = setTimeout(look, POLL_MS);
    };
    look();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, []);
  if (!rows.length) return null;
  const end = (row) => remove(`fleet/activity/running/${inPath(row.id)}`).then(
    () => setRows((before) => before.filter((each) => each.id !== row.id)),
    (problem) => notify(problem.message, "bad"),
  );
  return html`
    <section class="card scroll running" aria-label="Requests that run">
      <h2>${plural(rows.length, "request runs", "requests run")}</h2>
      <table class="runs">
        <thead><tr>
          <th class="number">For</th><th>Phase</th><th>Model</th>${operator && html`<th>Node</th><th>Key</th>`}<th><span class="visually-hidden">Cancel</span></th>
        </tr></thead>
        <tbody>${rows.map((row) => html`
          <tr key=${row.id}>
            <td class="number">${seconds(row.duration_s)}</td>
            <td><${Badge} kind=${row.phase === "wait" ? "warn" : "busy"} title=${row.path}>${PHASES[row.phase] ?? row.phase}<//></td>
            <td class="name-cell" title=${row.model}>${row.model}</td>
            ${operator && html`<td class="name-cell narrow">${row.node || "–"}</td><td class="name-cell narrow">${row.key}</td>`}
            <td><button class="danger small" onClick=${() => end(row)} aria-label=${`Cancel the request for ${row.model}`}>Cancel</button></td>
          </tr>`)}</tbody>
      </table>
    </section>`;
}
