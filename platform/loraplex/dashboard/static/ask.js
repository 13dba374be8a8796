// Questions before acts: a button with data-ask="ADDRESS" opens the dialog #ask with what the gateway asks there. A form
// with data-question is not sent twice, and says in itself why it was refused.

import { explain } from "./app.js";

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

function refuse(form, text) {
  const notice = form.querySelector("[data-refused]") ?? document.createElement("p");
  notice.className = "notice bad";
  notice.dataset.refused = "";
  notice.setAttribute("role", "alert");
  notice.textContent = text;
  form.querySelector(".dialog-foot").before(notice);
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
  const submit = event.target.querySelector?.("button[type=submit]");
  if (event.target.matches?.("[data-question]") && submit) submit.disabled = true;
});
document.body.addEventListener("htmx:afterRequest", (event) => {
  const submit = event.target.querySelector?.("button[type=submit]");
  if (event.target.matches?.("[data-question]") && submit && !event.detail.successful) submit.disabled = false;
});
// a message of the page would lie behind the dialog
document.addEventListener(
  "htmx:responseError",
  (event) => {
    const form = event.target.closest?.("dialog [data-question]");
    if (!form) return;
    event.stopPropagation();
    refuse(form, explain(event.detail.xhr.responseText, event.detail.xhr.status));
  },
  true,
);
