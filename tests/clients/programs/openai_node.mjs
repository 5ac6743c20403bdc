// The official OpenAI SDK for Node.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { greeting, key, model, report, result, schema, url, weather } from "./report.mjs";

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
const tools = [{ type: "function", function: { name: "get_weather", parameters: schema } }];

await report({
  async chat() {
    const said = await client.chat.completions.create({ model, messages });
    assert.equal(said.choices[0].message.content, greeting);
  },
  async stream() {
    const stream = client.chat.completions.stream({ model, messages });
    assert.equal(await stream.finalContent(), greeting);
  },
  async tools() {
    const called = await client.chat.completions.create({ model, messages, tools });
    const { message } = called.choices[0];
    assert.deepEqual(JSON.parse(message.tool_calls[0].function.arguments), weather);
    const returned = { role: "tool", tool_call_id: message.tool_calls[0].id, content: "sunny" };
    const said = await client.chat.completions.create({ model, tools, messages: [...messages, message, returned] });
    assert.equal(said.choices[0].message.content, result);
  },
  async structured() {
    const said = await client.chat.completions.parse({
      model,
      messages: [{ role: "user", content: "Reply in JSON." }],
      response_format: { type: "json_schema", json_schema: { name: "weather", schema, strict: true } },
    });
    assert.deepEqual(JSON.parse(said.choices[0].message.content), weather);
  },
  async "responses: state"() {
    const first = await client.responses.create({ model, input: "Say hello." });
    const second = await client.responses.create({ model, input: "Again.", previous_response_id: first.id });
    assert.equal(second.output_text, greeting);
    assert.equal((await client.responses.retrieve(first.id)).output_text, greeting);
    assert.equal((await client.responses.inputItems.list(second.id)).data.length, 3);
    await client.responses.delete(first.id);
    await assert.rejects(client.responses.retrieve(first.id), OpenAI.NotFoundError);
  },
  async "responses: background"() {
    let response = await client.responses.create({ model, input: "Say hello.", background: true });
    assert.ok(["queued", "in_progress"].includes(response.status));
    while (["queued", "in_progress"].includes(response.status)) {
      response = await client.responses.retrieve(response.id);
    }
    assert.equal(response.output_text, greeting);
  },
});
