"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const table = document.getElementById("table");
const body = table.tBodies[0];

// Sort by a column: numbers by their value, what has none last.
for (const [place, head] of [...table.tHead.rows[0].cells].entries()) {
  const button = head.querySelector("button");
  if (!button) continue;
  button.addEventListener("click", () => {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const key = (row) => {
      const cell = row.cells[Math.min(place, row.cells.length - 1)];
      return head.classList.contains("number") ? parseFloat(cell.dataset.value ?? cell.textContent) : cell.textContent;
    };
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (typeof x === "string") return (descending ? -1 : 1) * x.localeCompare(y);
      if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y);
      return (descending ? -1 : 1) * (x - y);
    });
    body.append(...rows);
  });
}

const filter = document.getElementById("filter");
function choose() {
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of body.rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    shown += !row.hidden;
  }
  document.getElementById("count").textContent = `${shown} of ${body.rows.length} rows`;
}
filter.addEventListener("input", choose);
choose();

const [first, second, metric] = ["first", "second", "metric"].map((id) => document.getElementById(id));
for (const [select, names, chosen] of [[first, data.methods, 0], [second, data.methods, 1], [metric, data.metrics, 0]]) {
  for (const [place, name] of names.entries()) {
    select.append(new Option(select === metric ? data.labels[name] : name, name, false, place === chosen));
  }
  select.addEventListener("change", compare);
}

function mean(values) {
  return values.reduce((a, b) => a + b, 0) / values.length;
}

function compare() {
  const lines = [];
  for (const setting of data.settings) {
    const [ours, theirs] = [first, second].map((s) => data.values[metric.value]?.[setting]?.[s.value] ?? {});
    const seeds = Object.keys(ours).filter((seed) => seed in theirs);
    if (!seeds.length) continue;
    const differences = seeds.map((seed) => ours[seed] - theirs[seed]);
    const average = mean(differences);
    const squares = differences.map((d) => (d - average) ** 2).reduce((a, b) => a + b, 0);
    const error = seeds.length > 1 ? Math.sqrt(squares / (seeds.length - 1) / seeds.length) : NaN;
    const line = document.createElement("tr");
    const cells = [setting, mean(seeds.map((s) => ours[s])).toFixed(4), mean(seeds.map((s) => theirs[s])).toFixed(4)];
    cells.push(average.toFixed(4) + (Number.isNaN(error) ? "" : ` ± ${error.toFixed(4)}`), String(seeds.length));
    for (const [place, text] of cells.entries()) {
      const cell = line.insertCell();
      const told = place === 3 && Math.abs(average) > 2 * error;
      (told ? cell.appendChild(document.createElement("strong")) : cell).textContent = text;
      if (place) cell.className = "number";
    }
    lines.push(line);
  }
  document.getElementById("compared").replaceChildren(...lines);
}
compare();
