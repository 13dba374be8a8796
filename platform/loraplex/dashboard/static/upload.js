// Uploading a folder: what of it is sent, how far it is, and the report. File names go into the page as text.

const form = document.getElementById("upload");
const at = (id) => document.getElementById(id);
const [drop, chosen, send, cancel, progress, bar, sent, result] = ["drop", "chosen", "send", "cancel", "progress", "bar", "sent", "result"].map(at);
const known = form.dataset.known.split(" ");
const maxBytes = Number(form.dataset.max);
const weights = "adapter_model.safetensors";
const pickle = "adapter_model.bin";
let files = [];
let request = null;

function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB"];
  let unit = 0;
  for (; bytes >= 1024 && unit < units.length - 1; unit += 1) bytes /= 1024;
  return `${unit ? bytes.toFixed(1) : bytes} ${units[unit]}`;
}

// as the command line does: optimizer states and logs stay here, nothing of the adapter itself is left out
function isSent(name, names) {
  if (name.startsWith(".")) return false;
  if (name === pickle) return !names.includes(weights);
  return known.includes(name) || name.startsWith("adapter_") || /^tokenizer[\w.-]*\.json$/.test(name);
}

function add(tag, parent, text, className) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function take(found) {
  const names = found.map((file) => file.name);
  files = found.filter((file) => isSent(file.name, names));
  chosen.replaceChildren();
  result.replaceChildren();
  if (!found.length) return say("The folder holds no files.");
  if (!names.some((name) => name.startsWith("adapter_"))) {
    files = [];
    return say("This is no adapter's folder: it holds neither adapter_config.json nor adapter_model.safetensors. Give the folder that PEFT's save_pretrained wrote.");
  }
  const region = add("div", chosen, undefined, "scroll");
  const body = add("tbody", add("table", region, undefined, "table"));
  for (const file of files) {
    const row = add("tr", body);
    add("th", row, file.name, "wrap").scope = "row";
    add("td", row, size(file.size), "num");
  }
  const total = files.reduce((sum, file) => sum + file.size, 0);
  const left = names.length - files.length;
  add("p", chosen, `${files.length} ${files.length === 1 ? "file" : "files"}, ${size(total)}.${left ? ` ${left} ${left === 1 ? "other stays" : "others stay"} here: no adapter needs ${left === 1 ? "it" : "them"}.` : ""}`, "small muted");
  if (total > maxBytes) {
    say(`These are ${size(total)}; ${size(maxBytes)} go in one upload here. Use loraplex adapters push, which sends larger ones in parts.`);
    files = [];
  }
}

function say(text) {
  const notice = add("p", chosen, text, "notice bad");
  notice.setAttribute("role", "alert");
}

async function readDropped({ items, files: plain }) {
  const entries = [...items].map((item) => item.webkitGetAsEntry?.()).filter(Boolean);
  if (!entries.length) return [...plain];
  const folder = entries.length === 1 && entries[0].isDirectory ? await readFolder(entries[0]) : entries;
  return Promise.all(folder.filter((entry) => entry.isFile).map((entry) => new Promise((done, fail) => entry.file(done, fail))));
}

async function readFolder(entry) {
  const reader = entry.createReader();
  const found = [];
  for (;;) {
    // a reader gives at most a hundred at a time
    const some = await new Promise((done, fail) => reader.readEntries(done, fail));
    if (!some.length) return found;
    found.push(...some);
  }
}

function upload() {
  const tenant = form.dataset.tenant || at("tenant").value.trim();
  const address = `/ui/upload/${encodeURIComponent(tenant)}/${encodeURIComponent(at("adapter").value.trim())}`;
  const query = new URLSearchParams({ promote: form.elements.promote.value });
  if (at("dry-run").checked) query.set("dry_run", "true");
  if (at("base")?.value) query.set("base", at("base").value);
  const body = new FormData();
  // what is small is judged first
  for (const file of [...files].sort((left, right) => left.size - right.size)) body.append("files", file, file.name);
  const beganAt = performance.now();
  request = new XMLHttpRequest();
  request.open("POST", `${address}?${query}`);
  request.setRequestHeader("accept", "application/json");
  request.upload.addEventListener("progress", (event) => showSent(event, beganAt));
  request.upload.addEventListener("load", () => {
    bar.removeAttribute("value");
    sent.textContent = "All is sent; it is being checked.";
  });
  request.addEventListener("load", () => finish(request));
  request.addEventListener("abort", () => end("Cancelled; nothing was stored."));
  request.addEventListener("error", () => fail("The connection broke off. Nothing is stored of an upload that is not whole: send it again."));
  begin();
  request.send(body);
}

function showSent({ loaded, total }, beganAt) {
  const seconds = (performance.now() - beganAt) / 1000;
  const left = loaded ? Math.ceil((total - loaded) / (loaded / seconds)) : null;
  bar.value = total ? loaded / total : 0;
  sent.textContent = `${size(loaded)} of ${size(total)}, ${Math.floor((100 * loaded) / total)} %${left && seconds > 1 ? `, about ${left} s left` : ""}`;
}

function begin() {
  result.replaceChildren();
  bar.value = 0;
  sent.textContent = "Sending.";
  progress.hidden = cancel.hidden = false;
  send.disabled = true;
}

function end(text = "") {
  request = null;
  bar.value = 0;
  bar.hidden = Boolean(text);
  sent.textContent = text;
  progress.hidden = !text;
  cancel.hidden = true;
  send.disabled = false;
}

function finish({ status, responseText }) {
  if (status === 401) return location.reload();
  end();
  bar.hidden = false;
  if ((status === 200 || status === 422) && responseText.trimStart().startsWith("<")) {
    // made by the gateway, which has escaped what it shows
    result.innerHTML = responseText;
  } else {
    return fail(explain(responseText, status));
  }
  result.focus();
  result.scrollIntoView({ block: "start" });
}

function fail(text) {
  end();
  const notice = add("p", result, text, "notice bad");
  notice.setAttribute("role", "alert");
  result.focus();
}

function explain(text, status) {
  try {
    const { message, code } = JSON.parse(text).error;
    return `${message} (${code})`;
  } catch {
    return `The gateway answered ${status}.`;
  }
}

for (const button of document.querySelectorAll("[data-pick]")) button.addEventListener("click", () => at(button.dataset.pick).click());
for (const id of ["folder", "files"]) {
  at(id).addEventListener("change", (event) => {
    // of a folder only what lies in itself
    take([...event.target.files].filter((file) => file.webkitRelativePath.split("/").length <= 2));
    event.target.value = "";
  });
}
drop.addEventListener("dragover", (event) => {
  event.preventDefault();
  drop.classList.add("over");
});
drop.addEventListener("dragleave", () => drop.classList.remove("over"));
drop.addEventListener("drop", async (event) => {
  event.preventDefault();
  drop.classList.remove("over");
  take(await readDropped(event.dataTransfer));
});
// what misses the place must not take the page away
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => event.preventDefault());
at("dry-run").addEventListener("change", (event) => (send.textContent = event.target.checked ? "Check" : "Upload"));
cancel.addEventListener("click", () => request?.abort());
form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (request) return;
  if (files.length) return upload();
  if (!chosen.querySelector(".notice")) say("Choose the adapter's folder first.");
});
