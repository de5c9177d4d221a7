// The Vercel AI SDK with its OpenAI-compatible, OpenAI (Responses and chat) and Anthropic providers.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

export const PACKAGE = "ai";
globalThis.AI_SDK_LOG_WARNINGS = false;
const SCHEMA = jsonSchema({
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
  additionalProperties: false,
});
const add = tool({ description: "Adds.", inputSchema: SCHEMA, execute: async ({ a, b }) => ({ sum: a + b }) });
// The model writes at random, so that it calls a tool only when it must: in the first two of three steps.
const STEPS = {
  prompt: "What is the sum?",
  tools: { add },
  maxOutputTokens: 400,
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => ({ toolChoice: ["required", { type: "tool", toolName: "add" }, "auto"][stepNumber] }),
};

function compatible(url) {
  return createOpenAICompatible({ name: "poolgrid", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true });
}

function openai(url) {
  return createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
}

async function every(model) {
  const text = await generateText({ model, system: "Be brief.", prompt: "Hello", maxOutputTokens: 20, maxRetries: 0 });
  assert.equal(text.usage.outputTokens, 20);
  const whole = await generateText({ model, maxRetries: 0, ...STEPS });
  assert.deepEqual(whole.steps.map((step) => step.toolResults.length > 0), [true, true, false]);
  const streamed = streamText({ model, maxRetries: 0, ...STEPS });
  for await (const part of streamed.fullStream) if (part.type === "error") throw part.error;
  assert.deepEqual((await streamed.steps).map((step) => step.toolResults.length > 0), [true, true, false]);
  const output = Output.object({ schema: SCHEMA });
  const object = await generateText({ model, maxRetries: 0, prompt: "Two numbers", maxOutputTokens: 400, output });
  assert.equal(typeof object.output.a, "number");
}

export async function check_chat(url) {
  await every(compatible(url)("tiny"));
}

export async function check_responses(url) {
  await every(openai(url)("tiny"));
}

export async function check_chat_of_the_openai_provider(url) {
  await every(openai(url).chat("tiny"));
}

export async function check_messages(url) {
  await every(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("tiny"));
}

export async function check_completions(url) {
  const text = await generateText({ model: compatible(url).completionModel("tiny"), prompt: "Hello", maxOutputTokens: 20 });
  assert.equal(text.usage.outputTokens, 20);
}

export async function check_tools_of_openais_servers_are_left_out(url) {
  const provider = openai(url);
  const tools = { add, web_search: provider.tools.webSearch({}), code_interpreter: provider.tools.codeInterpreter({}) };
  const answer = await generateText({ model: provider("tiny"), prompt: "Hello", tools, maxOutputTokens: 20, maxRetries: 0 });
  assert.equal(answer.response.headers["x-poolgrid-tools-left-out"], "web_search, code_interpreter");
}

export async function check_a_conversation_without_stored_responses(url) {
  const model = openai(url)("tiny");
  const providerOptions = { openai: { store: false, include: ["reasoning.encrypted_content"], promptCacheKey: "k", serviceTier: "auto" } };
  const first = await generateText({ model, maxRetries: 0, providerOptions, ...STEPS });
  const messages = [{ role: "user", content: STEPS.prompt }, ...first.response.messages, { role: "user", content: "Again" }];
  assert.ok(await generateText({ model, maxRetries: 0, providerOptions, tools: { add }, maxOutputTokens: 20, messages }));
}
