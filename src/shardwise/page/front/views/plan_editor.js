// Fields for a plan: its mesh, how inputs are cut, and its patterns; and the settings of the estimate.

import { ask } from "../parts/ask.js";
import { choice, element } from "../parts/dom.js";
import { announce } from "../parts/tooltip.js";

export function createPlanEditor(facts, onanswer) {
  const editors = facts.plans.map(planFields);
  const settings = settingFields(facts);
  const error = element("pre", { class: "error", role: "alert", hidden: true });
  const submit = element("button", { type: "submit", class: "main" }, "Estimate");
  const search = element("button", { type: "button", title: "The plan of the shortest step that fits" }, "Autoplan");
  const form = element(
    "form",
    { "aria-label": "The plan" },
    element("div", { class: "pair" }, ...editors.map((editor) => editor.node)),
    element("div", { class: "controls settings" }, ...settings.nodes, submit, search),
    ...(facts.found ? [element("p", { class: "note", "data-name": "found" }, facts.found)] : []),
    error,
  );
  const send = async (button, busy, more) => {
    const label = button.textContent;
    submit.disabled = search.disabled = true;
    button.textContent = busy;
    try {
      onanswer(await ask({ plans: editors.map((editor) => editor.read()), settings: settings.read(), ...more }));
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
      announce(problem.message);
    } finally {
      submit.disabled = search.disabled = false;
      button.textContent = label;
    }
  };
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(submit, "Estimating…", {});
  });
  search.addEventListener("click", () => send(search, "Searching…", { autoplan: true }));
  return element("section", { class: "card", "aria-label": "Change the plan", "data-card": "editor" }, form);
}

// Buttons that copy and save a plan as TOML, as its fields are at that moment; `text` returns it.
export function planFileButtons(name, text) {
  const done = element("output", { class: "note" });
  const act = (label, use) =>
    element(
      "button",
      {
        type: "button",
        class: "act",
        onclick: async () => {
          try {
            done.textContent = await use(await text());
          } catch (problem) {
            done.textContent = problem.message;
          }
          announce(done.textContent);
        },
      },
      label,
    );
  const copy = async (toml) => {
    await navigator.clipboard.writeText(toml);
    return "Copied.";
  };
  const save = (toml) => {
    const file = `${name.replace(/\.(toml|ya?ml|json)$/, "")}.toml`;
    const address = URL.createObjectURL(new Blob([toml], { type: "application/toml" }));
    element("a", { href: address, download: file }).click();
    URL.revokeObjectURL(address);
    return `Saved as ${file}.`;
  };
  return element(
    "span",
    { class: "controls", "data-name": "plan-file" },
    act("Copy as TOML", copy),
    act("Download", save),
    done,
  );
}

function planFields(plan) {
  const { data } = plan;
  const field = (label, value, name) => {
    const input = element("input", { type: "text", class: "code", value, spellcheck: "false", "data-name": name });
    return { node: element("label", { class: "field" }, label, input), input };
  };
  const mesh = field("Mesh", data.mesh, "mesh");
  const inputs = field("Inputs", data.input_plan || "", "input_plan");
  const list = element("div", { class: "patterns" });
  const rows = new Set();
  const add = (pattern, text) => {
    const row = {
      pattern: element("input", {
        type: "text",
        class: "code",
        value: pattern,
        "aria-label": "Pattern",
        spellcheck: "false",
        "data-name": "pattern",
      }),
      text: element("input", {
        type: "text",
        class: "code",
        value: text,
        "aria-label": `Placements of ${pattern || "the pattern"}`,
        spellcheck: "false",
        "data-name": "placements",
      }),
    };
    const remove = element(
      "button",
      {
        type: "button",
        "aria-label": `Remove ${pattern || "the pattern"}`,
        onclick: () => {
          rows.delete(row);
          row.node.remove();
        },
      },
      "×",
    );
    row.node = element("div", { class: "pattern" }, row.pattern, row.text, remove);
    rows.add(row);
    list.append(row.node);
  };
  for (const [pattern, text] of Object.entries(data.parameters)) add(pattern, text);
  const more = element(
    "button",
    {
      type: "button",
      onclick: () => {
        add("", "");
        [...rows].pop().pattern.focus();
      },
    },
    "Add a pattern",
  );
  const node = element(
    "fieldset",
    {},
    element("legend", {}, plan.name),
    element("div", { class: "controls" }, mesh.node, inputs.node),
    list,
    element(
      "div",
      { class: "controls" },
      more,
      planFileButtons(plan.name, async () => (await ask({ toml: read() })).toml),
    ),
  );
  const read = () => {
    const parameters = {};
    for (const row of rows) if (row.pattern.value.trim()) parameters[row.pattern.value.trim()] = row.text.value.trim();
    const given = { ...data, mesh: mesh.input.value.trim(), parameters };
    if (inputs.input.value.trim()) given.input_plan = inputs.input.value.trim();
    else delete given.input_plan;
    return given;
  };
  return { node, read };
}

function settingFields({ settings, choices }) {
  const chosen = { ...settings };
  const nodes = [];
  const number = (name, label) => {
    const input = element("input", {
      type: "number",
      min: "1",
      value: String(settings[name]),
      "data-name": name,
      onchange: () => {
        chosen[name] = Number(input.value);
      },
    });
    nodes.push(element("label", {}, label, input));
  };
  number("batch", "Batch");
  number("sequence", "Sequence");
  number("ranks_per_host", "Ranks per host");
  for (const [name, label] of [
    ["optimizer", "Optimizer"],
    ["device", "Device"],
  ])
    nodes.push(
      choice(
        label,
        choices[name].map((one) => [one, one]),
        settings[name],
        (value) => {
          chosen[name] = value;
        },
      ),
    );
  const types = ["", "f32", "bf16", "f16"].concat(
    settings.dtype && !["f32", "bf16", "f16"].includes(settings.dtype) ? [settings.dtype] : [],
  );
  nodes.push(
    choice(
      "Parameters in",
      types.map((one) => [one, one || "their dtype"]),
      settings.dtype || "",
      (value) => {
        chosen.dtype = value;
      },
    ),
  );
  return { nodes, read: () => chosen };
}
