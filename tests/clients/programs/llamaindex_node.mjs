// LlamaIndex TS over OpenAI chat.

import assert from "node:assert/strict";
import { OpenAI } from "@llamaindex/openai";
import { tool } from "llamaindex";
import { z } from "zod";
import { greeting, key, model, report, result, url, weather } from "./report.mjs";

const llm = new OpenAI({ model, apiKey: key, baseURL: `${url}/v1`, supportToolCall: true });
const getWeather = tool({
  name: "get_weather",
  description: "The weather of a city",
  parameters: z.object({ city: z.string(), days: z.number() }),
  execute: () => "sunny",
});
const user = (content) => ({ role: "user", content });

await report({
  async chat() {
    const response = await llm.chat({ messages: [user("Say hello.")] });
    assert.equal(response.message.content, greeting);
  },
  async stream() {
    const parts = [];
    for await (const chunk of await llm.chat({ messages: [user("Say hello.")], stream: true })) parts.push(chunk.delta);
    assert.equal(parts.join(""), greeting);
  },
  async tools() {
    const messages = [user("What is the weather?")];
    const asked = await llm.chat({ messages, tools: [getWeather] });
    const [call] = asked.message.options.toolCall;
    assert.deepEqual([call.name, typeof call.input === "string" ? JSON.parse(call.input) : call.input], ["get_weather", weather]);
    messages.push(asked.message, { role: "user", content: "sunny", options: { toolResult: { id: call.id, result: "sunny", isError: false } } });
    assert.equal((await llm.chat({ messages, tools: [getWeather] })).message.content, result);
  },
  async structured() {
    const format = z.object({ city: z.string(), days: z.number().int() });
    const response = await llm.chat({ messages: [user("The weather as JSON.")], responseFormat: format });
    assert.deepEqual(JSON.parse(response.message.content), weather);
  },
});
