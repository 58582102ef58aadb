// The block pool: a grid of all blocks, each with its look and its ref_count.
//
// Knows state and scene. Must not know other views. Every view has `node` and `draw(model, now)`; `model` is
// {state, scene}, `now` the end of the time axes.

import { h, panel, setAll, setText } from "../drawing/elements.js";
import { BLOCK_WORDS, blockLook } from "../looks/blocks.js";
import { number } from "../words/words.js";

const MAX_CELLS = 1024;

export class PoolPanel {
  constructor(view) {
    this.view = view;
    this.cells = new Map();
    this.grid = h("div", { class: "mvl-grid", role: "group", "aria-label": "Blocks of the pool; arrow keys move" });
    this.grid.addEventListener("keydown", (event) => this.move(event));
    this.note = h("p", { class: "mvl-note" });
    this.legend = h("p", { class: "mvl-legend" });
    this.counts = {};
    for (const [look, words] of Object.entries({
      free: "free", owned: "owned", copy: "private copy", used: "published, in use", kept: "published, ref_count 0", uncomputed: "published, not computed",
    })) {
      this.counts[look] = h("b", {}, "0");
      this.legend.append(h("span", { hidden: look === "uncomputed" }, h("i", { class: "mvl-cell", "data-look": look, "aria-hidden": "true" }), this.counts[look], ` ${words}`));
    }
    this.title = h("span", { class: "mvl-aside" }, "number in a cell = ref_count");
    this.node = panel("pool", "Block pool", this.title, this.grid, this.note, this.legend);
  }
  cell(id) {
    const node = h("button", { type: "button", class: "mvl-cell", "data-block": id, tabindex: this.cells.size ? -1 : 0 });
    this.grid.append(node);
    const entry = { node, key: "" };
    this.cells.set(id, entry);
    return entry;
  }
  move(event) {
    const columns = getComputedStyle(this.grid).gridTemplateColumns.split(" ").length;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    const at = Number(event.target.dataset && event.target.dataset.block);
    const next = by && this.cells.get(at + by);
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.node.tabIndex = 0;
    next.node.focus();
  }
  draw(model) {
    const { state, scene } = model;
    const totals = { free: 0, owned: 0, copy: 0, used: 0, kept: 0, uncomputed: 0 };
    const evicted = scene.evicted.step === scene.step ? new Set(scene.evicted.blocks) : new Set();
    let hidden = 0;
    for (const [id, block] of state.blocks) {
      const look = blockLook(block, id, scene);
      totals[look] += 1;
      if (id > MAX_CELLS) {
        if (look !== "free") hidden += 1;
        continue;
      }
      const entry = this.cells.get(id) || this.cell(id);
      const key = `${look}${block.refCount}${evicted.has(id) ? "x" : ""}`;
      if (entry.key === key) continue;
      entry.key = key;
      setAll(entry.node, {
        "data-look": look, "data-evicted": evicted.has(id) || null,
        "aria-label": `block ${id}, ${BLOCK_WORDS[look]}, ref_count ${block.refCount}`,
      });
      setText(entry.node, evicted.has(id) ? "×" : look === "free" ? "" : look === "kept" ? "·" : look === "uncomputed" ? "?" : String(block.refCount));
    }
    for (const [id, entry] of this.cells) {
      if (state.blocks.has(id)) continue;
      entry.node.remove();
      this.cells.delete(id);
    }
    setText(this.note, state.blocks.size > MAX_CELLS
      ? `The first ${number(MAX_CELLS)} of ${number(state.blocks.size)} blocks are drawn; ${number(hidden)} of the others hold something.` : "");
    for (const [look, node] of Object.entries(this.counts)) setText(node, number(totals[look]));
    this.counts.uncomputed.parentNode.hidden = totals.uncomputed === 0; // only where blocks are published too early
  }
}
