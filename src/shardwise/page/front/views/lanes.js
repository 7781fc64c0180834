// The move as an animation: each rank is a small picture of the tensor, before on the left and after on the right. Boxes
// leave the rank that sends them and fill the rank that receives them, round by round.

import { createPlot } from "../parts/canvas.js";
import { colourOf, mix, themeColour } from "../parts/colours.js";
import { element } from "../parts/dom.js";
import { formatBox, formatBytes, formatCount } from "../parts/format.js";

const LABEL = 15;
const GAP = 12;
const THINNEST = 1.5;

export function createLanes(lanes, itemsize) {
  const phases = listPhases(lanes.steps);
  const dims = chooseDims(lanes);
  const bounds = findBounds(lanes);
  const places = new Map(lanes.ranks.map((rank, i) => [rank, i]));
  const state = { time: 0, playing: false };
  const columns = lanes.ranks.length <= 4 ? 1 : lanes.ranks.length <= 8 ? 2 : 4;
  const rows = Math.ceil(lanes.ranks.length / columns);

  const nameOf = (rank) => (lanes.labels ? lanes.labels[places.get(rank)] : `rank ${rank}`);

  function geometry(width) {
    const middle = Math.max(48, width * 0.1);
    const side = (width - middle) / 2;
    const wide = (side - GAP * (columns - 1)) / columns;
    const [rowLength, columnLength] = dims.map((dim) => (dim === null ? 1 : bounds[dim][1] - bounds[dim][0]));
    const shape = dims[0] === null ? 0.2 : Math.min(1, Math.max(0.3, rowLength / Math.max(1, columnLength)));
    const tall = Math.min(wide * shape, rows > 2 ? 110 : 150);
    return { side, middle, wide, tall };
  }

  function panel(place, right, size) {
    const [column, row] = [place % columns, Math.floor(place / columns)];
    return [
      (right ? size.side + size.middle : 0) + column * (size.wide + GAP),
      22 + row * (size.tall + LABEL + GAP) + LABEL,
    ];
  }

  // Where a box of the tensor is within a panel.
  function inside(start, end, [x, y], size) {
    const along = (dim, room) => {
      if (dim === null) return [0, room];
      const [low, high] = bounds[dim];
      const scale = room / Math.max(1, high - low);
      const [from, until] = [(start[dim] - low) * scale, (end[dim] - low) * scale];
      return [Math.min(from, room - THINNEST), Math.max(until, Math.min(from, room - THINNEST) + THINNEST)];
    };
    const [y0, y1] = along(dims[0], size.tall);
    const [x0, x1] = along(dims[1], size.wide);
    return [x + x0, y + y0, x1 - x0, y1 - y0];
  }

  function now() {
    const index = Math.min(phases.length - 1, Math.floor(state.time));
    return { ...phases[index], index, share: Math.min(1, state.time - index) };
  }

  function draw(context, width) {
    const size = geometry(width);
    const phase = now();
    const step = lanes.steps[phase.step];
    context.font = `600 12px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = themeColour("soft");
    context.textBaseline = "top";
    context.textAlign = "left";
    context.fillText(phase.step === 0 ? "before" : "after the first step", 0, 2);
    context.fillText(phase.step === lanes.steps.length - 1 ? "after" : "in between", size.side + size.middle, 2);
    lanes.ranks.forEach((rank, place) => {
      drawPanel(context, rank, panel(place, false, size), size, step.before[place], 0.85);
      drawPanel(context, rank, panel(place, true, size), size, step.after[place], 0.13);
    });
    for (const move of step.moves) if (move[2] < phase.round) drawBox(context, move, 1, size);
    for (const move of step.moves) if (move[2] === phase.round) drawBox(context, move, phase.share, size);
    if (plot.found) drawFound(context, size);
  }

  function drawPanel(context, rank, corner, size, held, strength) {
    const colour = colourOf(places.get(rank), lanes.ranks.length);
    context.fillStyle = themeColour("grid");
    context.fillRect(...corner, size.wide, size.tall);
    context.fillStyle = colour;
    context.globalAlpha = strength;
    for (const [start, end] of held) context.fillRect(...inside(start, end, corner, size));
    context.globalAlpha = 1;
    context.strokeStyle = themeColour("line");
    context.lineWidth = 1;
    context.strokeRect(...corner, size.wide, size.tall);
    context.fillStyle = themeColour("ink");
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    context.textAlign = "left";
    context.textBaseline = "bottom";
    context.fillText(nameOf(rank), corner[0], corner[1] - 2);
  }

  function drawBox(context, [source, target, , start, end], share, size) {
    const a = inside(start, end, panel(places.get(source), false, size), size);
    const b = inside(start, end, panel(places.get(target), true, size), size);
    const eased = share * share * (3 - 2 * share);
    const rect = a.map((value, i) => value + (b[i] - value) * eased);
    const colour = colourOf(places.get(source), lanes.ranks.length);
    context.fillStyle = colour;
    context.fillRect(...rect);
    if (rect[2] > 6 && rect[3] > 4) {
      context.strokeStyle = share < 1 ? themeColour("ink") : mix(colour, "#ffffff", 0.5);
      context.lineWidth = share < 1 ? 1 : 0.6;
      context.strokeRect(...rect);
    }
  }

  function drawFound(context, size) {
    context.strokeStyle = themeColour("ink");
    context.lineWidth = 2;
    const { place, right } = plot.found;
    context.strokeRect(...panel(place, right, size), size.wide, size.tall);
  }

  function describe(place, right) {
    const step = lanes.steps[now().step];
    const rank = lanes.ranks[place];
    const size = geometry(plot.width);
    const corner = panel(place, right, size);
    const held = (right ? step.after : step.before)[place];
    const mine = step.moves.filter((move) => move[right ? 1 : 0] === rank && move[2] >= 0);
    const bytes = mine.reduce((sum, move) => sum + volume(move) * itemsize, 0);
    const lines = [
      `${nameOf(rank)}, ${right ? "after" : "before"}`,
      held.length
        ? `holds ${held
            .slice(0, 3)
            .map(([s, e]) => formatBox(s, e))
            .join(" ")}${held.length > 3 ? " …" : ""}`
        : "holds nothing",
    ];
    const whom = lanes.labels ? "each box counted once" : "among the ranks shown";
    lines.push(`${right ? "receives" : "sends"} ${formatBytes(bytes)} in ${formatCount(mine.length, "box")}, ${whom}`);
    return { key: `${place}${right}`, place, right, lines, at: [corner[0] + size.wide / 2, corner[1] + size.tall / 2] };
  }

  let cursor = [0, false];
  const plot = createPlot({
    label: `The move of ${formatCount(lanes.ranks.length, lanes.labels ? "block" : "rank")} in ${formatCount(phases.length, "round")}: before on the left, after on the right.`,
    name: "lanes",
    height: (width) => {
      const size = geometry(width);
      return 24 + rows * (size.tall + LABEL + GAP);
    },
    draw,
    find: (x, y) => {
      const size = geometry(plot.width);
      for (let place = 0; place < lanes.ranks.length; place += 1) {
        for (const right of [false, true]) {
          const [left, top] = panel(place, right, size);
          if (x >= left && x < left + size.wide && y >= top && y < top + size.tall) return describe(place, right);
        }
      }
      return null;
    },
    step: (key) => {
      const by = { ArrowUp: -1, ArrowDown: 1, Home: -100, End: 100 }[key] || 0;
      cursor = [
        Math.min(lanes.ranks.length - 1, Math.max(0, cursor[0] + by)),
        key === "ArrowRight" ? true : key === "ArrowLeft" ? false : cursor[1],
      ];
      return describe(...cursor);
    },
  });
  const whole = bounds.every(([low, high], dim) => low === 0 && high === lanes.shape[dim]);
  const seen =
    lanes.shape.length > 2
      ? element(
          "p",
          { class: "note" },
          `Drawn are dim ${dims[0]} down and dim ${dims[1]} across; the other dims are seen through.`,
        )
      : null;
  const region = whole
    ? null
    : element(
        "p",
        { class: "note" },
        `Each picture is the region ${formatBox(...[0, 1].map((at) => bounds.map((pair) => pair[at])))} of the tensor.`,
      );
  return { node: element("div", {}, createControls(state, phases, plot), plot.node, seen, region), plot, state };
}

// Each round of each step is a phase; a step without rounds has one, for its local copies.
function listPhases(steps) {
  return steps.flatMap((step, number) =>
    Array.from({ length: Math.max(1, step.rounds) }, (_, round) => ({ step: number, round })),
  );
}

// The part of the tensor in which the ranks that are shown hold something, before or after.
function findBounds(lanes) {
  const boxes = lanes.steps.flatMap((step) => [...step.before, ...step.after].flat());
  return lanes.shape.map((length, dim) => {
    const low = boxes.reduce((least, [start]) => Math.min(least, start[dim]), length);
    const high = boxes.reduce((most, [, end]) => Math.max(most, end[dim]), 0);
    return low < high ? [low, high] : [0, length];
  });
}

function volume([, , , start, end]) {
  return start.reduce((product, from, dim) => product * (end[dim] - from), 1);
}

// The two dims that differ most between boxes.
function chooseDims(lanes) {
  const dims = lanes.shape.map((_, dim) => dim);
  if (dims.length < 2) return [null, dims[0] ?? null];
  const kinds = dims.map(
    (dim) =>
      new Set(lanes.steps.flatMap((step) => [...step.before, ...step.after].flat().map(([start]) => start[dim]))).size,
  );
  return dims
    .sort((a, b) => kinds[b] - kinds[a] || b - a)
    .slice(0, 2)
    .sort((a, b) => a - b);
}

function createControls(state, phases, plot) {
  const slider = element("input", {
    type: "range",
    min: "0",
    max: String(phases.length),
    step: "0.01",
    value: "0",
    "aria-label": "Time",
    "data-name": "time",
    style: { flex: "1" },
  });
  const text = element("output", { class: "note" });
  const play = element("button", { type: "button", class: "act main" }, "Play");
  const show = () => {
    const index = Math.min(phases.length - 1, Math.floor(state.time));
    const phase = phases[index];
    const steps = phases[phases.length - 1].step + 1;
    text.textContent = `round ${index + 1} of ${phases.length}${steps > 1 ? `, step ${phase.step + 1} of ${steps}` : ""}`;
    slider.setAttribute("aria-valuetext", text.textContent);
    slider.value = String(state.time);
    if (plot.width) plot.redraw();
  };
  slider.addEventListener("input", () => {
    state.time = Number(slider.value);
    show();
  });
  let last = null;
  const tick = (moment) => {
    if (!state.playing) return;
    const speed = Math.max(0.55, phases.length / 12);
    state.time = Math.min(phases.length, state.time + ((moment - (last ?? moment)) / 1000) * speed);
    last = moment;
    show();
    if (state.time >= phases.length) stop();
    else requestAnimationFrame(tick);
  };
  const stop = () => {
    state.playing = false;
    play.textContent = "Play";
  };
  play.addEventListener("click", () => {
    if (state.playing) return stop();
    if (state.time >= phases.length) state.time = 0;
    state.playing = true;
    last = null;
    play.textContent = "Pause";
    requestAnimationFrame(tick);
  });
  show();
  return element("div", { class: "controls" }, play, slider, text);
}
