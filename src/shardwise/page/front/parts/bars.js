// A number for each rank, as bars: one for each rank while there is room, else each column of pixels is the range
// (light) and the mean (dark) of its ranks.

import { createPlot } from "./canvas.js";
import { themeColour } from "./colours.js";
import { formatBytes, formatNumber } from "./format.js";

const LEFT = 66;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 24;

// `series` are {title, values, colour}; `bound` is a value for each rank, drawn as a mark.
// `stacked` puts the series of a rank on top of each other; `limit` is a line across all ranks.
export function createBars({
  label,
  numbers,
  series,
  bound = null,
  height = 170,
  name,
  format = formatBytes,
  stacked = false,
  limit = 0,
}) {
  const count = series[0].values.length;
  const tops = stacked
    ? [largest(series[0].values.map((_, i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0)))]
    : series.map((one) => largest(one.values));
  const most = niceTop(Math.max(1, limit, ...tops, bound ? largest(bound) : 0));
  let cursor = 0;
  const rankAt = (index) => (numbers ? numbers[index] : index);

  function draw(context, width, tall) {
    const room = { x: LEFT, y: TOP, width: width - LEFT - RIGHT, height: tall - TOP - BOTTOM };
    drawGrid(context, room, most, format);
    const slot = room.width / count;
    if (stacked) drawStacks(context, room, slot);
    else if (slot >= 3) drawEach(context, room, slot);
    else drawRanges(context, room);
    if (limit) drawLimit(context, room);
    drawNumbers(context, room, slot);
    if (plot.found) {
      context.strokeStyle = themeColour("ink");
      const x = room.x + (plot.found.index + 0.5) * slot;
      context.globalAlpha = 0.5;
      context.strokeRect(x - Math.max(2, slot / 2), room.y, Math.max(4, slot), room.height);
      context.globalAlpha = 1;
    }
  }

  function drawEach(context, room, slot) {
    const gap = gapOf(slot);
    const wide = (slot - gap) / series.length;
    series.forEach((one, turn) => {
      context.fillStyle = one.colour;
      one.values.forEach((value, i) => {
        const tall = ((value || 0) / most) * room.height;
        context.fillRect(
          room.x + i * slot + gap / 2 + turn * wide,
          room.y + room.height - tall,
          Math.max(0.7, wide - 0.5),
          tall,
        );
      });
    });
    if (!bound) return;
    context.strokeStyle = themeColour("ink");
    context.lineWidth = 2;
    context.beginPath();
    bound.forEach((value, i) => {
      const y = room.y + room.height * (1 - value / most);
      context.moveTo(room.x + i * slot + gap / 2, y);
      context.lineTo(room.x + (i + 1) * slot - gap / 2, y);
    });
    context.stroke();
    context.lineWidth = 1;
  }

  // Where bars are thinner than pixels, a column of pixels is the fullest of its ranks.
  function drawStacks(context, room, slot) {
    const columns = Math.min(count, Math.floor(room.width));
    const wide = room.width / columns;
    const gap = slot > 4 ? gapOf(slot) : 0;
    const total = (i) => series.reduce((sum, one) => sum + (one.values[i] || 0), 0);
    for (let column = 0; column < columns; column += 1) {
      let rank = Math.floor((column * count) / columns);
      for (let i = rank; i < ((column + 1) * count) / columns; i += 1) if (total(i) > total(rank)) rank = i;
      let y = room.y + room.height;
      for (const one of series) {
        const tall = ((one.values[rank] || 0) / most) * room.height;
        context.fillStyle = one.colour;
        context.fillRect(room.x + column * wide + gap / 2, y - tall, wide - gap, tall);
        y -= tall;
      }
    }
  }

  function drawLimit(context, room) {
    const y = room.y + room.height * (1 - limit / most);
    context.strokeStyle = themeColour("warn");
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(room.x, y);
    context.lineTo(room.x + room.width, y);
    context.stroke();
    context.lineWidth = 1;
  }

  function drawRanges(context, room) {
    const columns = Math.floor(room.width);
    series.forEach((one, turn) => {
      context.fillStyle = one.colour;
      for (let x = 0; x < columns; x += 1) {
        const [low, high, mean] = summary(
          one.values,
          Math.floor((x * count) / columns),
          Math.max(Math.floor(((x + 1) * count) / columns), Math.floor((x * count) / columns) + 1),
        );
        const at = (value) => room.y + room.height * (1 - value / most);
        if (turn === 0) {
          context.globalAlpha = 0.35;
          context.fillRect(room.x + x, at(high), 1, at(low) - at(high));
          context.globalAlpha = 0.85;
          context.fillRect(room.x + x, at(low), 1, room.y + room.height - at(low));
        }
        context.globalAlpha = 1;
        context.fillRect(room.x + x, at(mean) - 1, 1, 2);
      }
    });
  }

  function drawNumbers(context, room, slot) {
    context.fillStyle = themeColour("soft");
    context.textBaseline = "top";
    context.textAlign = "center";
    const every = Math.max(1, niceStep(Math.ceil(44 / slot)));
    for (let i = 0; i < count; i += every)
      context.fillText(formatNumber(rankAt(i)), room.x + (i + 0.5) * slot, room.y + room.height + 6);
    context.textAlign = "right";
    context.fillText("rank", room.x - 8, room.y + room.height + 6);
  }

  function describe(index) {
    const lines = [`rank ${rankAt(index)}`, ...series.map((one) => `${one.title} ${format(one.values[index])}`)];
    if (bound) lines.push(`lower bound ${format(bound[index])}`);
    const slot = (plot.width - LEFT - RIGHT) / count;
    return { key: index, index, lines, at: [LEFT + (index + 0.5) * slot, TOP + 20] };
  }

  const plot = createPlot({
    label,
    height,
    name,
    draw,
    find: (x) => {
      const index = Math.floor(((x - LEFT) / (plot.width - LEFT - RIGHT)) * count);
      if (index < 0 || index >= count) return null;
      cursor = index;
      return describe(index);
    },
    step: (key, shift) => {
      const by = shift ? Math.max(1, Math.round(count / 20)) : 1;
      const moves = { ArrowLeft: cursor - by, ArrowRight: cursor + by, Home: 0, End: count - 1 };
      cursor = Math.min(count - 1, Math.max(0, moves[key] ?? cursor));
      return describe(cursor);
    },
  });
  return plot;
}

function drawGrid(context, room, most, format) {
  context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (let i = 0; i <= 4; i += 1) {
    const y = Math.round(room.y + room.height * (1 - i / 4)) + 0.5;
    context.strokeStyle = themeColour(i ? "grid" : "line");
    context.beginPath();
    context.moveTo(room.x, y);
    context.lineTo(room.x + room.width, y);
    context.stroke();
    context.fillStyle = themeColour("soft");
    if (i % 2 === 0) context.fillText(format((most * i) / 4), room.x - 8, y);
  }
}

// Few bars are not wider than they need be.
function gapOf(slot) {
  return Math.max(Math.min(4, slot * 0.15), slot - 90);
}

function summary(values, first, last) {
  let [low, high, sum] = [Infinity, -Infinity, 0];
  for (let i = first; i < last; i += 1) {
    const value = values[i] || 0;
    low = Math.min(low, value);
    high = Math.max(high, value);
    sum += value;
  }
  return [low, high, sum / (last - first)];
}

export function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= least);
}

function niceTop(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3.2, 4, 5, 6, 8, 10].map((f) => f * power).find((top) => top >= value);
}
