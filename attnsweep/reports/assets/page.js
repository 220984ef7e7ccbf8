// Draws the page's plots from the data in it (JSON, gzip, base64), with Vega-Lite. What the reader chose is in the
// address, so that a link opens the same view: #problem=2&kernel=flash_fwd_mma&x=BLOCK_M&y=BLOCK_N
const bytes = Uint8Array.from(atob(document.getElementById("data").textContent), (letter) => letter.charCodeAt(0));
const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
const { run, problems: later } = await new Response(unpacked).json();
const failures = [];
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const sans = getComputedStyle(document.body).fontFamily;
const ALONE = "(each candidate)";
const color = (name) => `var(--${name})`;
const figure = (value, digits = 4) => {
  if (value === null || value === undefined) return "–";
  const decimals = Math.min(5, Math.max(0, digits - 1 - Math.floor(Math.log10(value || 1))));
  return value.toFixed(decimals);
};
const config = {
  background: null, font: sans, view: { stroke: null },
  axis: {
    labelColor: color("soft"), titleColor: color("soft"), gridColor: color("line"), domainColor: color("line"),
    tickColor: color("line"), labelFontSize: 11.5, titleFontSize: 11.5, titleFontWeight: 400, labelLimit: 260,
  },
  legend: { labelColor: color("ink"), titleColor: color("soft"), labelFontSize: 11.5, titleFontSize: 11.5, titleFontWeight: 400, symbolStrokeWidth: 0 },
  header: { labelColor: color("soft"), titleColor: color("soft") },
  text: { color: color("ink"), fontSize: 11.5 },
  rule: { color: color("soft") },
};

async function draw(box, spec, label) {
  const options = { renderer: "svg", actions: false, ast: true, tooltip: { theme: "custom" } };
  try {
    await window.vegaEmbed(box, { config, description: label, autosize: { type: "fit-x", contains: "padding" }, width: "container", ...spec }, options);
  } catch (error) {
    failures.push(`${label}: ${error.message}`);
    nothing(box, `This plot failed: ${error.message}`);
  }
}

// Numbers as they are written, never in powers of ten.
const PLAIN = "format(datum.value, '.4~r')";

// Lines of a logarithmic axis: 1, 2 and 5 of each power of ten.
function marks(low, high) {
  const out = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power += 1) {
    for (const digit of [1, 2, 5]) if (digit * 10 ** power >= low && digit * 10 ** power <= high) out.push(Number(`${digit}e${power}`));
  }
  return out;
}

function nothing(box, words) {
  box.replaceChildren(Object.assign(document.createElement("p"), { className: "none", textContent: words }));
}

const narrow = (box) => box.clientWidth < 560;
// A legend of series: beside the plot, or below it where there is no room.
const legend = (box) => (narrow(box) ? { orient: "bottom", columns: box.clientWidth < 320 ? 1 : 2, symbolSize: 70, labelLimit: 150 } : { orient: "right", symbolSize: 70, labelLimit: 180 });
// A legend above the plot, in two columns where one row has no room.
const above = (box, more) => ({ orient: "top", ...(narrow(box) ? { columns: box.clientWidth < 320 ? 1 : 2 } : {}), ...more });
// Shades of series: ours from one end of the palette, baselines from the other.
const shades = (ours, theirs) => [...ours.map((_, index) => color(index ? `s${(index - 1) % 6}` : "accent")), ...theirs.map((_, index) => color(`s${5 - (index % 6)}`))];
// How much longer than its longest bar a plot is, so that the bar's figure is inside.
const room = (box) => 1 + 56 / Math.max(90, box.clientWidth - 190);

// -- one problem -------------------------------------------------------------------------------

// Bars longer than this many times the shortest are cut off, and say so.
const CUT = 8;

function baselines(box, problem) {
  if (!problem.baselines.length) return nothing(box, "This problem has no times.");
  const least = Math.min(...problem.baselines.map((baseline) => baseline.us));
  const most = Math.min(CUT * least, Math.max(...problem.baselines.map((baseline) => baseline.us)));
  const values = problem.baselines.map((baseline) => ({
    ...baseline, shown: Math.min(baseline.us, most), low: Math.min(baseline.low, most), high: Math.min(baseline.high, most),
    end: Math.max(Math.min(baseline.us, most), Math.min(baseline.high, most)), said: `${figure(baseline.us)}${baseline.us > most ? " →" : ""}`,
  }));
  const bounds = Object.entries(problem.bounds).filter(([, us]) => us <= most).map(([unit, us]) => ({ unit, us }));
  // Every line has its name; lines in one place share a label, and neighbours take turns in height.
  const labels = [];
  for (const bound of [...bounds].sort((a, b) => a.us - b.us)) {
    const last = labels.at(-1);
    if (last && bound.us < last.us * 1.02) last.unit += `, ${bound.unit}`;
    else labels.push({ ...bound });
  }
  const tooltip = [
    { field: "who", title: "kernel" }, { field: "us", title: "µs", format: ".4~g" }, { field: "cold", title: "cold L2 µs", format: ".4~g" },
    { field: "eager", title: "host µs", format: ".3~g" }, { field: "config", title: "config" },
  ];
  if (values.some((baseline) => baseline.chained !== null)) tooltip.splice(3, 0, { field: "chained", title: "chained µs", format: ".4~g" });
  const inTime = [...values].sort((a, b) => a.us - b.us).map((baseline) => baseline.who);
  const y = { field: "who", type: "nominal", sort: inTime, title: null, axis: { domain: false, ticks: false, labelColor: color("ink"), labelPadding: 6 } };
  return draw(box, {
    height: 30 * values.length, data: { values },
    layer: [
      {
        mark: { type: "bar", height: 15, cornerRadiusEnd: 2 },
        encoding: {
          y, tooltip,
          x: { field: "shown", type: "quantitative", title: "µs", scale: { domain: [0, most * room(box)], nice: false }, axis: { tickCount: 5 } },
          color: { field: "kind", type: "nominal", legend: null, scale: { domain: ["winner", "kernel", "baseline"], range: ["accent", "s0", "baseline"].map(color) } },
        },
      },
      { mark: { type: "rule", strokeWidth: 1.5, color: color("ink"), tooltip: null }, encoding: { y, x: { field: "low", type: "quantitative" }, x2: { field: "high" } } },
      { mark: { type: "text", align: "left", dx: 6 }, encoding: { y, x: { field: "end", type: "quantitative" }, text: { field: "said" } } },
      {
        data: { values: bounds }, mark: { type: "rule", strokeDash: [4, 3], strokeWidth: 1.3, color: color("bound") },
        encoding: { x: { field: "us", type: "quantitative" }, tooltip: [{ field: "unit", title: "bound" }, { field: "us", title: "µs", format: ".4~g" }] },
      },
      ...[0, 1].map((row) => ({
        data: { values: labels.filter((_, index) => (labels.length - 1 - index) % 2 === row) },
        mark: { type: "text", align: "left", baseline: "bottom", y: -3 - 14 * row, dx: -2, color: color("bound"), tooltip: null },
        encoding: { x: { field: "us", type: "quantitative" }, text: { field: "unit" } },
      })),
    ],
  }, `Time of the best of each family next to the baselines, ${problem.label}`);
}

function effects(box, problem) {
  const rows = (problem.effects?.parameters ?? []).filter((parameter) => parameter.values.some((value) => value.ratio !== null));
  if (!rows.length) { box.closest("figure").remove(); return null; }
  const told = ({ value }) => String(typeof value === "boolean" ? Number(value) : value);
  const label = (row) => (row.percent === null ? row.name : `${row.name}  ${row.percent} %`);
  // Names of variants are too long to stand beside each other: letters stand for them, which a line below tells.
  const long = new Map(rows.filter((row) => row.values.some((value) => told(value).length > 8)).map((row) => [row.name, row.values.map((value) => told(value))]));
  const said = (row, value) => (long.has(row.name) ? String.fromCharCode(97 + long.get(row.name).indexOf(told(value))) : told(value));
  const values = rows.flatMap((row) => row.values.filter((value) => value.ratio !== null).map((value) => ({
    ...value, who: label(row), name: row.name, full: told(value), said: said(row, value), of: `${value.faster} of ${value.pairs}`,
  })));
  const own = rows.flatMap((row) => row.values.filter((value) => value.value === row.reference).slice(0, 1).map((value) => ({ who: label(row), ratio: 1, said: said(row, value) })));
  const key = [...long].map(([name, names]) => `${name}: ${names.map((each, index) => `${String.fromCharCode(97 + index)} ${each}`).join(" · ")}`);
  const shares = problem.effects.parameters.filter((row) => row.percent).map((row) => `${row.name} ${row.percent} %`);
  key.push(`shares: ${[...shares, `the rest, of combinations and noise, ${problem.effects.rest} %`].join(" · ")}`);
  box.after(...key.map((textContent) => Object.assign(document.createElement("p"), { className: "legend", textContent })));
  const all = [...values.map((value) => value.ratio), 1];
  const [low, high] = [Math.min(...all) / 1.04, Math.max(...all) * 1.06];
  const y = { field: "who", type: "nominal", sort: rows.map(label), title: null, axis: { domain: false, ticks: false, labelColor: color("ink"), labelPadding: 6, grid: true } };
  const x = { field: "ratio", type: "quantitative", title: narrow(box) ? "× the best one's time" : "× the time of the best candidate's value", scale: { type: "log", domain: [low, high], nice: false }, axis: { labelExpr: "format(datum.value, '.3~r') + '×'", tickCount: 5 } };
  const tooltip = [{ field: "name", title: "parameter" }, { field: "full", title: "value" }, { field: "ratio", title: "×", format: ".4~g" }, { field: "of", title: "faster, of pairs" }];
  const text = (rows, shade, mark) => ({ data: { values: rows }, mark: { type: "text", fontSize: 10.5, color: color(shade), tooltip: null, ...mark }, encoding: { y, x, text: { field: "said" } } });
  return draw(box, {
    height: 34 * rows.length, data: { values },
    layer: [
      { data: { values: [{ ratio: 1 }] }, mark: { type: "rule", strokeWidth: 1.3, color: color("accent"), tooltip: null }, encoding: { x } },
      { mark: { type: "point", filled: true, opacity: 0.85, color: color("s0") }, encoding: { y, x, tooltip, size: { field: "pairs", type: "quantitative", legend: null, scale: { range: [30, 160] } } } },
      text(values, "soft", { dy: -12 }), text(own, "accent", { dy: 11, dx: 4, align: "left" }),
    ],
  }, `Effect of each parameter of ${problem.effects.kernel}, ${problem.label}`);
}

function frontier(box, problem) {
  if (problem.frontier.length < 2) { box.closest("figure").remove(); return null; }
  const points = problem.frontier;
  const limits = (values) => [Math.min(...values) / 1.1, Math.max(...values) * 1.1];
  const axis = (name, title, format) => {
    const [low, high] = limits(points.map((point) => point[name]));
    return { field: name, type: "quantitative", title, scale: { type: "log", domain: [low, high], nice: false }, axis: { tickCount: 6, labelExpr: format } };
  };
  const [x, y] = [axis("us", "µs", PLAIN), axis("error", "error", "format(datum.value, '.2~e')")];
  const tooltip = [{ field: "who", title: "kernel" }, { field: "us", title: "µs", format: ".4~g" }, { field: "error", format: ".3~e" }, { field: "config" }];
  const kind = (range) => ({ field: "kind", type: "nominal", title: null, legend: above(box), scale: { domain: ["kernel", "baseline"], range } });
  const [shade, shape] = [kind(["accent", "baseline"].map(color)), kind(["circle", "diamond"])];
  return draw(box, {
    height: 260,
    layer: [
      { data: { values: points.filter((point) => point.on) }, mark: { type: "line", interpolate: "step-after", strokeWidth: 1.4, color: color("accent"), tooltip: null }, encoding: { x, y } },
      { data: { values: points }, mark: { type: "point", filled: true, size: 45, opacity: 0.8 }, encoding: { x, y, color: shade, shape, tooltip } },
      { data: { values: points.filter((point) => point.kind === "baseline") }, mark: { type: "text", dy: -9, color: color("soft"), tooltip: null }, encoding: { x, y, text: { field: "who" } } },
    ],
  }, `Time against error, ${problem.label}`);
}

function search(box, problem) {
  const figure = box.closest("figure"), bySeconds = figure.querySelector(".plot + .plot");
  if (problem.search.length < 2) { figure.remove(); return null; }
  const timed = problem.search.every((point) => point.s !== undefined);
  if (!timed) { bySeconds.remove(); figure.querySelector("small .seconds").remove(); }
  const kernels = [...new Set(problem.search.map((point) => point.kernel))];
  const y = { field: "us", type: "quantitative", title: "µs", scale: { zero: false } };
  const tooltip = [{ field: "kernel" }, { field: "trial", title: "candidate" }, ...(timed ? [{ field: "s", title: "seconds" }] : []), { field: "us", title: "best so far, µs", format: ".4~g" }];
  const shade = { field: "kernel", type: "nominal", title: null, legend: kernels.length > 1 ? above(box) : null, scale: { domain: kernels, range: kernels.map((_, index) => color(`s${index % 4}`)) } };
  const against = (plot, field, title) => draw(plot, {
    height: 180, data: { values: problem.search }, encoding: { x: { field, type: "quantitative", title, axis: { tickCount: 8 } }, y, color: shade },
    layer: [{ mark: { type: "line", interpolate: "step-after", strokeWidth: 1.6 } }, { mark: { type: "point", filled: true, size: 28 }, encoding: { tooltip } }],
  }, `Best time so far against ${title}, ${problem.label}`);
  return Promise.all([against(box, "trial", "candidates tried"), ...(timed ? [against(bySeconds, "s", "seconds")] : [])]);
}

function stages(box, problem) {
  if (!problem.staged.length) { box.closest("figure").remove(); return null; }
  const names = [...new Set(problem.staged.flatMap((row) => Object.keys(row.stages)))];
  const values = [], totals = [];
  problem.staged.forEach((row, index) => {
    const label = `${index + 1}  ${row.who}`;
    const parts = Object.entries(row.stages);
    const sum = parts.reduce((total, [, us]) => total + us, 0);
    let from = 0;
    for (const [stage, us] of [...parts, ...(row.us > sum ? [["rest", row.us - sum]] : [])]) {
      values.push({ label, stage, us, from, to: (from += us), config: row.config });
    }
    totals.push({ label, launches: row.launches, us: row.us, end: Math.max(row.us, sum), said: figure(row.us), config: row.config });
  });
  const y = { field: "label", type: "nominal", sort: null, title: null, axis: { domain: false, ticks: false, labelColor: color("ink"), labelPadding: 6 } };
  const most = Math.max(...totals.map((total) => total.end));
  return draw(box, {
    height: 30 * totals.length,
    layer: [
      {
        data: { values }, mark: { type: "bar", height: 15 },
        encoding: {
          y, x: { field: "from", type: "quantitative", title: "µs", scale: { domain: [0, most * room(box)], nice: false }, axis: { tickCount: 5 } }, x2: { field: "to" },
          color: {
            field: "stage", type: "nominal", title: null, legend: above(box, { symbolType: "square" }),
            scale: { domain: [...names, "rest"], range: [...names.map((_, index) => color(`s${index % 6}`)), color("rest")] },
          },
          tooltip: [{ field: "stage" }, { field: "us", title: "µs", format: ".4~g" }, { field: "config", title: "config" }],
        },
      },
      { data: { values: totals }, mark: { type: "tick", color: color("ink"), thickness: 2, height: 21 }, encoding: { y, x: { field: "us", type: "quantitative" }, tooltip: [{ field: "us", title: "whole call µs", format: ".4~g" }, ...(totals.some((total) => total.launches !== null) ? [{ field: "launches", title: "empty launches µs", format: ".3~g" }] : []), { field: "config" }] } },
      { data: { values: totals }, mark: { type: "text", align: "left", dx: 6 }, encoding: { y, x: { field: "end", type: "quantitative" }, text: { field: "said" } } },
    ],
  }, `Stages of the best pipelines, ${problem.label}`);
}

// Candidates of one problem, as objects.
function candidates(index) {
  return run.trials.filter((trial) => trial[0] === index).map(([, kernel, status, us, reason, values]) => ({
    kernel: run.kernels[kernel].name, params: run.kernels[kernel].params, status: run.statuses[status], us,
    reason: reason === null ? "" : run.reasons[reason], values,
  }));
}

// The parameters in which the candidates differ, the one that changes the best time most first.
function differing(rows) {
  const weigh = (column) => {
    const best = new Map();
    for (const row of rows) if (row.us !== null) best.set(row.values[column], Math.min(row.us, best.get(row.values[column]) ?? Infinity));
    const times = [...best.values()];
    return times.length ? Math.max(...times) / Math.min(...times) : 0;
  };
  return rows[0].params.map((name, column) => ({ name, column }))
    .filter(({ column }) => new Set(rows.map((row) => row.values[column])).size > 1)
    .map((param) => ({ ...param, weight: weigh(param.column) })).sort((a, b) => b.weight - a.weight);
}

const words = (row, columns) => columns.map(({ name, column }) => `${name}=${row.values[column] ?? "–"}`).join(" ");
const inOrder = (values) => [...new Set(values)].sort((a, b) => (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));

function options(select, entries, chosen) {
  select.replaceChildren(...entries.map((entry) => new Option(entry, entry, false, entry === chosen)));
  select.value = entries.includes(chosen) ? chosen : entries[0] ?? "";
  select.disabled = entries.length < 2;
  return select.value;
}

function heatmap(box, problem, index, figureElement) {
  const all = candidates(index);
  const choose = Object.fromEntries([...figureElement.querySelectorAll("[data-choose]")].map((select) => [select.dataset.choose, select]));
  const kernels = [...new Set(all.map((row) => row.kernel))];
  const many = (kernel) => all.filter((row) => row.kernel === kernel).length;
  const winner = problem.baselines.find((baseline) => baseline.kind === "winner")?.who.replace("†", "");
  const first = kernels.includes(winner) ? winner : [...kernels].sort((a, b) => many(b) - many(a))[0];
  const kernel = options(choose.kernel, kernels, kernels.includes(state.kernel) ? state.kernel : first);
  const rows = all.filter((row) => row.kernel === kernel);
  const params = rows.length ? differing(rows) : [];
  const names = params.map((param) => param.name);
  const x = options(choose.x, names, names.includes(state.x) ? state.x : names[0]);
  const down = [...names.filter((name) => name !== x), ...(names.length ? [ALONE] : [])];
  const y = options(choose.y, down, down.includes(state.y) ? state.y : down[0]);
  if (!names.length) return nothing(box, `${kernel} has one candidate here: nothing to compare.`);
  const [across, below] = [x, y].map((name) => params.find((param) => param.name === name));
  return below ? grid(box, rows, params, across, below) : strip(box, rows, params, across);
}

function grid(box, rows, params, across, below) {
  const cells = new Map();
  for (const row of rows) {
    const at = [row.values[across.column], row.values[below.column]];
    const key = JSON.stringify(at);
    const cell = cells.get(key) ?? { x: String(at[0] ?? "–"), y: String(at[1] ?? "–"), us: null, timed: 0, tried: 0, ends: {}, config: "" };
    cell.tried += 1;
    if (row.us !== null) {
      cell.timed += 1;
      if (cell.us === null || row.us < cell.us) [cell.us, cell.config] = [row.us, words(row, params)];
    } else cell.ends[row.status] = (cell.ends[row.status] ?? 0) + 1;
    cells.set(key, cell);
  }
  const values = [...cells.values()].map((cell) => {
    const ends = Object.entries(cell.ends).map(([status, count]) => `${count} ${status.replace("_", " ")}`).join(", ");
    return { ...cell, ends, of: `${cell.timed} of ${cell.tried}`, said: cell.us === null ? Object.keys(cell.ends)[0]?.replace("_", " ") ?? "" : figure(cell.us, 3) };
  });
  const times = values.filter((cell) => cell.us !== null).map((cell) => cell.us);
  const [low, high] = [Math.min(...times), Math.max(...times)];
  // Seven steps, each the same ratio: a step is as much slower at the fast end as at the slow one.
  const steps = [1, 2, 3, 4, 5, 6].map((step) => low * (high / low) ** (step / 7));
  const domain = high > low ? steps : [low * 1.0001];
  const range = (prefix) => (high > low ? [0, 1, 2, 3, 4, 5, 6] : [0, 6]).map((step) => color(prefix + step));
  const columns = inOrder(rows.map((row) => row.values[across.column])).map((value) => String(value ?? "–"));
  const lines = inOrder(rows.map((row) => row.values[below.column])).map((value) => String(value ?? "–"));
  const width = Math.max(46, Math.min(150, Math.floor((box.clientWidth - 150) / columns.length)));
  const fits = width * columns.length + 150 <= box.clientWidth;
  box.classList.toggle("wide", !fits);
  const tooltip = [
    { field: "us", title: "fastest µs", format: ".4~g" }, { field: "config", title: "with" }, { field: "of", title: "have a time" }, { field: "ends", title: "the others" },
  ];
  const place = {
    x: { field: "x", type: "nominal", sort: columns, title: across.name, axis: { labelAngle: 0, domain: false, ticks: false, orient: "top", labelColor: color("ink") } },
    y: { field: "y", type: "nominal", sort: lines, title: below.name, axis: { domain: false, ticks: false, labelColor: color("ink"), labelLimit: 230, maxExtent: 260, titlePadding: 10 } },
  };
  const timed = { filter: "datum.us !== null" }, untimed = { filter: "datum.us === null" };
  return draw(box, {
    autosize: { type: "pad" }, width: { step: width }, height: { step: Math.max(38, Math.ceil(9 * below.name.length / lines.length)) }, data: { values },
    layer: [
      { transform: [untimed], mark: { type: "rect", stroke: color("paper"), strokeWidth: 2, fill: color("raised") }, encoding: { ...place, tooltip } },
      { transform: [untimed], mark: { type: "text", color: color("soft"), fontSize: 10.5 }, encoding: { ...place, text: { field: "said" }, tooltip } },
      {
        transform: [timed], mark: { type: "rect", stroke: color("paper"), strokeWidth: 2, cornerRadius: 3 },
        encoding: { ...place, tooltip, color: { field: "us", type: "quantitative", legend: null, scale: { type: "threshold", domain, range: range("h") } } },
      },
      {
        transform: [timed], mark: { type: "text", fontSize: width < 56 ? 10.5 : 12, tooltip: null },
        encoding: {
          ...place, text: { field: "said" }, tooltip, color: { field: "us", type: "quantitative", legend: null, scale: { type: "threshold", domain, range: range("t") } },
          opacity: { value: 1 },
        },
      },
    ],
    resolve: { scale: { color: "independent" } },
  }, `Fastest time for each ${across.name} and ${below.name}`);
}

function strip(box, rows, params, across) {
  box.classList.remove("wide");
  const timed = rows.filter((row) => row.us !== null);
  if (!timed.length) return nothing(box, "No candidate of this family has a time.");
  const values = timed.map((row) => ({ x: String(row.values[across.column] ?? "–"), us: row.us, config: words(row, params) }));
  const columns = inOrder(rows.map((row) => row.values[across.column])).map((value) => String(value ?? "–"));
  const x = { field: "x", type: "nominal", sort: columns, title: across.name, axis: { labelAngle: 0, labelColor: color("ink") } };
  const [low, high] = [Math.min(...timed.map((row) => row.us)), Math.max(...timed.map((row) => row.us))];
  const far = high > 4 * low;
  const scale = far ? { type: "log", domain: [low / 1.25, high * 1.1], nice: false } : { zero: false, domain: [low - 0.12 * (high - low || low), high + 0.05 * (high - low || low)], nice: false };
  const axis = { grid: true, labelExpr: PLAIN, ...(far ? { values: marks(low / 1.25, high * 1.1) } : { tickCount: 6 }) };
  return draw(box, {
    height: 300, data: { values },
    layer: [
      { mark: { type: "tick", thickness: 1.5, opacity: 0.65, color: color("s0"), width: 44 }, encoding: { x, y: { field: "us", type: "quantitative", title: "µs", scale, axis }, tooltip: [{ field: "us", title: "µs", format: ".4~g" }, { field: "config" }] } },
      { mark: { type: "text", dy: 13, fontWeight: 600, color: color("accent"), tooltip: null }, encoding: { x, y: { aggregate: "min", field: "us", type: "quantitative", title: "µs" }, text: { aggregate: "min", field: "us", format: ".4~g" } } },
    ],
  }, `Time of each candidate by ${across.name}`);
}

const SHOWN = 300;

function every(details, index) {
  const all = candidates(index).sort((a, b) => (a.us ?? Infinity) - (b.us ?? Infinity));
  const [search, status] = [details.querySelector("input"), details.querySelector("[role=status]")];
  const [head, body] = [details.querySelector("thead"), details.querySelector("tbody")];
  const lines = all.map((row) => {
    const settings = row.params.map((name, column) => `${name}=${row.values[column] ?? "–"}`).join(" ");
    return { cells: [figure(row.us), row.status.replace("_", " "), row.kernel, settings, row.reason], us: row.us ?? Infinity, text: `${row.kernel} ${row.status} ${settings} ${row.reason}`.toLowerCase() };
  });
  let by = 0, up = true;
  const header = ["µs", "status", "kernel", "config", "why"].map((title, column) => {
    const cell = Object.assign(document.createElement("th"), { className: column ? "" : "r", scope: "col" });
    const button = Object.assign(document.createElement("button"), { textContent: title, title: `Order by ${title}` });
    button.onclick = () => { [by, up] = [column, by === column ? !up : true]; fill(); };
    cell.append(button);
    return cell;
  });
  head.replaceChildren(Object.assign(document.createElement("tr"), {}));
  head.firstChild.append(...header);
  const fill = () => {
    const asked = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = lines.filter((line) => asked.every((word) => line.text.includes(word)));
    found.sort((a, b) => (up ? 1 : -1) * (by ? a.cells[by].localeCompare(b.cells[by], undefined, { numeric: true }) : a.us - b.us));
    header.forEach((cell, column) => cell.setAttribute("aria-sort", column === by ? (up ? "ascending" : "descending") : "none"));
    status.textContent = found.length > SHOWN ? `${found.length} found; the first ${SHOWN} are shown` : `${found.length} found`;
    body.replaceChildren(...found.slice(0, SHOWN).map((line) => {
      const row = document.createElement("tr");
      row.append(...line.cells.map((text, column) => Object.assign(document.createElement("td"), { textContent: text, className: ["r", "", "", "config", ""][column] })));
      return row;
    }));
  };
  search.oninput = fill;
  fill();
}

// -- all problems --------------------------------------------------------------------------------

function scaling(box, figureElement) {
  const choose = Object.fromEntries([...figureElement.querySelectorAll("[data-choose]")].map((select) => [select.dataset.choose, select]));
  // seqlen_q and seqlen_k are one axis where they are equal.
  const shapes = run.problems.map(({ axes, ...problem }) => {
    const { seqlen_q, seqlen_k, ...others } = axes;
    return { ...problem, axes: seqlen_q === seqlen_k ? { ...others, seqlen: seqlen_q } : { ...others, seqlen_q, seqlen_k } };
  });
  const rest = (problem, axis) => Object.entries(problem.axes).filter(([name]) => name !== axis && !(axis === "heads" && name === "heads_kv"))
    .map(([name, value]) => (typeof value === "boolean" ? (value ? name : `not ${name}`) : typeof value === "number" ? `${name} ${value}` : value)).join(", ");
  const groups = new Map();
  for (const axis of ["seqlen", "batch", "seqlen_k", "seqlen_q", "heads", "head_dim"]) {
    const found = new Map();
    for (const problem of shapes) {
      if (!(axis in problem.axes) || !problem.baselines.length) continue;
      const key = rest(problem, axis);
      found.set(key, [...(found.get(key) ?? []), problem]);
    }
    const several = [...found].filter(([, problems]) => new Set(problems.map((problem) => problem.axes[axis])).size > 1);
    if (several.length) groups.set(axis, new Map(several));
  }
  if (!groups.size) { figureElement.remove(); return null; }
  const axes = [...groups.keys()];
  const axis = options(choose.axis, axes, axes.includes(state.axis) ? state.axis : axes[0]);
  const rests = [...groups.get(axis).keys()];
  const fixed = options(choose.rest, rests, rests.includes(state.rest) ? state.rest : rests[0]);
  if (state.unit) choose.unit.value = state.unit;
  const unit = choose.unit.value;
  const problems = groups.get(axis).get(fixed);
  const value = { tflops: (problem, us) => problem.flops / us / 1e6, us: (_, us) => us, per_sequence: (problem, us) => us / problem.axes.batch }[unit];
  const values = problems.flatMap((problem) => problem.baselines.map((baseline) => ({ at: problem.axes[axis], value: value(problem, baseline.us), who: baseline.who, baseline: baseline.kind === "baseline", us: baseline.us, config: baseline.config })));
  const ours = [...new Set(values.filter((row) => !row.baseline).map((row) => row.who))];
  const theirs = [...new Set(values.filter((row) => row.baseline).map((row) => row.who))];
  const heights = values.map((row) => row.value);
  const ticks = unit === "tflops" ? { tickCount: 6 } : { values: marks(Math.min(...heights) / 2, Math.max(...heights) * 2) };
  const names = { tflops: "TFLOP/s", us: "µs a call", per_sequence: "µs a sequence" };
  return draw(box, {
    height: 340, data: { values },
    mark: { type: "line", point: { size: 55, filled: true }, strokeWidth: 2 },
    encoding: {
      x: { field: "at", type: "quantitative", title: axis, scale: { type: "log", base: 2, nice: false, padding: 14 }, axis: { values: inOrder(values.map((row) => row.at)), format: "d", grid: false } },
      y: { field: "value", type: "quantitative", title: names[unit], scale: { type: unit === "tflops" ? "linear" : "log" }, axis: { ...ticks, labelExpr: PLAIN } },
      color: { field: "who", type: "nominal", title: null, scale: { domain: [...ours, ...theirs], range: shades(ours, theirs) }, legend: legend(box) },
      strokeDash: { field: "baseline", type: "nominal", legend: null, scale: { domain: [false, true], range: [[1, 0], [5, 4]] } },
      shape: { field: "who", type: "nominal", title: null, scale: { domain: [...ours, ...theirs] }, legend: legend(box) },
      tooltip: [{ field: "who", title: "kernel" }, { field: "at", title: axis }, { field: "value", title: names[unit], format: ".4~g" }, { field: "us", title: "µs", format: ".4~g" }, { field: "config" }],
    },
  }, `Speed along ${axis}`);
}

function roofline(box) {
  const known = run.problems.filter((problem) => Object.keys(problem.bounds).length && problem.baselines.length);
  if (!known.length) return nothing(box, "The card's rates are unknown, so there are no bounds to draw.");
  const points = known.flatMap((problem) => problem.baselines.map((baseline) => ({
    who: baseline.who, kind: baseline.kind, intensity: problem.flops / problem.bytes, tflops: problem.flops / baseline.us / 1e6, problem: problem.label, us: baseline.us, config: baseline.config,
  })));
  const spread = points.map((point) => point.intensity);
  const [left, right] = [Math.min(...spread) / 3, Math.max(...spread) * 2.2];
  const roofs = new Map();
  for (const problem of known) {
    for (const [unit, us] of Object.entries(problem.bounds)) {
      const [tflops, slope] = [problem.flops / us / 1e6, problem.bytes / us / 1e6];
      // Memory allows so many bytes a second, every other unit so many FLOPs; exp2's per head_dim.
      const of = unit === "exp2" ? `, head_dim ${problem.axes.head_dim}` : "";
      const label = narrow(box) ? `${unit}${of}` : unit === "memory" ? `memory ${figure(slope, 3)} TB/s` : `${unit} ${figure(tflops, 3)} TFLOP/s${of}`;
      roofs.set(label, [left, right].map((at) => ({ label, unit, at, tflops: unit === "memory" ? slope * at : tflops })));
    }
  }
  const flat = [...roofs.values()].filter(([one]) => one.unit !== "memory").map(([one]) => one.tflops);
  const top = Math.max(...flat, ...points.map((point) => point.tflops)) * 1.5;
  // What is slower than this by far would press everything else together.
  const bottom = Math.max(Math.min(...points.map((point) => point.tflops)) / 1.6, top / 400);
  const below = new Set(points.filter((point) => point.tflops < bottom).map((point) => point.who));
  for (const ends of roofs.values()) {
    const slope = ends[0].unit === "memory" ? ends[0].tflops / ends[0].at : 0;
    if (!slope) continue;
    for (const [end, limit] of [[ends[0], bottom], [ends[1], top]]) {
      const at = Math.min(right, Math.max(left, limit / slope));
      if (end === ends[0] ? end.tflops < bottom : end.tflops > top) [end.at, end.tflops] = [at, slope * at];
    }
  }
  const lines = [...roofs.values()].flat();
  // Lines so near each other that their names would lie on each other share one name.
  const height = 400, place = (tflops) => (height * Math.log(top / tflops)) / Math.log(top / bottom);
  const labels = [];
  for (const [from, to] of [...roofs.values()].sort(([, one], [, other]) => other.tflops - one.tflops)) {
    if (from.unit === "memory") { labels.push(from); continue; }
    const near = labels.find((label) => label.unit !== "memory" && Math.abs(place(label.tflops) - place(to.tflops)) < 15);
    if (near) near.label += ` · ${to.label}`;
    else labels.push({ ...to, at: right });
  }
  const ours = [...new Set(points.filter((point) => point.kind !== "baseline").map((point) => point.who))];
  const theirs = [...new Set(points.filter((point) => point.kind === "baseline").map((point) => point.who))];
  const x = (extra = {}) => ({ field: "at", type: "quantitative", scale: { type: "log", domain: [left, right], nice: false }, title: "FLOP per byte", axis: { grid: false, labelExpr: PLAIN, values: marks(left, right) }, ...extra });
  const y = { field: "tflops", type: "quantitative", scale: { type: "log", domain: [bottom, top], nice: false }, title: "TFLOP/s", axis: { labelExpr: PLAIN, values: marks(bottom, top) } };
  const note = below.size ? [{ at: left, tflops: bottom, label: `below this: ${[...below].join(", ")}` }] : [];
  const text = (rows, align, dx, dy) => ({ data: { values: rows }, mark: { type: "text", align, dx, dy, color: color("bound"), tooltip: null }, encoding: { x: x(), y, text: { field: "label" } } });
  return draw(box, {
    height,
    layer: [
      { data: { values: lines }, mark: { type: "line", clip: true, strokeWidth: 1.4, strokeDash: [5, 3], color: color("bound") }, encoding: { x: x(), y, detail: { field: "label" } } },
      text(labels.filter((label) => label.unit !== "memory"), "right", -4, -6),
      text(labels.filter((label) => label.unit === "memory"), "left", 14, 12),
      { data: { values: note }, mark: { type: "text", align: "left", dx: 8, dy: -8, color: color("soft") }, encoding: { x: x(), y, text: { field: "label" } } },
      {
        data: { values: points.filter((point) => point.tflops >= bottom) },
        mark: { type: "point", filled: true, size: 80, opacity: 0.9 },
        encoding: {
          x: x({ field: "intensity" }), y,
          color: { field: "who", type: "nominal", title: null, scale: { domain: [...ours, ...theirs], range: shades(ours, theirs) }, legend: legend(box) },
          shape: { field: "who", type: "nominal", title: null, scale: { domain: [...ours, ...theirs] }, legend: legend(box) },
          tooltip: [{ field: "who", title: "kernel" }, { field: "problem" }, { field: "tflops", title: "TFLOP/s", format: ".4~g" }, { field: "intensity", title: "FLOP/byte", format: ".3~g" }, { field: "us", title: "µs", format: ".4~g" }, { field: "config" }],
        },
      },
    ],
  }, "Roofline of every problem");
}

// -- what is shown -------------------------------------------------------------------------------

const articles = [...document.querySelectorAll("article.problem")];
const choice = document.getElementById("problem-choice");

function remember(changes) {
  Object.assign(state, changes);
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
}

async function show(index) {
  articles.forEach((article, number) => { article.hidden = number !== index; });
  choice.value = String(index);
  const [article, problem] = [articles[index], run.problems[index]];
  if (article.dataset.done) return;
  article.dataset.done = "yes";
  const inline = articles.length - later.length;
  if (index >= inline) article.innerHTML = later[index - inline];
  article.querySelectorAll("table:is(.ranking, .ladder, .reasons)").forEach(sortable);
  const parts = Object.fromEntries([...article.querySelectorAll("[data-plot]")].map((part) => [part.dataset.plot, part]));
  const box = (part) => part.querySelector(".plot");
  const explore = () => heatmap(box(parts.heatmap), problem, index, parts.heatmap);
  parts.heatmap.addEventListener("change", (event) => {
    const name = event.target.dataset.choose;
    if (name === "kernel") { delete state.x; delete state.y; }
    remember({ [name]: event.target.value });
    explore();
  });
  const details = article.querySelector("details.every");
  details.addEventListener("toggle", () => details.open && !details.dataset.filled && (details.dataset.filled = "yes") && every(details, index));
  await Promise.all([baselines(box(parts.baselines), problem), stages(box(parts.stages), problem), effects(box(parts.effects), problem), frontier(box(parts.frontier), problem), search(box(parts.search), problem), explore()]);
}

function asked() {
  const index = Number(new URLSearchParams(location.hash.slice(1)).get("problem") ?? 0);
  return index >= 0 && index < articles.length ? index : 0;
}

async function begin() {
  document.body.classList.remove("plain");
  document.querySelectorAll("#summary table, #gains table").forEach(sortable);
  await show(asked());
  const scale = document.querySelector("[data-plot=scaling]"), roof = document.querySelector("[data-plot=roofline]");
  const along = () => scaling(scale.querySelector(".plot"), scale);
  scale.addEventListener("change", (event) => {
    const name = event.target.dataset.choose;
    if (name === "axis") delete state.rest;
    remember({ [name]: event.target.value });
    along();
  });
  await Promise.all([along(), roofline(roof.querySelector(".plot"))]);
  choice.addEventListener("change", async () => {
    remember({ problem: choice.value });
    await show(Number(choice.value));
  });
  window.addEventListener("hashchange", async () => {
    if (!location.hash.startsWith("#problem=")) return;
    Object.assign(state, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
    await show(asked());
    document.getElementById("problem").scrollIntoView();
  });
  // For whoever looks at the page with a program: that it is drawn, and what failed.
  document.documentElement.dataset.drawn = failures.length ? failures.join("; ") : "yes";
}

begin();
