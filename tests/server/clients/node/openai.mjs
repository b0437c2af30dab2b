// The npm package openai, against the server whose URL is the argument.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

import { QUESTION, SUM, TOO_LONG, report } from "./cases.mjs";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none", maxRetries: 0 });
const model = "embedded";
const asked = {
  model,
  messages: [{ role: "user", content: QUESTION }],
  temperature: 0,
  max_tokens: 24,
};

function add() {
  const number = { type: "integer" };
  const parameters = {
    type: "object",
    properties: { a: number, b: number },
    required: ["a", "b"],
    additionalProperties: false,
  };
  const description = "Add two numbers.";
  return { type: "function", function: { name: "add", description, strict: true, parameters } };
}

await report({
  async chat() {
    const answer = await client.chat.completions.create(asked);
    const { message, finish_reason } = answer.choices[0];
    return { text: message.content, finish_reason, tokens: answer.usage.completion_tokens };
  },

  async stream() {
    const stream = client.chat.completions.stream({
      ...asked,
      stream_options: { include_usage: true },
    });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    const whole = await stream.finalChatCompletion();
    return { text, whole: whole.choices[0].message.content, tokens: whole.usage.completion_tokens };
  },

  async tools() {
    const messages = [{ role: "user", content: SUM }];
    const limits = { temperature: 0, max_tokens: 60, parallel_tool_calls: false };
    const more = { model, tools: [add()], ...limits };
    const tool_choice = { type: "function", function: { name: "add" } };
    const first = await client.chat.completions.create({ ...more, messages, tool_choice });
    const { message, finish_reason } = first.choices[0];
    const [call] = message.tool_calls;
    const stream = client.chat.completions.stream({ ...more, messages, tool_choice });
    const streamed = (await stream.finalMessage()).tool_calls[0].function;
    messages.push(message, { role: "tool", tool_call_id: call.id, content: "5" });
    const last = await client.chat.completions.create({ ...more, messages, tool_choice: "none" });
    return {
      finish_reason,
      call: call.function,
      streamed: { name: streamed.name, arguments: streamed.arguments },
      answer: last.choices[0].message,
    };
  },

  async parse() {
    const city = z.object({ coastal: z.boolean(), climate: z.enum(["cold", "mild", "hot"]) });
    const answer = await client.chat.completions.parse({
      ...asked,
      messages: [{ role: "user", content: "Describe Oslo as JSON." }],
      response_format: zodResponseFormat(city, "city"),
      max_tokens: 60,
    });
    return answer.choices[0].message.parsed;
  },

  async completions() {
    const prompt = "The capital of France is";
    const limits = { max_tokens: 2, temperature: 0, logprobs: 1 };
    const answer = await client.completions.create({ model, prompt, echo: true, ...limits });
    const { text, logprobs } = answer.choices[0];
    return { text, joined: logprobs.tokens.join(""), logprobs: logprobs.token_logprobs };
  },

  async responses() {
    const input = QUESTION;
    const whole = await client.responses.create({
      model,
      input,
      temperature: 0,
      max_output_tokens: 24,
    });
    const stream = client.responses.stream({ model, input, temperature: 0, max_output_tokens: 24 });
    return { text: whole.output_text, streamed: (await stream.finalResponse()).output_text };
  },

  async embeddings() {
    const input = ["hello", "hello", "other words"];
    const packed = await client.embeddings.create({ model, input });
    const plain = await client.embeddings.create({ model, input, encoding_format: "float" });
    return {
      packed: packed.data.map((each) => Array.from(each.embedding)),
      plain: plain.data.map((each) => each.embedding),
    };
  },

  async models() {
    const names = [];
    for await (const each of client.models.list()) names.push(each.id);
    return names;
  },

  async errors() {
    const messages = [{ role: "user", content: TOO_LONG }];
    const found = [];
    for (const stream of [false, true]) {
      try {
        await client.chat.completions.create({ ...asked, messages, stream });
      } catch (error) {
        const typed = error instanceof OpenAI.BadRequestError;
        found.push({ typed, status: error.status, n_ctx: error.error?.n_ctx });
      }
    }
    return found;
  },
});
