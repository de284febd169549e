// Draws panels as SVG: a line for each curve, and a band from its lowest to its highest seed. Names
// stand at the ends of lines where there is room. Buttons below a plot hide lines, a pointer over it
// shows values. Colours of text and axes come from CSS, so that one page serves light and dark.

const SCALES = {
  "linear": value => value,
  "log": value => Math.log10(value),
  "log error": value => -Math.log10(1 - value),
};
const pen = document.createElement("canvas").getContext("2d");
pen.font = "12px system-ui, sans-serif";
const widthOf = text => pen.measureText(text).width;

function add(parent, name, attributes = {}, text = "") {
  const space = name === "svg" || parent instanceof SVGElement ? "2000/svg" : "1999/xhtml";
  const made = document.createElementNS(`http://www.w3.org/${space}`, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent.append(made);
  return made;
}

function shown(value, digits = 6) {
  const rounded = Number(value.toPrecision(digits));
  if (rounded && Math.abs(rounded) < 1e-4) return String(rounded);
  return rounded.toLocaleString("en-US", {maximumFractionDigits: 8});
}

function ticks(scale, low, high, most) {
  if (scale === "log error") return ticks("log", 1 - high, 1 - low, most).map(x => 1 - x);
  const inside = value => value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9);
  if (scale === "log") {
    const powers = [];
    for (let p = Math.floor(Math.log10(low)); 10 ** p <= high; p++) powers.push(10 ** p);
    for (const digits of [[1, 2, 3, 5, 7], [1, 2, 5], [1]]) {
      const made = powers.flatMap(power => digits.map(digit => digit * power)).filter(inside);
      if (made.length > 1 && made.length <= most) return made;
    }
    const every = Math.ceil(powers.length / most);
    if (powers.length > most) return powers.filter((_, i) => i % every === 0).filter(inside);
  }
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find(digit => digit * power >= rough * 0.999) * power;
  const made = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) made.push(i * step);
  return made;
}

// Places near the wanted ones that are a gap apart, in the same order, and above the end.
function spread(wanted, gap, end) {
  const order = [...wanted.keys()].sort((a, b) => wanted[a] - wanted[b]), placed = [...wanted];
  order.forEach((i, n) => { if (n) placed[i] = Math.max(placed[i], placed[order[n - 1]] + gap); });
  for (const i of order.reverse()) {
    placed[i] = Math.min(placed[i], end);
    end = placed[i] - gap;
  }
  return placed;
}

function drawPanel(panel) {
  const box = document.getElementById(`plot-${panel.name}`);
  const canvas = add(box, "div", {class: "canvas"});
  const legend = add(box, "div", {class: "legend"});
  const pressed = new Set();  // numbers of lines: hidden, or of faded lines, coloured
  const isDrawn = i => panel.lines[i].faded || !pressed.has(i);
  const isFaded = i => panel.lines[i].faded && !pressed.has(i);
  panel.lines.forEach((line, i) => {
    const button = add(legend, "button", {type: "button", "aria-pressed": !line.faded});
    sample(button, line, line.faded ? "var(--faded)" : line.colour);
    add(button, "span", {}, line.label);
    button.onclick = () => {
      pressed.delete(i) || pressed.add(i);
      button.setAttribute("aria-pressed", line.faded === pressed.has(i));
      button.querySelector("line").setAttribute("stroke", isFaded(i) ? "var(--faded)" : line.colour);
      draw();
    };
    // The line under the pointer, or with the focus, stands out.
    const stress = chosen => canvas.querySelectorAll("[data-line]").forEach(part =>
      part.classList.toggle("behind", chosen && part.dataset.line !== String(i)));
    button.onpointerenter = button.onfocus = () => stress(true);
    button.onpointerleave = button.onblur = () => stress(false);
  });
  const draw = () => {
    const width = canvas.clientWidth;
    if (!width) return;  // in a tab that is not shown
    canvas.replaceChildren();
    const drawn = [...panel.lines.keys()].filter(isDrawn);
    if (drawn.length) drawLines(canvas, panel, drawn, isFaded, width);
  };
  new ResizeObserver(draw).observe(canvas);
}

const dash = line => line.faded ? "none" : line.dash;

function sample(parent, line, colour) {
  const icon = add(parent, "svg", {width: 22, height: 10, "aria-hidden": true});
  const look = {stroke: colour, "stroke-width": line.thick ? 4 : 2.5, "stroke-dasharray": dash(line)};
  add(icon, "line", {x1: 0, x2: 22, y1: 5, y2: 5, ...look});
}

function range(values, scale) {
  const places = values.map(SCALES[scale]).filter(Number.isFinite);
  const low = Math.min(...places), high = Math.max(...places);
  const room = high > low ? 0.04 * (high - low) : 0.5;
  return [low - room, high + room];
}

function drawLines(canvas, panel, drawn, isFaded, width) {
  const lines = drawn.map(i => panel.lines[i]), height = Math.min(460, Math.max(300, 0.62 * width));
  const horizontal = panel.markers ? "log" : "linear";
  const [yLow, yHigh] = panel.y_range?.map(SCALES[panel.scale])
    ?? range(lines.flatMap(line => line.mean), panel.scale);
  if (!Number.isFinite(yLow)) return;  // no value is finite
  const invert = {"linear": v => v, "log": v => 10 ** v, "log error": v => 1 - 10 ** -v};
  const yTicks = ticks(panel.scale, ...[yLow, yHigh].map(invert[panel.scale]), height / 45);
  const ends = lines.map(line => line.mean.findLastIndex(Number.isFinite));
  const places = lines.flatMap(line => line.x).map(SCALES[horizontal]).filter(Number.isFinite);
  const xLow = Math.min(...places), xHigh = Math.max(...places);
  const atEnd = i => ends[i] >= 0
    && SCALES[horizontal](lines[i].x[ends[i]]) >= xHigh - 0.02 * (xHigh - xLow);
  const named = width < 560 ? [] : [...lines.keys()].filter(atEnd);
  const names = Math.max(0, ...named.map(i => widthOf(lines[i].label)));
  const left = 34 + Math.max(...yTicks.map(tick => widthOf(shown(tick))));
  const right = width - (named.length ? names + 40 : 20), top = 12, bottom = height - 48;
  const X = x => left + (SCALES[horizontal](x) - xLow) / (xHigh - xLow || 1) * (right - left);
  const Y = y => bottom - (SCALES[panel.scale](y) - yLow) / (yHigh - yLow) * (bottom - top);
  const kept = y => Math.min(bottom, Math.max(top, y));  // inside the axes

  const heading = `${panel.y_label} by ${panel.x_label}`;
  const svg = add(canvas, "svg", {width, height, role: "img", "aria-label": heading});
  const axes = add(svg, "g", {class: "axes"});
  for (const tick of yTicks) {
    add(axes, "line", {x1: left, x2: right, y1: Y(tick), y2: Y(tick)});
    add(axes, "text", {x: left - 6, y: Y(tick) + 4, "text-anchor": "end", class: "ytick"}, shown(tick));
  }
  const low = panel.markers ? 10 ** xLow : xLow, high = panel.markers ? 10 ** xHigh : xHigh;
  const xTicks = panel.markers ? panel.x_ticks : ticks("linear", low, high, (right - left) / 55);
  for (const tick of xTicks) {
    add(axes, "line", {x1: X(tick), x2: X(tick), y1: top, y2: bottom});
    const place = {x: X(tick), y: bottom + 18, "text-anchor": "middle", class: "xtick"};
    add(axes, "text", place, shown(tick));
  }
  const middle = (left + right) / 2;
  add(axes, "text", {x: middle, y: height - 8, "text-anchor": "middle"}, panel.x_label);
  const turned = {transform: `translate(13 ${(top + bottom) / 2}) rotate(-90)`};
  add(axes, "text", {...turned, "text-anchor": "middle"}, panel.y_label);

  const clip = `inside-${panel.name}`;
  add(add(svg, "clipPath", {id: clip}), "rect",
    {x: left, y: top - 2, width: right - left + 3, height: bottom - top + 4});
  const area = add(svg, "g", {"clip-path": `url(#${clip})`});
  const order = [...lines.keys()].reverse();  // the first line is drawn last, on top
  const depth = i => lines[i].thick ? 2 : isFaded(drawn[i]) ? 0 : 1;
  const bands = add(area, "g");
  for (const i of order.sort((a, b) => depth(a) - depth(b))) {
    const line = lines[i], faded = isFaded(drawn[i]), mine = {"data-line": drawn[i]};
    const colour = faded ? "var(--faded)" : line.colour;
    const points = [...line.x.keys()].filter(p => Number.isFinite(Y(line.mean[p])));
    if (!faded && points.some(p => line.low[p] < line.high[p])) {
      const there = points.map(p => `${X(line.x[p])},${kept(Y(line.low[p]))}`);
      const back = points.map(p => `${X(line.x[p])},${kept(Y(line.high[p]))}`).reverse();
      const d = `M${[...there, ...back].join("L")}Z`;
      add(bands, "path", {...mine, class: "band", d, fill: colour, opacity: panel.band_opacity});
    }
    // A line has a hole where a seed is not finite.
    const d = points.map((p, n) =>
      `${n && points[n - 1] === p - 1 ? "L" : "M"}${X(line.x[p])},${Y(line.mean[p])}`).join("");
    const style = {"stroke-width": line.thick ? 4 : faded ? 1 : 2, "stroke-dasharray": dash(line)};
    add(area, "path", {...mine, class: "line", d, stroke: colour, fill: "none", ...style});
    if (panel.markers) {
      for (const p of points) {
        add(area, "circle", {cx: X(line.x[p]), cy: Y(line.mean[p]), r: 3, fill: colour, ...mine});
      }
    }
  }
  const gap = named.length > 16 ? 13 : 15;
  const wanted = named.map(i => kept(Y(lines[i].mean[ends[i]])));
  spread(wanted, gap, bottom + 4).forEach((y, n) => {
    const i = named[n], colour = isFaded(drawn[i]) ? "var(--faded)" : lines[i].colour;
    const leader = `M${X(lines[i].x[ends[i]]) + 2},${wanted[n]}L${right + 24},${y}`;
    const mine = {"data-line": drawn[i]};
    add(svg, "path", {...mine, d: leader, stroke: colour, fill: "none", "stroke-width": 1});
    const label = {...mine, x: right + 28, y: y + 4, class: isFaded(drawn[i]) ? "end faded" : "end"};
    add(svg, "text", label, lines[i].label);
  });
  followPointer(canvas, svg, panel, lines, {X, Y, top, bottom, left, right});
}

// Shows the values of the lines at the evaluation that is nearest to the pointer.
function followPointer(canvas, svg, panel, lines, {X, Y, top, bottom, left, right}) {
  const marks = add(svg, "g", {class: "marks"}), tip = add(canvas, "div", {class: "tip"});
  const leave = () => { marks.replaceChildren(); tip.style.display = "none"; };
  leave();
  svg.onpointerleave = leave;
  svg.onpointermove = svg.onpointerdown = event => {
    leave();
    const frame = svg.getBoundingClientRect();
    const at = event.clientX - frame.left, across = event.clientY - frame.top;
    if (at < left - 10 || at > right + 10) return;
    let near = lines.map(line => {
      const points = [...line.x.keys()].filter(p => Number.isFinite(Y(line.mean[p])));
      const distance = p => Math.abs(X(line.x[p]) - at);
      const p = points.reduce((a, b) => distance(b) < distance(a) ? b : a, points[0]);
      return {line, p, x: X(line.x[p]), y: Y(line.mean[p])};
    }).filter(found => Math.abs(found.x - at) < 40);
    if (!near.length) return;
    near.sort((a, b) => Math.abs(a.y - across) - Math.abs(b.y - across));
    near = near.slice(0, 8).sort((a, b) => a.y - b.y);
    const {line, p, x} = near.reduce((a, b) => Math.abs(b.x - at) < Math.abs(a.x - at) ? b : a);
    add(marks, "line", {x1: x, x2: x, y1: top, y2: bottom});
    add(tip, "div", {}, `${panel.x_label} ${shown(line.x[p], 4)}`);
    for (const one of near) {
      add(marks, "circle", {cx: one.x, cy: one.y, r: 4, fill: one.line.colour});
      const row = add(tip, "div", {class: "value"});
      sample(row, one.line, one.line.colour);
      add(row, "span", {}, one.line.label);
      add(row, "b", {}, shown(one.line.mean[one.p], 3));
      const ends = [one.line.low[one.p], one.line.high[one.p]];
      if (ends[0] < ends[1]) add(row, "span", {}, ends.map(end => shown(end, 3)).join(" to "));
    }
    tip.style.display = "block";
    const beside = at < (left + right) / 2 ? x + 14 : x - tip.offsetWidth - 14;
    const room = canvas.clientWidth - tip.offsetWidth;
    tip.style.left = `${Math.max(0, Math.min(room, beside))}px`;
    tip.style.top = `${bottom - tip.offsetHeight - 8}px`;
  };
}

// Shows one of several plots: each button names its own.
function switchTabs(tabs) {
  const buttons = [...tabs.querySelectorAll("button")];
  const choose = chosen => buttons.forEach(button => {
    button.setAttribute("aria-selected", button === chosen);
    document.getElementById(button.dataset.plot).hidden = button !== chosen;
  });
  buttons.forEach(button => { button.onclick = () => choose(button); });
  choose(buttons[0]);
}
