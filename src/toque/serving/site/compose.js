// Writing of a recipe on a sheet. A recipe with an unwanted ingredient is written again.

import { openModel, randomSeed } from "./models.js";
import { ask, write } from "./requests.js";

const MAX_ATTEMPTS = 3;

/** The title of the requested recipe. */
export const titleOf = ({ style, dish }) => [style, dish].filter(Boolean).join(" ");

/** Write the requested recipe with the model of the sheet, and score it. */
export async function compose(sheet, request, signal) {
  await openModel(sheet.model, signal);
  const prompt = await promptFor(sheet, request, signal);
  const attempts = request.temperature > 0 && request.avoid.length ? MAX_ATTEMPTS : 1;
  for (let attempt = 1; ; attempt++) {
    await stream(sheet, { prompt, model: sheet.model, temperature: request.temperature }, signal);
    const { avoided } = await score(sheet, request, prompt, signal, attempt < attempts);
    if (!avoided.length) return;
    const named = avoided.join(" and ");
    if (attempt === attempts) {
      sheet.notice(`The recipe still contains ${named}. Leave it out, or write another one.`);
      return;
    }
    sheet.restart(`The recipe contained ${named}. Writing another one, ${attempt + 1} of ${attempts} …`);
  }
}

/** Show an earlier text, and score it again. */
export async function recall(sheet, request, text) {
  sheet.append(text);
  sheet.end();
  await openModel(sheet.model);
  await score(sheet, request, await promptFor(sheet, request));
}

async function promptFor({ model }, { dish, style, ingredients }, signal) {
  return (await ask("api/prompt", { model, dish, style, ingredients }, signal)).prompt;
}

async function stream(sheet, request, signal) {
  const start = performance.now();
  for await (const piece of write({ ...request, seed: randomSeed() }, signal)) {
    if (piece.text) sheet.append(piece.text);
    else sheet.end({ ...piece, seconds: (performance.now() - start) / 1000 });
  }
}

/** Score the text of a sheet and show the scores, unless the recipe will be written again. */
async function score(sheet, request, prompt, signal, canRepeat = false) {
  const { text, model } = sheet;
  const verdict = await ask("api/score", { prompt, text, avoid: request.avoid }, signal);
  if (canRepeat && verdict.avoided.length) return verdict;
  const classes = ask("api/classes", { model, title: titleOf(request), text }, signal);
  await sheet.showScores(verdict, classes);
  return verdict;
}
