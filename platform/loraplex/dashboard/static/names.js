// A field with data-of="ID" offers of its list what belongs to the tenant in that other field: all while it names none.

for (const input of document.querySelectorAll("input[list][data-of]")) {
  const list = document.getElementById(input.getAttribute("list"));
  const tenant = document.getElementById(input.dataset.of);
  const all = [...list.options];
  const tenants = new Set(all.map((option) => option.dataset.tenant));
  const narrow = () => {
    const wanted = tenant.value.trim();
    list.replaceChildren(...all.filter((option) => !tenants.has(wanted) || option.dataset.tenant === wanted));
  };
  tenant.addEventListener("input", narrow);
  narrow();
}
