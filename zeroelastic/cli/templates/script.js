"use strict";

// Drawings: what is pointed at, tapped, or reached with the arrow keys is read out beneath them.
const hint = "Point at a part, tap it, or use the arrow keys to read what it is.";

document.querySelectorAll(".chart").forEach((chart, number) => {
  const marks = [...chart.querySelectorAll("[data-tip]")];
  if (marks.length === 0) return;
  const plot = chart.querySelector(".plot");
  const readout = document.createElement("p");
  readout.className = "readout";
  readout.id = `readout-${number}`;
  readout.textContent = hint;
  readout.setAttribute("aria-live", "polite");
  chart.after(readout);
  chart.tabIndex = 0;
  chart.setAttribute("role", "group");
  chart.setAttribute("aria-label", plot.getAttribute("aria-label"));
  chart.setAttribute("aria-describedby", readout.id);
  let chosen = null;

  const choose = (mark) => {
    if (mark === null || mark === undefined || mark === chosen) return;
    if (chosen !== null) chosen.classList.remove("on");
    chosen = mark;
    chosen.classList.add("on");
    readout.textContent = chosen.dataset.tip;
  };
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return box.left + box.width / 2;
  };
  const inOtherRow = (down) => {
    let row = chosen.parentElement;
    const next = () => (down ? row.nextElementSibling : row.previousElementSibling);
    for (row = next(); row !== null; row = next()) {
      const others = row.classList.contains("row") ? [...row.children] : [];
      if (others.length > 0) {
        const here = middle(chosen);
        const distance = (mark) => Math.abs(middle(mark) - here);
        return others.reduce((best, mark) => (distance(best) > distance(mark) ? mark : best));
      }
    }
    return null;
  };

  for (const event of ["pointerover", "click"]) {
    chart.addEventListener(event, (what) => choose(what.target.closest("[data-tip]")));
  }
  chart.addEventListener("keydown", (key) => {
    const moves = {
      ArrowLeft: () => chosen.previousElementSibling,
      ArrowRight: () => chosen.nextElementSibling,
      ArrowUp: () => inOtherRow(false),
      ArrowDown: () => inOtherRow(true),
      Home: () => marks[0],
      End: () => marks[marks.length - 1],
    };
    if (!(key.key in moves) || key.ctrlKey || key.metaKey || key.altKey) return;
    key.preventDefault();
    choose(chosen === null ? marks[0] : moves[key.key]());
  });
});

// Long tables: rows that contain a text.
document.querySelectorAll(".table").forEach((block) => {
  const rows = [...block.querySelectorAll("tbody tr")];
  if (20 >= rows.length) return;
  const caption = block.querySelector(".caption");
  const input = document.createElement("input");
  input.type = "search";
  input.placeholder = "Filter";
  input.setAttribute("aria-label", `Filter: ${caption.textContent}`);
  input.addEventListener("input", () => {
    const wanted = input.value.toLowerCase();
    for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
  });
  caption.after(input);
});

// The data, as a file.
const save = document.getElementById("save");
save.hidden = false;
save.addEventListener("click", () => {
  const link = document.createElement("a");
  const text = document.getElementById("document").textContent;
  link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  link.download = save.dataset.name;
  link.click();
  URL.revokeObjectURL(link.href);
});
