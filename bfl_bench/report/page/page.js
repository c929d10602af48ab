"use strict";
(async () => {
  const byId = (id) => document.getElementById(id);
  const packed = Uint8Array.from(atob(byId("data").textContent), (character) => character.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = await new Response(stream).json();
  const SVG = byId("space").namespaceURI;
  const DASHES = ["", "7 3", "2 3", "9 3 2 3", "14 4", "5 2 1 2 1 2", "1 5"];
  const CIRCLE = "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0";
  const SHAPES = [CIRCLE, "M-4.5 -4.5h9v9h-9z", "M0 -6L5.5 4.5h-11z", "M0 -6.5L6 0L0 6.5L-6 0z"];
  const FIRST = 12; // panels of a kind before one asks for more
  const MOST_BANDS = 20, MOST_DOTS = 2000, MOST_STRIPS = 50, MOST_NAMES = 200; // that a chart has room for
  const state = { words: [], hidden: new Set(), metric: data.metric, log: false, expanded: new Set() };

  // Elements

  function add(parent, name, attributes = {}, text = null) {
    const isSvg = parent instanceof SVGElement || name === "svg";
    const element = isSvg ? document.createElementNS(SVG, name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== null) element.textContent = text;
    parent.append(element);
    return element;
  }

  function addSvg(parent, width, height, label) {
    return add(parent, "svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
  }

  const colourOf = (row) => `var(--c${row.colour})`;
  const dashOf = (row) => ({ "stroke-width": 2, "stroke-dasharray": DASHES[row.dash] });
  const strokeOf = (row) => ({ stroke: colourOf(row), fill: "none", ...dashOf(row) });
  const shapeOf = (row) => ({ d: SHAPES[row.dash % SHAPES.length], fill: colourOf(row) });
  const labelOf = (name) => data.labels[name];
  const title = (element, text) => add(element, "title", {}, text);

  function addSwatch(parent, row) {
    const svg = add(parent, "svg", { viewBox: "0 0 30 14", width: 30, height: 14, "aria-hidden": "true" });
    add(svg, "line", { x1: 0, x2: 30, y1: 7, y2: 7, ...strokeOf(row) });
    add(svg, "path", { ...shapeOf(row), transform: "translate(15 7) scale(0.8)" });
  }

  // Numbers

  function format(value) {
    for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
      if (Math.abs(value) >= size) return `${Number((value / (unit === "k" ? 1e3 : size)).toPrecision(4))}${unit}`;
    }
    return String(Number(value.toPrecision(4)));
  }

  function describe([mean, low, high]) {
    return low === undefined ? format(mean) : `${format(mean)} (${format(low)} to ${format(high)})`;
  }

  function ticks([low, high], number, log) {
    const found = [];
    if (log) {
      const digits = high / low > 50 ? [1] : [1, 2, 5];
      for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
        for (const digit of digits) found.push(digit * 10 ** power);
      }
      const inside = found.filter((value) => value >= low && value <= high);
      if (inside.length > 1) return inside;
      found.length = 0;
    }
    const rough = (high - low) / Math.max(number, 1);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((digit) => digit * power >= rough * 0.999);
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) {
      found.push(Number((k * step).toPrecision(12)));
    }
    return found;
  }

  function extent(values) {
    let low = Infinity, high = -Infinity;
    for (const value of values) [low, high] = [Math.min(low, value), Math.max(high, value)];
    return [low, high];
  }

  function padded(values, log) {
    const [low, high] = extent(values);
    if (log) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.06, high * (high / low) ** 0.06];
    const pad = (high - low) * 0.05 || Math.abs(high) * 0.05 || 1;
    return [low - (low >= 0 && low < pad ? low : pad), high + pad];
  }

  function makeScale(domain, from, to, log) {
    const place = log ? Math.log10 : (value) => value;
    const [low, high] = domain.map(place);
    const scale = (value) => from + ((place(value) - low) / (high - low)) * (to - from);
    scale.ticks = ticks(domain, Math.abs(to - from) / (from < to ? 75 : 38), log);
    return scale;
  }

  /** Axes with grid lines; the scales of the two directions. */
  function addAxes(svg, box, xDomain, yDomain, names, logs = {}) {
    const x = makeScale(xDomain, box.left, box.right, logs.x);
    const y = yDomain && makeScale(yDomain, box.bottom, box.top, logs.y);
    if (names.whole) x.ticks = x.ticks.filter(Number.isInteger);
    for (const value of y ? y.ticks : []) {
      add(svg, "line", { class: "gridline", x1: box.left, x2: box.right, y1: y(value), y2: y(value) });
      add(svg, "text", { x: box.left - 7, y: y(value) + 4, "text-anchor": "end" }, format(value));
    }
    for (const value of x.ticks) {
      add(svg, "line", { class: "gridline", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom });
      add(svg, "text", { x: x(value), y: box.bottom + 16, "text-anchor": "middle" }, format(value));
    }
    add(svg, "line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    add(svg, "text", { x: (box.left + box.right) / 2, y: box.bottom + 33, "text-anchor": "middle" }, names.x);
    add(svg, "text", { x: 0, y: box.top - 10 }, names.y);
    return [x, y];
  }

  // Which rows

  const matches = (row) => state.words.every((word) => `${row.find} ${row.name}`.toLowerCase().includes(word));
  const shown = () => data.rows.filter((row) => !row.absent && matches(row) && !state.hidden.has(row.index));

  /** Redraw without the page jumping: the new content replaces the old one at once. */
  function redraw(id, draw) {
    const place = byId(id), content = document.createElement("div");
    draw(content, place.clientWidth);
    place.replaceChildren(content);
  }

  function remark(content, text) {
    add(content, "p", { class: "remark" }, text);
  }

  function remarkLacking(content, rows, reason) {
    if (!rows.length) return;
    const names = rows.slice(0, 5).map((row) => row.name).join("; ") + (rows.length > 5 ? "; ..." : "");
    remark(content, `Not shown, ${reason}: ${names}`);
  }

  /** Small charts side by side; `least` is the width that one needs. */
  function addPanels(content, width, least, id, items, draw) {
    const columns = Math.max(1, Math.min(Math.floor((width + 16) / (least + 16)), Math.max(items.length, 3)));
    const own = Math.floor((width - 16 * (columns - 1)) / columns);
    const panels = add(content, "div", { class: "panels" });
    for (const item of firstOf(content, id, items, FIRST)) {
      draw(add(panels, "figure", { style: `width:${own}px` }), own, item);
    }
  }

  /** The first items of a kind, with a button for the others. */
  function firstOf(content, id, items, most) {
    if (items.length <= most || state.expanded.has(id)) return items;
    const place = add(content, "div", { class: "more" });
    const button = add(place, "button", { type: "button" }, `show all ${items.length}`);
    button.addEventListener("click", () => { state.expanded.add(id); drawCharts(); });
    return items.slice(0, most);
  }

  // Charts

  function drawCurves(content, width) {
    const clean = (value) => (state.log ? value.map((part) => (part > 0 ? part : value[0])) : value);
    const lines = [];
    for (const row of shown()) {
      const values = row.curves.values[state.metric] || [];
      const points = row.curves.rounds
        .map((round, i) => ({ round, value: values[i] && clean(values[i]) }))
        .filter(({ value }) => value && (!state.log || value[0] > 0));
      if (points.length) lines.push({ row, points });
    }
    if (!lines.length) return remark(content, "No row to show.");
    const all = lines.flatMap((line) => line.points);
    const [first, last] = extent(all.map((point) => point.round));
    const height = width < 600 ? 300 : 420;
    const svg = addSvg(content, width, height, `${labelOf(state.metric)} over the rounds`);
    const box = { left: 52, right: width - 12, top: 26, bottom: height - 40 };
    const xDomain = first === last ? [first - 1, last + 1] : [first, last];
    const yDomain = padded(all.flatMap((point) => point.value), state.log);
    const names = { x: "round", y: labelOf(state.metric), whole: true };
    const [x, y] = addAxes(svg, box, xDomain, yDomain, names, { y: state.log });
    const place = ({ round, value }, k) => `${x(round).toFixed(1)},${y(value[k] ?? value[0]).toFixed(1)}`;
    const path = (points, k) => points.map((point) => place(point, k));
    const banded = lines.filter(({ points }) => points.some((point) => point.value.length > 1));
    for (const { row, points } of banded.length <= MOST_BANDS ? banded : []) {
      const outline = [...path(points, 1), ...path(points, 2).reverse()].join(" ");
      const style = { fill: colourOf(row), "fill-opacity": banded.length > 6 ? 0.07 : 0.14 };
      add(svg, "polygon", { class: "band", "data-row": row.index, points: outline, ...style });
    }
    if (banded.length > MOST_BANDS) {
      remark(content, `The spread over seeds is drawn for up to ${MOST_BANDS} rows: filter, or choose fewer.`);
    }
    const dotted = all.length <= MOST_DOTS;
    for (const { row, points } of lines) {
      const group = add(svg, "g", { class: "line", "data-row": row.index });
      title(add(group, "polyline", { points: path(points, 0).join(" "), ...strokeOf(row) }), row.name);
      for (const { round, value } of dotted && points.length <= 60 ? points : points.slice(-1)) {
        const r = points.length <= 30 ? 3 : 2;
        const dot = add(group, "circle", { cx: x(round), cy: y(value[0]), r, fill: colourOf(row) });
        title(dot, `${row.name}\nround ${round}: ${labelOf(state.metric)} ${describe(value)}, seeds: ${row.seeds}`);
      }
    }
  }

  function drawReliability(content, width) {
    const rows = shown(), there = rows.filter((row) => row.reliability.length);
    addPanels(content, width, width < 600 ? 150 : 200, "reliability", there, (figure, own, row) => {
      const ece = row.final.ece ? `${labelOf("ece")} ${row.final.ece[0].toFixed(4)}` : "";
      const caption = add(figure, "figcaption", {}, row.name);
      add(caption, "small", {}, ece);
      const side = Math.min(own, 280), top = 36, svg = addSvg(figure, side, side + top, `reliability of ${row.name}`);
      const box = { left: 46, right: side - 6, top: top + 8, bottom: side - 40 + top };
      const [x, y] = addAxes(svg, box, [0, 1], [0, 1], { x: "confidence", y: "" });
      const turned = `translate(10 ${(box.top + box.bottom) / 2}) rotate(-90)`;
      add(svg, "text", { transform: turned, "text-anchor": "middle" }, "accuracy");
      const most = Math.max(...row.reliability.map((bin) => bin[2])), num = row.reliability.length;
      const total = row.reliability.reduce((sum, bin) => sum + bin[2], 0);
      row.reliability.forEach(([confidence, accuracy, count], i) => {
        if (!count) return;
        const wide = x(1 / num) - x(0) - 1;
        const place = { "data-row": row.index, x: x(i / num) + 0.5, width: wide, fill: colourOf(row) };
        const text = `confidence ${format(confidence)}, accuracy ${format(accuracy)}, ${count} of ${total} predictions`;
        const tall = y(0) - y(accuracy), share = (count / most) * (top - 8);
        title(add(svg, "rect", { ...place, y: y(accuracy), height: tall, "fill-opacity": 0.75 }), text);
        title(add(svg, "rect", { ...place, y: top - share, height: share, "fill-opacity": 0.35 }), text);
      });
      add(svg, "line", { class: "gridline", x1: x(0), y1: top, x2: x(1), y2: top });
      add(svg, "line", { class: "diagonal", x1: x(0), y1: y(0), x2: x(1), y2: y(1) });
      const after = row.calibrated.filter((bin) => bin[2]);
      const points = after.map(([confidence, accuracy]) => `${x(confidence)},${y(accuracy)}`).join(" ");
      if (after.length) add(svg, "polyline", { class: "after", "data-row": row.index, points });
      for (const [confidence, accuracy, count] of after) {
        const dot = add(svg, "circle", { class: "after", "data-row": row.index, cx: x(confidence), cy: y(accuracy), r: 3 });
        title(dot, `after temperature: confidence ${format(confidence)}, accuracy ${format(accuracy)}, ${count} predictions`);
      }
    });
    remarkLacking(content, rows.filter((row) => !row.reliability.length && row.seeds), "runs without reliability.csv");
    if (!there.length) remark(content, "No row to show.");
  }

  function drawUncertainty(content, width) {
    const rows = shown();
    const kinds = [
      { name: "risk over coverage", x: "coverage", of: (row) => row.risk.risk },
      { name: "accuracy under shift", x: "severity", of: (row) => row.shift.accuracy },
      { name: "negative log-likelihood under shift", x: "severity", of: (row) => row.shift.nll },
      { name: "calibration error under shift", x: "severity", of: (row) => row.shift.ece },
    ].filter((kind) => rows.some(kind.of));
    const foreign = rows.filter((row) => row.entropy.test);
    if (!kinds.length && !foreign.length) return remark(content, "No row to show.");
    addPanels(content, width, 320, "uncertainty", kinds, (figure, own, kind) => {
      add(figure, "figcaption", {}, kind.name);
      const there = rows.filter(kind.of), height = 260, svg = addSvg(figure, own, height, kind.name);
      const box = { left: 46, right: own - 8, top: 10, bottom: height - 40 };
      const points = there.flatMap(kind.of), names = { x: kind.x, y: "", whole: kind.x === "severity" };
      const spread = extent(points.map((point) => point[0])), yDomain = padded(points.map((point) => point[1]));
      const xDomain = spread[0] === spread[1] ? [spread[0] - 1, spread[1] + 1] : spread;
      const [x, y] = addAxes(svg, box, xDomain, yDomain, names);
      for (const row of there) {
        const path = kind.of(row).map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ");
        title(add(svg, "polyline", { "data-row": row.index, points: path, ...strokeOf(row) }), row.name);
      }
    });
    addPanels(content, width, 240, "entropy", foreign, addEntropies);
  }

  function addEntropies(figure, own, row) {
    add(figure, "figcaption", {}, `entropy of predictions, ${row.name}`);
    const sets = Object.entries(row.entropy), height = 220, svg = addSvg(figure, own, height, `entropy, ${row.name}`);
    const box = { left: 46, right: own - 8, top: 10, bottom: height - 40 };
    const middles = row.entropy.test.map((point) => point[0]), half = middles[0];
    const xDomain = [0, middles[middles.length - 1] + half];
    const yDomain = [0, padded(sets.flatMap(([, points]) => points.map((point) => point[1])))[1]];
    const [x, y] = addAxes(svg, box, xDomain, yDomain, { x: "entropy (nats)", y: "" });
    sets.forEach(([name, points], i) => {
      const steps = points.flatMap(([middle, share]) => [[middle - half, share], [middle + half, share]]);
      const path = steps.map(([entropy, share]) => `${x(entropy).toFixed(1)},${y(share).toFixed(1)}`);
      const ends = [`${x(0)},${y(0)}`, ...path, `${x(xDomain[1])},${y(0)}`].join(" ");
      const style = i ? { ...strokeOf(row), "stroke-dasharray": DASHES[i] } : { fill: colourOf(row), "fill-opacity": 0.35 };
      title(add(svg, "polyline", { "data-row": row.index, points: ends, ...style }), name === "test" ? "test set" : name);
    });
  }

  function drawClients(content, width) {
    const rows = shown(), there = rows.filter((row) => row.clients);
    if (!there.length) remark(content, "No row to show.");
    else addStrips(content, width, firstOf(content, "clients", there, MOST_STRIPS));
    remarkLacking(content, rows.filter((row) => !row.clients && row.seeds), "runs without clients.csv");
  }

  function addStrips(content, width, there) {
    const beside = width >= 640, longest = Math.max(...there.map((row) => row.name.length));
    const names = beside ? Math.min(260, 20 + 7 * longest) : 0, letters = beside ? 36 : Math.floor(width / 7);
    const step = beside ? 30 : 46, height = there.length * step + 46;
    const svg = addSvg(content, width, height, "accuracy of local models");
    const box = { left: names + 8, right: width - 14, top: 2, bottom: height - 40 };
    const [x] = addAxes(svg, box, [0, 1], null, { x: "accuracy", y: "" });
    there.forEach((row, i) => {
      const group = add(svg, "g", { class: "strip", "data-row": row.index });
      const middle = box.top + i * step + (beside ? step / 2 : step - 14);
      const [low, q1, median, q3, high] = row.clients.quartiles, numbers = row.clients.quartiles.map(format);
      const place = beside ? { x: names, y: middle + 4, "text-anchor": "end" } : { x: box.left, y: middle - 14 };
      const name = row.name.length > letters ? `${row.name.slice(0, letters - 1)}…` : row.name;
      add(group, "text", { class: "name", ...place }, name);
      const style = { stroke: colourOf(row), "stroke-width": 1.5, fill: colourOf(row), "fill-opacity": 0.18 };
      add(group, "line", { ...style, x1: x(low), x2: x(high), y1: middle, y2: middle });
      add(group, "rect", { ...style, x: x(q1), width: Math.max(x(q3) - x(q1), 1), y: middle - 8, height: 16 });
      row.clients.dots.forEach((value, k) => {
        const cy = middle - 4 + ((k * 5) % 9);
        add(group, "circle", { cx: x(value), cy, r: 2, fill: colourOf(row), "fill-opacity": 0.7 });
      });
      add(group, "line", { ...style, "stroke-width": 3, x1: x(median), x2: x(median), y1: middle - 8, y2: middle + 8 });
      const middles = `quartiles ${numbers.slice(1, 4).join(", ")}`;
      title(group, `${row.name}\nleast ${numbers[0]}, ${middles}, greatest ${numbers[4]}; ${row.clients.num} models`);
    });
  }

  function drawCost(content, width) {
    const kinds = [
      { name: labelOf("seconds_per_round"), of: (row) => row.seconds },
      { name: labelOf("bytes_up"), of: (row) => row.final.bytes_up },
    ];
    addPanels(content, width, 360, "cost", kinds, (figure, own, kind) => {
      add(figure, "figcaption", {}, `${labelOf("ga")} against ${kind.name}`);
      const there = shown().filter((row) => kind.of(row) && row.final.ga);
      const lacking = shown().filter((row) => row.seeds && !there.includes(row));
      if (!there.length) remark(figure, "No row to show.");
      else addScatter(figure, own, kind, there);
      remarkLacking(figure, lacking, "not recorded");
    });
  }

  function addScatter(figure, own, kind, there) {
    const height = 340, svg = addSvg(figure, own, height, `${labelOf("ga")} against ${kind.name}`);
    const costs = there.map((row) => kind.of(row)[0]), low = Math.min(...costs);
    const log = low > 0 && Math.max(...costs) / low > 20;
    const spread = there.flatMap(kind.of).filter((value) => !log || value > 0);
    const box = { left: 44, right: own - 14, top: 28, bottom: height - 40 };
    const names = { x: kind.name + (log ? ", logarithmic" : ""), y: labelOf("ga") };
    const yDomain = padded(there.flatMap((row) => row.final.ga));
    const [x, y] = addAxes(svg, box, padded(spread, log), yDomain, names, { x: log });
    const points = there.map((row) => ({ row, cost: kind.of(row), cx: x(kind.of(row)[0]), cy: y(row.final.ga[0]) }));
    for (const { row, cost, cx, cy } of points) {
      const group = add(svg, "g", { class: "point", "data-row": row.index }), ga = row.final.ga;
      title(group, `${row.name}\n${labelOf("ga")} ${describe(ga)}\n${kind.name} ${describe(cost)}`);
      const line = { stroke: colourOf(row), "stroke-opacity": 0.5, "stroke-width": 1.5 };
      const [left, right] = cost.length > 1 && (!log || cost[1] > 0) ? cost.slice(1) : [cost[0], cost[0]];
      add(group, "line", { ...line, x1: x(left), x2: x(right), y1: cy, y2: cy });
      add(group, "line", { ...line, x1: cx, x2: cx, y1: y(ga[1] ?? ga[0]), y2: y(ga[2] ?? ga[0]) });
      add(group, "path", { ...shapeOf(row), transform: `translate(${cx} ${cy})`, "fill-opacity": 0.85 });
    }
    if (points.length <= MOST_NAMES) addNames(svg, points, { left: box.left, right: own, bottom: box.bottom });
  }

  /** Names beside points, where there is room; the legend and the title say what the other points are. */
  function addNames(svg, points, box) {
    const taken = points.map(({ cx, cy }) => ({ x: cx - 6, y: cy - 6, w: 12, h: 12 }));
    const meet = (a, b) => a.x < b.x + b.w && b.x < a.x + a.w && a.y < b.y + b.h && b.y < a.y + a.h;
    for (const { row, cx, cy } of points) {
      const w = 6.4 * row.name.length, left = -9 - w;
      const offsets = [[9, -7], [left, -7], [9, -20], [9, 6], [left, -20], [left, 6], [-w / 2, -22], [-w / 2, 9]];
      const spots = offsets.map(([dx, dy]) => ({ x: cx + dx, y: cy + dy, w, h: 13 }));
      const inside = (spot) => spot.x > box.left && spot.x + w < box.right && spot.y > 0 && spot.y < box.bottom - 12;
      const spot = spots.find((one) => inside(one) && !taken.some((other) => meet(one, other)));
      if (!spot) continue;
      taken.push(spot);
      add(svg, "text", { class: "halo", "data-row": row.index, x: spot.x, y: spot.y + 11 }, row.name);
    }
  }

  function drawPartitions(content, width) {
    const rows = shown(), covered = new Set(data.partitions.flatMap((split) => split.rows));
    const there = data.partitions.filter((split) => split.rows.some((i) => rows.includes(data.rows[i])));
    addPanels(content, width, 300, "partitions", there, addHeatMap);
    const lacking = rows.filter((row) => !covered.has(row.index));
    remarkLacking(content, lacking, "runs without partition.csv, of an older version");
    if (!there.length && !lacking.length) remark(content, "No row to show.");
  }

  function addHeatMap(figure, own, split) {
    const [classes, most] = [1, 2].map((k) => Math.max(1, ...split.cells.map((cell) => cell[k] + (k < 2))));
    const using = split.rows.map((i) => data.rows[i].name), columns = split.shown, left = 30, top = 20;
    const caption = add(figure, "figcaption", { title: using.join("\n") }, split.title);
    const clients = (columns < split.clients ? `first ${columns} of ` : "") + `${split.clients} clients`;
    const number = `${using.length} ${using.length > 1 ? "rows" : "row"}`;
    add(caption, "small", {}, `${clients}, at most ${most} of a class; in ${number}`);
    const wide = (own - left - 4) / columns, tall = Math.max(Math.min(wide, 22), Math.min(300 / classes, 14));
    const right = left + columns * wide, bottom = top + classes * tall;
    const svg = addSvg(figure, own, bottom + 30, `partition of ${split.title}`);
    const middleOf = (client, label) => ({ x: left + (client + 0.5) * wide, y: top + (label + 0.5) * tall + 3.5 });
    const numbered = wide >= 5 * String(most).length + 3 && tall >= 12;
    add(svg, "text", { x: 0, y: 11 }, "class");
    add(svg, "text", { x: (left + right) / 2, y: bottom + 28, "text-anchor": "middle" }, "client");
    const frame = { fill: "none", stroke: "var(--line)" };
    add(svg, "rect", { x: left, y: top, width: right - left, height: bottom - top, ...frame });
    for (const [client, label, count] of split.cells) {
      const style = { fill: "var(--accent)", "fill-opacity": (0.06 + (0.94 * count) / most).toFixed(3) };
      const place = { x: left + client * wide, y: top + label * tall, width: wide, height: tall };
      title(add(svg, "rect", { ...place, ...style }), `client ${client}, class ${label}: ${count}`);
      if (!numbered) continue;
      const ink = `fill:var(${count > 0.6 * most ? "--card" : "--ink"});pointer-events:none`;
      add(svg, "text", { class: "small", style: ink, "text-anchor": "middle", ...middleOf(client, label) }, count);
    }
    const within = (end) => (k) => k < end && Number.isInteger(k);
    const whole = (end, most) => ticks([0, end - 1 || 1], Math.min(end - 1, most)).filter(within(end));
    for (const label of whole(classes, (classes * tall) / 14)) {
      add(svg, "text", { class: "small", x: left - 5, y: middleOf(0, label).y, "text-anchor": "end" }, label);
    }
    for (const client of whole(columns, own / 24)) {
      add(svg, "text", { class: "small", x: middleOf(client, 0).x, y: bottom + 13, "text-anchor": "middle" }, client);
    }
  }

  const charts = {
    curves: drawCurves,
    reliability: drawReliability,
    uncertainty: drawUncertainty,
    clients: drawClients,
    cost: drawCost,
    partitions: drawPartitions,
  };
  const seen = new Set(), stale = new Set(Object.keys(charts)); // in view; not drawn since something changed

  function drawSeen() {
    for (const id of stale) {
      if (!seen.has(id)) continue;
      stale.delete(id);
      redraw(id, charts[id]);
    }
  }

  /** Draw what is in view, and the others when they come into it. */
  function drawCharts() {
    for (const id of Object.keys(charts)) stale.add(id);
    drawSeen();
  }

  function watchCharts() {
    const observer = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) seen[isIntersecting ? "add" : "delete"](target.id);
      drawSeen();
    }, { rootMargin: "200px" });
    for (const id of Object.keys(charts)) observer.observe(byId(id));
    window.addEventListener("beforeprint", () => {
      for (const id of Object.keys(charts)) seen.add(id);
      drawSeen();
    });
  }

  // Table, legend, controls

  function sortBy(head) {
    const direction = head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending";
    const column = [...head.parentNode.children].indexOf(head), sign = direction === "ascending" ? 1 : -1;
    head.parentNode.querySelectorAll("[aria-sort]").forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", direction);
    const valueOf = (line) => {
      const cell = line.cells[column], text = cell ? cell.dataset.value ?? cell.textContent : "-";
      if (["-", "–", "not run"].includes(text)) return null;
      return text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text);
    };
    const compare = (a, b) => {
      if (a === null || b === null) return (a === null) - (b === null); // what is missing comes last
      return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en"));
    };
    const body = byId("table").tBodies[0];
    const lines = [...body.rows].map((line) => ({ line, value: valueOf(line) }));
    body.append(...lines.sort((a, b) => compare(a.value, b.value)).map(({ line }) => line));
  }

  let emphasised = null;
  function emphasise(index) {
    if (index === emphasised) return;
    emphasised = index;
    for (const mark of document.querySelectorAll(".chart [data-row]")) {
      mark.classList.toggle("dim", index !== null && mark.dataset.row !== index);
    }
  }

  function watch(element) {
    element.addEventListener("mouseover", (event) => emphasise(event.target.closest("[data-row]")?.dataset.row ?? null));
    element.addEventListener("mouseleave", () => emphasise(null));
  }

  function choose() {
    const found = data.rows.map(matches);
    for (const line of byId("table").tBodies[0].rows) line.hidden = !found[line.dataset.row];
    for (const item of byId("groups").children) {
      item.hidden = !found[item.dataset.row];
      item.querySelector("input").checked = !state.hidden.has(Number(item.dataset.row));
    }
    const number = found.filter(Boolean).length;
    const charted = shown().filter((row) => row.seeds).length;
    byId("count").textContent = `${number} of ${data.rows.length} rows; ${charted} in charts`;
    drawCharts();
  }

  function chooseMetric() {
    state.metric = byId("metric").value;
    state.log = byId("log").checked;
    const terms = [...document.querySelectorAll("dt")].filter((term) => term.dataset.name === state.metric);
    byId("defined").textContent = terms.length ? terms[0].nextElementSibling.textContent : "";
    stale.add("curves");
    drawSeen();
  }

  data.rows.forEach((row, index) => { row.index = index; });
  const lines = byId("table").tBodies[0].rows;
  data.rows.forEach((row, index) => {
    lines[index].dataset.row = index;
    if (!row.absent) addSwatch(lines[index].cells[0], row);
  });
  watch(byId("table").tBodies[0]);
  watch(byId("groups"));
  for (const row of data.rows.filter((one) => !one.absent)) {
    const item = add(byId("groups"), "li", { "data-row": row.index }), label = add(item, "label");
    const box = add(label, "input", { type: "checkbox" });
    addSwatch(label, row);
    add(label, "span", {}, row.name + (row.seeds ? "" : " (diverged)"));
    box.addEventListener("change", () => { state.hidden[box.checked ? "delete" : "add"](row.index); choose(); });
  }
  for (const name of data.columns) add(byId("metric"), "option", { value: name }, labelOf(name));
  byId("metric").value = state.metric;
  byId("metric").addEventListener("change", chooseMetric);
  byId("log").addEventListener("change", chooseMetric);
  byId("filter").addEventListener("input", (event) => {
    state.words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean);
    choose();
  });
  for (const [id, hide] of [["all", false], ["none", true]]) {
    byId(id).addEventListener("click", () => {
      for (const row of data.rows.filter(matches)) state.hidden[hide ? "add" : "delete"](row.index);
      choose();
    });
  }
  for (const button of byId("table").tHead.querySelectorAll("th button")) {
    button.addEventListener("click", () => sortBy(button.parentNode));
  }
  if (window.innerWidth <= 900) byId("legend").open = false;
  choose();
  chooseMetric();
  watchCharts();
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth !== width) requestAnimationFrame(drawCharts);
    width = window.innerWidth;
  });
})();
