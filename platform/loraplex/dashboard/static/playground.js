// One prompt to one or two models. What they answer goes into the page as text, whatever it is.

import { showToast } from "./app.js";

const SHOWN_DIGEST = "sha256:".length + 12;
const form = document.getElementById("playground");
const [go, stop, heard] = ["go", "stop", "heard"].map((id) => document.getElementById(id));
const panes = [...document.querySelectorAll("[data-pane]")].map((root) => new Pane(root));
let running = null;

function Pane(root) {
  const find = (name) => root.querySelector(`[data-${name}]`);
  const model = root.querySelector("input");
  const [answer, problem, origin] = [find("answer"), find("problem"), find("origin")];
  const figures = Object.fromEntries([...root.querySelectorAll("[data-figure]")].map((one) => [one.dataset.figure, one]));

  this.name = () => model.value.trim();

  this.clear = () => {
    answer.textContent = origin.textContent = "";
    problem.hidden = true;
    for (const figure of Object.values(figures)) figure.textContent = "–";
  };

  this.fail = (message, code) => {
    problem.textContent = code ? `${message} (${code})` : message;
    problem.hidden = false;
  };

  this.ask = async (fields, signal) => {
    this.clear();
    const beganAt = performance.now();
    let firstAt = null, lastAt = null, pieces = 0, usage = null;
    answer.classList.add("running");
    const show = () => {
      const tokens = usage?.completion_tokens ?? pieces;
      figures.tokens.textContent = usage ? `${tokens} · ${usage.prompt_tokens} read` : String(tokens);
      if (firstAt !== null) figures.first.textContent = `${Math.round(firstAt - beganAt)} ms`;
      if (tokens > 1 && lastAt > firstAt) figures.rate.textContent = ((tokens - 1) / ((lastAt - firstAt) / 1000)).toFixed(1);
    };
    try {
      const response = await fetch("/ui/playground/answer", {
        method: "POST",
        headers: { "content-type": "application/json", accept: "text/event-stream" },
        body: JSON.stringify({ ...fields, model: this.name() }),
        signal,
      });
      const told = (name) => response.headers.get(`x-loraplex-${name}`);
      if (response.redirected || response.status === 401) return void location.reload();
      if (!response.ok) {
        const { error } = await response.json();
        return this.fail(error.message, error.code);
      }
      origin.textContent = [told("model"), told("digest")?.slice(0, SHOWN_DIGEST), told("replica")].filter(Boolean).join(" · ");
      origin.title = told("digest") ?? "";
      for await (const event of readEvents(response.body)) {
        if (event.error) return this.fail(event.error.message, event.error.code);
        if (event.usage) usage = event.usage;
        const choice = event.choices?.[0];
        const text = choice?.delta?.content;
        if (text) {
          lastAt = performance.now();
          firstAt ??= lastAt;
          pieces += 1;
          answer.append(text);
          answer.scrollTop = answer.scrollHeight;
        }
        if (choice?.finish_reason) figures.finish.textContent = choice.finish_reason;
        show();
      }
    } catch (error) {
      if (error.name === "AbortError") figures.finish.textContent = "you";
      else this.fail("The answer broke off; the gateway does not answer.");
    } finally {
      answer.classList.remove("running");
    }
  };
}

async function* readEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function readFields() {
  const value = (id) => document.getElementById(id).value;
  const fields = {
    messages: [{ role: "user", content: value("prompt") }],
    max_tokens: Number(value("max-tokens")),
    stream: true,
    stream_options: { include_usage: true },
  };
  if (value("temperature") !== "") fields.temperature = Number(value("temperature"));
  if (value("seed") !== "") fields.seed = Number(value("seed"));
  return fields;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  go.disabled = true;
  stop.disabled = false;
  heard.textContent = "Waiting for answers.";
  const asked = panes.filter((pane) => pane.name());
  panes.forEach((pane) => pane.clear());
  await Promise.all(asked.map((pane) => pane.ask(readFields(), running.signal)));
  running = null;
  go.disabled = false;
  stop.disabled = true;
  heard.textContent = "The answers are complete.";
});
stop.addEventListener("click", () => running?.abort());
document.getElementById("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});
addEventListener("offline", () => showToast("This machine is offline.", "warn"));
