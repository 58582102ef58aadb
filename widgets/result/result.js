// The result of a race: what each request recovered, and all of them together.
//
// Knows lanes and counters. Must not know other views.

import { h, Keyed, panel, setAll, setText } from "../drawing/elements.js";
import { STATE_WORDS } from "../looks/requests.js";
import { number } from "../words/words.js";

export class ResultPanel {
  constructor() {
    this.list = h("ul", { class: "mvl-results" });
    this.items = new Keyed(this.list, () => h("li", {}));
    this.total = h("p", { class: "mvl-total", "data-result-total": "" });
    this.empty = h("p", { class: "mvl-empty" }, "Fire a race to see what each request recovers.");
    this.node = panel("result", "Result", null, this.empty, this.total, this.list);
  }
  draw({ scene }) {
    const looked = scene.lanes.filter((lane) => lane.recovered !== null || lane.forked);
    const over = scene.lanes.length > 0 && scene.active.size === 0;
    this.empty.hidden = looked.length > 0;
    this.node.dataset.over = String(over);
    this.items.update(looked, (lane) => lane.arrivalSeq, (node, lane) => {
      const role = lane.role === "alone" ? "" : ` (${lane.role})`;
      const adopted = lane.adopted ? ` and adopted ${number(lane.adopted)}` : "";
      const end = lane.state === "finished" || lane.state === "running" ? "" : `, ${STATE_WORDS[lane.state]}`;
      setAll(node, { "data-result-request": lane.id, "data-recovered": lane.recovered, "data-prompt": lane.prompt, "data-role": lane.role, "data-state": lane.state });
      setText(node, `${lane.id}${role} ${lane.forked
        ? `ran on the prompt of ${lane.sampleOf}` : `recovered ${number(lane.recovered)} of ${number(lane.prompt)} prompt tokens${adopted}`}${end}`);
    });
    const { queried, recovered, computed, adopted } = scene.totals;
    setAll(this.total, { "data-recovered": recovered, "data-queried": queried, "data-over": String(over) });
    setText(this.total, !looked.length ? "" : `${over ? "In all" : "So far"}: ${number(recovered)} of ${number(queried)} prompt tokens recovered, ${adopted ? `${number(adopted)} adopted, ` : ""}${number(computed)} computed.`);
  }
}
