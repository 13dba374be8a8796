// What every page can do: menu, theme, dialogs, copying, messages. Text from anywhere goes into the page as text.

const MAX_TOASTS = 3;
const TOAST_MS = 6000;

export function showToast(text, tone = "ok") {
  const toast = document.createElement("div");
  toast.className = `toast ${["ok", "warn", "bad", "info"].includes(tone) ? tone : ""}`;
  toast.textContent = text;
  const toasts = document.getElementById("toasts");
  toasts?.append(toast);
  while (toasts?.childElementCount > MAX_TOASTS) toasts.firstElementChild.remove();
  setTimeout(() => toast.remove(), tone === "bad" ? 2 * TOAST_MS : TOAST_MS);
}

export function explain(text, status) {
  try {
    const { message } = JSON.parse(text).error;
    return /[.!?]$/.test(message) ? message : `${message}.`;
  } catch {
    return status ? `The gateway answered ${status}.` : "The gateway does not answer.";
  }
}

function prepareMenu() {
  const button = document.querySelector(".menu-button");
  button?.addEventListener("click", () => {
    const isOpen = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!isOpen));
    document.getElementById("menu").classList.toggle("open", !isOpen);
  });
}

function prepareTheme() {
  const select = document.getElementById("theme");
  if (!select) return;
  select.value = document.documentElement.dataset.theme ?? "";
  select.addEventListener("change", () => {
    if (select.value) {
      localStorage.setItem("loraplex-theme", select.value);
      document.documentElement.dataset.theme = select.value;
    } else {
      localStorage.removeItem("loraplex-theme");
      delete document.documentElement.dataset.theme;
    }
    document.dispatchEvent(new Event("theme"));
  });
}

function handleClick(event) {
  const opener = event.target.closest("[data-open]");
  if (opener) document.getElementById(opener.dataset.open)?.showModal();
  const closer = event.target.closest("[data-close]");
  if (closer) closer.closest("dialog")?.close();
  const copier = event.target.closest("[data-copy]");
  if (copier) copy(copier);
}

async function copy(button) {
  try {
    await navigator.clipboard.writeText(button.dataset.copy);
    showToast("Copied.");
  } catch {
    showToast("This browser does not let pages copy here: select the text instead.", "warn");
  }
}

function tellAge(element) {
  const seconds = Math.round((Date.now() - new Date(element.dateTime)) / 1000);
  const [size, unit] = [[86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]].find(([one]) => Math.abs(seconds) >= one) ?? [1, "second"];
  const format = new Intl.RelativeTimeFormat("en", { numeric: "auto" });
  element.title = `${format.format(-Math.round(seconds / size), unit)} · ${new Date(element.dateTime).toLocaleString()}`;
}

prepareMenu();
prepareTheme();
document.addEventListener("click", handleClick);
document.addEventListener("mouseover", (event) => {
  const time = event.target.closest?.("time[datetime]");
  if (time) tellAge(time);
});
// A part that could not be read says so where it would be, and offers to try again.
function tellFailed({ detail }) {
  const { elt, target, requestConfig, xhr } = detail;
  const text = explain(xhr.responseText, xhr.status);
  if (requestConfig?.verb !== "get" || !target || target.matches("dialog")) return showToast(text, "bad");
  tellRead();
  const notice = document.createElement("div");
  notice.className = "notice bad";
  notice.dataset.failed = "";
  notice.setAttribute("role", "alert");
  const message = document.createElement("p");
  message.textContent = target.id !== "main" && target.textContent.trim() ? `${text} What stands below was found before.` : text;
  const row = document.createElement("p");
  row.className = "row";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "button small-button";
  button.textContent = "Try again";
  button.addEventListener("click", () => {
    const found = target.isConnected ? target : document.getElementById(target.id);
    const told = (name) => elt.getAttribute?.(name) ?? undefined;
    window.htmx.ajax("GET", requestConfig.path, { source: elt.isConnected ? elt : found, target: found, swap: told("hx-swap"), select: told("hx-select") });
  });
  row.append(button);
  notice.append(message, row);
  if (target.id === "main") target.prepend(notice);
  else target.before(notice);
}

function tellRead() {
  document.querySelectorAll("[data-failed]").forEach((one) => one.remove());
}

document.body.addEventListener("htmx:responseError", tellFailed);
document.body.addEventListener("htmx:sendError", tellFailed);
document.body.addEventListener("htmx:afterSwap", tellRead);
// A header `HX-Trigger: {"toast": {"text": ..., "tone": ...}}` of any answer.
document.body.addEventListener("toast", (event) => showToast(event.detail.text ?? event.detail.value ?? "", event.detail.tone));
