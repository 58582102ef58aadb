// The counters: tokens recovered and computed, TTFT, requests by state, free blocks, the step.
//
// Knows state and scene. Must not know other views.

import { h, setText } from "../drawing/elements.js";
import { duration, number } from "../words/words.js";

export class CountersPanel {
  constructor() {
    this.values = {};
    const card = (name, title, wide) => {
      const value = h("b", {}, "–");
      const note = h("small", {});
      this.values[name] = { value, note };
      return h("div", { class: `mvl-card${wide ? " mvl-wide" : ""}`, "data-counter": name }, h("span", {}, title), value, note);
    };
    this.bar = h("i");
    const recovered = card("recovered", "Recovered tokens", true);
    recovered.append(h("div", { class: "mvl-meter", "aria-hidden": "true" }, this.bar));
    this.node = h("section", { class: "mvl-counters", "aria-label": "Counters" },
      recovered, card("computed", "Prefill computed"), card("ttft", "TTFT"), card("requests", "Run · wait · held"), card("free", "Free blocks"), card("step", "Step"));
  }
  draw({ state, scene }, now) {
    const set = (name, value, note = "") => {
      setText(this.values[name].value, value);
      setText(this.values[name].note, note);
    };
    const { queried, recovered, computed, adopted } = scene.totals;
    const later = adopted ? `; ${number(adopted)} adopted` : "";
    set("recovered", number(recovered), queried ? `of ${number(queried)} asked for: hit rate ${((100 * recovered) / queried).toFixed(1)}%${later}` : "nothing asked for yet");
    this.bar.style.width = `${queried ? (100 * recovered) / queried : 0}%`;
    set("computed", number(computed), "tokens");
    const times = scene.lanes.map((lane) => lane.ttftMs).filter((ms) => ms !== null);
    if (times.length) {
      const low = Math.min(...times), high = Math.max(...times);
      // In seconds from one second on: a range of two long numbers does not fit its card.
      const seconds = high >= 1000;
      const short = (value) => (seconds ? (value / 1000).toFixed(value < 1000 ? 2 : value < 99950 ? 1 : 0) : number(value));
      const unit = seconds ? "s" : "ms";
      set("ttft", short(low) === short(high) ? short(low) : `${short(low)} – ${short(high)}`, times.length > 1 ? `${unit}, first to last` : unit);
    } else set("ttft", "–");
    const count = { running: state.running.length, waiting: state.waiting.length, held: 0 };
    for (const request of state.requests.values()) if (request.state === "held") count.held += 1;
    set("requests", `${count.running} · ${count.waiting} · ${count.held}`);
    set("free", `${number(state.freeQueue.length)} / ${number(state.blocks.size)}`, `${number(state.prefixIndex.size)} published`);
    set("step", number(scene.step), scene.lanes.length ? duration(now.ms) : "");
  }
}
