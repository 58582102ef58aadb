// The hash chain: the published blocks from parent to child. Long runs without a branch are folded.
//
// Knows state and scene. Must not know other views.

import { h, panel, s, setAll, setText } from "../drawing/elements.js";
import { blockLook } from "../looks/blocks.js";
import { plural } from "../words/words.js";

export class ChainPanel {
  constructor(view) {
    this.view = view;
    this.all = false;
    this.signature = "";
    this.boxes = [];
    this.svg = s("svg", { class: "mvl-chain-svg", role: "img" });
    this.scroll = h("div", { class: "mvl-scroll", tabindex: "0", "aria-label": "Hash chain, scrolls sideways" }, this.svg);
    this.empty = h("p", { class: "mvl-empty" }, "Nothing is published.");
    this.toggle = h("button", { type: "button", class: "mvl-link", "aria-pressed": "false", onclick: () => {
      this.all = !this.all;
      this.toggle.setAttribute("aria-pressed", String(this.all));
      setText(this.toggle, this.all ? "fold long runs" : "show every block");
      this.signature = "";
      view.invalidate();
    } }, "show every block");
    const aside = h("span", { class: "mvl-aside" }, "parent → child · hash over block id ", this.toggle);
    this.node = panel("chain", "Hash chain of what is published", aside, this.empty, this.scroll);
  }
  draw(model) {
    const { scene, state } = model;
    const signature = `${scene.hashes.size}:${[...scene.hashes.values()].reduce((sum, f) => sum + f.seq * 31 + f.block, 0)}:${this.all}`;
    this.empty.hidden = scene.hashes.size > 0;
    this.scroll.hidden = scene.hashes.size === 0;
    if (signature !== this.signature) {
      this.signature = signature;
      this.layout(scene);
    }
    for (const box of this.boxes) {
      const block = state.blocks.get(box.block);
      if (block) setAll(box.node, { "data-look": blockLook(block, box.block, scene) });
    }
  }
  layout(scene) {
    const children = new Map();
    for (const [hash, facts] of scene.hashes) {
      const parent = scene.hashes.has(facts.parent) ? facts.parent : "";
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push({ hash, ...facts, orphan: parent === "" && facts.parent !== "" });
    }
    const W = 46, H = 34, GAP = 14, LEFT = 46;
    const content = [];
    this.boxes = [];
    let row = 0;
    let widest = 0;
    const walk = (first, column, rowOf, fromX, fromRow) => {
      // One run: follow the only child until the chain parts or ends.
      const run = [first];
      let kids = children.get(first.hash) || [];
      while (kids.length === 1) {
        run.push(kids[0]);
        kids = children.get(kids[0].hash) || [];
      }
      const fold = !this.all && run.length > 9;
      const shown = fold ? [...run.slice(0, 3), null, ...run.slice(-2)] : run;
      const y = rowOf * (H + 12) + 6;
      let x = fromX;
      const fromY = fromRow * (H + 12) + 6 + H / 2;
      let labelEnd = 0;
      shown.forEach((item, i) => {
        const left = LEFT + column * (W + GAP);
        const mid = y + H / 2;
        const path = i === 0 && fromRow !== rowOf
          ? `M${x} ${fromY} h${GAP / 2} V${mid} H${left - 4}` : `M${x} ${mid} H${left - 4}`;
        content.push(s("path", { d: path, class: "mvl-edge", "marker-end": `url(#${this.view.uid}-tip)` }));
        if (item === null) {
          const width = W + 18;
          content.push(
            s("rect", { x: left, y: y + 5, width, height: H - 10, rx: 12, class: "mvl-fold" }),
            s("text", { x: left + width / 2, y: mid + 4, class: "mvl-fold-text" }, `${run.length - 5} more`),
          );
          x = left + width;
          column += 1 + 18 / (W + GAP);
        } else {
          const node = s("g", { class: "mvl-box", "data-block": item.block, tabindex: "-1" },
            s("rect", { x: left, y, width: W, height: H, rx: 5 }),
            s("text", { x: left + W / 2, y: y + 14, class: "mvl-hash" }, item.hash.slice(0, 5)),
            s("text", { x: left + W / 2, y: y + 28, class: "mvl-id" }, String(item.block)));
          content.push(node);
          this.boxes.push({ node, block: item.block });
          const label = item.label || (item.orphan ? "parent evicted" : "");
          if (label) {
            // A label says which tokens it is about, so it may stand further right than its block.
            const words = left < labelEnd ? `· ${label}` : label;
            const at = Math.max(left, labelEnd);
            content.push(s("text", { x: at, y: y - 1, class: "mvl-salt" }, words));
            labelEnd = at + words.length * 6 + 4;
          }
          x = left + W;
          column += 1;
        }
      });
      widest = Math.max(widest, x);
      kids.forEach((kid, i) => {
        const next = i === 0 ? rowOf : ++row;
        walk(kid, column, next, x, rowOf);
      });
      if (!kids.length) {
        content.push(s("text", { x: x + 8, y: y + H / 2 + 4, class: "mvl-by" }, `${run[run.length - 1].index + 1} blocks`));
        widest = Math.max(widest, x + 70);
      }
    };
    const roots = children.get("") || [];
    roots.forEach((root, i) => {
      if (i > 0) row += 1;
      if (row < 40) walk(root, 0, row, LEFT - GAP, 0);
    });
    content.unshift(
      s("defs", {}, s("marker", { id: `${this.view.uid}-tip`, viewBox: "0 0 6 6", refX: 4, refY: 3, markerWidth: 6, markerHeight: 6, orient: "auto" },
        s("path", { d: "M0 0 L6 3 L0 6 z", class: "mvl-tip" }))),
      s("text", { x: 2, y: 6 + H / 2 + 4, class: "mvl-by" }, "root"),
    );
    this.svg.replaceChildren(...content);
    const height = (row + 1) * (H + 12) + 6;
    setAll(this.svg, {
      width: widest + 10, height, viewBox: `0 0 ${widest + 10} ${height}`,
      "aria-label": `Hash chain: ${plural(scene.hashes.size, "published block")} in ${plural(row + 1, "branch").replace("branchs", "branches")}`,
    });
  }
}
