// Parts of a whole as one bar of HTML, to a common scale, with a limit and a mark.

import { inkOn } from "./colours.js";
import { element } from "./dom.js";
import { formatBytes } from "./format.js";

// `parts` are [name, bytes, colour, why]; `limit` and `mark` are [name, bytes] or null.
export function createStack({
  title,
  parts,
  limit = null,
  mark = null,
  top,
  remark = "",
  over = false,
  narrow = false,
}) {
  const share = (bytes) => `${(100 * bytes) / top}%`;
  const spans = parts
    .filter(([, bytes]) => bytes > 0)
    .map(([name, bytes, colour, why]) => {
      const wide = bytes / top;
      return element(
        "span",
        {
          style: { width: share(bytes), background: colour, color: inkOn(colour) },
          "data-why": `${name}: ${formatBytes(bytes)}${why ? `\n${why}` : ""}`,
        },
        wide > (narrow ? 0.4 : 0.2)
          ? `${name} ${formatBytes(bytes)}`
          : wide > (narrow ? 0.22 : 0.09)
            ? formatBytes(bytes)
            : "",
      );
    });
  const lines = [limit, mark].map((entry, i) =>
    entry && entry[1] <= top
      ? element("i", {
          class: i ? "mark-line" : "limit",
          style: { left: share(entry[1]) },
          title: `${entry[0]}: ${formatBytes(entry[1])}`,
        })
      : null,
  );
  const text = [...parts.filter(([, bytes]) => bytes > 0), limit, mark]
    .filter(Boolean)
    .map(([name, bytes]) => `${name} ${formatBytes(bytes)}`)
    .join(", ");
  return element(
    "div",
    { class: "line" },
    element(
      "div",
      { class: "caption" },
      element("span", {}, title),
      element("span", { class: over ? "over" : "note" }, remark),
    ),
    element("div", { class: "track", role: "img", "aria-label": `${title}: ${text}` }, ...spans, ...lines),
  );
}
