// Service worker: stores all files of this page, so that it opens without a network.

const VERSION = "{{ version }}";
const FILES = {{ files }};
const PAGE = `toque ${registration.scope} `;
const NAME = PAGE + VERSION;

addEventListener("install", (event) => {
  skipWaiting();
  event.waitUntil(caches.open(NAME).then((cache) => cache.addAll(FILES)));
});

addEventListener("activate", (event) => {
  event.waitUntil(removeOthers().then(() => clients.claim()));
});

addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(answer(event.request));
});

async function answer(request) {
  const stored = await (await caches.open(NAME)).match(request, { ignoreSearch: true });
  return stored ?? fetch(request);
}

/** Remove the files of other versions of this page. Other pages of the same host keep theirs. */
async function removeOthers() {
  const names = await caches.keys();
  return Promise.all(names.filter((name) => name.startsWith(PAGE) && name !== NAME).map((name) => caches.delete(name)));
}
