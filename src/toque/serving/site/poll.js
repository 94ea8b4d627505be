// Repeated requests that show the current state of the server.

import { ask } from "./requests.js";

const PAUSE_MS = 2000;

/**
 * Request a path every two seconds. Call `show` with each new answer, and `report` with a problem or "".
 * Return a function that requests immediately, with a property `stop`.
 */
export function poll(path, show, report) {
  const stopper = new AbortController();
  const { signal } = stopper;
  let last = "";
  let wake = () => {};

  async function run() {
    while (!signal.aborted) {
      try {
        const answer = await ask(path, undefined, signal);
        report("");
        const text = JSON.stringify(answer);
        if (text !== last && !signal.aborted) show(answer);
        last = text;
      } catch (failure) {
        if (signal.aborted || failure.status === 401) return;
        report(failure.message);
      }
      await new Promise((resolve) => {
        wake = resolve;
        setTimeout(resolve, PAUSE_MS);
      });
    }
  }

  void run();
  const now = () => wake();
  now.stop = () => stopper.abort();
  return now;
}
