// Composing: a model writes a recipe on a sheet, again where it names what is to be left out.

import { ask, write } from "./requests.js";

const MOST_ATTEMPTS = 3;

/** The dish as it is asked for and shown. */
export const titleOf = ({ style, dish }) => [style, dish].filter(Boolean).join(" ");

/** Have the sheet's model write what is requested, and judge it. */
export async function compose(sheet, request, signal) {
  const prompt = await promptFor(sheet, request, signal);
  const attempts = request.temperature > 0 && request.avoid.length ? MOST_ATTEMPTS : 1;
  for (let attempt = 1; ; attempt++) {
    await stream(sheet, { prompt, model: sheet.model, temperature: request.temperature }, signal);
    const { avoided } = await judge(sheet, request, prompt, signal, attempt < attempts);
    if (!avoided.length) return;
    const named = avoided.join(" and ");
    if (attempt === attempts) {
      sheet.notice(`It still names ${named}. Leave it out, or ask again.`);
      return;
    }
    sheet.restart(`It named ${named}. Writing another, ${attempt + 1} of ${attempts} …`);
  }
}

/** Show a text of earlier, judged anew. */
export async function recall(sheet, request, text) {
  sheet.append(text);
  sheet.end();
  await judge(sheet, request, await promptFor(sheet, request));
}

async function promptFor({ model }, { dish, style, ingredients }, signal) {
  return (await ask("api/prompt", { model, dish, style, ingredients }, signal)).prompt;
}

async function stream(sheet, request, signal) {
  const began = performance.now();
  const seed = Math.floor(Math.random() * 2 ** 31);
  for await (const piece of write({ ...request, seed }, signal)) {
    if (piece.text) sheet.append(piece.text);
    else sheet.end({ ...piece, seconds: (performance.now() - began) / 1000 });
  }
}

/** The verdict on what a sheet holds, shown on it; not one that another attempt will follow. */
async function judge(sheet, request, prompt, signal, isFollowed = false) {
  const { text, model } = sheet;
  const verdict = await ask("api/score", { prompt, text, avoid: request.avoid }, signal);
  if (isFollowed && verdict.avoided.length) return verdict;
  const classes = ask("api/classes", { model, title: titleOf(request), text }, signal);
  await sheet.judge(verdict, classes);
  return verdict;
}
