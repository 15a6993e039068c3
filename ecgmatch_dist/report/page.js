// A click on a column's name sorts the table. Folded parts open when a link leads into them, and for printing.
document.addEventListener("click", (event) => {
  const button = event.target.closest("thead button");
  if (!button) return;
  const head = button.closest("th"), table = head.closest("table"), body = table.tBodies[0];
  const column = head.cellIndex, down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const key = (row) => {
    const cell = row.cells[column], value = cell.dataset.value;
    return value === undefined ? cell.textContent.trim() : value === "" ? NaN : Number(value);
  };
  const compare = (a, b) => {
    if (typeof a === "string" || typeof b === "string") return String(a).localeCompare(String(b), undefined, { numeric: true });
    return a - b;
  };
  const rows = Array.from(body.rows, (row) => [key(row), row]);
  const known = rows.filter(([k]) => k === k && k !== "–"), unknown = rows.filter(([k]) => !(k === k && k !== "–"));
  known.sort(([a], [b]) => (down ? -compare(a, b) : compare(a, b)));
  body.append(...[...known, ...unknown].map(([, row]) => row));
});
addEventListener("hashchange", () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let part = target?.closest("details"); part; part = part.parentNode.closest("details")) part.open = true;
  target?.scrollIntoView();
});
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((part) => (part.open = true)));
