// The npm packages ai and @ai-sdk/openai-compatible, against the server whose URL is the argument.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import {
  APICallError,
  embedMany,
  generateObject,
  generateText,
  stepCountIs,
  streamText,
  tool,
} from "ai";
import { z } from "zod";

import { QUESTION, SUM, TOO_LONG, report } from "./cases.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;

const provider = createOpenAICompatible({
  name: "speculoe",
  baseURL: `${process.argv[2]}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = provider("embedded");
const asked = { model, prompt: QUESTION, temperature: 0, maxOutputTokens: 24, maxRetries: 0 };

await report({
  async generateText() {
    const { text, usage, finishReason } = await generateText(asked);
    return { text, tokens: usage.outputTokens, finishReason };
  },

  async streamText() {
    const answer = streamText(asked);
    let text = "";
    for await (const piece of answer.textStream) text += piece;
    const { outputTokens: tokens } = await answer.usage;
    return { text, tokens, finishReason: await answer.finishReason };
  },

  async tools() {
    const add = tool({
      description: "Add two numbers.",
      inputSchema: z.object({ a: z.number().int(), b: z.number().int() }),
      execute: async ({ a, b }) => a + b,
    });
    const forced = {
      ...asked,
      prompt: SUM,
      maxOutputTokens: 60,
      tools: { add },
      providerOptions: { speculoe: { parallel_tool_calls: false } },
    };
    // The first step must call, the second answers from what came of it.
    const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
    const { steps, text } = await generateText({ ...forced, stopWhen: stepCountIs(2), prepareStep });
    const [streamed] = await streamText({ ...forced, toolChoice: "required" }).toolCalls;
    return {
      reasons: steps.map((step) => step.finishReason),
      call: steps[0].toolCalls[0].input,
      result: steps[0].toolResults[0].output,
      streamed: streamed.input,
      text,
    };
  },

  async generateObject() {
    const schema = z.object({ coastal: z.boolean(), climate: z.enum(["cold", "mild", "hot"]) });
    const more = { schema, prompt: "Describe Oslo as JSON.", maxOutputTokens: 60 };
    return (await generateObject({ ...asked, ...more })).object;
  },

  async embedMany() {
    const values = ["hello", "hello", "other words"];
    const embedding = provider.embeddingModel("embedded");
    return (await embedMany({ model: embedding, values, maxRetries: 0 })).embeddings;
  },

  async errors() {
    const found = [];
    const note = (error) =>
      found.push({
        typed: APICallError.isInstance(error),
        status: error.statusCode,
        retryable: error.isRetryable,
        message: error.message,
      });
    await generateText({ ...asked, prompt: TOO_LONG }).catch(note);
    const stream = streamText({ ...asked, prompt: TOO_LONG, onError: ({ error }) => note(error) });
    await stream.consumeStream();
    return found;
  },
});
