// OpenAI's agents for JavaScript, on both of its APIs.
import { Agent, OpenAIProvider, Runner, setTracingDisabled, tool } from '@openai/agents';
import { z } from 'zod';

setTracingDisabled(true);
const baseURL = `${process.env.PENSTOCK_URL}/v1`;
const model = process.env.PENSTOCK_MODEL;
const question = 'What is the capital of France?';
const Weather = z.object({ city: z.enum(['Paris', 'Bern']), unit: z.enum(['C', 'F']) });

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

for (const useResponses of [true, false]) {
  const which = useResponses ? 'responses' : 'chat';
  const runner = new Runner({ modelProvider: new OpenAIProvider({ apiKey: 'none', baseURL, useResponses }) });
  const settings = { model, name: 'A', instructions: 'Be brief.', modelSettings: { maxTokens: 64, temperature: 0 } };
  await check(which, async () => assert((await runner.run(new Agent(settings), question)).finalOutput, 'no text'));
  await check(`${which}, streamed`, async () => {
    const result = await runner.run(new Agent(settings), question, { stream: true });
    let text = '';
    for await (const part of result.toTextStream()) text += part;
    assert(text, 'no text');
  });
  await check(`${which}, forced tool`, async () => {
    let given;
    const weather = tool({
      name: 'weather',
      description: 'The weather in a city',
      parameters: Weather,
      execute: async (value) => ((given = value), '21'),
    });
    const agent = new Agent({
      ...settings,
      tools: [weather],
      toolUseBehavior: 'stop_on_first_tool',
      modelSettings: { ...settings.modelSettings, toolChoice: 'weather' },
    });
    await runner.run(agent, question);
    fits(given);
  });
  await check(`${which}, json_schema`, async () => {
    fits((await runner.run(new Agent({ ...settings, outputType: Weather }), question)).finalOutput);
  });
}
