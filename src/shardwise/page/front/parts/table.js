// A table of any length with search and sort. Only the rows in view are in the document.
//
// `columns` are {title, value(row), text(row), search(row), kind, width}: value sorts, text is shown and searched, unless
// `search` says what is searched instead. With `fold`, {key(row), name(row)}, rows with equal keys whose names differ in
// numbers only are one row, which opens. A table narrower than `least` can be scrolled sideways.

import { element, uniqueId } from "./dom.js";
import { formatCount } from "./format.js";

const ROW_HEIGHT = 30;
const BEYOND = 8;
const PRINTED = 400;

export function createTable({ columns, rows, what, onchoose, label, height = 420, sorted = null, fold = null, least = null }) {
  const groups = fold ? findGroups(rows, fold) : new Map();
  const state = { order: sorted, search: "", shown: rows, chosen: null, opened: new Set() };
  const body = element("tbody");
  const count = element("output", { class: "note" });
  const search = element("input", {
    type: "search",
    placeholder: `Search ${formatCount(rows.length, what)}`,
    "aria-label": `Search ${what}s`,
    oninput: () => {
      state.search = search.value;
      refresh();
    },
  });
  const scroll = element("div", {
    class: "scroll",
    tabindex: "0",
    role: "group",
    "aria-label": `Rows of ${label}`,
    style: { maxHeight: `${height}px` },
    onscroll: () => paint(),
  });
  const heads = columns.map((column, index) => {
    const button = element("button", { type: "button", onclick: () => sortBy(index) }, column.title);
    return element(
      "th",
      { class: column.kind, scope: "col", style: column.width ? { width: column.width } : {} },
      button,
    );
  });
  const id = uniqueId("table");
  scroll.append(
    element(
      "table",
      { id, "aria-label": label, "aria-rowcount": rows.length, style: { minWidth: least || `${columns.length * 92}px` } },
      element("thead", {}, element("tr", {}, ...heads)),
      body,
    ),
  );

  function sortBy(index) {
    const same = state.order && state.order[0] === index;
    const descending = columns[index].kind === "number";
    state.order = same ? [index, !state.order[1]] : [index, descending];
    refresh();
  }

  function refresh() {
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    state.shown = words.length
      ? rows.filter((row) => {
          const text = searchText(row);
          return words.every((word) => text.includes(word));
        })
      : rows.slice();
    if (state.order) {
      const [index, descending] = state.order;
      const value = columns[index].value;
      state.shown.sort((a, b) => (descending ? compare(value(b), value(a)) : compare(value(a), value(b))));
    }
    const folds = groups.size > 0 && !words.length;
    if (folds) state.shown = state.shown.filter(isShown);
    heads.forEach((head, index) => {
      const mine = state.order && state.order[0] === index;
      head.setAttribute("aria-sort", mine ? (state.order[1] ? "descending" : "ascending") : "none");
    });
    const all = state.shown.length === rows.length;
    const some = `${formatCount(state.shown.length, what)} of ${rows.length.toLocaleString("en-US")}`;
    count.textContent = all ? "" : folds ? `${formatCount(rows.length, what)}, those alike folded` : some;
    scroll.scrollTop = 0;
    paint();
  }

  // Of those alike the first one stands for all, until it is opened.
  function isShown(row) {
    const group = groups.get(row);
    return !group || group.rows[0] === row || state.opened.has(group);
  }

  function toggle(group) {
    if (!state.opened.delete(group)) state.opened.add(group);
    const top = scroll.scrollTop;
    refresh();
    scroll.scrollTop = top;
    paint();
  }

  function foldButton(group, open) {
    return element(
      "button",
      {
        type: "button",
        class: "fold",
        "aria-expanded": String(open),
        "aria-label": `${open ? "Fold" : "Show"} ${formatCount(group.rows.length, what)} alike`,
        onclick: (event) => {
          event.stopPropagation();
          toggle(group);
        },
      },
      open ? "▾" : `▸ ${group.rows.length} ×`,
    );
  }

  function searchText(row) {
    return columns
      .map((column) => (column.search || column.text)(row))
      .join(" ")
      .toLowerCase();
  }

  function paint(all = false) {
    const begin = performance.now();
    const total = state.shown.length;
    const room = scroll.clientHeight || height;
    let first = Math.max(0, Math.floor(scroll.scrollTop / ROW_HEIGHT) - BEYOND);
    let last = Math.min(total, Math.ceil((scroll.scrollTop + room) / ROW_HEIGHT) + BEYOND);
    if (all) [first, last] = [0, Math.min(total, PRINTED)];
    const lines = state.shown.slice(first, last).map((row, i) => line(row, first + i));
    const empty = total
      ? []
      : [
          element(
            "tr",
            {},
            element(
              "td",
              { colspan: columns.length, class: "note" },
              rows.length ? "Nothing matches." : `No ${what}s.`,
            ),
          ),
        ];
    body.replaceChildren(gap(first), ...lines, ...empty, gap(all ? 0 : total - last));
    scroll.dataset.redrawMs = (performance.now() - begin).toFixed(2);
  }

  function gap(lines) {
    const cell = element("td", { colspan: columns.length, style: { height: `${lines * ROW_HEIGHT}px` } });
    return element("tr", { class: "gap", "aria-hidden": "true", hidden: lines === 0 }, cell);
  }

  function line(row, index) {
    const group = groups.get(row);
    const head = group && group.rows[0] === row && !state.search.trim();
    const open = head && state.opened.has(group);
    const cells = columns.map((column, at) => {
      const text = head && !open && at === 0 ? group.title : column.text(row);
      return element(
        "td",
        { class: [column.kind, column.code ? "code" : ""].join(" "), title: text.length > 18 ? text : null },
        head && at === 0 ? foldButton(group, open) : null,
        text,
      );
    });
    const chosen = onchoose && row === state.chosen;
    return element(
      "tr",
      {
        class: `row ${chosen ? "chosen" : ""}`,
        "aria-rowindex": index + 2,
        "aria-selected": onchoose ? String(chosen) : null,
        onclick: onchoose ? () => choose(row) : null,
      },
      ...cells,
    );
  }

  function choose(row) {
    state.chosen = row;
    paint();
    if (onchoose) onchoose(row);
  }

  scroll.addEventListener("keydown", (event) => {
    if (!onchoose || !["ArrowDown", "ArrowUp"].includes(event.key) || event.target !== scroll) return;
    event.preventDefault();
    const at = state.shown.indexOf(state.chosen);
    const next = Math.min(state.shown.length - 1, Math.max(0, at + (event.key === "ArrowDown" ? 1 : -1)));
    const top = next * ROW_HEIGHT;
    if (top < scroll.scrollTop || top > scroll.scrollTop + scroll.clientHeight - 3 * ROW_HEIGHT)
      scroll.scrollTop = Math.max(0, top - 2 * ROW_HEIGHT);
    if (state.shown[next]) choose(state.shown[next]);
  });
  addEventListener("beforeprint", () => paint(true));
  addEventListener("afterprint", () => paint());
  new ResizeObserver(() => paint()).observe(scroll);
  refresh();
  const setSearch = (text) => {
    search.value = text;
    state.search = text;
    refresh();
  };
  return {
    search: setSearch,
    node: element("div", {}, element("div", { class: "controls" }, search, count), scroll),
    choose,
    state,
  };
}

// Rows that are alike: three or more with one key, and one name if its numbers are left out.
function findGroups(rows, { key, name }) {
  const byKey = new Map();
  for (const row of rows) {
    const found = `${name(row).replace(/\d+/g, "#")} ${key(row)}`;
    if (!byKey.has(found)) byKey.set(found, []);
    byKey.get(found).push(row);
  }
  const groups = new Map();
  for (const alike of byKey.values()) {
    if (alike.length < 3) continue;
    const group = { rows: alike, title: foldedName(alike.map(name)) };
    for (const row of alike) groups.set(row, group);
  }
  return groups;
}

// "layers.0-79.up.weight" for names that differ in one number, "layers.*.experts.*" for those that differ in several.
function foldedName(names) {
  const numbers = names.map((name) => (name.match(/\d+/g) || []).map(Number));
  const varies = numbers[0].map((first, at) => numbers.some((found) => found[at] !== first));
  let at = -1;
  return names[0].replace(/\d+/g, (found) => {
    at += 1;
    if (!varies[at]) return found;
    if (varies.filter(Boolean).length > 1) return "*";
    const column = numbers.map((row) => row[at]);
    return `${Math.min(...column)}-${Math.max(...column)}`;
  });
}

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined) return 1;
  if (b === null || b === undefined) return -1;
  return typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
}
