// openai.

import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as harness from "./harness.mjs";
import { CALL, CHAT, LONG, MODEL as model, STRUCTURED, TOOL } from "./harness.mjs";

const client = new OpenAI({ baseURL: `${harness.URL}/v1`, apiKey: "none" });
const City = z.object({ name: z.string(), people: z.number().int() });
const user = (content) => [{ role: "user", content }];
const weather = zodFunction({
  name: "weather",
  parameters: z.object({ city: z.string() }),
  function: harness.weather,
});
const create = (messages, fields) => client.chat.completions.create({ model, messages, ...fields });
const text = async (messages, fields) => (await create(messages, fields)).choices[0].message.content;

async function stream() {
  const chunks = await harness.collected(await create(user(CHAT), { stream: true }));
  return chunks.map((one) => one.choices[0]?.delta.content ?? "");
}

async function tool() {
  const runner = client.chat.completions.runTools({
    model,
    messages: user(TOOL),
    tools: [weather],
  });
  return await runner.finalContent();
}

async function forced() {
  const found = [];
  for (const tool_choice of ["required", { type: "function", function: { name: "weather" } }]) {
    const answer = await create(user(CALL), { tools: [weather], tool_choice });
    found.push(JSON.parse(answer.choices[0].message.tool_calls[0].function.arguments));
  }
  return found;
}

async function structured() {
  const found = await client.chat.completions.parse({
    model,
    messages: user(STRUCTURED),
    response_format: zodResponseFormat(City, "city"),
  });
  return found.choices[0].message.parsed;
}

async function context() {
  const error = await harness.errorOf(create(user(LONG)));
  return [error.constructor.name, error.code];
}

const shown = [
  {
    role: "user",
    content: [
      { type: "text", text: "What is this?" },
      { type: "image_url", image_url: { url: `data:image/png;base64,${harness.PNG}` } },
    ],
  },
  { role: "assistant", content: "A dot." },
];

await harness.report({
  "openai, Node": {
    chat: () => text(user(CHAT)),
    stream,
    tool,
    forced,
    structured,
    context,
    image: () => text([...shown, ...user(CHAT)]),
  },
});
