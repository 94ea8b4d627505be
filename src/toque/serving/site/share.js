// Export of a model: the format, the model card, and the download.

import { button, element } from "./dom.js";
import { encodePath } from "./format.js";
import { ask } from "./requests.js";

const FORMATS = [
  ["gguf", "For apps such as Ollama and LM Studio (GGUF file)"],
  ["hf", "For Python programs and servers (Hugging Face folder)"],
];
const ADAPTER = ["adapter", "Only the adapter, for peft"];

/** Open the dialog for a model. */
export async function openShare(model) {
  const format = element("select", { id: "share-format" }, ...FORMATS.map(([value, text]) => new Option(text, value)));
  const result = element("div", { role: "status" });
  const card = element("pre", {}, "Reading the model card …");
  const dialog = element(
    "dialog",
    { className: "share" },
    element("h2", {}, "Share the model"),
    element("div", { className: "field" }, element("label", { htmlFor: "share-format" }, "Format"), format),
    element("details", {}, element("summary", {}, "Model card"), card),
    result,
    element(
      "p",
      { className: "actions" },
      button("Export", (self) => void run(self), { className: "primary" }),
      button("Close", () => dialog.close()),
    ),
  );
  dialog.setAttribute("aria-label", "Share the model");
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();

  async function run(self) {
    self.disabled = true;
    result.replaceChildren(element("p", { className: "waiting" }, "Writing the model and comparing it with the original …"));
    try {
      const { name, message } = await ask("api/export", { model, format: format.value });
      const link = element("a", { className: "button", href: `api/export/${encodePath(name)}.zip`, download: "" }, "Download as a zip file");
      result.replaceChildren(element("p", {}, message), element("p", {}, link));
    } catch (failure) {
      result.replaceChildren(element("p", { className: "problem" }, failure.message));
    }
    self.disabled = false;
  }

  const answer = await ask(`api/card?model=${encodeURIComponent(model)}`).catch(({ message }) => ({ card: message }));
  card.textContent = answer.card || "This model has no card.";
  if (answer.has_adapter) format.append(new Option(ADAPTER[1], ADAPTER[0]));
}
