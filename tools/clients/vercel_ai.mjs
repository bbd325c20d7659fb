// Vercel's AI SDK with its providers for OpenAI-compatible servers, for OpenAI (responses) and for Anthropic.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, jsonSchema, Output, streamText, tool } from 'ai';

const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const name = process.env.PENSTOCK_MODEL;
const prompt = 'What is the capital of France?';
const parameters = jsonSchema({
  type: 'object',
  properties: { city: { type: 'string', enum: ['Paris', 'Bern'] }, unit: { type: 'string', enum: ['C', 'F'] } },
  required: ['city', 'unit'],
  additionalProperties: false,
});
const weather = tool({ description: 'The weather in a city', inputSchema: parameters });

async function check(what, work) {
  try {
    await work();
    console.log('RESULT ' + JSON.stringify({ check: what, ok: true }));
  } catch (error) {
    console.error(error);
    console.log('RESULT ' + JSON.stringify({ check: what, ok: false, why: String(error).slice(0, 300) }));
  }
}

function assert(condition, what) {
  if (!condition) throw new Error(what);
}

function fits(value) {
  assert(['Paris', 'Bern'].includes(value.city) && ['C', 'F'].includes(value.unit), JSON.stringify(value));
}

const models = {
  '': createOpenAICompatible({ name: 'penstock', baseURL, supportsStructuredOutputs: true })(name),
  'responses, ': createOpenAI({ baseURL, apiKey: 'none' })(name),
  'anthropic, ': createAnthropic({ baseURL, apiKey: 'none' })(name),
};
for (const [which, model] of Object.entries(models)) {
  const options = { model, prompt, maxOutputTokens: 48, temperature: 0, maxRetries: 0 };
  await check(`${which}chat`, async () => assert((await generateText(options)).text, 'no text'));
  await check(`${which}stream`, async () => {
    let text = '';
    for await (const part of streamText(options).textStream) text += part;
    assert(text, 'no text');
  });
  await check(`${which}forced tool`, async () => {
    const made = await generateText({ ...options, tools: { weather }, toolChoice: { type: 'tool', toolName: 'weather' } });
    fits(made.toolCalls[0].input);
  });
  await check(`${which}json_schema`, async () => {
    const made = await generateText({ ...options, output: Output.object({ schema: parameters }) });
    fits(made.output);
  });
}
