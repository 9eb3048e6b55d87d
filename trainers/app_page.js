() => {
  // "/" goes to the search box; arrow keys walk over the results, as in a grid.
  const box = () => document.querySelector("#moemb-box textarea");
  const cards = () => [...document.querySelectorAll(".moemb-results .card > a")].filter((card) => card.offsetParent);
  const typing = (element) => element && (element.isContentEditable || /^(INPUT|TEXTAREA|SELECT)$/.test(element.tagName));
  // Gradio calls the button "Submit" whatever stands on it; a voice must be able to say what an eye reads.
  const named = setInterval(() => {
    const button = document.querySelector("#moemb-box .submit-button");
    if (!button) return;
    button.setAttribute("aria-label", "Search");
    box()?.setAttribute("aria-label", "Search by words; attach a picture, a PDF or a clip with the button before");
    clearInterval(named);
  }, 100);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const active = document.activeElement;
    if (event.key === "/" && !typing(active)) {
      event.preventDefault();
      box()?.focus();
      return;
    }
    if (event.key === "ArrowDown" && active === box() && !active.value.includes("\n") && cards().length) {
      event.preventDefault();
      cards()[0].focus();
      return;
    }
    const all = cards();
    const here = all.indexOf(active);
    if (here < 0) return;
    const top = all[0].getBoundingClientRect().top;
    const columns = all.filter((card) => Math.abs(card.getBoundingClientRect().top - top) < 4).length || 1;
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
    if (!(event.key in steps)) return;
    event.preventDefault();
    const next = here + steps[event.key];
    if (next < 0 && event.key === "ArrowUp") box()?.focus();
    else all[Math.max(0, Math.min(all.length - 1, next))]?.focus();
  });
}
