// Requests to the server of this page. An error is a Failure with a message for people.

import { at, say } from "./dom.js";

/** Error with a message for people. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** Show the message of a Failure, by default as the problem of the view. Throw any other error. */
export function report(failure, show = (text) => say(at("problem"), text)) {
  if (!(failure instanceof Failure)) throw failure;
  show(failure.message);
}

/** Send a GET, or a POST if there is a body. Return the JSON of the answer. */
export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** Exchange the token of the server for a cookie. */
export async function login(token) {
  await send("session", { token });
}

/** Yield the pieces of a text while it is generated: {text}, and at the end {reason, tokens}. */
export async function* write(request, signal, path = "v1/completions") {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  const answer = await send(path, streamed, signal);
  let reason = null;
  let tokens = 0;
  for await (const event of received(answer.body)) {
    if (event.error) throw new Failure(event.error.message);
    tokens = event.usage?.completion_tokens ?? tokens;
    const choice = event.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content;
    if (text) yield { text };
    reason = choice?.finish_reason ?? reason;
  }
  if (reason === null) throw new Failure("The connection ended before the end of the text.");
  yield { reason, tokens };
}

async function send(path, body, signal) {
  const options = body
    ? { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) }
    : {};
  let answer;
  try {
    answer = await fetch(path, { ...options, signal });
  } catch (error) {
    throw unreachable(error);
  }
  if (!answer.ok) throw await failureOf(answer);
  return answer;
}

/** Yield the objects of server-sent events. "[DONE]" is the end. */
async function* received(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw unreachable(error);
    }
    if (piece.done) return;
    const lines = (waiting + piece.value).split(/\r?\n/);
    waiting = lines.pop();
    for (const line of lines) {
      const data = line.startsWith("data:") ? line.slice(5).trim() : "";
      if (data === "[DONE]") return;
      if (data) yield JSON.parse(data);
    }
  }
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  return new Failure("The server cannot be reached. Check that its command still runs in the terminal.");
}

/** The error of a refused request. Without the token, the page asks for it. */
export async function failureOf(answer) {
  const message = (await answer.json().catch(() => null))?.error?.message;
  const seconds = Number(answer.headers.get("Retry-After"));
  let text = message ?? `The server answered with status ${answer.status} ${answer.statusText}.`;
  if (seconds) {
    const retry = `Try again in ${seconds} second${seconds === 1 ? "" : "s"}.`;
    text = `${text.replace("Try again in a moment.", "").trim()} ${retry}`;
  }
  const failure = new Failure(text, answer.status);
  if (answer.status === 401) document.dispatchEvent(new Event("token-needed"));
  return failure;
}
