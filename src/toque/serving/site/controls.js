// Actions for a run in a studio: stop, continue, train longer, use, share, and delete.

import { at, button, element, say } from "./dom.js";
import { baseName, linkTo } from "./format.js";
import { editLink, viewFor } from "./models.js";
import { poll } from "./poll.js";
import { ask } from "./requests.js";
import { openShare } from "./share.js";

const ACTIVE = ["running", "scoring", "preparing"];

export class Controls {
  #refresh = null;
  #state = ""; // the last state of the run
  #shown = ""; // JSON of the run with the shown actions

  /** Show the actions for the run `name`. Servers other than a studio have none. */
  constructor(name) {
    this.name = name;
    if (!document.body.dataset.views.includes("home")) return;
    at("controls").hidden = false;
    this.message = element("p", { className: "problem", hidden: true, role: "alert" }); // failure of the run
    this.problem = element("p", { className: "problem", hidden: true, role: "alert" }); // failure of an action
    this.title = element("h1", { hidden: true });
    this.actions = element("p", { className: "actions" });
    this.hint = element("p", { className: "hint", hidden: true });
    this.log = element("details", {}, element("summary", {}, "Log"), element("pre"));
    this.log.addEventListener("toggle", () => void this.#showLog());
    at("controls").append(this.title, this.actions, this.problem, this.hint, this.message, this.log);
    this.#refresh = poll("api/home", (home) => this.#show(home), (text) => say(this.message, text));
  }

  stop() {
    this.#refresh?.stop();
  }

  #show({ runs }) {
    const run = runs.find(({ name }) => name === this.name);
    // Equal actions stay, so that a button keeps the focus.
    const { state, form, job, is_finished, saved, folder_exists } = run ?? {};
    const shown = JSON.stringify([state, form, job, is_finished, Boolean(saved), folder_exists]);
    if (shown !== this.#shown) this.actions.replaceChildren(...(run ? this.#actionsOf(run) : []));
    this.#shown = shown;
    if (!run) return;
    this.#replaceReport(run.folder_exists ? "" : this.name);
    say(this.message, run.state === "failed" ? run.sentence : "");
    const isAhead = run.state === "preparing" || run.state === "queued";
    say(this.hint, isAhead ? `${run.sentence} You may close this page.` : (run.remark ?? ""));
    if (ACTIVE.includes(this.#state) && !ACTIVE.includes(run.state)) this.#notify(run);
    this.#state = run.state;
    if (this.log.open) void this.#showLog();
  }

  /** Show the name of a run that has no report yet as the title of the page, or "" to show the report. */
  #replaceReport(name) {
    document.querySelector(".report").hidden = Boolean(name);
    at("controls").role = name ? "main" : null; // a page has one main part
    say(this.title, name);
  }

  #actionsOf(run) {
    const actions = [];
    const link = (text, href) => actions.push(element("a", { className: "button", href }, text));
    const act = (text, work, properties) => actions.push(button(text, work, properties));
    const isActive = ACTIVE.includes(run.state);
    if (run.is_finished || run.saved) {
      const view = viewFor(run.form);
      link(view === "use" ? "Cook with it" : "Talk to it", linkTo(view, this.name));
      link("Compare", `#/compare?left=${encodeURIComponent(this.name)}`);
    }
    if (isActive) act("Stop", () => this.#send("api/stop", { run: this.name }));
    if (!isActive && run.state !== "queued" && run.folder_exists) {
      if (run.is_finished) act("Train longer", () => this.#trainLonger(run));
      else act("Continue", () => this.#send("api/continue", { run: this.name }));
    }
    if (run.is_finished) {
      const query = new URLSearchParams([["base", this.name], ...run.sources.map((file) => ["file", file])]);
      link("Begin again from it", `#/new?${query}`);
      act("Share", () => openShare(this.name));
    }
    if (run.job && !isActive) {
      const text = run.state === "queued" ? "Remove from the queue" : "Dismiss the error";
      act(text, () => this.#send("api/dismiss", { job: run.job }));
    }
    if (run.state === "failed") link("Change its settings", editLink(this.name));
    if (run.folder_exists && !isActive && run.state !== "queued") {
      act("Delete", () => this.#delete(), { className: "danger" });
    }
    return actions;
  }

  async #send(path, body) {
    try {
      const answer = await ask(path, body);
      say(this.problem, "");
      this.#refresh();
      return answer;
    } catch (failure) {
      say(this.problem, failure.message);
      return null;
    }
  }

  /** Ask for the new length of the run, in place of the actions. */
  #trainLonger(run) {
    const half = `${Math.ceil((1.5 * run.seconds) / 60)} minutes`;
    const input = element("input", { type: "text", maxLength: 40, value: half, id: "longer" });
    const form = element("form", { className: "actions" });
    form.append(
      element("label", { htmlFor: "longer" }, "New length of the whole training"),
      input,
      element("button", { type: "submit", className: "primary" }, "Train"),
      button("Cancel", () => form.replaceWith(this.actions)),
    );
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      if (await this.#send("api/continue", { run: this.name, time: input.value })) form.replaceWith(this.actions);
    });
    this.actions.replaceWith(form);
    input.select();
  }

  async #delete() {
    const answer = await this.#send("api/delete", { run: this.name });
    if (!answer) return;
    sessionStorage.setItem("toque.deleted", JSON.stringify({ id: answer.id, run: this.name }));
    location.hash = "#/home";
  }

  async #showLog() {
    if (!this.log.open) return;
    const { log } = await ask(`api/log?run=${encodeURIComponent(this.name)}`).catch(({ message }) => ({ log: message }));
    this.log.querySelector("pre").textContent = log || "The log is empty.";
  }

  /** Tell the user that the run has ended, if the browser may. */
  #notify({ sentence }) {
    if (window.Notification?.permission === "granted") {
      new Notification(`Toque: ${baseName(this.name)}`, { body: sentence, icon: "page/toque.svg" });
    }
  }
}
