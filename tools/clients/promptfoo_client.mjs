// promptfoo: an evaluation by chats, by a schema, by Anthropic's messages and by responses.
import { execFileSync } from 'node:child_process';
import { mkdtempSync, readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { tmpdir } from 'node:os';

const url = process.env.PENSTOCK_URL;
const model = process.env.PENSTOCK_MODEL;
const folder = mkdtempSync(join(tmpdir(), 'promptfoo-'));
const config = { apiBaseUrl: `${url}/v1`, apiKey: 'none', max_tokens: 24, temperature: 0 };
const schema = { type: 'object', properties: { city: { type: 'string', enum: ['Paris'] } }, required: ['city'], additionalProperties: false };
const response_format = { type: 'json_schema', json_schema: { name: 'city', strict: true, schema } };
const providers = [
  { id: `openai:chat:${model}`, label: 'chat', config },
  { id: `openai:chat:${model}`, label: 'json_schema', config: { ...config, response_format } },
  { id: `openai:completion:${model}`, label: 'completions', config },
  { id: `openai:responses:${model}`, label: 'responses', config: { ...config, max_output_tokens: 24 } },
  { id: `anthropic:messages:${model}`, label: 'messages', config: { apiBaseUrl: url, apiKey: 'none', max_tokens: 24 } },
];
const tests = [{ vars: { country: 'France' }, assert: [{ type: 'javascript', value: 'output.length > 0' }] }];
writeFileSync(join(folder, 'config.json'), JSON.stringify({ prompts: ['The capital of {{country}} is'], providers, tests }));
const env = { ...process.env, PROMPTFOO_DISABLE_TELEMETRY: '1', PROMPTFOO_DISABLE_UPDATE: '1', PROMPTFOO_CONFIG_DIR: folder };
const words = ['promptfoo', 'eval', '--no-cache', '--no-progress-bar', '-c', join(folder, 'config.json'), '-o', join(folder, 'made.json')];
try {
  execFileSync('npx', words, { env, stdio: 'pipe', timeout: 200_000 });
} catch (error) {
  console.error(String(error.stdout).slice(-2000)); // it exits with 100 where an assertion failed
}
for (const one of JSON.parse(readFileSync(join(folder, 'made.json'))).results.results) {
  const said = one.response?.output;
  const ok = Boolean(said) && !one.response?.error;
  const why = ok ? undefined : String(one.error ?? one.response?.error).slice(0, 300);
  console.log('RESULT ' + JSON.stringify({ check: one.provider.label, ok, why }));
}
