// The latest batches with their progress and cost, and a way to cancel those that run.
import { get, inPath, post } from "../api.js";
import { compact, count, dayAndClock, money } from "../format.js";
import { html, useEffect } from "../html.js";
import { Badge, Empty, Loading, Problem, notify, useLoaded } from "../parts.js";

const POLL_MS = 2000;
const RUNNING = ["validating", "in_progress"];
const KINDS = { completed: "good", failed: "bad", expired: "bad", cancelled: "warn", cancelling: "warn" };

export function Batches({ operator }) {
  const { value, error, reload } = useLoaded((signal) => get("fleet/batches?limit=100", { signal }), []);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || reload(), POLL_MS);
    return () => clearInterval(timer);
  }, []);
  if (error && !value) return html`<${Problem} error=${error} retry=${reload} />`;
  if (!value) return html`<${Loading} what="the batches" />`;
  if (!value.batches.length) return html`<${Empty} title="No batches yet">Submit one with <code>cortex batch submit FILE</code>, or with the client of OpenAI or Anthropic.<//>`;
  const cancel = (row) => post(`v1/${row.api === "anthropic" ? "messages/" : ""}batches/${inPath(row.id)}/cancel`).then(reload, (problem) => notify(problem.message, "bad"));
  return html`
    <section class="card scroll" aria-label="Batches">
      <table class="runs">
        <thead><tr>
          <th>Created</th><th>Status</th><th>Lines</th><th class="number">Failed</th><th class="number">Tokens</th><th class="number">Cost</th>
          ${operator && html`<th>Key</th>`}<th>Batch</th><th><span class="visually-hidden">Cancel</span></th>
        </tr></thead>
        <tbody>${value.batches.map((row) => html`
          <tr key=${row.id}>
            <td>${dayAndClock(row.created_at)}</td>
            <td><${Badge} kind=${KINDS[row.status] ?? "busy"} title=${row.endpoint}>${row.status.replaceAll("_", " ")}<//></td>
            <td><progress value=${row.done} max=${Math.max(1, row.lines)} aria-label="Lines that are done" /> ${count(row.done)} of ${count(row.lines)}</td>
            <td class="number">${count(row.failed)}</td>
            <td class="number">${compact(row.tokens)}</td>
            <td class="number">${row.cost ? money(row.cost) : "–"}</td>
            ${operator && html`<td class="name-cell narrow">${row.key}</td>`}
            <td class="name-cell" title=${row.id}>${row.id}</td>
            <td>${row.is_own && RUNNING.includes(row.status) && html`<button class="danger small" onClick=${() => cancel(row)} aria-label=${`Cancel the batch ${row.id}`}>Cancel</button>`}</td>
          </tr>`)}</tbody>
      </table>
    </section>`;
}
