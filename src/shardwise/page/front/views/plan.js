// The page of one model plan, or of two side by side: memory against the device, traffic by axis, modules, parameters.

import { createBars } from "../parts/bars.js";
import { colourOf, PARTS } from "../parts/colours.js";
import { card, element, figures, legend, swatch } from "../parts/dom.js";
import { formatBytes, formatCount, formatNumber, formatSeconds, formatShape } from "../parts/format.js";
import { createStack } from "../parts/stack.js";
import { createTable } from "../parts/table.js";
import { createTree } from "../parts/tree.js";
import { createPlanEditor, planFileButtons } from "./plan_editor.js";
import { moduleTree, readRows, ruleOf } from "./plan_model.js";

const MEMORY = [
  ["parameters", "parameter_bytes"],
  ["gradients", "gradient_bytes"],
  ["optimizer", "optimizer_bytes"],
  ["activations", "activation_bytes"],
];
const LEAST_SHARE = 0.06;

export function showPlan(root, facts, { served, show }) {
  const rows = readRows(facts);
  const table = parameterTable(facts, rows);
  root.append(
    ...(served ? [createPlanEditor(facts, show)] : []),
    facts.plans.length > 1 ? compareCard(facts) : figures(planFigures(facts)),
    memoryCard(facts),
    trafficCard(facts),
    ...unevenCards(facts),
    treeCard(facts, rows, table),
    card(
      "Parameters",
      `${formatCount(rows.length, "parameter")} of ${facts.model}, bytes on one rank.`,
      { class: "wide", "data-card": "parameters" },
      table.node,
    ),
    movesCard(facts),
    ...(served ? [] : facts.plans.map(planFileCard)),
  );
}

function planFileCard(plan) {
  const buttons = planFileButtons(plan.name, async () => plan.toml);
  const text = element("pre", { class: "file" }, ...plan.toml.split("\n").flatMap((row) => [row, element("br")]));
  return card(plan.name, "", { class: "half", "data-card": "plan-file" }, buttons, text);
}

function planFigures(facts) {
  const [plan] = facts.plans;
  const [device, memory] = plan.device;
  const room = memory - plan.peak_bytes;
  return [
    [
      "Model",
      shortCount(facts.elements),
      `parameters, ${facts.model}`,
      null,
      `${formatNumber(facts.elements)} elements in ${formatCount(plan.rows.length, "parameter")}, shared ones once.`,
    ],
    ["Ranks", formatNumber(plan.ranks), plan.mesh],
    [
      "Peak of memory",
      formatBytes(plan.peak_bytes),
      room >= 0 ? `fits: ${formatBytes(room)} of ${device} free` : `${formatBytes(-room)} more than ${device} has`,
      room >= 0 ? "good" : "warn",
      `The most that the fullest rank holds at one moment of the rehearsed step.\n${MEMORY.map(([name, key]) => `${name} ${plan[key] === null ? "unknown" : formatBytes(plan[key])}`).join(", ")}\nThe largest: ${largestOf(facts, plan, "parameters")}`,
    ],
    [
      "Step",
      formatSeconds(plan.step_seconds),
      `${formatSeconds(plan.compute_seconds)} computing, ${formatSeconds(plan.communication_seconds)} moving`,
      null,
      `Computing and moving, less what overlaps.\nComputing: ${(plan.flops / 1e12).toPrecision(3)} TFLOP of one rank, each operator by its rate on ${device} or its bytes\nMoving: for each move its latency, and its bytes over the bandwidth of its links`,
    ],
    [
      "Tokens per second",
      plan.step_seconds ? formatNumber(Math.round(plan.tokens / plan.step_seconds)) : "-",
      `${formatNumber(plan.tokens)} in a step`,
      null,
      `The tokens of all ranks over the seconds of a step: ${formatNumber(plan.tokens)} / ${formatSeconds(plan.step_seconds)}`,
    ],
    [
      "Received in a step",
      formatBytes(sumOf(plan.traffic)),
      "by one rank",
      null,
      `What the busiest rank receives, forward and backward.\n${Object.entries(plan.traffic)
        .map(([axis, bytes]) => `${axis} ${formatBytes(bytes)}`)
        .join(", ")}\nThe largest: ${largestMoves(facts, plan.moves)}`,
    ],
  ];
}

// The three parameters of which a rank has the most bytes, and the three moves that bring it the most.
function largestOf(facts, plan, column) {
  const [name, bytes] = ["name", column].map((title) => facts.columns.indexOf(title));
  const rows = [...plan.rows].sort((a, b) => b[bytes] - a[bytes]).slice(0, 3);
  return rows.map((row) => `${row[name]} ${formatBytes(row[bytes])}`).join(", ") || "none";
}

function largestMoves(facts, moves) {
  const [label, bytes] = ["label", "received"].map((title) => facts.move_columns.indexOf(title));
  const rows = [...moves].sort((a, b) => b[bytes] - a[bytes]).slice(0, 3);
  return rows.map((row) => `${row[label]} ${formatBytes(row[bytes])}`).join(", ") || "none";
}

function whyOf(facts, plan, name) {
  const words = {
    parameters: "The bytes of this rank's part of each parameter.",
    gradients: "The bytes of this rank's part of each gradient, in the dtype in which they are summed.",
    optimizer: `What ${facts.settings ? facts.settings.optimizer : "the optimizer"} keeps for each element of a parameter.`,
    activations: "What the forward pass keeps for the backward pass, as seen in the rehearsal.",
  };
  return facts.columns.includes(name) ? `${words[name]} The largest: ${largestOf(facts, plan, name)}` : words[name];
}

function shortCount(count) {
  if (count >= 1e9) return `${(count / 1e9).toFixed(1)} B`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} M` : formatNumber(count);
}

function sumOf(amounts) {
  return Object.values(amounts).reduce((sum, value) => sum + value, 0);
}

// One row for each figure, one column for each plan; the better one is marked, in words as well as by weight.
function compareCard(facts) {
  const [a, b] = facts.plans;
  const rate = (plan) => (plan.step_seconds ? plan.tokens / plan.step_seconds : 0);
  const lines = [
    ["mesh", (plan) => plan.mesh, null],
    ["ranks", (plan) => formatNumber(plan.ranks), null],
    ["peak of memory", (plan) => formatBytes(plan.peak_bytes), (plan) => -plan.peak_bytes],
    [
      "fits",
      (plan) => (plan.fits ? `yes, in ${plan.device[0]}` : `no, ${plan.device[0]} has ${formatBytes(plan.device[1])}`),
      (plan) => Number(plan.fits),
    ],
    ["received in a step", (plan) => formatBytes(sumOf(plan.traffic)), (plan) => -sumOf(plan.traffic)],
    ["step", (plan) => formatSeconds(plan.step_seconds), (plan) => -plan.step_seconds],
    ["of which moving", (plan) => formatSeconds(plan.communication_seconds), (plan) => -plan.communication_seconds],
    ["tokens per second", (plan) => formatNumber(Math.round(rate(plan))), rate],
  ];
  const cells = ([title, text, score]) => {
    const better = score && score(a) !== score(b) ? (score(a) > score(b) ? a : b) : null;
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, title),
      ...[a, b].map((plan) =>
        element(
          "td",
          { class: plan === better ? "better" : "" },
          text(plan),
          plan === better ? element("span", { class: "unseen" }, " (better)") : null,
        ),
      ),
    );
  };
  const head = element(
    "tr",
    {},
    element("th", { scope: "col" }, "figure"),
    ...[a, b].map((plan) => element("th", { scope: "col" }, plan.name)),
  );
  const table = element(
    "table",
    { class: "compare" },
    element("thead", {}, head),
    element("tbody", {}, ...lines.map(cells)),
  );
  const note = `${facts.model}, ${shortCount(facts.elements)} parameters. The better of two figures is marked.`;
  return card("Two plans", note, { "data-card": "compare" }, table, movingText(facts));
}

function movingText(facts) {
  const names = facts.plans.map((plan) => plan.name);
  const text = (cost, from, to) =>
    cost
      ? [`${from} → ${to}: ${formatBytes(cost.bytes)} between ranks, about ${formatSeconds(cost.seconds)}`, ...cost.busiest]
          .join("; ")
      : `${from} → ${to}: the plans are not for the same parameters`;
  const [forth, back] = facts.resharding;
  return element(
    "p",
    { class: "moving", "data-name": "moving" },
    element("strong", {}, "Moving the parameters "),
    text(forth, names[0], names[1]),
    element("br"),
    text(back, names[1], names[0]),
  );
}

function memoryCard(facts) {
  const used = Math.max(
    1,
    ...facts.plans.flatMap((plan) => [plan.peak_bytes, MEMORY.reduce((sum, [, key]) => sum + (plan[key] || 0), 0)]),
  );
  const device = Math.max(...facts.plans.map((plan) => plan.device[1]));
  const far = used < LEAST_SHARE * device; // a bar to the scale of the device would not be seen
  const top = 1.04 * (far ? used : Math.max(device, used));
  const stacks = facts.plans.map((plan) =>
    createStack({
      title: `${plan.name} on ${plan.mesh}`,
      parts: MEMORY.map(([name, key]) => [name, plan[key] || 0, PARTS[name], whyOf(facts, plan, name)]),
      limit: [`memory of ${plan.device[0]}`, plan.device[1]],
      mark: ["peak", plan.peak_bytes],
      top,
      over: !plan.fits,
      remark: plan.fits
        ? `peak ${formatBytes(plan.peak_bytes)} of ${formatBytes(plan.device[1])}`
        : `peak ${formatBytes(plan.peak_bytes)}: ${formatBytes(plan.peak_bytes - plan.device[1])} too much`,
    }),
  );
  const entries = MEMORY.map(([name]) => [swatch(PARTS[name]), name === "optimizer" ? "optimizer state" : name]);
  entries.push(...(far ? [] : [[swatch(null, "bound"), "memory of the device"]]), [swatch(null, "dashed"), "peak"]);
  const unknown = facts.plans.some((plan) => plan.activation_bytes === null);
  const note = unknown
    ? "On the fullest rank; activations are not known from shapes alone."
    : "On the fullest rank. Gradients and activations are not all held at once: the peak may be below their sum.";
  return card(
    "Memory of a rank",
    note,
    { class: "wide", "data-card": "memory" },
    element("div", { class: "stack" }, ...stacks),
    legend(entries),
  );
}

function trafficCard(facts) {
  const axes = [...new Set(facts.plans.flatMap((plan) => Object.keys(plan.traffic)))];
  const top = 1.02 * Math.max(1, ...facts.plans.map((plan) => sumOf(plan.traffic)));
  const stacks = facts.plans.map((plan) =>
    createStack({
      title: plan.name,
      parts: axes.map((axis, i) => [axis, plan.traffic[axis] || 0, colourOf(i, axes.length), whyAlong(facts, plan, axis)]),
      top,
      narrow: true,
      remark: formatBytes(sumOf(plan.traffic)),
    }),
  );
  const entries = axes.map((axis, i) => [
    swatch(colourOf(i, axes.length)),
    axis.includes(",") ? `across ${axis.replace(",", " and ")}` : `along ${axis}`,
  ]);
  const body = axes.length
    ? [element("div", { class: "stack" }, ...stacks), legend(entries)]
    : [element("p", { class: "empty" }, "A step moves nothing between ranks.")];
  return card(
    "Traffic of a step",
    "Received by one rank, by axis.",
    { class: "narrow", "data-card": "traffic" },
    ...body,
  );
}

function whyAlong(facts, plan, axis) {
  const at = facts.move_columns.indexOf("axes");
  const moves = plan.moves.filter((move) => move[at].join(",") === axis);
  return `What one rank receives along ${axis}. The largest moves: ${largestMoves(facts, moves)}`;
}

// Ranks that hold different amounts get a bar each; mostly they do not, and a sentence is enough.
function unevenCards(facts) {
  return facts.plans
    .filter((plan) => plan.by_rank && !plan.by_rank.equal && plan.by_rank.count)
    .map((plan) => {
      const names = ["parameters", "gradients", "optimizer"];
      const series = names.map((name, i) => ({ title: name, values: plan.by_rank.values[i], colour: PARTS[name] }));
      const bars = createBars({
        label: `Bytes of parameters, gradients and optimizer state on ${formatCount(plan.by_rank.count, "rank")}`,
        name: "plan-ranks",
        numbers: plan.by_rank.numbers,
        series,
        stacked: true,
      });
      return card(
        `Held by each rank, ${plan.name}`,
        "Ranks hold different amounts.",
        { "data-card": "uneven" },
        bars.node,
        legend(series.map((one) => [swatch(one.colour), one.title])),
      );
    });
}

function treeCard(facts, rows, table) {
  const tree = createTree(moduleTree(rows), { label: "Modules", onchoose: (node) => table.search(node.path) });
  const note = facts.plans.length > 1 ? `Held by one rank, ${facts.plans[0].name}.` : "Held by one rank.";
  return card("Modules", note, { class: "narrow", "data-card": "modules" }, tree);
}

function parameterTable(facts, rows) {
  const two = facts.plans.length > 1;
  const other = (read) => (row) => (row.other ? read(row.other) : null);
  const columns = [
    { title: "parameter", value: (r) => r.name, text: (r) => r.name, code: true, width: two ? "25%" : "32%" },
    {
      title: "shape",
      value: (r) => r.shape.reduce((a, b) => a * b, 1),
      text: (r) => formatShape(r.shape),
      width: two ? "14%" : "17%",
    },
    {
      title: two ? "layout 1" : "layout",
      value: (r) => ruleOf(r.layout),
      text: (r) => ruleOf(r.layout),
      code: true,
      width: two ? "13%" : "15%",
    },
    ...(two
      ? [
          {
            title: "layout 2",
            value: other((r) => ruleOf(r.layout)),
            text: (r) => (r.other ? ruleOf(r.other.layout) : "-"),
            code: true,
            width: "13%",
          },
        ]
      : []),
    { title: two ? "held 1" : "held", kind: "number", value: (r) => r.memory, text: (r) => formatBytes(r.memory) },
    ...(two
      ? [
          {
            title: "held 2",
            kind: "number",
            value: other((r) => r.parameters + r.gradients + r.optimizer),
            text: (r) => (r.other ? formatBytes(r.other.parameters + r.other.gradients + r.other.optimizer) : "-"),
          },
          { title: "to move", kind: "number", value: (r) => r.moved, text: (r) => formatBytes(r.moved) },
        ]
      : [{ title: "weights", kind: "number", value: (r) => r.parameters, text: (r) => formatBytes(r.parameters) }]),
    ...(two
      ? []
      : [
          {
            title: "traffic",
            kind: "number",
            value: (r) => r.traffic,
            text: (r) => (r.traffic ? formatBytes(r.traffic) : "-"),
          },
        ]),
  ];
  const fold = {
    key: (r) => `${r.shape} ${r.dtype} ${r.layout} ${r.other ? r.other.layout : ""}`,
    name: (r) => r.name,
  };
  return createTable({ what: "parameter", label: "Parameters", rows, columns, fold });
}

function movesCard(facts) {
  const rows = facts.plans.flatMap((plan) =>
    plan.moves.map((move) => ({
      ...Object.fromEntries(facts.move_columns.map((name, i) => [name, move[i]])),
      plan: plan.name,
    })),
  );
  const two = facts.plans.length > 1;
  const table = createTable({
    what: "move",
    label: "Moves of a step",
    height: 340,
    rows,
    sorted: [two ? 5 : 4, true],
    columns: [
      ...(two ? [{ title: "plan", value: (m) => m.plan, text: (m) => m.plan, width: "10%" }] : []),
      {
        title: "asked for by",
        value: (m) => m.label,
        text: (m) => `${m.label}${m.backward ? ", backward" : ""}`,
        width: "20%",
      },
      { title: "times", kind: "number", value: (m) => m.count, text: (m) => formatNumber(m.count), width: "6%" },
      { title: "from", value: (m) => m.from, text: (m) => m.from, code: true, width: two ? "26%" : "32%" },
      { title: "to", value: (m) => m.to, text: (m) => ruleOf(m.to), code: true, width: "13%" },
      {
        title: "received",
        kind: "number",
        value: (m) => m.received,
        text: (m) => formatBytes(m.received),
        width: "9%",
      },
      { title: "axes", value: (m) => m.axes.join(" "), text: (m) => m.axes.join(" "), width: "9%" },
      { title: "time", kind: "number", value: (m) => m.seconds, text: (m) => formatSeconds(m.seconds), width: "8%" },
    ],
  });
  const hidden = facts.plans.reduce((sum, plan) => sum + plan.hidden_moves, 0);
  return card(
    "Moves of a step",
    hidden ? `${formatNumber(hidden)} more are not listed.` : "What operators ask for, most bytes first.",
    { "data-card": "moves" },
    table.node,
  );
}
