// What just happened and why: the sentences, newest first.
//
// Knows the story's entries and their sentences. Must not know events.

import { h, Keyed, panel, setAll, setText } from "../drawing/elements.js";
import { storyText } from "./sentences.js";

// These matter less: they stand back.
const QUIET = new Set(["allocated", "freed", "opened", "start", "policies"]);

export class StoryPanel {
  constructor() {
    this.list = h("ol", { class: "mvl-story-list", reversed: true });
    this.items = new Keyed(this.list, () => {
      const node = h("li", {});
      node.parts = [h("span", { class: "mvl-when" }), h("i", { "aria-hidden": "true" }), h("span", {})];
      node.append(...node.parts);
      return node;
    });
    this.key = "";
    this.empty = h("p", { class: "mvl-empty" }, "Nothing has happened yet.");
    this.node = panel("story", "What just happened, and why", h("span", { class: "mvl-aside" }, "newest first"),
      this.empty, h("div", { class: "mvl-story-scroll", tabindex: "0", "aria-label": "Story, newest first" }, this.list));
  }
  draw({ scene }) {
    const last = scene.story[scene.story.length - 1];
    const key = last ? `${scene.story.length}|${last.seq}|${last.ids.length}|${scene.seq}` : "";
    if (key === this.key) return;
    this.key = key;
    this.empty.hidden = scene.story.length > 0;
    const newest = scene.story.slice().reverse();
    this.items.update(newest, (entry) => entry.seq, (node, entry) => {
      const isNew = entry.step === scene.step;
      const stamp = `${entry.ids.length}${isNew}`;
      if (node.stamp === stamp) return;
      node.stamp = stamp;
      const [when, , text] = node.parts;
      setText(when, entry.step === 0 ? "start" : `step ${entry.step}`);
      setAll(node, { "data-kind": entry.kind, "data-quiet": QUIET.has(entry.kind) || null, "data-new": isNew || null });
      setText(text, storyText(entry));
    });
  }
}
