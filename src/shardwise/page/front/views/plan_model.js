// What the page works out from the rows of a plan: parameters as objects, and the tree of modules with sums.

import { formatBytes } from "../parts/format.js";

// The rows of the first plan, each with the row of the second one, if there is one.
export function readRows(facts) {
  const [first, second] = facts.plans.map((plan) =>
    plan.rows.map((row) => Object.fromEntries(facts.columns.map((name, i) => [name, row[i]]))),
  );
  const others = new Map((second || []).map((row) => [row.name, row]));
  const moved = facts.resharding && facts.resharding[0] ? facts.resharding[0].by_parameter : null;
  return first.map((row, i) => ({
    ...row,
    memory: row.parameters + row.gradients + row.optimizer,
    other: others.get(row.name) || null,
    moved: moved ? moved[i] : null,
  }));
}

// A tree over dotted paths; a node knows the memory of all parameters below it.
export function moduleTree(rows) {
  const root = makeNode("model", "");
  for (const row of rows) {
    const parts = row.name.split(".");
    let node = root;
    node.bytes += row.memory;
    parts.forEach((part, depth) => {
      if (!node.byName.has(part)) node.byName.set(part, makeNode(part, parts.slice(0, depth + 1).join(".")));
      node = node.byName.get(part);
      node.bytes += row.memory;
      node.count += 1;
    });
  }
  const total = root.bytes || 1;
  const finish = (node) => ({
    name: node.name,
    path: node.path,
    share: node.bytes / total,
    text: formatBytes(node.bytes),
    count: node.count,
    children: foldAlike([...node.byName.values()].map(finish), node.path),
  });
  return finish(root);
}

// Numbered neighbours with the same content, such as 80 equal layers, as one node that opens to the first of them.
function foldAlike(nodes, path) {
  const content = (node) => `${node.text} ${node.count} ${node.children.map((c) => `${c.name} ${content(c)}`).join()}`;
  const numbered = (node) => /^\d+$/.test(node.name);
  const runs = [];
  for (const node of nodes) {
    const run = runs.at(-1);
    if (run && numbered(node) && numbered(run[0]) && content(run[0]) === content(node)) run.push(node);
    else runs.push([node]);
  }
  return runs.flatMap((run) => {
    if (run.length < 3) return run;
    return [
      {
        name: `${run[0].name}-${run.at(-1).name}, ${run.length} alike`,
        path: path ? `${path}.` : "",
        share: run.reduce((sum, node) => sum + node.share, 0),
        text: `${run.length} × ${run[0].text}`,
        count: run.reduce((sum, node) => sum + node.count, 0),
        children: [run[0]],
      },
    ];
  });
}

function makeNode(name, path) {
  return { name, path, bytes: 0, count: 0, byName: new Map() };
}

// The rule of a layout without dtype and shape, which have columns of their own.
export function ruleOf(layout) {
  const place = layout.search(/ (on|as|@) /);
  const rule = place < 0 ? "whole" : layout.slice(place + 1);
  return rule.includes(": ") ? rule.slice(rule.indexOf(": ") + 2) : rule;
}
