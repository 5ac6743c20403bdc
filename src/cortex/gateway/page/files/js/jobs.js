// Orders that take a while: those that run, and those that ended while somebody looked.
import { get, inPath, remove } from "./api.js";
import { html, signal, useEffect } from "./html.js";
import { Badge, notify } from "./parts.js";
import { Progress } from "./views/progress.js";

const POLL_MS = 1000;
const IDLE_MS = 10000;
const TITLES = { load: "Load", unload: "Unload", pin: "Pin", pull: "Pull" };

const jobs = signal([]);
export const endedJobs = signal(0);
/* Grows whenever a job has ended. */
const announced = new Set();
let viewers = 0;
let timer = 0;

/** Look at the jobs now: one was started or cancelled. `own`: report its end as a notice. */
export function jobsChanged(own) {
  if (own) announced.add(own);
  clearTimeout(timer);
  timer = setTimeout(look, 0);
}

async function look() {
  let next = IDLE_MS;
  try {
    const found = (await get("fleet/jobs")).jobs;
    const running = new Set(found.filter((job) => job.state === "running").map((job) => job.id));
    const known = new Map(jobs.value.map((job) => [job.id, job]));
    for (const job of found) {
      if (running.has(job.id)) continue;
      if (known.get(job.id)?.state === "running" || announced.has(job.id)) endedJobs.value += 1;
      if (announced.delete(job.id)) announce(job);
    }
    jobs.value = found.filter((job) => running.has(job.id) || known.has(job.id));
    if (running.size || announced.size) next = POLL_MS;
  } catch {
    // The banner of the page says that the connection is lost.
  }
  clearTimeout(timer);
  if (viewers || announced.size) timer = setTimeout(look, next);
}

function announce(job) {
  const what = `${TITLES[job.kind] ?? job.kind} ${job.model}`;
  if (job.state === "failed") notify(`${what} failed: ${job.error?.message ?? "the log of the gateway has the reason"}`, "bad");
  else notify(`${what}: ${job.state}.`);
}

const cancel = (job) => remove(`fleet/jobs/${inPath(job.id)}`).then(() => jobsChanged(), (problem) => notify(problem.message, "bad"));
const dismiss = (job) => {
  jobs.value = jobs.value.filter((each) => each !== job);
};

export function Jobs() {
  useEffect(() => {
    viewers += 1;
    jobsChanged();
    return () => {
      viewers -= 1;
    };
  }, []);
  if (!jobs.value.length) return null;
  return html`
    <ul class="jobs card" aria-label="Jobs">${jobs.value.map((job) => html`
      <li key=${job.id}>
        <span class="job-name"><strong>${TITLES[job.kind] ?? job.kind}</strong> ${job.model} <span class="dim">on ${job.nodes.join(", ") || "…"}</span></span>
        ${job.state === "running"
          ? html`<${Progress} progress=${job} /> ${job.can_cancel && html`<button class="small" onClick=${() => cancel(job)}>Cancel</button>`}`
          : html`<${Badge} kind=${{ done: "good", failed: "bad" }[job.state] ?? ""}>${job.state}<//>
            ${job.error && job.state === "failed" && html`<span class="dim job-error">${job.error.message}</span>`}
            <button class="ghost small" aria-label=${`Dismiss ${job.model}`} onClick=${() => dismiss(job)}>✕</button>`}
      </li>`)}</ul>`;
}
