// Web workers as frames, for pages opened from a disk: browsers start no worker there, and the search runs in one.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    #frame = document.createElement("iframe");
    #loaded;

    constructor(url) {
      super();
      this.#frame.hidden = true;
      this.#loaded = new Promise((resolve) => this.#frame.addEventListener("load", resolve, { once: true })).then(() => {
        const inside = this.#frame.contentWindow;
        inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
        inside.importScripts = async (...urls) => {
          for (const each of urls) await this.#run(each);
        };
        return this.#run(url);
      });
      document.documentElement.append(this.#frame);
    }

    postMessage(data) {
      void this.#loaded.then(() => this.#frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.#frame.remove();
    }

    #run(url) {
      const inside = this.#frame.contentDocument;
      const script = Object.assign(inside.createElement("script"), { src: url });
      return new Promise((resolve, reject) => {
        script.addEventListener("load", resolve);
        script.addEventListener("error", () => reject(new Error(`${url} cannot be loaded`)));
        inside.documentElement.append(script);
      });
    }
  };
}
