// Sign-in with a key, or through the operator's provider. The key is sent once; afterwards the browser holds a cookie that scripts cannot read.
import { get, post } from "../api.js";
import { html, useEffect, useState } from "../html.js";
import { Problem } from "../parts.js";
import { identify } from "../state.js";

export function SignIn() {
  const [key, setKey] = useState("");
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const [methods, setMethods] = useState({ openid: false });
  useEffect(() => void get("session/methods").then(setMethods, () => {}), []);
  async function submit(event) {
    event.preventDefault();
    setBusy(true);
    setError(null);
    try {
      await post("session", { key });
      await identify();
    } catch (problem) {
      setError(problem);
      setBusy(false);
    }
  }
  return html`
    <main class="alone">
      <form class="sign-in card" onSubmit=${submit}>
        <img src="page/icon.svg" alt="" width="44" height="44" />
        <h1>Sign in to cortex</h1>
        ${methods.openid && html`<a class="button primary" href="session/start">Sign in with your account</a>`}
        <label for="key">API key</label>
        <input id="key" type="password" autocomplete="current-password" placeholder="ck-…" required spellcheck=${false} autofocus
          value=${key} onInput=${(event) => setKey(event.target.value)} aria-describedby="key-help" />
        ${error && html`<${Problem} error=${error} />`}
        <button class="primary" disabled=${busy || !key.trim()}>${busy ? "Signing in…" : "Sign in"}</button>
        <p class="dim" id="key-help">An operator makes keys with <code>cortex keys add NAME</code>.</p>
      </form>
    </main>`;
}
