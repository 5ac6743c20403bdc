// The official Anthropic SDK for Node.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { greeting, key, model, report, result, schema, url, weather } from "./report.mjs";

const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const tools = [{ name: "get_weather", input_schema: schema }];
const options = { model, max_tokens: 500 };

await report({
  async chat() {
    const said = await client.messages.create({ ...options, messages });
    assert.equal(said.content.at(-1).text, greeting);
  },
  async stream() {
    assert.equal(await client.messages.stream({ ...options, messages }).finalText(), greeting);
  },
  async tools() {
    const called = await client.messages.create({ ...options, messages, tools });
    assert.equal(called.stop_reason, "tool_use");
    const call = called.content.at(-1);
    assert.deepEqual(call.input, weather);
    const returned = { role: "user", content: [{ type: "tool_result", tool_use_id: call.id, content: "sunny" }] };
    const turns = [...messages, { role: "assistant", content: called.content }, returned];
    const said = await client.messages.create({ ...options, tools, messages: turns });
    assert.equal(said.content.at(-1).text, result);
  },
  async structured() {
    const tool_choice = { type: "tool", name: "get_weather" };
    const said = await client.messages.create({ ...options, messages, tools, tool_choice });
    assert.deepEqual(said.content.at(-1).input, weather);
  },
});
