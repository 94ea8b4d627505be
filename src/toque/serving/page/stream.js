// A server's token, and the server-sent events of an answer: what every page of Toque's needs.

const TOKEN = "toque.token";

/** Keep the server's token until this tab is closed. */
export function useToken(token) {
  sessionStorage.setItem(TOKEN, token);
}

/** The header that shows the token, if there is one. */
export function tokenHeader() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** The objects of a stream of server-sent events; "[DONE]" ends it. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const piece = await reader.read();
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
