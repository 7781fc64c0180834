// A slice of a tensor, each dim to scale: tiles with the colours of their holders. Copies are bands, addends of a pending
// reduction are hatched, borders of fused groups are dashed. Tiles smaller than pixels are drawn pixel by pixel.

import { clipText, createPlot } from "../parts/canvas.js";
import { channels, inkOn, themeColour } from "../parts/colours.js";
import { formatBox, formatBytes, formatHolders, formatNumber, formatRanks } from "../parts/format.js";
import { classColours } from "./rank_colours.js";

const LEFT = 58;
const TOP = 26;
const MOST_TILES = 5000;
const MOST_BANDS = 6;

// `state` is {layout, model, view, classes, chosenRank, zoom}; the owner changes it and calls redraw.
export function createPicture(state, { label, tallest = 460, name = "layout" }) {
  let cursor = null;
  const kept = { key: "", picture: null };
  const lengthOf = (dim) => (dim === null ? 1 : state.layout.shape[dim]);

  function geometry(width) {
    const room = width - LEFT - 12;
    const [rows, columns] = [Math.max(1, lengthOf(state.view.rows)), Math.max(1, lengthOf(state.view.columns))];
    const shape = Math.min(2.2, Math.max(0.25, rows / columns));
    const strip = state.view.rows === null;
    let wide = room;
    let tall = strip ? 96 : room * shape;
    if (!strip && tall > tallest - TOP) {
      tall = tallest - TOP - 10;
      wide = Math.min(room, Math.max(tall / shape, room * 0.72));
    }
    return { x: LEFT, y: TOP, wide, tall };
  }

  function windowNow() {
    const [rows, columns] = [lengthOf(state.view.rows), lengthOf(state.view.columns)];
    const { x, y, factor } = state.zoom;
    return { rows: [y * rows, (y + 1 / factor) * rows], columns: [x * columns, (x + 1 / factor) * columns] };
  }

  function scale() {
    const area = geometry(plot.width);
    const shown = windowNow();
    const across = area.wide / (shown.columns[1] - shown.columns[0]);
    const down = area.tall / (shown.rows[1] - shown.rows[0]);
    return {
      area,
      shown,
      toX: (v) => area.x + (v - shown.columns[0]) * across,
      toY: (v) => area.y + (v - shown.rows[0]) * down,
    };
  }

  function rectangle(tile, { toX, toY, area }) {
    const span = (dim, to, low, high) => {
      const [from, until] = dim === null ? [0, 1] : [tile.starts[dim], tile.ends[dim]];
      return [Math.max(low, to(from)), Math.min(high, to(until))];
    };
    const [x0, x1] = span(state.view.columns, toX, area.x, area.x + area.wide);
    const [y0, y1] = span(state.view.rows, toY, area.y, area.y + area.tall);
    return [x0, y0, x1 - x0, y1 - y0];
  }

  function draw(context) {
    const now = scale();
    context.font = `12px ${getComputedStyle(document.body).fontFamily}`;
    context.fillStyle = themeColour("grid");
    context.fillRect(now.area.x, now.area.y, now.area.wide, now.area.tall);
    const colours = classColours(state.classes);
    if (!state.layout.shape.includes(0)) {
      if (state.model.countIn(state.view, now.shown) > MOST_TILES && state.model.ownersAt)
        drawPixels(context, now, colours);
      else
        for (const tile of state.model.tilesIn(state.view, now.shown))
          drawTile(context, tile, rectangle(tile, now), colours);
    }
    drawGroups(context, now);
    drawCuts(context, now);
    if (plot.found) {
      context.strokeStyle = themeColour("ink");
      context.lineWidth = 2.5;
      context.strokeRect(...rectangle(plot.found.tile, now));
    }
  }

  function drawTile(context, tile, [x, y, wide, tall], colours) {
    if (wide <= 0 || tall <= 0) return;
    const holders = tile.holders;
    const ranks = holders.flat();
    const bands = Math.max(1, Math.min(ranks.length, MOST_BANDS, Math.floor(wide / 3)));
    for (let i = 0; i < bands; i += 1) {
      const rank = ranks[Math.floor((i * ranks.length) / bands)];
      context.fillStyle = colours[state.classes.of(rank)] || themeColour("faint");
      context.fillRect(x + (wide * i) / bands, y, wide / bands + 0.3, tall);
    }
    if (holders.length > 1) hatch(context, x, y, wide, tall);
    if (state.chosenRank !== null && !ranks.includes(state.chosenRank)) {
      context.fillStyle = themeColour("card");
      context.globalAlpha = 0.78;
      context.fillRect(x, y, wide, tall);
      context.globalAlpha = 1;
    }
    if (wide > 3 && tall > 3) {
      context.strokeStyle = themeColour("card");
      context.lineWidth = wide > 12 && tall > 12 ? 1.5 : 0.5;
      context.strokeRect(x, y, wide, tall);
    }
    if (wide > 16 && tall > 15) drawLabel(context, holders, [x, y, wide, tall], colours);
  }

  function drawLabel(context, holders, [x, y, wide, tall], colours) {
    const text = clipText(context, formatHolders(holders), wide - 8);
    const several = holders.flat().length > 1;
    const colour = colours[state.classes.of(holders[0][0])] || "#888888";
    const half = context.measureText(text).width / 2;
    if (several) {
      context.fillStyle = themeColour("card");
      context.globalAlpha = 0.9;
      context.fillRect(x + wide / 2 - half - 4, y + tall / 2 - 8, half * 2 + 8, 16);
      context.globalAlpha = 1;
    }
    context.fillStyle = several ? themeColour("ink") : inkOn(colour);
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.fillText(text, x + wide / 2, y + tall / 2 + 0.5);
  }

  // The pixels are kept: a pointer that moves over the picture only draws a frame on them.
  function drawPixels(context, now, colours) {
    const { area } = now;
    const [wide, tall] = [Math.max(1, Math.floor(area.wide)), Math.max(1, Math.floor(area.tall))];
    const key = JSON.stringify([state.view, state.zoom, state.classes.what, state.chosenRank, wide, tall]);
    if (kept.key !== key) Object.assign(kept, { key, picture: paintPixels(now, colours, wide, tall) });
    context.imageSmoothingEnabled = false;
    context.drawImage(kept.picture, area.x, area.y, area.wide, area.tall);
  }

  function paintPixels({ shown }, colours, wide, tall) {
    const positions = (count, [low, high]) =>
      Array.from({ length: count }, (_, i) => low + ((i + 0.5) * (high - low)) / count);
    const owners = state.model.ownersAt(state.view, positions(tall, shown.rows), positions(wide, shown.columns));
    const palette = colours.map(channels);
    const image = new ImageData(wide, tall);
    const pixels = image.data;
    let at = 0;
    for (const row of owners) {
      for (const rank of row) {
        const colour = palette[state.classes.of(rank)] || [136, 136, 136];
        const weak = state.chosenRank !== null && rank !== state.chosenRank;
        [pixels[at], pixels[at + 1], pixels[at + 2]] = colour;
        pixels[at + 3] = weak ? 50 : 255;
        at += 4;
      }
    }
    const buffer = new OffscreenCanvas(wide, tall);
    buffer.getContext("2d").putImageData(image, 0, 0);
    return buffer;
  }

  // Borders between fused groups, with their numbers.
  function drawGroups(context, now) {
    for (const group of state.layout.groups) {
      const down = group.dim === state.view.rows;
      if (!down && group.dim !== state.view.columns) continue;
      let end = 0;
      context.strokeStyle = themeColour("ink");
      context.setLineDash([7, 4]);
      context.lineWidth = 2;
      for (const length of group.lengths.slice(0, -1)) {
        end += length;
        const place = down ? now.toY(end) : now.toX(end);
        context.beginPath();
        context.moveTo(down ? now.area.x - 6 : place, down ? place : now.area.y - 6);
        context.lineTo(down ? now.area.x + now.area.wide + 6 : place, down ? place : now.area.y + now.area.tall + 6);
        context.stroke();
      }
      context.setLineDash([]);
      context.lineWidth = 1;
    }
  }

  // Positions of cuts at the borders, as many as there is room for.
  function drawCuts(context, now) {
    context.fillStyle = themeColour("soft");
    context.font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const mark = (dim, window, to, room, write) => {
      if (dim === null) return;
      let last = -Infinity;
      const ends = [...state.model.cutsOf(dim), state.layout.shape[dim]];
      for (const cut of ends) {
        if (cut < window[0] || cut > window[1]) continue;
        const place = to(cut);
        if (place - last < room) continue;
        last = place;
        write(formatNumber(cut), place);
      }
    };
    context.textAlign = "center";
    context.textBaseline = "bottom";
    mark(state.view.columns, now.shown.columns, now.toX, 52, (text, x) =>
      context.fillText(text, Math.min(Math.max(x, LEFT), plot.width - 22), TOP - 6),
    );
    context.textAlign = "right";
    context.textBaseline = "middle";
    mark(state.view.rows, now.shown.rows, now.toY, 18, (text, y) => context.fillText(text, LEFT - 7, y));
  }

  function describe(tile) {
    const elements = tile.starts.reduce((product, start, dim) => product * (tile.ends[dim] - start), 1);
    const holders = tile.holders;
    const lines = [formatBox(tile.starts, tile.ends)];
    lines.push(
      `sizes ${tile.starts.map((start, d) => formatNumber(tile.ends[d] - start)).join(" x ") || "scalar"}, ${formatNumber(elements)} elements`,
    );
    if (state.layout.itemsize) lines.push(`${formatBytes(elements * state.layout.itemsize)} on each holder`);
    if (holders.length > 1)
      lines.push(
        `pending ${state.layout.pending}: addends on ranks ${formatHolders(holders, 8).replaceAll("+", " + ")}`,
      );
    else
      lines.push(
        `${holders[0].length > 1 ? `${formatNumber(holders[0].length)} replicas, ranks` : "rank"} ${formatRanks(holders[0])}`,
      );
    const hosts = [
      ...new Set(
        holders
          .flat()
          .slice(0, 4096)
          .map((rank) => Math.floor(rank / state.layout.ranks_per_host)),
      ),
    ];
    lines.push(`${hosts.length > 1 ? "hosts" : "host"} ${formatRanks(hosts)}`);
    if (state.model.merged > 1) lines.push(`stands for up to ${formatNumber(state.model.merged)} neighbouring boxes`);
    return lines;
  }

  function foundTile(tile) {
    if (!tile) return null;
    const [x, y, wide, tall] = rectangle(tile, scale());
    return { key: tile.key, tile, lines: describe(tile), at: [x + wide / 2, y + tall / 2] };
  }

  function tileNear(x, y) {
    const { area, shown } = scale();
    const [across, down] = [(x - area.x) / area.wide, (y - area.y) / area.tall];
    if (across < 0 || across >= 1 || down < 0 || down >= 1) return null;
    const position = state.view.at.slice();
    if (state.view.columns !== null)
      position[state.view.columns] = shown.columns[0] + across * (shown.columns[1] - shown.columns[0]);
    if (state.view.rows !== null) position[state.view.rows] = shown.rows[0] + down * (shown.rows[1] - shown.rows[0]);
    return state.model.at(state.view, position);
  }

  // The keyboard goes from tile to tile: to the one beyond an edge of the present one.
  function stepTo(key) {
    const position = cursor ? cursor.starts.slice() : state.view.at.slice();
    const moves = {
      ArrowLeft: [state.view.columns, -1],
      ArrowRight: [state.view.columns, 1],
      ArrowUp: [state.view.rows, -1],
      ArrowDown: [state.view.rows, 1],
    };
    const [dim, by] = moves[key] || [null, 0];
    if (cursor && dim !== null) position[dim] = by > 0 ? cursor.ends[dim] : cursor.starts[dim] - 1;
    if (key === "Home") position.fill(0);
    const tile = state.model.at(state.view, position);
    cursor = tile || cursor;
    return foundTile(cursor);
  }

  const plot = createPlot({
    label,
    name,
    height: (width) => geometry(width).tall + TOP + 12,
    draw,
    find: (x, y) => {
      const tile = tileNear(x, y);
      cursor = tile || cursor;
      return foundTile(tile);
    },
    step: stepTo,
  });
  plot.zoomAt = (factor, x = 0.5, y = 0.5) => {
    const zoom = state.zoom;
    const next = Math.max(1, zoom.factor * factor);
    const clamp = (value) => Math.min(1 - 1 / next, Math.max(0, value));
    zoom.x = clamp(zoom.x + x / zoom.factor - x / next);
    zoom.y = clamp(zoom.y + y / zoom.factor - y / next);
    zoom.factor = next;
    plot.redraw();
  };
  plot.panBy = (dx, dy) => {
    const zoom = state.zoom;
    const { area } = scale();
    const clamp = (value) => Math.min(1 - 1 / zoom.factor, Math.max(0, value));
    zoom.x = clamp(zoom.x - dx / area.wide / zoom.factor);
    zoom.y = clamp(zoom.y - dy / area.tall / zoom.factor);
    plot.redraw();
  };
  return plot;
}

function hatch(context, x, y, wide, tall) {
  context.save();
  context.beginPath();
  context.rect(x, y, wide, tall);
  context.clip();
  context.lineWidth = 1.3;
  for (const [colour, shift] of [
    ["rgb(255 255 255 / 60%)", 0],
    ["rgb(0 0 0 / 40%)", 1.3],
  ]) {
    context.strokeStyle = colour;
    context.beginPath();
    for (let at = -tall; at < wide; at += 10) {
      context.moveTo(x + at + shift, y + tall);
      context.lineTo(x + at + tall + shift, y);
    }
    context.stroke();
  }
  context.restore();
}
