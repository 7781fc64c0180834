// Questions about a layout: which tile is at a point, and which tiles are in a window of a slice.
//
// A view is {rows, columns, at}: the dims drawn down and across (null: none), and a position in each other dim. A tile
// is a box with its holders: for each addend of a pending reduction, the ranks that have it.

export function createModel(layout) {
  return layout.regular ? createRegularModel(layout) : createBoxModel(layout);
}

// The two dims with the most cuts, the last ones among equals: what a picture shows first.
export function defaultView(layout, model) {
  const dims = layout.shape.map((_, dim) => dim);
  const byCuts = dims.slice().sort((a, b) => model.cutsOf(b).length - model.cutsOf(a).length || b - a);
  const [rows, columns] = byCuts.slice(0, 2).sort((a, b) => a - b);
  const at = layout.shape.map(() => 0);
  if (layout.shape.length === 1) return { rows: null, columns: 0, at };
  return { rows: rows ?? null, columns: columns ?? null, at };
}

function createRegularModel(layout) {
  const { cuts, owners, addends, replicas, merged } = layout.regular;
  const counts = cuts.map((dim) => dim.starts.length);
  const filled = cuts.map((dim) => dim.starts.map((_, i) => i).filter((i) => dim.ends[i] > dim.starts[i]));
  const starts = cuts.map((dim, d) => filled[d].map((i) => dim.starts[i]));

  function cellAt(dim, position) {
    const cell = filled[dim][lastAtMost(starts[dim], position)];
    return cell !== undefined && position < cuts[dim].ends[cell] ? cell : -1;
  }

  function tileOf(cells) {
    let index = 0;
    cells.forEach((cell, dim) => {
      index = index * counts[dim] + cell;
    });
    const first = index * addends * replicas;
    return {
      key: index,
      starts: cells.map((cell, dim) => cuts[dim].starts[cell]),
      ends: cells.map((cell, dim) => cuts[dim].ends[cell]),
      first,
      copies: addends * replicas,
      get holders() {
        const found = [];
        for (let a = 0; a < addends; a += 1) found.push(owners.slice(first + a * replicas, first + (a + 1) * replicas));
        return found;
      },
    };
  }

  // The range of filled cells along a dim that meet a window.
  function range(dim, low, high) {
    if (dim === null) return [null];
    const from = Math.max(0, lastAtMost(starts[dim], low));
    const to = lastAtMost(starts[dim], high - 1e-9);
    return filled[dim].slice(from, to + 1);
  }

  return {
    merged: merged.reduce((a, b) => a * b, 1),
    count: counts.reduce((a, b) => a * b, 1),
    cutsOf: (dim) => starts[dim],
    at(view, position) {
      const cells = layout.shape.map((_, dim) => cellAt(dim, position[dim]));
      return cells.includes(-1) ? null : tileOf(cells);
    },
    countIn(view, window) {
      return range(view.rows, ...window.rows).length * range(view.columns, ...window.columns).length;
    },
    tilesIn(view, window) {
      const fixed = layout.shape.map((_, dim) =>
        dim === view.rows || dim === view.columns ? 0 : cellAt(dim, view.at[dim]),
      );
      if (fixed.includes(-1)) return [];
      const [down, across] = [range(view.rows, ...window.rows), range(view.columns, ...window.columns)];
      const tiles = [];
      for (const row of down) {
        for (const column of across) {
          const cells = fixed.slice();
          if (row !== null) cells[view.rows] = row;
          if (column !== null) cells[view.columns] = column;
          tiles.push(tileOf(cells));
        }
      }
      return tiles;
    },
    // The first owner at each of many rows and columns, for pictures with more cells than pixels.
    ownersAt(view, rows, columns) {
      const strides = counts.map((_, d) => counts.slice(d + 1).reduce((a, b) => a * b, 1));
      const base = layout.shape.reduce(
        (sum, _, d) => sum + (d === view.rows || d === view.columns ? 0 : cellAt(d, view.at[d]) * strides[d]),
        0,
      );
      const place = (dim, position) => (dim === null ? 0 : cellAt(dim, position) * strides[dim]);
      const across = columns.map((position) => place(view.columns, position));
      return rows.map((position) => {
        const row = base + place(view.rows, position);
        return across.map((column) => owners[(row + column) * addends * replicas]);
      });
    },
  };
}

function createBoxModel(layout) {
  const { starts, ends, holders } = layout.boxes;
  const tiles = starts.map((start, i) => ({
    key: i,
    starts: start,
    ends: ends[i],
    holders: holders[i],
    copies: holders[i].flat().length,
  }));
  const cuts = layout.shape.map((_, dim) => [...new Set(starts.map((start) => start[dim]))].sort((a, b) => a - b));
  const inSlice = (tile, view) =>
    layout.shape.every(
      (_, dim) =>
        dim === view.rows ||
        dim === view.columns ||
        (tile.starts[dim] <= view.at[dim] && view.at[dim] < tile.ends[dim]),
    );
  return {
    merged: 1,
    count: tiles.length,
    cutsOf: (dim) => cuts[dim],
    at: (view, position) =>
      tiles.find((tile) =>
        tile.starts.every((start, dim) => start <= position[dim] && position[dim] < tile.ends[dim]),
      ) || null,
    countIn: () => 0,
    tilesIn: (view) => tiles.filter((tile) => inSlice(tile, view)),
  };
}

// The last index whose value is at most this one; -1: none.
function lastAtMost(values, wanted) {
  let [low, high] = [0, values.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] <= wanted) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
