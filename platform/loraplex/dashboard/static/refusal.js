// Why a form was not taken: beside the field that is meant, else above its buttons. Text goes into the page as text.

function say(id, parent, text) {
  const line = document.getElementById(id) ?? document.createElement("p");
  line.id = id;
  line.className = "field-error";
  line.textContent = text;
  if (!line.isConnected) parent.append(line);
  return line;
}

function mark(control, text) {
  const id = `${control.id}-error`;
  const described = (control.getAttribute("aria-describedby") ?? "").split(" ").filter((one) => one && one !== id);
  say(id, control.closest(".field"), text).setAttribute("role", "alert");
  control.setAttribute("aria-invalid", "true");
  control.setAttribute("aria-describedby", [...described, id].join(" "));
}

// what is said of a field ends with the next letter that is typed there
export function clear(control) {
  control.form.querySelector(":scope [data-refused]")?.remove();
  const group = control.closest("[data-param]");
  if (group) document.getElementById(`${group.dataset.param}-error`)?.remove();
  if (!control.hasAttribute("aria-invalid")) return;
  document.getElementById(`${control.id}-error`)?.remove();
  control.removeAttribute("aria-invalid");
  const left = control.getAttribute("aria-describedby").split(" ").filter((one) => one !== `${control.id}-error`);
  if (left.length) control.setAttribute("aria-describedby", left.join(" "));
  else control.removeAttribute("aria-describedby");
}

// what the browser finds wrong with a field, before anything is sent
export function complain(control) {
  if (!control.closest(".field")) return;
  const name = control.labels[0]?.textContent.trim() || control.name;
  const { validity } = control;
  let text = control.validationMessage;
  if (validity.valueMissing) text = `${name} is missing.`;
  else if (validity.patternMismatch && control.dataset.misfit) text = `${name} is ${control.dataset.misfit}.`;
  mark(control, text);
  control.form.querySelector(":invalid:not(fieldset)")?.focus();
}

export function refuse(form, text, param) {
  form.querySelector("[data-refused]")?.remove();
  const control = param ? form.elements.namedItem(param) : null;
  if (control instanceof HTMLElement && control.type !== "hidden" && control.closest(".field")) {
    mark(control, text);
    return control.focus();
  }
  const group = param ? form.querySelector(`[data-param="${CSS.escape(param)}"]`) : null;
  if (group) {
    say(`${param}-error`, group, text).setAttribute("role", "alert");
    return group.querySelector("input")?.focus();
  }
  const notice = document.createElement("p");
  notice.className = "notice bad";
  notice.dataset.refused = "";
  notice.setAttribute("role", "alert");
  notice.textContent = text;
  form.querySelector("[data-foot], .dialog-foot").before(notice);
}
