// Repeated requests that show the current state of the server.

import { ask } from "./requests.js";

const PAUSE_MS = 2000;

/**
 * Call `step` again and again until the signal. It returns the pause in milliseconds, or null to stop.
 * Return a function that ends the current pause.
 */
export function repeat(step, signal) {
  let wake = () => {};

  async function run() {
    while (!signal.aborted) {
      const pause = await step();
      if (pause === null) return;
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, pause);
      });
    }
  }

  void run();
  return () => wake();
}

/**
 * Request a path every two seconds. Call `show` with each new answer, and `report` with a problem or "".
 * Return a function that requests immediately, with a property `stop`.
 */
export function poll(path, show, report) {
  const stopper = new AbortController();
  const { signal } = stopper;
  let last = "";

  async function request() {
    try {
      const answer = await ask(path, undefined, signal);
      report("");
      const text = JSON.stringify(answer);
      if (text !== last && !signal.aborted) show(answer);
      last = text;
    } catch (failure) {
      if (signal.aborted || failure.status === 401) return null;
      report(failure.message);
    }
    return PAUSE_MS;
  }

  const now = repeat(request, signal);
  now.stop = () => stopper.abort();
  return now;
}
