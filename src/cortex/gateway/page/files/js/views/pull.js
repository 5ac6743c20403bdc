// The dialog that downloads a model from the hub: what a repository offers, how large it is, and where it would fit.
import { get, inPath, post } from "../api.js";
import { bytes, plural } from "../format.js";
import { html, useEffect, useLayoutEffect, useState } from "../html.js";
import { jobsChanged } from "../jobs.js";
import { Dialog, Problem, useLoaded } from "../parts.js";
import { allNodes } from "../state.js";

const TYPING_MS = 700;
const REPOSITORY = /^[^/\s]+\/[^/@:\s]+(@[^:\s]+)?$/;
const NOW = ["fits", "resident", "starting", "asleep"];
const LATER = ["fits_soon", "fits_after_eviction", "blocked", "crowded"];

export function Pull({ onClose }) {
  const [fields, setFields] = useState({ model: "", quant: "", node: "" });
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const nodes = allNodes().filter((node) => node.kind === "neuron" && node.up);
  const { name, isAsking, offer, problem } = useOffer(fields.model, fields.node);
  const set = (field) => (event) => setFields({ ...fields, [field]: event.target.value });
  useLayoutEffect(() => {
    // A quantisation of the repository before is none of this one; the only one needs no choice.
    if (offer) setFields((before) => ({ ...before, quant: chosen(offer, before.quant) }));
  }, [offer]);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      const { job } = await post("fleet/pull", { model: fields.model.trim(), quant: fields.quant.trim() || null, node: fields.node || null });
      jobsChanged(job.id);
      onClose();
    } catch (failure) {
      setError(failure);
      setBusy(false);
    }
  }
  const isChosen = fields.model.trim() && (!offer || offer.variants.some((each) => (each.quant ?? "") === fields.quant));
  return html`
    <${Dialog} title="Pull a model from the hub" wide onClose=${onClose}>
      <form onSubmit=${submit}>
        <div class="fields">
          <label>Repository<input required placeholder="Qwen/Qwen3-8B-GGUF" spellcheck=${false} autocapitalize="off" value=${fields.model} onInput=${set("model")} /></label>
          <label>Node<select value=${fields.node} onChange=${set("node")}><option value="">Choose for me</option>${nodes.map((node) => html`<option key=${node.name} value=${node.name}>${node.name}</option>`)}</select></label>
        </div>
        ${offer
          ? html`<${Variants} offer=${offer} value=${fields.quant} onChoose=${(quant) => setFields({ ...fields, quant })} />`
          : html`<div class="fields"><label>Quantisation<input placeholder="The repository's own" spellcheck=${false} value=${fields.quant} onInput=${set("quant")} /></label></div>`}
        ${isAsking && html`<p class="dim" role="status">Asking the hub for the sizes of ${name}…</p>`}
        ${problem && html`<p class="dim" role="status">The sizes are not known. ${problem.message}</p>`}
        ${error && html`<${Problem} error=${error} />`}
        <footer><button type="button" onClick=${onClose}>Cancel</button><button class="primary" disabled=${busy || !isChosen}>${busy ? "Starting…" : "Pull"}</button></footer>
      </form>
    <//>`;
}

/** What the hub offers under the name that was typed, once it is complete and the typing has stopped. */
function useOffer(typed, node) {
  const [name, setName] = useState("");
  useEffect(() => {
    const wanted = typed.trim();
    const timer = setTimeout(() => setName(REPOSITORY.test(wanted) ? wanted : ""), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  const key = `${name}\n${node}`;
  const { value, error } = useLoaded(
    async (signal) => {
      if (!name) return null;
      try {
        return { key, offer: await get(`fleet/hub/${inPath(name)}${node ? `?node=${encodeURIComponent(node)}` : ""}`, { signal }) };
      } catch (problem) {
        if (problem.name === "AbortError") throw problem;
        return { key, problem };
      }
    },
    [name, node],
  );
  const known = name && name === typed.trim() && value?.key === key ? value : {};
  return { name, isAsking: Boolean(name) && value?.key !== key, offer: known.offer, problem: known.problem ?? error };
}

function chosen(offer, before) {
  const quants = offer.variants.map((each) => each.quant ?? "");
  const same = quants.find((quant) => quant.toLowerCase() === before.trim().toLowerCase());
  if (same !== undefined && (before || quants.includes(""))) return same;
  return quants.length === 1 ? quants[0] : quants.find((quant) => quant === "Q4_K_M") ?? (quants.includes("") ? "" : before);
}

function Variants({ offer, value, onChoose }) {
  return html`
    <fieldset class="variants">
      <legend>What to download</legend>
      <ul>${offer.variants.map(({ quant, bytes: size, num_files: files, nodes }) => html`
        <li key=${quant ?? ""}><label>
          <input type="radio" name="quant" checked=${(quant ?? "") === value} onChange=${() => onChoose(quant ?? "")} />
          <span class="variant-name">${quant ?? "Safetensors"}</span>
          <span class="number">${bytes(size)}</span>
          <span class="dim variant-fit">${files > 1 ? `${plural(files, "file")} · ` : ""}<${Fit} nodes=${nodes} /></span>
        </label></li>`)}</ul>
      <p class="dim small-text">Only the files are compared with the free memory. The KV cache needs more, and so do most quantisations on a CPU.</p>
    </fieldset>`;
}

function Fit({ nodes }) {
  const named = (verdicts) => nodes.filter((each) => verdicts.includes(each.verdict)).map((each) => each.node);
  const [now, later, full] = [named(NOW), named(LATER), nodes.filter((each) => !each.fits_on_disk).map((each) => each.node)];
  const why = nodes.map((each) => `${each.node}: ${each.reason}`).join("\n");
  const withHost = nodes.filter((each) => each.fits_with_host).map((each) => each.node);
  if (!now.length && !later.length && withHost.length) {
    return html`<span class="warn-text" title=${why}>fits ${places(withHost)} if it is a mixture, with host memory</span>`;
  }
  if (!now.length && !later.length) return html`<span class="bad-text" title=${why}>fits nowhere</span>`;
  return html`<span title=${why}>
    ${now.length > 0 && html`<span class="good-text">fits ${places(now)}</span>`}
    ${now.length > 0 && later.length > 0 && " · "}
    ${later.length > 0 && html`<span class="warn-text">after eviction ${places(later)}</span>`}
    ${full.length > 0 && html`<span class="bad-text"> · disk too full ${places(full)}</span>`}</span>`;
}

const places = (names) => (names.length > 3 ? `on ${names.length} nodes` : `on ${names.join(", ")}`);
