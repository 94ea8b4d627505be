// Worker that writes texts with the model, with onnxruntime in WebAssembly.

import * as ort from "./ort.wasm.min.mjs";
import { Tokenizer } from "./tokenizers.min.mjs";

const WASM = "ort-wasm-simd-threaded.wasm";
const PAUSE_MS = 30; // time between two pauses, in which the worker reads messages

const post = (kind, data = {}) => postMessage({ kind, ...data });
const loading = load();
let isStopped = false;

addEventListener("message", async ({ data }) => {
  if (data.kind === "stop") isStopped = true;
  else await attempt(() => write(data));
});
void attempt(async () => post("ready", { differs: !hasSameTokens(await loading) }));

async function attempt(work) {
  try {
    await work();
  } catch (failure) {
    post("problem", { message: `The model cannot be used in this browser: ${failure.message ?? failure}` });
  }
}

/** Load the files, and report how much is loaded. */
async function load() {
  const settings = await (await get("settings.json")).json();
  const sizes = settings.bytes;
  const total = Object.values(sizes).reduce((sum, size) => sum + size, 0);
  let loaded = 0;
  const files = {};
  for (const [name, size] of Object.entries(sizes)) {
    files[name] = await read(name, size, (n) => post("loaded", { share: (loaded += n) / total }));
  }
  ort.env.wasm.wasmBinary = files[WASM].buffer;
  ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? Math.min(4, navigator.hardwareConcurrency) : 1;
  const [json, config] = await Promise.all(
    ["tokenizer.json", "tokenizer_config.json"].map(async (name) => (await get(name)).json()),
  );
  const open = (name) => ort.InferenceSession.create(files[name], { executionProviders: ["wasm"] });
  return {
    settings,
    tokenizer: new Tokenizer(json, config),
    encoder: settings.start === null ? null : await open("onnx/encoder_model.onnx"),
    decoder: await open(settings.start === null ? "onnx/model.onnx" : "onnx/decoder_model_merged.onnx"),
  };
}

async function get(name) {
  const response = await fetch(name);
  if (!response.ok) throw new Error(`${name} was not loaded (status ${response.status}).`);
  return response;
}

/** Read a file of `size` bytes. */
async function read(name, size, onBytes) {
  const content = new Uint8Array(size);
  let end = 0;
  const reader = (await get(name)).body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    if (end + part.value.length > size) break;
    content.set(part.value, end);
    end += part.value.length;
    onBytes(part.value.length);
  }
  if (end !== size) throw new Error(`${name} has the wrong size. Copy the folder again.`);
  return content;
}

/** Check that prompts have the same tokens here as in training. */
function hasSameTokens({ settings, tokenizer }) {
  return settings.samples.every(({ prompt, ids }) => String(tokenizer.encode(prompt).ids) === String(ids));
}

async function write({ prompt, temperature }) {
  isStopped = false;
  const model = await loading;
  const { settings, tokenizer } = model;
  const ids = tokenizer.encode(prompt).ids;
  const limit = Math.min(settings.max_new_tokens, settings.start === null ? settings.context - ids.length : Infinity);
  if (limit < 1) throw new Error("The text is too long for the model. Shorten it.");
  const started = performance.now();
  const tokens = [];
  let pausedAt = started;
  let isEnded = false;
  for await (const logits of steps(model, ids, tokens)) {
    forbid(logits, repeated(tokens, settings.no_repeat_ngram_size));
    const token = temperature > 0 ? sample(logits, temperature) : largest(logits);
    isEnded = settings.ends.includes(token);
    if (isEnded || isStopped) break;
    tokens.push(token);
    if (performance.now() - pausedAt > PAUSE_MS) {
      // The last character may be incomplete.
      post("text", { text: decode(tokenizer, tokens).replace(/\ufffd+$/u, "") });
      await new Promise((resolve) => setTimeout(resolve));
      pausedAt = performance.now();
    }
    if (tokens.length === limit) break;
  }
  post("text", { text: decode(tokenizer, tokens) });
  const seconds = (performance.now() - started) / 1000;
  post("end", { tokens: tokens.length, seconds, isCut: !isEnded, isStopped });
}

const decode = (tokenizer, tokens) =>
  tokenizer.decode(tokens, { skip_special_tokens: true, clean_up_tokenization_spaces: false }).trim();

/** Yield the logits of each position. The caller adds the chosen token to `tokens`. */
async function* steps({ settings, encoder, decoder }, prompt, tokens) {
  let cache = emptyCache(decoder, settings);
  let next = encoder ? [settings.start] : prompt;
  let constant = {};
  if (encoder) {
    const mask = ones(prompt.length);
    const { last_hidden_state } = await encoder.run({ input_ids: integers(prompt), attention_mask: mask });
    constant = { encoder_hidden_states: last_hidden_state, encoder_attention_mask: mask };
  }
  for (let length = next.length; ; length++) {
    const inputs = { input_ids: integers(next), ...constant, ...cache };
    if (encoder) inputs.use_cache_branch = new ort.Tensor("bool", [tokens.length > 0], [1]);
    else {
      inputs.attention_mask = ones(length);
      inputs.position_ids = integers(next.map((_, i) => length - next.length + i));
    }
    const { logits, ...present } = await decoder.run(inputs);
    cache = Object.fromEntries(
      Object.entries(present).map(([name, value]) => [name.replace("present", "past_key_values"), value]),
    );
    yield logits.data.subarray(-logits.dims[2]);
    next = tokens.slice(-1);
  }
}

const integers = (values) => new ort.Tensor("int64", BigInt64Array.from(values, BigInt), [1, values.length]);
const ones = (length) => integers(Array(length).fill(1));

function emptyCache(decoder, { heads, head_size }) {
  const names = decoder.inputNames.filter((name) => name.startsWith("past_key_values"));
  return Object.fromEntries(
    names.map((name) => [name, new ort.Tensor("float32", new Float32Array(), [1, heads, 0, head_size])]),
  );
}

/** The tokens that would repeat the last n tokens of the text: each follows the same n - 1 tokens before. */
function repeated(tokens, n) {
  if (!n || tokens.length < n) return [];
  const last = String(tokens.slice(tokens.length - n + 1));
  return tokens.slice(n - 1).filter((_, i) => String(tokens.slice(i, i + n - 1)) === last);
}

function forbid(logits, tokens) {
  for (const token of tokens) logits[token] = -Infinity;
}

function largest(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

/** Draw a token by softmax(logits / temperature). */
function sample(logits, temperature) {
  const most = logits[largest(logits)];
  const shares = Float64Array.from(logits, (logit) => Math.exp((logit - most) / temperature));
  let rest = Math.random() * shares.reduce((sum, share) => sum + share, 0);
  for (let i = 0; i < shares.length; i++) {
    rest -= shares[i];
    if (rest < 0) return i;
  }
  return largest(logits);
}
