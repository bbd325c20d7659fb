// llama.cpp's side of cpu_weights.py: answers "decode N" and "prefill N" on stdin with one line of JSON each. Owns nothing else.
// node llama_cpp_side.mjs FOLDER-WITH-NODE_MODULES MODEL.gguf THREADS
import path from "node:path";
import readline from "node:readline";
import { pathToFileURL } from "node:url";

const [folder, modelPath, threads] = process.argv.slice(2);
const entry = path.join(path.resolve(folder), "node_modules/node-llama-cpp/dist/index.js");
const { getLlama } = await import(pathToFileURL(entry).href);
const DECODED = 32; // tokens of each request, as in cpu_weights.py
const started = performance.now();
const llama = await getLlama({ gpu: false, build: "never", maxThreads: Number(threads), logLevel: "error" });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({ contextSize: 1024, sequences: 8, batchSize: 512, threads: Number(threads) });
const sequences = Array.from({ length: 8 }, () => context.getSequence());
const random = (count) => Array.from({ length: count }, () => 1000 + Math.floor(Math.random() * 40000));
const median = (values) => [...values].sort((a, b) => a - b)[Math.floor(values.length / 2)];

async function decode(sequence, tokens) {
    await sequence.clearHistory();
    const at = [];
    for await (const _ of sequence.evaluate(random(16), { temperature: 0, yieldEogToken: true })) {
        at.push(performance.now());
        if (at.length === tokens) break;
    }
    return at;
}

async function measure(kind, count) {
    if (kind === "prefill") {
        await sequences[0].clearHistory();
        const start = performance.now();
        await sequences[0].evaluateWithoutGeneratingNewTokens(random(count));
        return performance.now() - start;
    }
    const all = await Promise.all(sequences.slice(0, count).map((sequence) => decode(sequence, DECODED)));
    const begun = Math.max(...all.map((at) => at[0]));
    const ends = all[0].filter((at) => at >= begun);
    return median(ends.slice(1).map((at, i) => at - ends[i]));
}

console.log(JSON.stringify({ ready_s: (performance.now() - started) / 1000, rss_mib: process.memoryUsage().rss / 2 ** 20 }));
for await (const line of readline.createInterface({ input: process.stdin })) {
    const [kind, count] = line.split(" ");
    const before = process.cpuUsage();
    const ms = await measure(kind, Number(count));
    const { user, system } = process.cpuUsage(before);
    console.log(JSON.stringify({ ms, cpu_ms: (user + system) / 1000 / (kind === "decode" ? DECODED : 1) }));
}
process.exit(0);
