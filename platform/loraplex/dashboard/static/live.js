// Parts of a page that the gateway keeps current. <div data-live="/ui/live/..."> opens a stream while the page is seen;
// an event named as an element within it (data-part="NAME") replaces that element's content, which the gateway has
// escaped. Other events go to `listen`.

const AGAIN_MS = 5000;
const FOCUSABLE = "a[href], button, summary, [tabindex]";
const listeners = new Map();

export function listen(name, take) {
  listeners.set(name, take);
}

class Live {
  constructor(root) {
    this.root = root;
    this.note = root.querySelector("[data-live-note]");
    this.source = null;
    this.again = null;
    this.lagsSince = null;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    if (!document.hidden) this.open();
  }

  open() {
    if (this.source) return;
    this.source = new EventSource(this.root.dataset.live);
    this.source.onerror = () => {
      this.lag("Nothing new can be read now.");
      if (this.source?.readyState !== EventSource.CLOSED) return;
      // browsers do not ask again where the answer was a refusal
      this.close();
      this.again = setTimeout(() => this.open(), AGAIN_MS);
    };
    this.source.addEventListener("ended", () => location.reload());
    this.source.addEventListener("moved", () => {
      this.close();
      this.say("Other tabs are kept current. Reload this one to follow here.");
    });
    this.source.addEventListener("problem", (event) => (event.data ? this.lag(event.data) : this.catchUp()));
    for (const part of this.root.querySelectorAll("[data-part]")) {
      this.source.addEventListener(part.dataset.part, (event) => this.replace(part, event.data));
    }
    for (const [name, take] of listeners) {
      this.source.addEventListener(name, (event) => take(JSON.parse(event.data)));
    }
  }

  // what is shown grows old from now on
  lag(reason) {
    this.lagsSince ??= new Date().toISOString().slice(11, 19);
    this.say(`${reason} What is shown is of ${this.lagsSince} UTC; the page follows again by itself.`);
  }

  catchUp() {
    this.lagsSince = null;
    this.say("");
  }

  close() {
    clearTimeout(this.again);
    this.source?.close();
    this.source = null;
  }

  replace(part, html) {
    const active = document.activeElement;
    // whoever types here is not disturbed
    if (part.contains(active) && active.matches("input, select, textarea")) return;
    const focused = [...part.querySelectorAll(FOCUSABLE)].indexOf(active);
    const scrolled = [...part.querySelectorAll(".scroll")].map((one) => [one.scrollLeft, one.scrollTop]);
    const opened = [...part.querySelectorAll("details")].map((one) => one.open);
    part.innerHTML = html;
    window.htmx?.process(part);
    part.querySelectorAll(".scroll").forEach((one, index) => one.scrollTo(...(scrolled[index] ?? [0, 0])));
    part.querySelectorAll("details").forEach((one, index) => (one.open = opened[index] ?? false));
    if (focused >= 0) part.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
  }

  say(text) {
    if (!this.note) return;
    this.note.textContent = text;
    this.note.hidden = !text;
  }
}

// after the modules of the page have said what they listen to
addEventListener("DOMContentLoaded", () => document.querySelectorAll("[data-live]").forEach((root) => new Live(root)));
