"use strict";
// Sort and search of the table of fused nodes.  The page is whole without them: what steers them appears here.
(() => {
  const table = document.getElementById("fusions");
  if (!table) return;
  const bodies = [...table.tBodies];
  const figure = (body, column) => {
    const cell = body.rows[0].cells[column];
    const data = cell.querySelector("data");
    return data ? Number(data.value) : cell.textContent.trim();
  };
  const compare = (a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(b));

  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const up = head.getAttribute("aria-sort") === "descending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const sorted = bodies.toSorted((a, b) => compare(figure(a, column), figure(b, column)) * (up ? 1 : -1));
      table.append(...sorted);
    });
  });

  const search = document.getElementById("search");
  const found = document.getElementById("found");
  const words = new Map(bodies.map((body) => [
    body, [body.rows[0], ...body.querySelectorAll(".nodes")].map((part) => part.textContent).join(" ").toLowerCase(),
  ]));
  search.closest("[hidden]").hidden = false;
  search.addEventListener("input", () => {
    const wanted = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const [body, text] of words) {
      body.hidden = !wanted.every((word) => text.includes(word));
      shown += !body.hidden;
    }
    found.textContent = wanted.length ? `${shown} of ${bodies.length} rows` : "";
  });
})();
