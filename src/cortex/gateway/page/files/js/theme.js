// Runs before the first paint, so that the page never flashes in the wrong colours.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("cortex.theme");
  } catch {
    // Storage may be blocked: the system's setting applies.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
