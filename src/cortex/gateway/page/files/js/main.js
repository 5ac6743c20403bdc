// The frame of the page: sign-in, navigation, and the view that the address names.
import { remove } from "./api.js";
import { html, render, signal, useEffect, useState } from "./html.js";
import { Notices, Problem, notify } from "./parts.js";
import { identify, link, session, signedOut } from "./state.js";
import { SignIn } from "./views/signin.js";

const VIEWS = [
  { id: "fleet", title: "Fleet", icon: "M4 5h16v5H4zM4 14h16v5H4zM7 7.5h.01M7 16.5h.01", operator: true },
  { id: "models", title: "Models", icon: "M12 3 4 7.5v9L12 21l8-4.5v-9zM4 7.5l8 4.5 8-4.5M12 12v9" },
  { id: "playground", title: "Playground", icon: "M4 5h16v11H9l-5 4z" },
  { id: "activity", title: "Activity", icon: "M3 12h4l3-8 4 16 3-8h4" },
  { id: "history", title: "History", icon: "M4 19h16M5 15l4-5 4 3 6-8", operator: true },
  { id: "usage", title: "Usage", icon: "M5 20V10M12 20V4M19 20v-7" },
];

const place = signal(location.hash);
addEventListener("hashchange", () => {
  place.value = location.hash;
});

const visibleViews = () => VIEWS.filter((view) => session.value.operator || !view.operator);

function currentView() {
  const wanted = place.value.replace(/^#\/?/, "").split(/[/?]/)[0];
  const views = visibleViews();
  return views.find((view) => view.id === wanted) ?? views.find((view) => view.id === "playground" && !session.value.operator) ?? views[0];
}

/** Loads the code of a view when it is first shown. */
function View({ id }) {
  const [loaded, setLoaded] = useState({});
  const [error, setError] = useState(null);
  useEffect(() => {
    setError(null);
    import(`./views/${id}.js`).then(
      (module) => setLoaded({ id, Component: module.default }),
      () => setError(new Error("This part of the page could not be loaded. Check that the gateway runs.")),
    );
  }, [id]);
  if (error) return html`<${Problem} error=${error} retry=${() => location.reload()} />`;
  return loaded.id === id ? html`<${loaded.Component} />` : html`<p class="dim loading">Loading…</p>`;
}

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("cortex.theme", theme);
  } catch {
    // Storage may be blocked: the choice lasts until the page is closed.
  }
}

function ThemeChoice() {
  const [theme, change] = useState(document.documentElement.dataset.theme ?? "system");
  const choose = (event) => {
    change(event.target.value);
    setTheme(event.target.value);
  };
  return html`
    <label class="theme"><span class="visually-hidden">Colours</span>
      <select value=${theme} onChange=${choose}>
        <option value="system">System</option><option value="light">Light</option><option value="dark">Dark</option>
      </select>
    </label>`;
}

async function signOut() {
  try {
    await remove("session");
    signedOut();
  } catch (problem) {
    notify(problem.message, "bad");
  }
}

function Frame() {
  const view = currentView();
  useEffect(() => {
    document.title = `${view.title} · cortex`;
  }, [view.id]);
  return html`
    <a class="skip" href="#main" onClick=${(event) => { event.preventDefault(); document.getElementById("main").focus(); }}>Skip to the content</a>
    <nav class="rail" aria-label="Views">
      <div class="brand"><img src="page/icon.svg" alt="" width="28" height="28" /><span>cortex</span></div>
      <div class="links">
        ${visibleViews().map((each) => html`
          <a key=${each.id} href="#/${each.id}" aria-current=${each.id === view.id ? "page" : null}>
            <svg viewBox="0 0 24 24" aria-hidden="true"><path d=${each.icon} /></svg><span>${each.title}</span>
          </a>`)}
      </div>
      <div class="rail-foot"><${Account} /></div>
    </nav>
    <main id="main" tabindex="-1" class="view-${view.id}">
      ${link.value === "lost" && html`<div class="banner" role="status">The connection to the gateway is lost; reconnecting. What you see may be old.</div>`}
      <${View} id=${view.id} />
      <footer class="phone-foot"><${Account} /></footer>
    </main>`;
}

/** At the foot of the rail, or on a phone at the foot of the view. */
function Account() {
  const who = session.value;
  return html`
    ${!who.open && html`<div class="who"><span class="who-name" title=${who.name}>${who.name}</span>
      <span class="dim">${who.operator ? "operator" : "user"}</span>
      <button class="ghost small" onClick=${signOut}>Sign out</button></div>`}
    <${ThemeChoice} />
    <span class="dim version">cortex ${who.version}</span>`;
}

function App() {
  const [error, setError] = useState(null);
  const start = () => {
    setError(null);
    identify().catch(setError);
  };
  useEffect(start, []);
  let content;
  if (error) content = html`<div class="alone"><${Problem} error=${error} retry=${start} /></div>`;
  else if (session.value === undefined) content = html`<div class="alone"><p class="dim loading">Loading…</p></div>`;
  else content = session.value === null ? html`<${SignIn} />` : html`<${Frame} />`;
  return html`${content}<${Notices} />`;
}

render(html`<${App} />`, document.getElementById("app"));
