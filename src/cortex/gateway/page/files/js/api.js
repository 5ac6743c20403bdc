// Calls to the gateway. URLs are relative, so that the page works behind any path prefix.

const PAGE_HEADERS = { "x-cortex-page": "1" };

export class ApiError extends Error {
  constructor(message, status, code, details) {
    super(message);
    this.status = status;
    this.code = code;
    this.details = details ?? {};
  }
}

/** The base URL of the API, without a slash at its end. */
export const baseUrl = () => new URL(".", location.href).href.replace(/\/$/, "");

/** A model or node name as one part of a path; its slashes stay, as the routes expect. */
export const inPath = (name) => name.split("/").map(encodeURIComponent).join("/");

let whenDenied = () => {};

/** Calls `handler` when the gateway no longer accepts the session. */
export function onDenied(handler) {
  whenDenied = handler;
}

export async function request(method, path, body, { signal, headers } = {}) {
  const options = { method, signal, headers: { ...PAGE_HEADERS, ...headers }, credentials: "same-origin" };
  if (body !== undefined) {
    options.body = JSON.stringify(body);
    options.headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new ApiError("The gateway does not respond. Check that it runs and that this host can reach it.", 0);
  }
  if (response.status === 401 && path !== "session") whenDenied();
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  let problem = {};
  try {
    problem = (await response.json()).error ?? {};
  } catch {
    // A proxy in between may respond with something other than JSON.
  }
  const message = problem.message ?? `The gateway responded with status ${response.status}.`;
  return new ApiError(message, response.status, problem.code, problem.details);
}

const json = async (response) => (await response).json();
export const get = (path, options) => json(request("GET", path, undefined, options));
export const post = (path, body, options) => json(request("POST", path, body ?? {}, options));
export const patch = (path, body, options) => json(request("PATCH", path, body, options));
export const put = (path, body, options) => json(request("PUT", path, body, options));
export const remove = (path, options) => json(request("DELETE", path, undefined, options));

/**
 * Follows a stream of events until the returned function is called. Reconnects by itself, and while the tab is hidden
 * there is no connection at all. `onState` gets "live" or "lost".
 */
export function follow(path, handlers, onState = () => {}) {
  let source = null;
  let timer = 0;
  let delay = 500;
  let hasEnded = false;

  function open() {
    close();
    if (document.hidden || hasEnded) return;
    source = new EventSource(path);
    source.onopen = () => {
      delay = 500;
      onState("live");
    };
    source.onerror = () => {
      onState("lost");
      close();
      timer = setTimeout(retry, delay);
      delay = Math.min(delay * 2, 8000);
    };
    for (const [name, handle] of Object.entries(handlers)) {
      source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
    }
  }

  async function retry() {
    try {
      await get("session");
    } catch (problem) {
      if (problem.status === 401) return whenDenied();
    }
    open();
  }

  function close() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }

  const changed = () => (document.hidden ? close() : open());
  document.addEventListener("visibilitychange", changed);
  open();
  return () => {
    hasEnded = true; // also for a retry that waits for its response
    document.removeEventListener("visibilitychange", changed);
    close();
  };
}
