// A tree with numbers beside each node: arrow keys move and open, as the tree pattern of ARIA asks.

import { element, uniqueId } from "./dom.js";

// A node is {name, children, numbers: [share 0..1, text]}; children are made when a node is opened.
export function createTree(root, { label, onchoose, opened = 1 }) {
  const tree = element("ul", { class: "tree", role: "tree", "aria-label": label });

  function addItem(node, parent, depth) {
    const id = uniqueId("node");
    const inner = node.children.length ? element("ul", { role: "group", hidden: true }) : null;
    const twist = element("span", { class: "twist", "aria-hidden": "true" }, inner ? "▸" : "");
    const meter = element(
      "span",
      { class: "meter", "aria-hidden": "true" },
      element("i", { style: { width: `${100 * node.share}%` } }),
    );
    const line = element(
      "div",
      { class: "node", style: { paddingLeft: `${8 + depth * 16}px` } },
      element("span", { class: "name", id: `${id}-name`, title: node.name }, twist, node.name),
      meter,
      element("span", { class: "bytes", id: `${id}-bytes` }, node.text),
    );
    const item = element(
      "li",
      {
        role: "treeitem",
        tabindex: "-1",
        "aria-level": depth + 1,
        "aria-labelledby": `${id}-name ${id}-bytes`,
        "aria-expanded": inner ? "false" : null,
      },
      line,
      inner,
    );
    let filled = false;
    item.toggle = (open) => {
      if (!inner) return;
      if (open && !filled) node.children.forEach((child) => addItem(child, inner, depth + 1));
      filled = filled || open;
      inner.hidden = !open;
      twist.textContent = open ? "▾" : "▸";
      item.setAttribute("aria-expanded", String(open));
    };
    line.addEventListener("click", () => {
      focus(item);
      item.toggle(item.getAttribute("aria-expanded") === "false");
      if (onchoose) onchoose(node);
    });
    parent.append(item);
    if (depth < opened) item.toggle(true);
    return item;
  }

  function focus(item) {
    for (const other of tree.querySelectorAll("[tabindex='0']")) other.tabIndex = -1;
    item.tabIndex = 0;
    item.focus();
  }

  tree.addEventListener("keydown", (event) => {
    const items = [...tree.querySelectorAll("[role=treeitem]")].filter((item) => item.offsetParent !== null);
    const at = items.indexOf(document.activeElement);
    if (at < 0) return;
    const open = items[at].getAttribute("aria-expanded");
    const moves = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 };
    if (event.key in moves) focus(items[Math.min(items.length - 1, Math.max(0, moves[event.key]))]);
    else if (event.key === "ArrowRight" && open === "false") items[at].toggle(true);
    else if (event.key === "ArrowRight" && open === "true") focus(items[at + 1]);
    else if (event.key === "ArrowLeft" && open === "true") items[at].toggle(false);
    else if (event.key === "ArrowLeft") focus(items[at].parentElement.closest("[role=treeitem]") || items[at]);
    else if (event.key === "Enter" || event.key === " ") items[at].firstChild.click();
    else return;
    event.preventDefault();
  });

  root.children.forEach((child) => addItem(child, tree, 0));
  if (tree.firstChild) tree.firstChild.tabIndex = 0;
  return tree;
}
