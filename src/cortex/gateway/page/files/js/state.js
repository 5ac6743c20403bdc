// What the page knows: who is signed in, the nodes of the fleet, and the latest events. Views read signals.
import { follow, get, onDenied } from "./api.js";
import { batch, signal } from "./html.js";

export const session = signal(undefined);
/* undefined: not known yet; null: signed out; else {name, operator, open, version}. */
export const link = signal("connecting");
/* "connecting", "live" or "lost". */
export const nodeNames = signal([]);
export const waiting = signal({});
export const events = signal([]);
/* The latest decisions and events, newest first. */
export const hasFleet = signal(false);

const MAX_EVENTS = 200;
const HISTORY = 60;
const KINDS = [
  "decision", "node_drained", "node_undrained", "node_suspected", "node_up", "node_down", "node_suspending", "node_asleep", "node_waking", "node_woken", "node_not_suspended", "node_lost", "load_started", "model_loaded", "load_failed", "load_cancelled",
  "unload_started", "model_asleep", "model_unloaded", "unload_failed", "workers_recycled", "recycle_failed",
];
const nodes = new Map();
const rates = new Map();

/** The signal of one node; a view that reads it is drawn again when that node changes, and only then. */
export function node(name) {
  if (!nodes.has(name)) nodes.set(name, signal(null));
  return nodes.get(name);
}

export const allNodes = () => nodeNames.value.map((name) => node(name).value).filter(Boolean);

/** Tokens per second of a model on a node, one number per second, oldest first. */
export const history = (nodeName, model) => rates.get(`${nodeName}\n${model}`) ?? [];
export const second = signal(0);

function replaceAll({ nodes: reported, waiting: depths }) {
  batch(() => {
    for (const each of reported) node(each.name).value = each;
    const names = reported.map((each) => each.name);
    if (names.join("\n") !== nodeNames.value.join("\n")) nodeNames.value = names;
    waiting.value = depths;
    hasFleet.value = true;
    link.value = "live";
  });
}

const remember = (event) => {
  events.value = [event, ...events.value].slice(0, MAX_EVENTS);
};

let stop = null;

/** Follow the fleet. Only operators may. */
export function followFleet() {
  stop?.();
  const handlers = {
    fleet: replaceAll,
    node: (changed) => {
      node(changed.name).value = changed;
    },
    waiting: (depths) => {
      waiting.value = depths;
    },
  };
  for (const kind of KINDS) handlers[kind] = remember;
  const end = follow("fleet/events?nodes=1", handlers, (state) => {
    if (state === "lost") link.value = "lost";
  });
  const timer = setInterval(sample, 1000);
  stop = () => {
    end();
    clearInterval(timer);
  };
}

function sample() {
  if (document.hidden) return;
  for (const name of nodeNames.value) {
    for (const model of node(name).value?.models ?? []) {
      if (model.state !== "ready") continue;
      const key = `${name}\n${model.id}`;
      const values = rates.get(key) ?? [];
      values.push(model.load.tokens_per_s);
      if (values.length > HISTORY) values.shift();
      rates.set(key, values);
    }
  }
  second.value += 1;
}

export function signedOut() {
  stop?.();
  stop = null;
  batch(() => {
    session.value = null;
    nodeNames.value = [];
    events.value = [];
    hasFleet.value = false;
    link.value = "connecting";
  });
  nodes.clear();
  rates.clear();
}

onDenied(signedOut);

/** Ask the gateway who we are, and begin to follow the fleet if we may. Throws when the gateway does not respond. */
export async function identify() {
  try {
    session.value = await get("session");
  } catch (problem) {
    if (problem.status !== 401) throw problem;
    signedOut();
    return;
  }
  if (session.value.operator) followFleet();
}
