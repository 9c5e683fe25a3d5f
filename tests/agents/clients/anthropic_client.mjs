// @anthropic-ai/sdk.

import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";
import * as harness from "./harness.mjs";
import { CALL, CHAT, LONG, MODEL as model, STRUCTURED, TOOL } from "./harness.mjs";

const client = new Anthropic({ baseURL: harness.URL, apiKey: "none" });
const City = z.object({ name: z.string(), people: z.number().int() });
const user = (content) => [{ role: "user", content }];
const create = (messages, fields) =>
  client.messages.create({ model, max_tokens: 500, messages, ...fields });
const text = async (messages) => (await create(messages)).content.at(-1).text;
const TOOLS = [
  {
    name: "weather",
    input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
];

async function stream() {
  const events = client.messages.stream({ model, max_tokens: 500, messages: user(CHAT) });
  const found = [];
  events.on("text", (part) => found.push(part));
  await events.finalMessage();
  return found;
}

async function tool() {
  const weather = betaZodTool({
    name: "weather",
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    run: harness.weather,
  });
  const runner = client.beta.messages.toolRunner({
    model,
    max_tokens: 500,
    messages: user(TOOL),
    tools: [weather],
  });
  return (await runner.runUntilDone()).content.at(-1).text;
}

async function forced() {
  const found = [];
  for (const tool_choice of [{ type: "any" }, { type: "tool", name: "weather" }]) {
    found.push((await create(user(CALL), { tools: TOOLS, tool_choice })).content.at(-1).input);
  }
  return found;
}

async function structured() {
  const found = await client.messages.parse({
    model,
    max_tokens: 500,
    messages: user(STRUCTURED),
    output_config: { format: zodOutputFormat(City) },
  });
  return found.parsed_output;
}

async function context() {
  const error = await harness.errorOf(create(user(LONG)));
  return [error.constructor.name, error.error.error.message.split(":")[0]];
}

const source = { type: "base64", media_type: "image/png", data: harness.PNG };
const shown = [
  {
    role: "user",
    content: [
      { type: "image", source },
      { type: "text", text: "What is this?" },
    ],
  },
  { role: "assistant", content: "A dot." },
];

await harness.report({
  "anthropic, Node": {
    chat: () => text(user(CHAT)),
    stream,
    tool,
    forced,
    structured,
    context,
    image: () => text([...shown, ...user(CHAT)]),
  },
});
