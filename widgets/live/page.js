// All views over one recording, laid out on one page, and the loop that draws them.
//
// Knows the views by name, and a player. Must not know what a view draws, or where events come from. A console is made
// by whoever makes the page: the page only shows it and draws it with the views.

import { ChainPanel } from "../chain/chain.js";
import { CountersPanel } from "../counters/counters.js";
import { h } from "../drawing/elements.js";
import { FlightsPanel } from "../flights/flights.js";
import { place } from "../fold/clock.js";
import { PoolPanel } from "../pool/pool.js";
import { ResultPanel } from "../result/result.js";
import { StoryPanel } from "../story/story.js";
import { TablesPanel } from "../tables/tables.js";
import { TimelinePanel } from "../timeline/timeline.js";
import { Highlight } from "./highlight.js";
import { Player } from "./player.js";
import { PlayerBar } from "./player_bar.js";

export const PANELS = {
  counters: CountersPanel, timeline: TimelinePanel, pool: PoolPanel, tables: TablesPanel, chain: ChainPanel,
  story: StoryPanel, flights: FlightsPanel, result: ResultPanel,
};
const PAIRS = [["pool", "tables"], ["story", ["result", "flights"]]];

let viewCount = 0;

/** All panels over one recording. `makeConsole(page)` may return controls to show above; `destroy()` releases everything. */
export class LabPage {
  constructor(root, recording, { show, paced = false, title = "", makeConsole = () => null }) {
    viewCount += 1;
    this.uid = `mvl${viewCount}-${Math.floor(performance.now())}`;
    this.recording = recording;
    this.player = new Player(recording, paced);
    this.seen = recording.end;
    this.drawing = false;
    this.dead = false;
    this.root = h("section", { class: "mvl", id: this.uid, "aria-label": title || "Prefix cache" });
    this.highlight = new Highlight(this);
    this.console = makeConsole(this);
    this.bar = new PlayerBar(this);
    this.panels = [];
    const parts = new Map();
    for (const name of show) {
      if (!PANELS[name]) continue;
      const part = new PANELS[name](this);
      this.panels.push(part);
      parts.set(name, part.node);
    }
    this.layOut(parts, title);
    root.append(this.root);
    this.onEvents = () => {
      this.player.onEvents(this.seen, performance.now());
      this.seen = recording.end;
      this.invalidate();
    };
    recording.listeners.add(this.onEvents);
    if (paced && recording.end > recording.base) {
      this.player.onEvents(recording.base, performance.now());
    }
    this.invalidate();
  }
  layOut(parts, title) {
    const take = (name) => {
      const node = parts.get(name);
      parts.delete(name);
      return node;
    };
    this.root.append(this.highlight.style);
    if (this.console) this.root.append(this.console.node);
    else if (title) this.root.append(h("div", { class: "mvl-title" }, title));
    this.root.append(this.bar.node);
    for (const name of ["counters", "timeline"]) if (parts.has(name)) this.root.append(take(name));
    for (const pair of PAIRS) {
      const cells = pair.map((entry) => [].concat(entry).filter((name) => parts.has(name)).map(take)).filter((nodes) => nodes.length);
      if (cells.length) {
        this.root.append(h("div", { class: "mvl-columns", "data-pair": [].concat(...pair).join(" "), "data-count": cells.length },
          ...cells.map((nodes) => (nodes.length === 1 ? nodes[0] : h("div", { class: "mvl-stack" }, ...nodes)))));
      }
      if (pair[0] === "pool" && parts.has("chain")) this.root.append(take("chain"));
    }
    this.root.append(this.highlight.tip);
  }
  destroy() {
    this.dead = true;
    cancelAnimationFrame(this.frame);
    this.recording.listeners.delete(this.onEvents);
    for (const part of this.panels) if (part.destroy) part.destroy();
    this.root.remove();
  }
  invalidate() {
    if (this.drawing || this.dead) return;
    this.drawing = true;
    this.frame = requestAnimationFrame(() => {
      this.drawing = false;
      this.draw();
    });
  }
  draw() {
    const time = performance.now();
    const moving = this.player.tick(time);
    const model = this.player.current;
    const { scene } = model;
    const now = this.axisNow(scene, time);
    this.bar.draw(model);
    for (const part of this.panels) part.draw(model, now);
    if (this.console) this.console.draw(model);
    this.highlight.draw();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    if (moving || (this.player.mode === "live" && now.grows && !still)) {
      if (moving) this.invalidate();
      else setTimeout(() => this.invalidate(), 50); // open bars grow with the clock, 20 times a second
    }
  }
  axisNow(scene, time) {
    const at = scene.origin === null ? { ms: 0, step: 0 } : place(scene, { ms: scene.ms, step: scene.step });
    const real = scene.config && scene.config.runner !== "virtual";
    const grows = this.player.mode === "live" && scene.active.size > 0 && real;
    if (grows) at.ms += Math.min(20000, time - this.recording.heardAt);
    const known = this.player.mode === "live" ? null : this.recording.raceEnds.get(scene.race);
    return { ...at, grows, max: known || { ms: at.ms * 1.02, step: at.step } };
  }
}
