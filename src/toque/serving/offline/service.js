// Service worker: stores all files of this page, so that it opens without a network.

const VERSION = "{{ version }}";
const FILES = {{ files }};

addEventListener("install", (event) => {
  skipWaiting();
  event.waitUntil(caches.open(VERSION).then((cache) => cache.addAll(FILES)));
});

addEventListener("activate", (event) => {
  event.waitUntil(removeOthers().then(() => clients.claim()));
});

addEventListener("fetch", (event) => {
  if (event.request.method === "GET") event.respondWith(answer(event.request));
});

async function answer(request) {
  const stored = await (await caches.open(VERSION)).match(request, { ignoreSearch: true });
  return stored ?? fetch(request);
}

/** Remove the files of other versions of this page. Other pages of the same address keep theirs. */
async function removeOthers() {
  const prefix = VERSION.slice(0, VERSION.lastIndexOf("-") + 1);
  const names = await caches.keys();
  return Promise.all(names.filter((name) => name.startsWith(prefix) && name !== VERSION).map((name) => caches.delete(name)));
}
