// Vercel's AI SDK with three providers.

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import * as harness from "./harness.mjs";
import { CALL, CHAT, CITY, LONG, MODEL, STRUCTURED, TOOL } from "./harness.mjs";

const baseURL = `${harness.URL}/v1`;
const apiKey = "none";
const models = {
  "openai-compatible": createOpenAICompatible({
    name: "local",
    baseURL,
    apiKey,
    supportsStructuredOutputs: true,
  })(MODEL),
  openai: createOpenAI({ baseURL, apiKey })(MODEL),
  anthropic: createAnthropic({ baseURL, apiKey })(MODEL),
};
const City = z.object({ name: z.string(), people: z.number().int() });
const inputSchema = z.object({ city: z.string() });
const tools = {
  weather: tool({ description: "The weather in a city.", inputSchema, execute: harness.weather }),
};
const shown = [
  {
    role: "user",
    content: [
      { type: "text", text: "What is this?" },
      { type: "file", mediaType: "image/png", data: harness.PNG },
    ],
  },
  { role: "assistant", content: "A dot." },
  { role: "user", content: CHAT },
];

function features(model) {
  const text = async (fields) => (await generateText({ model, ...fields })).text;
  async function forced() {
    const found = [];
    for (const toolChoice of ["required", { type: "tool", toolName: "weather" }]) {
      const answer = await generateText({ model, prompt: CALL, tools, toolChoice });
      found.push(answer.toolCalls[0].input);
    }
    return found;
  }
  async function structured() {
    // Anthropic's provider has a function of its own called for models that it does not know.
    const prompt = `${STRUCTURED}\nCall: {"name": "json", "arguments": ${CITY}}`;
    return (await generateText({ model, prompt, output: Output.object({ schema: City }) })).output;
  }
  async function context() {
    const error = await harness.errorOf(generateText({ model, prompt: LONG, maxRetries: 0 }));
    const body = JSON.parse(error.responseBody).error;
    return [error.name, body.code ?? body.message.split(":")[0]];
  }
  return {
    chat: () => text({ prompt: CHAT }),
    stream: () => harness.collected(streamText({ model, prompt: CHAT }).textStream),
    tool: () => text({ prompt: TOOL, tools, stopWhen: stepCountIs(3) }),
    forced,
    structured,
    context,
    image: () => text({ messages: shown }),
  };
}

await harness.report(
  Object.fromEntries(
    Object.entries(models).map(([name, model]) => [`AI SDK: ${name}`, features(model)]),
  ),
);
