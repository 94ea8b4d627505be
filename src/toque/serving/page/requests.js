// Requests to the server that serves this page. What fails is a Failure, whose message is for people.

import { events, tokenHeader } from "./stream.js";

export { useToken } from "./stream.js";

/** Something that went wrong, in words. */
export class Failure extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

/** The JSON answer to a GET, or to a POST of `body`. */
export async function ask(path, body, signal) {
  return (await send(path, body, signal)).json();
}

/** The pieces of a text while it is written: {text}, and last {reason, tokens}. */
export async function* write(request, signal, path = "v1/completions") {
  const streamed = { ...request, stream: true, stream_options: { include_usage: true } };
  const answer = await send(path, streamed, signal);
  let reason = null;
  let tokens = 0;
  for await (const event of received(answer.body)) {
    if (event.error) throw new Failure(`The server gave up: ${event.error.message}`);
    tokens = event.usage?.completion_tokens ?? tokens;
    const choice = event.choices?.[0];
    const text = choice?.text ?? choice?.delta?.content;
    if (text) yield { text };
    reason = choice?.finish_reason ?? reason;
  }
  if (reason === null) {
    throw new Failure("The connection ended before the text did. What had arrived is shown.");
  }
  yield { reason, tokens };
}

async function send(path, body, signal) {
  const headers = { "Content-Type": "application/json", ...tokenHeader() };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  let answer;
  try {
    answer = await fetch(path, { ...options, signal });
  } catch (error) {
    throw unreachable(error);
  }
  if (!answer.ok) throw new Failure(await reasonOf(answer), answer.status);
  return answer;
}

async function* received(stream) {
  try {
    yield* events(stream);
  } catch (error) {
    throw unreachable(error);
  }
}

function unreachable(error) {
  if (error.name === "AbortError") return error;
  return new Failure("The server cannot be reached. Is `toque serve` still running?");
}

async function reasonOf(answer) {
  const said = (await answer.json().catch(() => null))?.error?.message ?? "";
  const seconds = Number(answer.headers.get("Retry-After"));
  const when = seconds ? `in ${seconds} second${seconds === 1 ? "" : "s"}` : "in a moment";
  switch (answer.status) {
    case 401:
      return "This server asks for its token, the one given to `toque serve --token`.";
    case 429:
      return `The kitchen is full: as many texts are being written as the server takes. Try again ${when}.`;
    case 503:
      return `The server is not taking requests, because it is starting or ending. Try again ${when}.`;
    default:
      return said || `The server answered with ${answer.status} ${answer.statusText}.`;
  }
}
