// The official client of Anthropic's API, for TypeScript.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

export const PACKAGE = "@anthropic-ai/sdk";
const HI = [{ role: "user", content: "Where is the next station?" }];
const TOOL = {
  name: "get_weather",
  description: "The weather of a city",
  input_schema: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

function client(url) {
  return new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0, timeout: 60_000 });
}

export async function check_message(url) {
  const message = await client(url).messages.create({ model: "tiny", max_tokens: 50, messages: HI, system: "Be brief." });
  assert.equal(message.content[0].type, "text");
  assert.ok(message.usage.output_tokens > 0);
}

export async function check_streamed_tool_use(url) {
  const choice = { type: "tool", name: "get_weather" };
  const stream = client(url).messages.stream({
    model: "tiny",
    max_tokens: 500,
    messages: HI,
    tools: [TOOL],
    tool_choice: choice,
  });
  const message = await stream.finalMessage();
  const use = message.content.at(-1);
  assert.equal(typeof use.input.city, "string");
  const results = [{ type: "tool_result", tool_use_id: use.id, content: "It rains." }];
  const messages = [...HI, { role: "assistant", content: message.content }, { role: "user", content: results }];
  assert.ok((await client(url).messages.create({ model: "tiny", max_tokens: 20, messages, tools: [TOOL] })).content);
}

export async function check_count_tokens(url) {
  const counted = await client(url).messages.countTokens({ model: "tiny", messages: HI, tools: [TOOL] });
  assert.ok(counted.input_tokens > 0);
}

export async function check_an_error_is_the_clients_own_exception(url) {
  await assert.rejects(client(url).messages.create({ model: "nothing", max_tokens: 5, messages: HI }), Anthropic.NotFoundError);
}
