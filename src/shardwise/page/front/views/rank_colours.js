// Which colour has a rank? By its number, its host, or its coordinate along an axis of the mesh.

import { element, legend, swatch } from "../parts/dom.js";
import { colourOf, rampImage } from "../parts/colours.js";

export function colourChoices(layout) {
  const choices = [
    ["rank", "rank"],
    ["host", "host"],
  ];
  for (const axis of layout.axes) if (axis.size > 1) choices.push([`axis ${axis.name}`, `axis ${axis.name}`]);
  return choices;
}

// A function from a rank to {index, count, text}.
export function rankClasses(layout, choice) {
  const numbers = layout.ranks.numbers;
  const count = layout.ranks.count;
  if (choice === "host") {
    const size = layout.ranks_per_host;
    const last = numbers ? numbers[count - 1] : count - 1;
    const hosts = Math.floor(Math.max(0, last) / size) + 1;
    return { count: hosts, what: "host", of: (rank) => Math.floor(rank / size) };
  }
  const axis = layout.axes.findIndex((one) => choice === `axis ${one.name}`);
  if (axis >= 0) {
    const stride = layout.axes.slice(axis + 1).reduce((product, one) => product * one.size, 1);
    const places = layout.mesh_ranks ? new Map(layout.mesh_ranks.map((rank, i) => [rank, i])) : null;
    const size = layout.axes[axis].size;
    return {
      count: size,
      what: layout.axes[axis].name,
      of: (rank) => Math.floor((places ? places.get(rank) : rank) / stride) % size,
    };
  }
  const places = numbers ? new Map(numbers.map((rank, i) => [rank, i])) : null;
  return {
    count,
    what: "rank",
    of: (rank) => (places ? places.get(rank) : rank),
    label: (index) => (numbers ? numbers[index] : index),
  };
}

export function classColours(classes) {
  return Array.from({ length: Math.max(1, classes.count) }, (_, i) => colourOf(i, classes.count));
}

export function colourLegend(classes, more = []) {
  const colours = classColours(classes);
  const name = (index) => (classes.label ? classes.label(index) : index);
  const entries =
    colours.length <= 8
      ? colours.map((colour, i) => [swatch(colour), `${classes.what} ${name(i)}`])
      : [
          [
            element("span", { class: "ramp", style: { background: rampImage() } }),
            `${classes.what} ${name(0)} to ${name(colours.length - 1)}`,
          ],
        ];
  return legend([...entries, ...more]);
}
