// Pictures of a message: chosen, pasted or dropped, shown before they are sent, and in the conversation.
import { html, signal, useRef } from "../html.js";
import { notify } from "../parts.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_MB = 20;
const MAX_PICTURES = 100;

/* The pictures of the next message, by the id of its conversation. */
const waiting = signal({});

export const attachedTo = (conversation) => waiting.value[conversation.id] ?? [];

const attach = (conversation, pictures) => {
  waiting.value = { ...waiting.value, [conversation.id]: pictures };
};

/** Takes the pictures, which are sent now. */
export function takeAttached(conversation) {
  const taken = attachedTo(conversation);
  attach(conversation, []);
  return taken;
}

async function addFiles(conversation, files) {
  for (const file of files) {
    const name = file.name || "picture";
    if (!TYPES.includes(file.type)) notify(`${name} cannot be sent as a picture: choose JPEG, PNG, WebP or GIF.`, "bad");
    else if (file.size > MAX_MB * 1e6) notify(`${name} has ${(file.size / 1e6).toFixed(1)} MB, at most ${MAX_MB} are sent.`, "bad");
    else if (attachedTo(conversation).length >= MAX_PICTURES) return notify(`A message has at most ${MAX_PICTURES} pictures.`, "bad");
    else {
      try {
        const picture = { name, url: await asDataUrl(file) };
        attach(conversation, [...attachedTo(conversation), picture]);
      } catch {
        notify(`${name} cannot be read.`, "bad");
      }
    }
  }
}

const asDataUrl = (file) => new Promise((resolve, reject) => {
  const reader = new FileReader();
  reader.onload = () => resolve(reader.result);
  reader.onerror = () => reject(reader.error);
  reader.readAsDataURL(file);
});

/** Handlers for the element that pictures are pasted or dropped on. Other contents are left to the browser. */
export const receivesPictures = (conversation) => ({
  onPaste: (event) => {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    addFiles(conversation, files);
  },
  onDragOver: (event) => {
    if (![...(event.dataTransfer?.types ?? [])].includes("Files")) return;
    event.preventDefault();
    event.currentTarget.classList.add("receiving");
  },
  onDragLeave: (event) => event.currentTarget.classList.remove("receiving"),
  onDrop: (event) => {
    event.currentTarget.classList.remove("receiving");
    const files = [...(event.dataTransfer?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    addFiles(conversation, files);
  },
});

/** The pictures of the next message, which can be removed, and what does not fit the models. */
export function Attached({ conversation, models }) {
  const pictures = attachedTo(conversation);
  if (!pictures.length) return null;
  const blind = conversation.models.filter((id) => models.some((model) => model.id === id && !model.capabilities.vision));
  const seeing = models.filter((model) => model.capabilities.vision).map((model) => model.id);
  return html`
    <div class="attached">
      <ul class="pictures" aria-label="Pictures of the next message">
        ${pictures.map((picture, index) => html`
          <li key=${index}><img src=${picture.url} alt=${picture.name} title=${picture.name} />
            <button type="button" class="small" aria-label=${`Remove ${picture.name}`}
              onClick=${() => attach(conversation, pictures.filter((each) => each !== picture))}>✕</button></li>`)}
      </ul>
      ${blind.length > 0 && html`<p class="bad-text" role="alert">${blind.join(" and ")} ${blind.length > 1 ? "are" : "is"} not known to read pictures.
        ${seeing.length ? ` Choose ${seeing.slice(0, 3).join(" or ")}, or remove the pictures.` : " No model here reads pictures."}</p>`}
    </div>`;
}

/** A button that opens the browser's choice of files. */
export function ChoosePictures({ conversation }) {
  const input = useRef(null);
  const chosen = (event) => {
    addFiles(conversation, [...event.target.files]);
    event.target.value = "";  // so that the same file can be chosen again
  };
  return html`
    <button type="button" class="choose" title="Add pictures; they can also be pasted and dropped" onClick=${() => input.current.click()}>Picture</button>
    <input ref=${input} type="file" hidden aria-label="Pictures" accept=${TYPES.join(",")} multiple onChange=${chosen} />`;
}

/** The pictures of a message in the conversation. */
export const Shown = ({ pictures }) => pictures?.length ? html`
  <ul class="pictures" aria-label="Pictures">
    ${pictures.map((picture, index) => html`
      <li key=${index}>${picture.url
        ? html`<img src=${picture.url} alt=${picture.name} title=${picture.name} />`
        : html`<span class="dim gone">${picture.name}: this browser had no room to keep it</span>`}</li>`)}
  </ul>` : null;
