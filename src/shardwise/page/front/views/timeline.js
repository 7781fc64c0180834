// Events of each rank over time. Where events are thinner than pixels, one per pixel is drawn: the work is bounded by what
// can be seen.

import { clipText, createPlot } from "../parts/canvas.js";
import { inkOn, themeColour } from "../parts/colours.js";
import { formatBytes, formatNumber, formatSeconds } from "../parts/format.js";

const LEFT = 62;
const TOP = 24;
const MOST_LANES = 6;
const TALLEST = 620;

// `rows` is a list for each rank of {start, duration, lane, what}, sorted by start; times in microseconds.
export function createTimeline({ facts, rows, colours, state }) {
  const total = Math.max(1e-3, facts.seconds * 1e6);
  const levels = Math.min(MOST_LANES, 1 + facts.lanes.reduce((a, b) => Math.max(a, b), 0));
  const shownRanks = () => Math.min(rows.length, state.most);
  const rowHeight = () => Math.max(9, Math.min(18 * levels + 6, Math.floor((TALLEST - TOP) / shownRanks())));
  const cursor = { place: 0, index: -1 };

  const windowNow = () => [state.from * total, (state.from + 1 / state.zoom) * total];
  const toX = (time) => {
    const [low, high] = windowNow();
    return LEFT + ((time - low) / (high - low)) * (plot.width - LEFT - 8);
  };

  function draw(context, width, tall) {
    const [low, high] = windowNow();
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    drawTimes(context, low, high, tall);
    const height = rowHeight();
    for (let line = 0; line < shownRanks(); line += 1) {
      const place = state.first + line;
      if (place >= rows.length) break;
      const y = TOP + line * height;
      context.fillStyle = themeColour("soft");
      context.textAlign = "right";
      context.textBaseline = "middle";
      if (height > 11 || line % 2 === 0) context.fillText(`rank ${facts.ranks[place]}`, LEFT - 8, y + height / 2);
      context.fillStyle = themeColour(line % 2 ? "card" : "grid");
      context.fillRect(LEFT, y, width - LEFT - 8, height);
      drawRow(context, rows[place], y, height - 2, low, high);
    }
    if (plot.found) {
      const { event, place } = plot.found;
      const [x, y, wide, high2] = rectangle(event, place);
      context.strokeStyle = themeColour("ink");
      context.lineWidth = 2;
      context.strokeRect(x, y, Math.max(2, wide), high2);
    }
  }

  function drawRow(context, events, y, height, low, high) {
    const level = height / levels;
    const painted = Array.from({ length: levels }, () => -1);
    for (const event of events) {
      if (event.start > high) break;
      if (event.start + event.duration < low) continue;
      const depth = Math.min(levels - 1, event.lane);
      const x0 = Math.max(LEFT, toX(event.start));
      const x1 = Math.min(plot.width - 8, toX(event.start + event.duration));
      if (x1 <= painted[depth] + 0.4) continue;
      painted[depth] = x1;
      const colour = colours[facts.kinds[event.what][1]];
      context.fillStyle = colour;
      context.fillRect(x0, y + 1 + depth * level, Math.max(0.7, x1 - x0 - (x1 - x0 > 3 ? 0.6 : 0)), level - 0.5);
      if (x1 - x0 > 34 && level > 11) {
        context.fillStyle = inkOn(colour);
        context.textAlign = "left";
        context.textBaseline = "middle";
        context.fillText(
          clipText(context, facts.kinds[event.what][0], x1 - x0 - 8),
          x0 + 4,
          y + 1 + (depth + 0.5) * level,
        );
      }
    }
  }

  function drawTimes(context, low, high, tall) {
    const step = niceStep((high - low) / Math.max(2, (plot.width - LEFT) / 110));
    context.textAlign = "center";
    context.textBaseline = "bottom";
    for (let time = Math.ceil(low / step) * step; time <= high; time += step) {
      const x = Math.round(toX(time)) + 0.5;
      context.strokeStyle = themeColour("line");
      context.beginPath();
      context.moveTo(x, TOP - 4);
      context.lineTo(x, tall);
      context.stroke();
      context.fillStyle = themeColour("soft");
      context.fillText(formatSeconds(time / 1e6), Math.min(x, plot.width - 24), TOP - 6);
    }
  }

  function rectangle(event, place) {
    const height = rowHeight();
    const level = (height - 2) / levels;
    const x = Math.max(LEFT, toX(event.start));
    const until = Math.min(plot.width - 8, toX(event.start + event.duration));
    return [x, TOP + (place - state.first) * height + 1 + Math.min(levels - 1, event.lane) * level, until - x, level];
  }

  function describe(event, place) {
    const [name, kind, bytes, source, layouts] = facts.kinds[event.what];
    const lines = [
      name,
      `${kind} on rank ${facts.ranks[place]}, ${formatSeconds(event.duration / 1e6)}, starts at ${formatSeconds(event.start / 1e6)}`,
    ];
    if (bytes) lines.push(`${formatBytes(bytes)}, ${formatNumber(bytes)} bytes`);
    if (layouts) lines.push(layouts);
    if (source) lines.push(source);
    const [x, y] = rectangle(event, place);
    return { key: `${place}:${event.start}:${event.lane}`, event, place, lines, at: [x, y] };
  }

  function find(x, y) {
    const height = rowHeight();
    const place = state.first + Math.floor((y - TOP) / height);
    if (x < LEFT || y < TOP || place >= Math.min(rows.length, state.first + shownRanks())) return null;
    const [low, high] = windowNow();
    const time = low + ((x - LEFT) / (plot.width - LEFT - 8)) * (high - low);
    const slack = ((high - low) / (plot.width - LEFT)) * 1.5;
    const depth = Math.floor(((y - TOP - (place - state.first) * height) / height) * levels);
    let best = null;
    for (const event of rows[place]) {
      if (event.start > time + slack) break;
      if (event.start + event.duration < time - slack) continue;
      const better = !best || Math.abs(event.lane - depth) <= Math.abs(best.lane - depth);
      if (better) best = event;
    }
    return best ? describe(best, place) : null;
  }

  const plot = createPlot({
    label: `Timeline of ${formatNumber(facts.count)} events on ${formatNumber(facts.ranks.length)} ranks over ${formatSeconds(facts.seconds)}. Arrow keys go from event to event and rank to rank.`,
    name: "timeline",
    height: () => TOP + rowHeight() * shownRanks() + 4,
    draw,
    find,
    step: (key) => {
      if (key === "ArrowUp" || key === "ArrowDown")
        cursor.place = Math.min(rows.length - 1, Math.max(0, cursor.place + (key === "ArrowDown" ? 1 : -1)));
      const events = rows[cursor.place];
      const moves = { ArrowLeft: cursor.index - 1, ArrowRight: cursor.index + 1, Home: 0, End: events.length - 1 };
      cursor.index = Math.min(events.length - 1, Math.max(0, moves[key] ?? cursor.index));
      return events[cursor.index] ? describe(events[cursor.index], cursor.place) : null;
    },
  });
  plot.zoomBy = (factor, at = 0.5) => {
    const next = Math.max(1, state.zoom * factor);
    state.from = Math.min(1 - 1 / next, Math.max(0, state.from + at / state.zoom - at / next));
    state.zoom = next;
    plot.redraw();
  };
  plot.panBy = (pixels) => {
    state.from = Math.min(1 - 1 / state.zoom, Math.max(0, state.from - pixels / (plot.width - LEFT) / state.zoom));
    plot.redraw();
  };
  return plot;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}
