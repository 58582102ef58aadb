// The block tables: for each request the physical block of every logical one, and how far it is filled.
//
// Knows state and scene. Must not know other views.

import { h, Keyed, panel, setAll, setText } from "../drawing/elements.js";
import { ENDED } from "../fold/lanes.js";
import { blockLook } from "../looks/blocks.js";
import { heldWords, STATE_WORDS } from "../looks/requests.js";
import { plural } from "../words/words.js";

/** How blocks came into a table, where that is out of the ordinary. */
function cameWords(lane, items, scene) {
  const adopted = items.filter((item) => lane.adoptedBlocks.includes(item.id));
  const copied = items.filter((item) => scene.copies.has(item.id));
  const parts = copied.map((item) => `${item.id} is a copy of ${scene.copies.get(item.id)} (❐)`);
  if (adopted.length) parts.push(`${plural(adopted.length, "block")} adopted in mid-prefill (◇)`);
  return parts.join(", ");
}

export class TablesPanel {
  constructor(view) {
    this.view = view;
    this.body = h("div", { class: "mvl-tables-body" });
    this.rows = new Keyed(this.body, (lane) => this.row(lane));
    this.empty = h("p", { class: "mvl-empty" }, "No request yet.");
    const aside = h("span", { class: "mvl-aside" }, "logical block 0, 1, 2 … → block id");
    this.node = panel("tables", "Block tables", aside, this.empty, this.body);
  }
  row(lane) {
    const name = h("span", { class: "mvl-name", "data-request": lane.id }, lane.id);
    const chips = h("span", { class: "mvl-chips" });
    const note = h("span", { class: "mvl-note" });
    const node = h("div", { class: "mvl-row" }, name, h("div", {}, chips, note));
    node.parts = {
      chips: new Keyed(chips, (item) => h("span", { class: "mvl-cell mvl-chip", "data-block": item.id }, String(item.id))),
      note,
    };
    return node;
  }
  draw(model) {
    const { state, scene } = model;
    this.empty.hidden = scene.lanes.length > 0;
    const size = scene.config ? scene.config.block_size : 16;
    this.rows.update(scene.lanes, (lane) => lane.arrivalSeq, (node, lane) => {
      const request = state.requests.get(lane.id);
      const mine = request && scene.laneOf.get(lane.id) === scene.lanes.indexOf(lane);
      const items = mine ? request.blockIds.map((id, index) => ({ id, index })) : [];
      node.parts.chips.update(items, (item) => `${item.index}:${item.id}`, (chip, item) => {
        const block = state.blocks.get(item.id);
        const filled = Math.max(0, Math.min(1, (request.numComputed - item.index * size) / size));
        setAll(chip, {
          "data-look": blockLook(block, item.id, scene),
          "data-shared": block.refCount > 1 || null,
          "data-came": lane.adoptedBlocks.includes(item.id) ? "adopted" : scene.copies.has(item.id) ? "copied" : null,
          style: filled < 1 ? `--fill:${Math.round(filled * 100)}%` : null,
        });
      });
      let note = cameWords(lane, items, scene);
      if (!items.length) {
        note = { held: `${heldWords(lane)}: no block yet`, waiting: "waiting: no block yet", preempted: "preempted: gave its blocks up" }[lane.state]
          || (ENDED.has(lane.state) ? `${STATE_WORDS[lane.state]}: gave its blocks back` : "no block yet");
      }
      setText(node.parts.note, note);
    });
  }
}
