// Elements of the page. Texts become text nodes: no name of a tensor, file or rank is ever read as markup.

const BOOLEANS = new Set(["disabled", "hidden", "open", "checked"]);

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (BOOLEANS.has(name)) node.toggleAttribute(name, value);
    else if (name === "value") node.value = value;
    else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value);
  }
  const given = children.flat().filter((child) => child !== null && child !== undefined);
  node.append(...given.map((child) => (child instanceof Node ? child : visible(String(child)))));
  return node;
}

// A text in which characters that are not seen, such as line ends or those that turn the direction of writing, are
// written as escapes: a name looks like what it is.
export function visible(text) {
  return text.replace(/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}]/gu, (sign) => `\\u{${sign.codePointAt(0).toString(16)}}`);
}

let made = 0;

export function uniqueId(prefix) {
  made += 1;
  return `${prefix}-${made}`;
}

// A card: a section with a heading, and perhaps a sentence that says what it shows.
export function card(title, note, properties, ...children) {
  const id = uniqueId("heading");
  const { class: kind, ...rest } = properties;
  const head = element("header", {}, element("h2", { id }, title), note ? element("p", { class: "note" }, note) : null);
  return element("section", { class: `card ${kind || ""}`, "aria-labelledby": id, ...rest }, head, ...children);
}

// The row of large numbers at the top: entries of [label, value, remark, class, why]. Why: of what a number is made, shown
// beside the pointer or at the focus.
export function figures(entries) {
  const items = entries.map(([label, value, remark, kind, why]) =>
    element(
      "div",
      why ? { class: "asked", tabindex: "0", "aria-description": why, "data-why": why } : {},
      element("dt", {}, label),
      element("dd", { class: kind }, value, remark ? element("span", { class: "more" }, remark) : null),
    ),
  );
  return element("dl", { class: "figures" }, ...items);
}

export function choice(label, options, chosen, onchange) {
  const select = element("select", { onchange: () => onchange(select.value) });
  for (const [value, text] of options) select.append(element("option", { value }, text));
  select.value = chosen;
  return element("label", {}, label, select);
}

export function legend(entries) {
  const items = entries.map(([sign, text]) => element("li", {}, sign, text));
  return element("ul", { class: "legend" }, ...items);
}

export function swatch(colour, kind = "") {
  return element("span", {
    class: `swatch ${kind}`,
    style: colour ? { background: colour } : {},
    "aria-hidden": "true",
  });
}
