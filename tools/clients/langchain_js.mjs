// LangChain for JavaScript: its ChatOpenAI, on both of OpenAI's APIs.
import { ChatOpenAI } from '@langchain/openai';

const question = 'What is the capital of France?';
const weather = {
  name: 'weather',
  description: 'The weather in a city',
  parameters: {
    type: 'object',
    properties: { city: { type: 'string', enum: ['Paris', 'Bern'] }, unit: { type: 'string', enum: ['C', 'F'] } },
    required: ['city', 'unit'],
    additionalProperties: false,
  },
};

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

for (const useResponsesApi of [false, true]) {
  const which = useResponsesApi ? 'responses, ' : '';
  const model = new ChatOpenAI({
    model: process.env.PENSTOCK_MODEL,
    apiKey: 'none',
    configuration: { baseURL: `${process.env.PENSTOCK_URL}/v1` },
    temperature: 0,
    maxTokens: 64,
    maxRetries: 0,
    useResponsesApi,
  });
  await check(`${which}chat`, async () => assert((await model.invoke(question)).text, 'no text'));
  await check(`${which}stream`, async () => {
    let text = '';
    for await (const part of await model.stream(question)) text += part.text;
    assert(text, 'no text');
  });
  await check(`${which}forced tool`, async () => {
    const bound = model.bindTools([{ type: 'function', function: weather }], { tool_choice: 'weather' });
    fits((await bound.invoke(question)).tool_calls[0].args);
  });
  await check(`${which}json_schema`, async () => {
    const formed = model.withStructuredOutput(weather.parameters, { name: 'weather', method: 'jsonSchema', strict: true });
    fits(await formed.invoke(question));
  });
}
