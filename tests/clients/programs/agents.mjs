// Coding agents as commands: Claude Code over Messages, Codex over Responses, Qwen Code, opencode, pi and Continue over chat.
// Each replies, and runs a tool.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { mkdir, mkdtemp, readFile, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { greeting, key, model, report, result, url } from "./report.mjs";

const modules = join(dirname(fileURLToPath(import.meta.url)), "..", "node_modules");

/** Run a command in a new folder that is also its home; returns what it prints, and the folder. */
async function run(command, options, environment, files = {}) {
  const folder = await mkdtemp(join(tmpdir(), "agent-"));
  for (const [name, text] of Object.entries(files)) {
    await mkdir(dirname(join(folder, name)), { recursive: true });
    await writeFile(join(folder, name), text);
  }
  const env = { PATH: process.env.PATH, HOME: folder, ...environment(folder) };
  const output = await new Promise((resolve, reject) => {
    const child = execFile(command, options, { cwd: folder, env, timeout: 1_200_000 }, (error, stdout, stderr) =>
      error ? reject(new Error(`${error.message}\n${stdout}\n${stderr}`)) : resolve(stdout));
    child.stdin.end();
  });
  return { output, folder };
}

function claude(...options) {
  const command = join(modules, ".bin", "claude");
  return run(command, ["-p", "--model", model, ...options], () => ({
    ANTHROPIC_BASE_URL: url,
    ANTHROPIC_API_KEY: key,
    CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    DISABLE_AUTOUPDATER: "1",
  }));
}

const codexConfiguration = `
model = "${model}"
model_provider = "cortex"
[model_providers.cortex]
name = "cortex"
base_url = "${url}/v1"
wire_api = "responses"
`;

function codex(...options) {
  const command = join(modules, ".bin", "codex");
  const environment = (folder) => ({ CODEX_HOME: folder });
  return run(command, ["exec", "--skip-git-repo-check", ...options], environment, { "config.toml": codexConfiguration });
}

const cost = { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 };
const piModels = {
  providers: {
    cortex: {
      baseUrl: `${url}/v1`,
      api: "openai-completions",
      apiKey: key,
      models: [{ id: model, name: model, reasoning: false, input: ["text"], cost, contextWindow: 32000, maxTokens: 2000 }],
    },
  },
};

function pi(...options) {
  const command = join(modules, ".bin", "pi");
  const files = { ".pi/agent/models.json": JSON.stringify(piModels) };
  return run(command, ["--provider", "cortex", "--model", model, ...options], () => ({}), files);
}

function qwen(...options) {
  const command = join(modules, ".bin", "qwen");
  const environment = () => ({ OPENAI_BASE_URL: `${url}/v1`, OPENAI_API_KEY: key, OPENAI_MODEL: model });
  return run(command, ["--auth-type", "openai", ...options], environment);
}

const opencodeConfiguration = {
  $schema: "https://opencode.ai/config.json",
  autoupdate: false,
  share: "disabled",
  provider: {
    cortex: {
      npm: "@ai-sdk/openai-compatible",
      name: "cortex",
      options: { baseURL: `${url}/v1`, apiKey: key },
      models: { [model]: { limit: { context: 32000, output: 2000 } } },
    },
  },
  model: `cortex/${model}`,
  small_model: `cortex/${model}`,
  permission: { bash: "allow" },
};

function opencode(...options) {
  const command = join(modules, ".bin", "opencode");
  const environment = () => ({
    OPENCODE_CONFIG_CONTENT: JSON.stringify(opencodeConfiguration),
    OPENCODE_DISABLE_AUTOUPDATE: "1",
    OPENCODE_DISABLE_MODELS_FETCH: "1",
  });
  return run(command, ["run", "--model", `cortex/${model}`, ...options], environment);
}

const continueConfiguration = `
name: cortex
version: 1.0.0
schema: v1
models:
  - name: ${model}
    provider: openai
    model: ${model}
    apiBase: ${url}/v1
    apiKey: ${key}
    roles: [chat]
    capabilities: [tool_use]
`;

function continues(...options) {
  const command = join(modules, ".bin", "cn");
  const environment = () => ({ CONTINUE_TELEMETRY_ENABLED: "0" });
  return run(command, ["--config", "config.yaml", ...options], environment, { "config.yaml": continueConfiguration });
}

await report({
  async "Claude Code: chat"() {
    assert.equal((await claude("Say hello.")).output.trim(), greeting);
  },
  async "Claude Code: tools"() {
    const { output, folder } = await claude("--allowedTools", "Bash", "--", "Make made.txt.");
    assert.equal(output.trim(), result);
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
  async "Qwen Code: chat"() {
    assert.equal((await qwen("-p", "Say hello.")).output.trim(), greeting);
  },
  async "Qwen Code: tools"() {
    const { output, folder } = await qwen("--yolo", "-p", "Make made.txt.");
    assert.equal(output.trim(), result);
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
  async "opencode: chat"() {
    assert.match((await opencode("Say hello.")).output, new RegExp(greeting));
  },
  async "opencode: tools"() {
    const { output, folder } = await opencode("Make made.txt.");
    assert.match(output, new RegExp(result));
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
  async "pi: chat"() {
    assert.equal((await pi("-p", "Say hello.")).output.trim(), greeting);
  },
  async "Continue: chat"() {
    assert.equal((await continues("-p", "Say hello.")).output.trim(), greeting);
  },
  async "pi: tools"() {
    const { output, folder } = await pi("-p", "Make made.txt.");
    assert.equal(output.trim(), result);
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
  async "Continue: tools"() {
    const { output, folder } = await continues("--auto", "-p", "Make made.txt.");
    assert.equal(output.trim(), result);
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
  async "Codex: chat"() {
    assert.equal((await codex("Say hello.")).output.trim(), greeting);
  },
  async "Codex: tools"() {
    const { output, folder } = await codex("--sandbox", "danger-full-access", "Make made.txt.");
    assert.equal(output.trim(), result);
    assert.equal(await readFile(join(folder, "made.txt"), "utf8"), "scripted\n");
  },
});
