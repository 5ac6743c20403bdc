// How far a load or a download has come.
import { bytes, seconds } from "../format.js";
import { html } from "../html.js";

const STAGES = {
  resolve: "Finding files", download: "Downloading", read: "Reading weights", place: "Placing weights",
  compile: "Compiling kernels", warm: "Warming up",
};

export function Progress({ progress }) {
  const { done_bytes: done, total_bytes: total, eta_s: eta } = progress;
  const stage = progress.waits_for ?? progress.substage ?? progress.stage;
  const parts = [STAGES[stage] ?? `${stage[0].toUpperCase()}${stage.slice(1)}`];
  if (total) parts.push(`${bytes(done)} of ${bytes(total)}`);
  if (eta != null && eta > 0) parts.push(`about ${seconds(Math.ceil(eta))} left`);
  return html`
    <div class="progress">
      <progress aria-label=${parts[0]} max=${total || 1} value=${total ? done : undefined}></progress>
      <span class="dim">${parts.join(" · ")}</span>
    </div>`;
}
