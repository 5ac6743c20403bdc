// The same request for other programs.

const KEY = "CORTEX_API_KEY";

/** The body without the files of pictures, which nobody wants to copy. */
export const shortened = (body) => JSON.parse(JSON.stringify(body), (_, value) =>
  (typeof value === "string" && value.startsWith("data:") && value.length > 100 ? `${value.slice(0, value.indexOf(",") + 1)}...` : value));

/** A word that a shell takes literally. */
const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

export function asCurl(base, body, withKey) {
  const key = withKey ? ` \\\n  -H "authorization: Bearer $${KEY}"` : "";
  return `curl ${base}/v1/chat/completions \\\n  -H 'content-type: application/json'${key} \\\n  -d ${quoted(JSON.stringify(body))}`;
}

export function asPython(base, body, withKey) {
  const key = withKey ? `os.environ["${KEY}"]` : '"unused"';
  const options = Object.entries(body).map(([name, value]) => `    ${name}=${python(value)},`);
  return [
    ...(withKey ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url="${base}/v1", api_key=${key})`,
    "stream = client.chat.completions.create(",
    ...options, "    stream=True,", ")",
    "for part in stream:", "    if part.choices:", '        print(part.choices[0].delta.content or "", end="", flush=True)',
  ].join("\n");
}

export function asClaudeCode(base, body, withKey) {
  const key = withKey ? `"$${KEY}"` : "unused";
  return [
    `export ANTHROPIC_BASE_URL=${quoted(base)}`, `export ANTHROPIC_AUTH_TOKEN=${key}`,
    `export ANTHROPIC_MODEL=${quoted(body.model)}`, "claude",
  ].join("\n");
}

function python(value) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (Array.isArray(value)) return `[${value.map(python).join(", ")}]`;
  if (typeof value === "object") return `{${Object.entries(value).map(([key, each]) => `${JSON.stringify(key)}: ${python(each)}`).join(", ")}}`;
  return JSON.stringify(value);
}
