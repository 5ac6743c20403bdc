// The AI SDK with every provider that fits: OpenAI (Responses and chat), OpenAI-compatible, and Anthropic.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { greeting, key, model, report, result, url, weather } from "./report.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: key });
const compatible = createOpenAICompatible({
  name: "cortex", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true,
});
const anthropic = createAnthropic({ baseURL: `${url}/v1`, apiKey: key });
const providers = {
  responses: openai(model),
  chat: openai.chat(model),
  compatible: compatible(model),
  anthropic: anthropic(model),
};
const shape = z.object({ city: z.string(), days: z.number().int() });
const common = { maxRetries: 0, maxOutputTokens: 500 };

function weatherTool(calls) {
  return tool({
    description: "The weather of a city.",
    inputSchema: shape,
    execute: async (given) => (calls.push(given), "sunny"),
  });
}

const tasks = {};
for (const [name, languageModel] of Object.entries(providers)) {
  tasks[`${name}: chat`] = async () => {
    const { text, usage } = await generateText({ model: languageModel, prompt: "Say hello.", ...common });
    assert.equal(text, greeting);
    assert.ok(usage.outputTokens > 0);
  };
  tasks[`${name}: stream`] = async () => {
    const stream = streamText({ model: languageModel, prompt: "Say hello.", ...common, onError() {} });
    const pieces = [];
    for await (const piece of stream.textStream) pieces.push(piece);
    assert.equal(pieces.join(""), greeting);
  };
  for (const way of ["whole", "streamed"]) {
    tasks[`${name}: tools, ${way}`] = async () => {
      const calls = [];
      const options = {
        model: languageModel,
        prompt: "What is the weather in Oslo?",
        tools: { get_weather: weatherTool(calls) },
        stopWhen: stepCountIs(3),
        ...common,
      };
      const made = way === "whole" ? await generateText(options) : streamText({ ...options, onError() {} });
      assert.equal(await made.text, result);
      assert.equal((await made.steps).length, 2);
      assert.deepEqual(calls, [weather]);
    };
  }
  tasks[`${name}: second turn`] = async () => {
    // The OpenAI provider refers to what was said by its id (`item_reference`): the gateway must have stored it.
    const messages = [{ role: "user", content: "Say hello." }];
    const first = await generateText({ model: languageModel, messages, ...common });
    const turns = [...messages, ...first.response.messages, { role: "user", content: "Again." }];
    const second = await generateText({ model: languageModel, messages: turns, ...common });
    assert.equal(second.text, greeting);
    const referred = JSON.stringify(second.request.body ?? "").includes("item_reference");
    assert.equal(referred, name === "responses");
  };
  tasks[`${name}: structured`] = async () => {
    const { object } = await generateObject({ model: languageModel, schema: shape, prompt: "Reply in JSON.", ...common });
    assert.deepEqual(object, weather);
  };
}
await report(tasks);
