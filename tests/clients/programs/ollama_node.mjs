// Ollama's own package for Node.

import assert from "node:assert/strict";
import { Ollama } from "ollama";
import { greeting, model, report, result, schema, url, weather } from "./report.mjs";

const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];

await report({
  async chat() {
    const said = await client.chat({ model: `${model}:latest`, messages, keep_alive: "5m" });
    assert.equal(said.message.content, greeting);
    assert.ok(said.total_duration > 0 && said.eval_count > 0);
  },
  async stream() {
    let text = "";
    let last;
    for await (const piece of await client.chat({ model, messages, stream: true })) {
      text += piece.message.content;
      last = piece;
    }
    assert.equal(text, greeting);
    assert.equal(last.done_reason, "stop");
  },
  async tools() {
    const { message } = await client.chat({ model, messages, tools });
    assert.deepEqual(message.tool_calls[0].function.arguments, weather);
    const returned = { role: "tool", tool_name: "get_weather", content: "sunny" };
    const said = await client.chat({ model, tools, messages: [...messages, message, returned] });
    assert.equal(said.message.content, result);
  },
  async structured() {
    const asked = [{ role: "user", content: "Reply in JSON." }];
    const said = await client.chat({ model, messages: asked, format: schema });
    assert.deepEqual(JSON.parse(said.message.content), weather);
  },
  async generate() {
    assert.equal((await client.generate({ model, prompt: "Say hello." })).response, greeting);
  },
  async listings() {
    const { models } = await client.list();
    assert.ok(models.some((one) => one.name === model));
    assert.ok((await client.ps()).models.some((one) => one.name === model));
    assert.ok((await client.show({ model })).capabilities.includes("completion"));
    assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  },
  async errors() {
    await assert.rejects(client.chat({ model: "other", messages }), /There is no model `other`/);
    await assert.rejects(client.chat({ model: "other", messages, stream: true }), /There is no model `other`/);
  },
});
