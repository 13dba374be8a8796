// Before anything is painted: the theme that was chosen here, if any.
(() => {
  const chosen = localStorage.getItem("loraplex-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
