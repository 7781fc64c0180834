// Bytes from each rank (down) to each rank (across). Where ranks are many, a cell is a group of them; click to look into
// it: a server answers, or the file has the cells of single ranks.

import { createPlot } from "../parts/canvas.js";
import { mix, themeColour } from "../parts/colours.js";
import { element, legend } from "../parts/dom.js";
import { formatBytes, formatNumber } from "../parts/format.js";

const CELLS = 128;
const LEFT = 56;
const TOP = 30;

export function createMatrix(matrix, numbers, onzoom) {
  const { values } = matrix;
  const [height, width] = [values.length, values.length ? values[0].length : 0];
  const most = Math.max(1, ...values.map((row) => row.reduce((a, b) => Math.max(a, b), 0)));
  const cursor = [0, 0];
  const side = (room) => Math.min(room - LEFT - 10, 440);
  const rankAt = (place) => (numbers ? numbers[place] : place);

  function groupOf([first, last, step], index) {
    const from = first + index * step;
    const until = Math.min(last, from + step) - 1;
    return { from, until, text: from === until ? `rank ${rankAt(from)}` : `ranks ${rankAt(from)} to ${rankAt(until)}` };
  }

  function draw(context, room) {
    const size = side(room);
    const [wide, tall] = [size / width, size / height];
    const [cold, hot] = [themeColour("heat-0"), themeColour("heat-1")];
    context.fillStyle = themeColour("grid");
    context.fillRect(LEFT, TOP, size, size);
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const gap = wide > 8 ? 1 : 0;
    values.forEach((row, y) =>
      row.forEach((value, x) => {
        if (!value) return;
        const share = value / most;
        context.fillStyle = mix(cold, hot, 0.12 + 0.88 * share);
        context.fillRect(LEFT + x * wide, TOP + y * tall, wide - gap, tall - gap);
        if (wide > 58 && tall > 18) {
          context.fillStyle = share > 0.45 ? themeColour("card") : themeColour("ink");
          context.textAlign = "center";
          context.textBaseline = "middle";
          context.fillText(formatBytes(value), LEFT + (x + 0.5) * wide, TOP + (y + 0.5) * tall);
        }
      }),
    );
    drawNumbers(context, wide, tall);
    if (plot.found) {
      context.strokeStyle = themeColour("ink");
      context.lineWidth = 2;
      context.strokeRect(LEFT + plot.found.x * wide, TOP + plot.found.y * tall, Math.max(3, wide), Math.max(3, tall));
    }
  }

  function drawNumbers(context, wide, tall) {
    context.fillStyle = themeColour("soft");
    const every = (step, room) => 2 ** Math.max(0, Math.ceil(Math.log2(room / step)));
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let y = 0; y < height; y += every(tall, 16))
      context.fillText(formatNumber(rankAt(groupOf(matrix.rows, y).from)), LEFT - 7, TOP + (y + 0.5) * tall);
    context.textAlign = "center";
    context.textBaseline = "bottom";
    for (let x = 0; x < width; x += every(wide, 44))
      context.fillText(formatNumber(rankAt(groupOf(matrix.columns, x).from)), LEFT + (x + 0.5) * wide, TOP - 5);
  }

  function describe(x, y) {
    const [from, to] = [groupOf(matrix.rows, y), groupOf(matrix.columns, x)];
    const size = side(plot.width);
    const sender = matrix.sampled ? `rank ${rankAt(from.from)}` : from.text;
    const lines = [`${sender} → ${to.text}`, values[y][x] ? formatBytes(values[y][x]) : "nothing is sent"];
    if (matrix.sampled) lines.push(`the row is one sender of ${from.text}`);
    return {
      key: y * width + x,
      x,
      y,
      lines,
      at: [LEFT + ((x + 0.5) * size) / width, TOP + ((y + 0.5) * size) / height],
    };
  }

  const plot = createPlot({
    label: `Bytes from rank to rank, ${height} rows of senders by ${width} columns of receivers; the largest cell has ${formatBytes(most)}. Arrow keys move.`,
    name: "matrix",
    height: (room) => side(room) + TOP + 6,
    draw,
    find: (px, py) => {
      const size = side(plot.width);
      const [x, y] = [Math.floor(((px - LEFT) / size) * width), Math.floor(((py - TOP) / size) * height)];
      if (x < 0 || y < 0 || x >= width || y >= height) return null;
      [cursor[0], cursor[1]] = [x, y];
      return describe(x, y);
    },
    step: (key, shift) => {
      const by = shift ? 8 : 1;
      const moves = {
        ArrowLeft: [-by, 0],
        ArrowRight: [by, 0],
        ArrowUp: [0, -by],
        ArrowDown: [0, by],
        Home: [-width, -height],
        End: [width, height],
      };
      const [dx, dy] = moves[key];
      cursor[0] = Math.min(width - 1, Math.max(0, cursor[0] + dx));
      cursor[1] = Math.min(height - 1, Math.max(0, cursor[1] + dy));
      return describe(...cursor);
    },
  });
  if (onzoom) {
    const zoom = (x, y) => onzoom({ senders: around(matrix.rows, y), receivers: around(matrix.columns, x) });
    plot.canvas.addEventListener("click", () => {
      if (plot.found) zoom(plot.found.x, plot.found.y);
    });
    plot.canvas.addEventListener("keydown", (event) => {
      if (event.key === "Enter") zoom(...cursor);
    });
  }
  const ramp = element("span", {
    class: "ramp",
    style: { background: "linear-gradient(90deg, var(--heat-0), var(--heat-1))" },
  });
  const key = legend([
    [ramp, `0 B to ${formatBytes(most)}`],
    [element("span"), "senders down, receivers across"],
  ]);
  return { node: element("div", {}, plot.node, key), plot };
}

// Whether cells stand for several ranks that can be looked at one by one; of sampled senders only the receivers can.
export function canZoom(matrix, served) {
  const detail = matrix.detail;
  if (!served && !detail) return false;
  return matrix.columns[2] > 1 || (matrix.rows[2] > 1 && (served || detail.step === 1));
}

// A part of the matrix of a written file, put together from the runs of equal cells that the file has.
export function cutMatrix(matrix, { senders, receivers }) {
  const { step, ends, starts, lengths, bytes } = matrix.detail;
  const [top, bottom] = step === 1 ? senders : [0, matrix.count];
  const [left, right] = receivers;
  const rowStep = step === 1 ? Math.ceil((bottom - top) / CELLS) : step;
  const columnStep = Math.ceil((right - left) / CELLS);
  const values = Array.from({ length: Math.ceil((bottom - top) / rowStep) }, () =>
    new Array(Math.ceil((right - left) / columnStep)).fill(0),
  );
  for (let sender = top; sender < bottom; sender += step) {
    const row = values[Math.floor((sender - top) / rowStep)];
    const index = sender / step;
    for (let run = index ? ends[index - 1] : 0; run < ends[index]; run += 1) {
      const last = Math.min(right, starts[run] + lengths[run]);
      for (let x = Math.max(left, starts[run]); x < last; x += 1) row[Math.floor((x - left) / columnStep)] += bytes[run];
    }
  }
  return {
    ...matrix,
    rows: [top, bottom, rowStep],
    columns: [left, right, columnStep],
    sampled: step > 1,
    values,
  };
}

// The ranks of a cell, and their neighbours as far as they are drawn rank by rank.
function around([first, last, step], index) {
  const half = Math.max(64, Math.ceil(step / 2));
  const middle = first + index * step + Math.floor(step / 2);
  const low = Math.max(first, Math.min(middle - half, last - 2 * half));
  return [low, Math.min(last, low + 2 * half)];
}
