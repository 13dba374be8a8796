// The evidence of an escalation: as many rows of ranks as were tried, the digest of a file that stays on this machine,
// and the names of adapters that the chosen tenant has.

const ranks = document.querySelector(".ranks");
const maxRanks = Number(ranks.dataset.max);
const template = ranks.querySelector("[data-row]").cloneNode(true);

function number() {
  const rows = [...ranks.querySelectorAll("[data-row]")];
  rows.forEach((row, index) => {
    for (const input of row.querySelectorAll("input")) {
      const kind = input.name.endsWith(".rank") ? "rank" : "value";
      input.name = `evidence.ranks_tried[${index}].${kind}`;
      row.querySelector(`label[for="${input.id}"]`).htmlFor = `${kind}-${index}`;
      input.id = `${kind}-${index}`;
    }
    row.querySelector("[data-remove]").disabled = rows.length === 1;
  });
  ranks.querySelector("[data-add]").disabled = rows.length >= maxRanks;
}

function add() {
  const row = template.cloneNode(true);
  ranks.querySelector("[data-add]").before(row);
  number();
  row.querySelector("input").focus();
}

async function digest(picker) {
  const [file] = picker.files;
  picker.value = "";
  if (!file) return;
  const input = document.getElementById(picker.dataset.digestFor);
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", await file.arrayBuffer()));
  input.value = `sha256:${[...bytes].map((one) => one.toString(16).padStart(2, "0")).join("")}`;
  input.dispatchEvent(new Event("input", { bubbles: true }));
}

ranks.addEventListener("click", (event) => {
  if (event.target.closest("[data-add]")) add();
  const remover = event.target.closest("[data-remove]");
  if (!remover) return;
  remover.closest("[data-row]").remove();
  number();
  ranks.querySelector("[data-add]").focus();
});
number();

for (const picker of document.querySelectorAll("[data-digest-for]")) {
  const button = document.querySelector(`[data-pick="${picker.id}"]`);
  // browsers compute digests on pages over TLS, and of this machine
  if (!crypto.subtle) button.hidden = true;
  button.addEventListener("click", () => picker.click());
  picker.addEventListener("change", () => digest(picker));
}
