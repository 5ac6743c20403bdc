// Small parts that several views use.
import { html, signal, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

/* --- notices: what happened, said once, at the bottom of the page */

const notices = signal([]);
let noticeNumber = 0;

export function notify(text, kind = "info") {
  const id = ++noticeNumber;
  notices.value = [...notices.value.slice(-3), { id, text, kind }];
  setTimeout(() => dismiss(id), kind === "bad" ? 12000 : 5000);
}

const dismiss = (id) => {
  notices.value = notices.value.filter((each) => each.id !== id);
};

export const Notices = () => html`
  <div class="notices" role="status" aria-live="polite">
    ${notices.value.map((each) => html`
      <div key=${each.id} class="notice ${each.kind}">
        <span>${each.text}</span>
        <button class="ghost small" aria-label="Dismiss" onClick=${() => dismiss(each.id)}>✕</button>
      </div>`)}
  </div>`;

/* --- a modal dialog on the browser's own element, which keeps the focus inside and closes on Escape */

export function Dialog({ title, onClose, children, wide }) {
  const element = useRef(null);
  // Before the browser paints: an Escape right after the dialog appeared would otherwise come before it is open.
  useLayoutEffect(() => {
    const before = document.activeElement;
    element.current.showModal();
    element.current.querySelector("header ~ * :is(input, select, textarea)")?.focus(); // not the button that closes it
    return () => before?.isConnected && before.focus();
  }, []);
  const outside = (event) => event.target === element.current && onClose();
  return html`
    <dialog ref=${element} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose} onMouseDown=${outside}>
      <div class="dialog-body">
        <header><h2>${title}</h2><button class="ghost small" aria-label="Close" onClick=${onClose}>✕</button></header>
        ${children}
      </div>
    </dialog>`;
}

export const Badge = ({ kind = "", children, title }) => html`<span class="badge ${kind}" title=${title}>${children}</span>`;

export const Empty = ({ title, children }) => html`
  <div class="empty"><p class="empty-title">${title}</p>${children && html`<div>${children}</div>`}</div>`;

/** Text in which backticks mark code, as the gateway writes its messages. */
export const Prose = ({ text }) => String(text).split("`").map((part, index) => (index % 2 ? html`<code>${part}</code>` : part));

export const Problem = ({ error, retry }) => html`
  <div class="problem" role="alert">
    <span><${Prose} text=${error.message} /></span>
    ${retry && html`<button class="small" onClick=${retry}>Try again</button>`}
  </div>`;

export const Loading = ({ what }) => html`<p class="dim loading" role="status">Loading ${what}…</p>`;

export function CopyButton({ text, label = "Copy", small = true }) {
  const [done, setDone] = useState(false);
  async function copy() {
    const value = typeof text === "function" ? text() : text;
    if (await copyText(value)) {
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    } else {
      notify("The browser does not allow copying here: select the text instead.", "bad");
    }
  }
  return html`<button type="button" class="ghost ${small ? "small" : ""}" onClick=${copy}>${done ? "Copied" : label}</button>`;
}

/** Without TLS browsers offer no clipboard to scripts; a hidden field still works there. */
async function copyText(value) {
  try {
    await navigator.clipboard.writeText(value);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = value;
    field.className = "off-screen";
    document.body.append(field);
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

/** A menu that closes when something in it is chosen, on Escape, and on a click outside it. */
export function Menu({ label, text, children }) {
  const element = useRef(null);
  // Before the browser paints: it would otherwise miss an Escape right after it appeared.
  useLayoutEffect(() => {
    const close = (event) => {
      const menu = element.current;
      if (!menu?.open) return;
      if (event.type === "keydown" ? event.key === "Escape" : !menu.contains(event.target)) menu.open = false;
    };
    document.addEventListener("click", close);
    document.addEventListener("keydown", close);
    return () => {
      document.removeEventListener("click", close);
      document.removeEventListener("keydown", close);
    };
  }, []);
  // The focus is here before what was chosen opens a dialog, which gives it back at its end.
  const close = () => {
    element.current.open = false;
    element.current.querySelector("summary").focus();
  };
  return html`
    <details class="menu ${text ? "with-text" : ""}" ref=${element}>
      <summary aria-label=${text ? null : label} title=${text ? null : label}>${text ?? "⋯"}</summary>
      <div class="menu-items" role="menu" onClickCapture=${close}>${children}</div>
    </details>`;
}

export const MenuItem = ({ onClick, children, danger, disabled }) => html`
  <button role="menuitem" class=${danger ? "danger" : ""} disabled=${disabled} onClick=${onClick}>${children}</button>`;

/** The last minute as a line. */
export function Sparkline({ values, label }) {
  const top = Math.max(1, ...values);
  const points = values.map((value, index) => `${60 - values.length + index},${(15 - (value / top) * 14).toFixed(1)}`);
  return html`
    <svg class="sparkline" viewBox="0 0 60 16" preserveAspectRatio="none" role="img" aria-label=${label}>
      <polyline points=${points.join(" ")} />
    </svg>`;
}

/** Runs `load` now and whenever `deps` change; returns {value, error, reload}. */
export function useLoaded(load, deps) {
  const [state, setState] = useState({ value: undefined, error: null });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const controller = new AbortController();
    load(controller.signal).then(
      (value) => setState({ value, error: null }),
      (error) => error.name !== "AbortError" && setState((before) => ({ value: before.value, error })),
    );
    return () => controller.abort();
  }, [...deps, turn]);
  return { ...state, reload: () => setTurn((before) => before + 1) };
}
