// LangChain JS: OpenAI chat and Responses, Anthropic Messages, and Ollama.

import assert from "node:assert/strict";
import { ChatAnthropic } from "@langchain/anthropic";
import { HumanMessage, ToolMessage } from "@langchain/core/messages";
import { tool } from "@langchain/core/tools";
import { ChatOllama } from "@langchain/ollama";
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";
import { greeting, key, model, report, result, url, weather } from "./report.mjs";

const getWeather = tool(() => "sunny", {
  name: "get_weather",
  description: "The weather of a city",
  schema: z.object({ city: z.string(), days: z.number() }),
});
const Weather = z.object({ city: z.string(), days: z.number().int() });
const openai = { model, apiKey: key, configuration: { baseURL: `${url}/v1` } };
const routes = {
  chat: new ChatOpenAI({ ...openai, useResponsesApi: false }),
  responses: new ChatOpenAI({ ...openai, useResponsesApi: true }),
  anthropic: new ChatAnthropic({ model, apiKey: key, anthropicApiUrl: url, maxTokens: 200 }),
  ollama: new ChatOllama({ model, baseUrl: url }),
};
const text = (message) => (typeof message.content === "string" ? message.content : message.content.map((part) => part.text ?? "").join(""));

const tasks = {};
for (const [route, chat] of Object.entries(routes)) {
  tasks[`${route}: chat`] = async () => assert.equal(text(await chat.invoke("Say hello.")), greeting);
  tasks[`${route}: stream`] = async () => {
    const parts = [];
    for await (const chunk of await chat.stream("Say hello.")) parts.push(text(chunk));
    assert.equal(parts.join(""), greeting);
    assert.ok(parts.filter(Boolean).length > 1);
  };
  tasks[`${route}: tools`] = async () => {
    const bound = chat.bindTools([getWeather]);
    const question = new HumanMessage("What is the weather?");
    const asked = await bound.invoke([question]);
    const [call] = asked.tool_calls;
    assert.deepEqual([call.name, call.args], ["get_weather", weather]);
    const returned = new ToolMessage({ content: "sunny", tool_call_id: call.id, name: call.name });
    assert.equal(text(await bound.invoke([question, asked, returned])), result);
  };
  tasks[`${route}: structured`] = async () => {
    const structured = chat.withStructuredOutput(Weather, route === "anthropic" ? { name: "Weather" } : { name: "Weather", method: "jsonSchema" });
    assert.deepEqual(await structured.invoke("The weather as JSON."), weather);
  };
}
await report(tasks);
