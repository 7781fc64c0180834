// A form whose fields are sent to the server. A written file has no server, and no form.

import { ask } from "./ask.js";
import { element, uniqueId } from "./dom.js";
import { announce } from "./tooltip.js";

// `fields` are {name, label, value, kind}: kind "code" is a line of notation, "number" or "text" a small field.
export function createForm({ fields, button, onanswer, extra, label }) {
  const inputs = new Map();
  const rows = [];
  const small = element("div", { class: "row" });
  for (const field of fields) {
    const id = uniqueId("field");
    const input = element("input", {
      id,
      type: field.kind === "number" ? "number" : "text",
      class: field.kind === "code" ? "code" : "",
      value: field.value,
      min: field.kind === "number" ? "1" : null,
      spellcheck: "false",
      placeholder: field.placeholder,
      "data-name": field.name,
    });
    inputs.set(field.name, input);
    if (field.kind === "code") rows.push(element("label", { for: id }, field.label), input);
    else small.append(element("label", { class: "field", for: id }, field.label, input));
  }
  const error = element("pre", { class: "error", role: "alert", hidden: true });
  const submit = element("button", { type: "submit", class: "main" }, button);
  small.append(submit);

  const form = element("form", { class: "form" }, ...rows, small);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      const answer = await ask({ ...read(), ...(extra ? extra() : {}) });
      error.hidden = true;
      onanswer(answer);
    } catch (problem) {
      error.textContent = problem.message;
      error.hidden = false;
      announce(problem.message);
    } finally {
      submit.disabled = false;
    }
  });
  const read = () => {
    const values = {};
    for (const field of fields) {
      const text = inputs.get(field.name).value.trim();
      values[field.name] = field.kind === "number" ? Number(text) : text;
    }
    return values;
  };
  return { node: element("section", { class: "card", "aria-label": label }, form, error), read };
}
