// Tables of the site: a click on a heading sorts (sort.js); the table of every problem has filters and a plot.
const element = (name, attributes = {}, ...children) => {
  const svg = ["svg", "g", "line", "circle", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
};

// A line for each group of problems, and a dot for each problem where its × base is.
const plotOf = (rows, every) => {
  const groups = [...new Set(every.map((row) => row.dataset.group))]
    .map((name) => [name, every.filter((row) => row.dataset.group === name).length])
    .sort((a, b) => b[1] - a[1]).map(([name]) => name);
  const left = 150, width = 900, height = 24, ratios = every.map((row) => Number(row.dataset.ratio)).filter(Boolean);
  const ends = [Math.min(...ratios), Math.max(...ratios)].map(Math.log);
  const x = (ratio) => left + (width - left - 20) * (Math.log(ratio) - ends[0]) / (ends[1] - ends[0]);
  const bottom = groups.length * height;
  const svg = element("svg", { viewBox: `0 0 ${width} ${bottom + 40}`, role: "img", "aria-label": "× base of each problem, by kind" });
  for (const tick of [0.5, 1, 1.5, 2, 3, 5, 10, 20, 30].filter((t) => Math.log(t) >= ends[0] && Math.log(t) <= ends[1])) {
    svg.append(element("line", { x1: x(tick), x2: x(tick), y1: 0, y2: bottom, class: tick === 1 ? "one" : "tick" }));
    svg.append(element("text", { x: x(tick), y: bottom + 14, "text-anchor": "middle" }, `${tick}×`));
  }
  svg.append(element("text", { x: left, y: bottom + 32 }, "← the fastest baseline is faster · attnsweep is faster →"));
  groups.forEach((name, at) => {
    const y = at * height + height / 2, own = rows.filter((row) => row.dataset.group === name && row.dataset.ratio);
    svg.append(element("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, `${name} (${own.length})`));
    for (const [index, row] of own.entries()) {
      const ratio = Number(row.dataset.ratio), lift = (index * 7) % 13 - 6;
      const about = `${row.cells[1].textContent}, ${row.dataset.card}: ${ratio}× ${row.cells[3].textContent}`;
      const dot = { cx: x(ratio), cy: y + lift, r: 3.2, class: ratio >= 1 ? "ahead" : "behind" };
      svg.append(element("circle", dot, element("title", {}, about)));
    }
  });
  return svg;
};

const filtered = (place) => {
  const every = [...place.querySelectorAll("tbody tr")];
  const names = { card: "card", op: "op", mask: "mask", dtype: "dtype", head_dim: "head_dim" };
  const figure = element("figure", { class: "plot" }), said = element("p", { class: "said", role: "status" });
  const controls = element("p", { class: "filters" });
  const chosen = {};
  const show = () => {
    const rows = every.filter((row) => {
      const fits = Object.entries(chosen).every(([name, value]) => !value || row.dataset[name].split(" ").includes(value));
      row.hidden = !fits;
      return fits;
    });
    const logs = rows.map((row) => Math.log(Number(row.dataset.ratio))).filter(Number.isFinite);
    const mean = logs.length ? Math.exp(logs.reduce((a, b) => a + b, 0) / logs.length).toFixed(2) : "–";
    said.textContent = `${rows.length} of ${every.length} problems · ${mean}× the fastest baseline in the geometric mean`;
    figure.replaceChildren(plotOf(rows, every));
  };
  for (const name of Object.keys(names)) {
    const values = [...new Set(every.flatMap((row) => row.dataset[name].split(" ")))];
    values.sort((a, b) => number(a) - number(b) || a.localeCompare(b));
    const options = values.map((value) => element("option", { value }, value));
    const select = element("select", { name }, element("option", { value: "" }, "all"), ...options);
    select.addEventListener("change", () => { chosen[name] = select.value; show(); });
    controls.append(element("label", {}, `${names[name]} `, select));
  }
  place.prepend(figure, controls, said);
  show();
};

const begin = () => {
  document.querySelectorAll("article table:is(:not([class]), .every)").forEach(sortable);
  document.querySelectorAll(".problems").forEach(filtered);
};
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", begin);
else begin();
