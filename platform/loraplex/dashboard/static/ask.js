// Questions before acts: a button with data-ask="ADDRESS" opens the dialog #ask with what the gateway asks there. A form
// with data-question is not sent twice, and says in itself why it was refused: beside the field that a refusal names.

import { explain } from "./app.js";
import { clear, complain, refuse } from "./refusal.js";

const whole = 100;

async function open(button) {
  const dialog = document.getElementById("ask");
  // or what was asked before would open where this cannot be asked
  dialog.replaceChildren();
  await window.htmx.ajax("GET", button.dataset.ask, { target: dialog, swap: "innerHTML" });
  if (!dialog.querySelector("form")) return;
  if (!dialog.open) dialog.showModal();
  prepare(dialog);
}

function prepare(dialog) {
  const back = dialog.querySelector("input[name=back]");
  if (back) back.value = location.pathname;
  sum(dialog);
  (dialog.querySelector("[data-weight], input[name=typed]") ?? dialog.querySelector("[data-close]:not(.close)"))?.focus();
}

// what does not add up is not sent
function sum(dialog) {
  const shown = dialog.querySelector("[data-sum]");
  if (!shown) return;
  const weights = [...dialog.querySelectorAll("[data-weight]")].map((input) => Number(input.value || 0));
  const total = weights.reduce((left, right) => left + right, 0);
  shown.textContent = total === whole ? `Sum: ${total} %` : `Sum: ${total} %, but all of them together are 100 %`;
  shown.classList.toggle("bad-text", total !== whole);
  dialog.querySelector("button[type=submit]").disabled = total !== whole;
}

// what takes a moment says so on its button
function wait(form, isOn) {
  const submit = form.querySelector("button[type=submit]");
  if (!submit) return;
  submit.disabled = isOn;
  if (!submit.dataset.busy) return;
  submit.dataset.text ??= submit.textContent;
  submit.textContent = isOn ? submit.dataset.busy : submit.dataset.text;
}

function readParam(text) {
  try {
    return JSON.parse(text).error.param;
  } catch {
    return null;
  }
}

document.addEventListener("click", (event) => {
  const button = event.target.closest?.("[data-ask]");
  if (button) open(button);
});
document.addEventListener("input", (event) => {
  if (event.target.matches?.("[data-weight]")) sum(document.getElementById("ask"));
});
document.body.addEventListener("htmx:afterSwap", (event) => {
  if (event.detail.target.id === "ask" && event.detail.target.querySelector("form")) prepare(event.detail.target);
  if (event.detail.target.id === "main") document.getElementById("main").focus();
});
document.body.addEventListener("htmx:beforeRequest", (event) => {
  if (event.target.matches?.("[data-question]")) wait(event.target, true);
});
document.body.addEventListener("htmx:afterRequest", (event) => {
  if (event.target.matches?.("[data-question]") && !event.detail.successful) wait(event.target, false);
});
// in place of the browser's balloons, of which it shows one at a time
document.addEventListener(
  "invalid",
  (event) => {
    if (!event.target.form?.matches("[data-question]")) return;
    event.preventDefault();
    complain(event.target);
  },
  true,
);
document.addEventListener("input", (event) => {
  if (event.target.form?.matches?.("[data-question]")) clear(event.target);
});
// a message of the page would lie behind a dialog, and far from the field
for (const kind of ["htmx:responseError", "htmx:sendError"]) {
  document.addEventListener(
    kind,
    (event) => {
      const form = event.target.closest?.("[data-question]");
      if (!form) return;
      event.stopPropagation();
      const { responseText, status } = event.detail.xhr;
      refuse(form, explain(responseText, status), readParam(responseText));
    },
    true,
  );
}
