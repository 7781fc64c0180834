// The entrance: reads the facts and shows the view that fits them.

import { element, visible } from "./parts/dom.js";
import { announce, explainFigures, hideTip } from "./parts/tooltip.js";
import { showCheckpoint } from "./views/checkpoint.js";
import { showLayout } from "./views/layout.js";
import { showMove } from "./views/move.js";
import { showPlan } from "./views/plan.js";
import { showStep } from "./views/step.js";

const VIEWS = {
  layout: showLayout,
  move: showMove,
  checkpoint: showCheckpoint,
  plan: showPlan,
  plans: showPlan,
  step: showStep,
};

function show(facts, served) {
  const begin = performance.now();
  const root = document.getElementById("content");
  root.replaceChildren();
  hideTip();
  document.getElementById("kind").textContent = facts.kind;
  document.getElementById("title").textContent = visible(facts.title);
  document.title = `${visible(facts.title)} · shardwise`;
  const view = VIEWS[facts.kind];
  if (view)
    view(root, facts, {
      served,
      show: (answer) => {
        show(answer, served);
        announce("The page shows the new numbers.");
      },
    });
  else root.append(element("p", { class: "empty" }, `This page cannot show a ${facts.kind}.`));
  root.dataset.shown = facts.kind;
  root.dataset.showMs = (performance.now() - begin).toFixed(1);
}

const facts = JSON.parse(document.getElementById("facts").textContent);
show(facts, facts.served);
explainFigures(document.getElementById("content"));
