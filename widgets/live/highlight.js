// One block or one request, highlighted in all views at once, with a tooltip that says why it is what it is.
//
// Knows the attributes `data-block` and `data-request` that views give to their nodes. Must not know the views.

import { h, setText } from "../drawing/elements.js";
import { explainBlock } from "../looks/blocks.js";
import { explainRequest } from "../looks/requests.js";

/** Follows the pointer and the keyboard on a page. `style` and `tip` are nodes for the page to show. */
export class Highlight {
  constructor(page) {
    this.page = page;
    this.pinned = null;
    this.style = h("style", {});
    this.tip = h("div", { class: "mvl-tooltip", role: "tooltip", hidden: true });
    for (const [event, handle] of Object.entries({ mouseover: this.point, focusin: this.point, mouseout: this.unpoint, focusout: this.unpoint, click: this.pin, keydown: this.key })) {
      page.root.addEventListener(event, (e) => handle.call(this, e));
    }
  }
  /** The tooltip again, of the moment that is shown now. */
  draw() {
    if (this.hovered) this.showTip();
  }
  target(event) {
    return event.target.closest && event.target.closest("[data-block],[data-request]");
  }
  point(event) {
    const node = this.target(event);
    if (!node || !this.page.root.contains(node)) return;
    this.hovered = node;
    // Beside the pointer where a node is wide, such as a lane; a keyboard has no pointer.
    this.pointer = node.dataset.block === undefined && event.clientX ? event.clientX + 14 : null;
    this.mark(node);
    this.showTip();
  }
  unpoint() {
    this.hovered = null;
    this.tip.hidden = true;
    this.mark(null);
  }
  pin(event) {
    const node = this.target(event);
    if (!node) return;
    const what = this.selector(node);
    this.pinned = this.pinned === what ? null : what;
    this.mark(node);
  }
  key(event) {
    if (event.key !== "Escape") return;
    this.pinned = null;
    this.unpoint();
  }
  selector(node) {
    const { block, request } = node.dataset;
    return block !== undefined ? `[data-block="${block}"]` : `[data-request="${CSS.escape(request)}"]`;
  }
  mark(node) {
    const chosen = [this.pinned, node ? this.selector(node) : null].filter(Boolean);
    if (node && node.dataset.block === undefined) {
      const request = this.page.player.current.state.requests.get(node.dataset.request);
      if (request) chosen.push(...request.blockIds.map((id) => `.mvl-pool [data-block="${id}"]`));
    }
    const root = `#${CSS.escape(this.page.uid)}`;
    setText(this.style, chosen.map((what) => `${root} ${what}{--lit:1;outline:2px solid var(--mvl-lit);outline-offset:0;z-index:2}
${root} ${what} rect{stroke:var(--mvl-lit);stroke-width:2}`).join("\n"));
  }
  showTip() {
    const node = this.hovered;
    if (!node || !node.isConnected) return this.unpoint();
    const { player, recording, root } = this.page;
    const model = player.current;
    const lines = node.dataset.block !== undefined
      ? explainBlock(recording, model, Number(node.dataset.block)) : explainRequest(model, node.dataset.request);
    this.tip.replaceChildren(...lines.map((line, i) => h(i ? "div" : "strong", {}, line)));
    this.tip.hidden = false;
    const box = root.getBoundingClientRect();
    const at = node.getBoundingClientRect();
    const left = Math.max(4, Math.min((this.pointer || at.left) - box.left, box.width - this.tip.offsetWidth - 8));
    const below = at.bottom - box.top + 6;
    const fits = below + this.tip.offsetHeight < box.height;
    const top = fits || node.dataset.block === undefined ? below : at.top - box.top - this.tip.offsetHeight - 6;
    this.tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
    return undefined;
  }
}
