// The search of the site runs in a worker, which browsers refuse to pages that are opened from the disk: there it runs
// in a hidden frame, with the same messages.  The theme's offline plugin would fetch such a script from the network; a
// file of this name is taken in its place.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(script) {
      super();
      this.waiting = []; // messages from before the script is there
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => this.start(script), { once: true });
      document.body.append(this.frame);
    }

    async start(script) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...scripts) => Promise.all(scripts.map((each) => this.run(each)));
      await this.run(script);
      const waiting = this.waiting;
      this.waiting = null;
      waiting.forEach((data) => this.postMessage(data));
    }

    run(script) {
      return new Promise((done, failed) => {
        const element = this.frame.contentDocument.createElement("script");
        Object.assign(element, { src: new URL(script, location.href).href, onload: done, onerror: failed });
        this.frame.contentDocument.head.append(element);
      });
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data);
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
