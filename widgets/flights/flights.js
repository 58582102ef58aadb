// Who computes for whom now: open flights, samples of one prompt, shared prefixes, each with those held behind it.
//
// Knows state and lanes. Must not know other views.

import { h, Keyed, panel, setAll, setText } from "../drawing/elements.js";
import { laneFor, lastSpan } from "../fold/lanes.js";
import { number } from "../words/words.js";

export class FlightsPanel {
  constructor() {
    this.body = h("div", { class: "mvl-flights-body" });
    this.rows = new Keyed(this.body, () => {
      const node = h("div", { class: "mvl-flight" });
      node.parts = [h("span", { class: "mvl-flight-id" }), h("b", {}), h("span", { class: "mvl-flight-arrow", "aria-hidden": "true" }, "⟵"), h("span", {})];
      node.append(...node.parts);
      return node;
    });
    this.empty = h("p", { class: "mvl-empty" });
    this.released = h("p", { class: "mvl-note" });
    this.node = panel("flights", "Flights", null, this.body, this.empty, this.released);
  }
  draw({ state, scene }) {
    const rows = [...state.flights].map(([id, flight]) => ({ key: `f${id}`, title: `flight ${id}`, leader: flight.leader, does: "leads", held: flight.followers }));
    for (const [first, held] of state.samples) rows.push({ key: `s${first}`, title: "samples", leader: first, does: "computes the prompt", held });
    const waits = new Map();
    for (const [id, leader] of state.awaiting) waits.set(leader, [...(waits.get(leader) || []), id]);
    for (const [leader, held] of waits) {
      const blocks = held.map((id) => {
        const span = laneFor(scene, id) && lastSpan(laneFor(scene, id));
        return span && span.blocks ? `${id} (block ${number(span.blocks[1])})` : id;
      });
      rows.push({ key: `p${leader}`, title: "prefix", leader, does: "computes blocks", held: blocks });
    }
    this.rows.update(rows, (row) => row.key, (node, row) => {
      const [id, leader, arrow, held] = node.parts;
      setText(id, row.title);
      setText(leader, `${row.leader} ${row.does}`);
      setAll(leader, { "data-request": row.leader });
      arrow.hidden = !row.held.length;
      setText(held, row.held.length ? `held: ${row.held.join(", ")}` : "nobody is held");
    });
    this.empty.hidden = rows.length > 0;
    setText(this.empty, {
      "single-flight": "No flight is open.", "shared-prefix": "Nobody waits for a shared prefix.", "wait-or-recompute": "Nobody waits for a shared prefix.",
    }[scene.config && scene.config.coordination] || "No coordination: every request is on its own.");
    setText(this.released, state.released.size ? `Released, not ended yet: ${[...state.released].sort().join(", ")}` : "");
  }
}
