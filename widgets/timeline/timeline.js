// The timeline: a lane for each request, with its phases, marks and facts, and the arrows between lanes.
//
// Knows lanes. Must not know blocks or other views.

import { h, Keyed, panel, s, setAll, setText } from "../drawing/elements.js";
import { ENDED } from "../fold/lanes.js";
import { roleWords, STATE_WORDS } from "../looks/requests.js";
import { countRange, duration, number, plural } from "../words/words.js";

const GLYPHS = { first: "●", recovered: "◆", adopted: "◇", copied: "❐", finished: "✓", aborted: "✕", failed: "!", leads: "★", fork: "┳", beside: "┊" };
const MORE_WORDS = { adopted: "adopted", copied: "block copied on write", fork: "samples begin", beside: "computes beside another" };
const ABOVE = new Set(["recovered", "adopted", "copied", "leads"]);
const LEFT = 92;
const TOP = 8;
const BOTTOM = 24;
const BAR = 16;

function niceStep(span, wanted) {
  const raw = span / Math.max(1, wanted);
  const power = 10 ** Math.floor(Math.log10(raw || 1));
  return [1, 2, 5, 10].map((f) => f * power).find((step) => step >= raw) || power;
}

export class TimelinePanel {
  constructor(view) {
    this.view = view;
    this.axis = "ms";
    this.width = 0;
    const id = view.uid;
    const hatch = (name, size) => s("pattern", { id: `${id}-${name}`, width: size, height: size, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
      s("rect", { width: size, height: size, class: `mvl-${name}-ground` }), s("rect", { width: size / 2.4, height: size, class: `mvl-${name}-line` }));
    this.grid = s("g");
    this.lanes = s("g");
    this.arrows = s("g");
    this.svg = s("svg", { class: "mvl-timeline-svg", role: "img" }, s("defs", {}, hatch("held", 6), hatch("preempted", 6)), this.grid, this.lanes, this.arrows);
    this.rows = new Keyed(this.lanes, (lane) => this.row(lane));
    this.ticks = new Keyed(this.grid, () => s("g", { class: "mvl-tick" }, s("line"), s("text")));
    this.links = new Keyed(this.arrows, () => s("g", { class: "mvl-arrow" }));
    this.empty = h("p", { class: "mvl-empty" }, "No request yet.");
    this.buttons = ["ms", "step"].map((axis) => h("button", { type: "button", class: "mvl-toggle", "aria-pressed": String(axis === this.axis), onclick: () => {
      this.axis = axis;
      this.buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(["ms", "step"][i] === axis)));
      view.invalidate();
    } }, axis === "ms" ? "ms" : "steps"));
    const legend = h("span", { class: "mvl-aside mvl-keys" }, ...[["waiting", "waiting"], ["held", "held"], ["prefill", "prefill (tokens)"], ["decode", "decode (tokens)"], ["preempted", "preempted"]].map(
      ([phase, words]) => h("span", {}, h("i", { class: "mvl-key", "data-phase": phase, "aria-hidden": "true" }), words)),
    h("span", {}, h("i", { class: "mvl-key-mark", "data-mark": "first", "aria-hidden": "true" }, "●"), "first token"),
    h("span", {}, h("i", { class: "mvl-key-mark", "data-mark": "recovered", "aria-hidden": "true" }, "◆"), "recovered"));
    // Not every engine has these: their keys come with them.
    this.more = ["adopted", "copied", "fork", "beside"].map((kind) => {
      const node = h("span", { hidden: true }, h("i", { class: "mvl-key-mark", "data-mark": kind, "aria-hidden": "true" }, GLYPHS[kind]), MORE_WORDS[kind]);
      legend.append(node);
      return { kind, node };
    });
    this.node = panel("timeline", "Timeline", h("span", { class: "mvl-axis", role: "group", "aria-label": "Axis" }, ...this.buttons), legend, this.empty, this.svg);
    this.observer = new ResizeObserver((entries) => {
      this.width = entries[0].contentRect.width;
      view.invalidate();
    });
    this.observer.observe(this.node);
  }
  destroy() {
    this.observer.disconnect();
  }
  row(lane) {
    const node = s("g", { class: "mvl-lane", "data-request": lane.id });
    const hit = s("rect", { class: "mvl-hit", x: 0 });
    const name = s("text", { class: "mvl-lane-name", x: 2 });
    const role = s("text", { class: "mvl-lane-role", x: 2 });
    const spans = s("g");
    const marks = s("g");
    const facts = s("text", { class: "mvl-lane-facts" });
    const facts2 = s("text", { class: "mvl-lane-facts2" });
    node.append(hit, name, role, spans, marks, facts, facts2);
    node.parts = {
      hit, name, role, facts, facts2,
      spans: new Keyed(spans, () => s("g", {}, s("rect", { rx: 3 }), s("text"))),
      marks: new Keyed(marks, () => s("text", { class: "mvl-mark" })),
    };
    return node;
  }
  draw(model, now) {
    const { scene } = model;
    const { lanes } = scene;
    this.empty.hidden = lanes.length > 0;
    this.svg.style.display = lanes.length ? "" : "none";
    const paper = this.paper(lanes.length, now);
    const { width, total } = paper;
    setAll(this.svg, { width, height: total, viewBox: `0 0 ${width} ${total}`, "aria-label": this.label(scene) });
    this.drawTicks(paper);
    for (const { kind, node } of this.more) {
      node.hidden = !(scene.arrows.some((arrow) => arrow.kind === kind) || lanes.some((lane) => lane.marks.some((mark) => mark.kind === kind)));
    }
    this.rows.update(lanes, (lane) => lane.arrivalSeq, (node, lane) => this.drawLane(node, lane, paper.yOf(lanes.indexOf(lane)), paper, now));
    this.drawArrows(scene, paper);
  }
  /** Measures: how wide and high all is, and where a moment (`x`) and a lane (`yOf`) lie. */
  paper(numLanes, now) {
    const axis = this.axis;
    const width = Math.max(300, Math.round(this.width || this.node.clientWidth || 900) - 2);
    const narrow = width < 480; // then the facts are short
    const right = narrow ? 114 : 178;
    const height = numLanes > 8 ? 26 : 32;
    const plot = width - LEFT - right;
    const end = Math.max(now[axis], now.max[axis], axis === "ms" ? 1 : 4);
    return {
      axis, width, narrow, height, plot, end,
      factsX: width - right + 24,
      total: TOP + numLanes * height + BOTTOM,
      x: (value) => LEFT + (Math.min(value, end) / end) * plot,
      yOf: (index) => TOP + index * height + height / 2,
    };
  }
  drawTicks({ axis, plot, end, x, total }) {
    const step = axis === "ms" ? niceStep(end, Math.min(7, plot / 50)) : Math.max(1, niceStep(end, Math.min(10, plot / 40)));
    const ticks = [];
    for (let value = 0; value <= end * 1.0001; value += step) ticks.push(value);
    const seconds = axis === "ms" && end > 8000;
    this.ticks.update(ticks, (value) => value, (node, value) => {
      const [line, text] = node.childNodes;
      setAll(line, { x1: x(value), x2: x(value), y1: TOP - 4, y2: total - BOTTOM + 4 });
      setAll(text, { x: x(value), y: total - 8, "text-anchor": value === 0 ? "start" : "middle" });
      const last = value + step > end;
      const unit = axis === "ms" ? (seconds ? " s" : " ms") : " steps";
      setText(text, `${seconds ? Number((value / 1000).toFixed(2)) : number(value)}${last ? unit : ""}`);
    });
  }
  drawLane(node, lane, y, { axis, width, height, narrow, factsX, x }, now) {
    const { parts } = node;
    setAll(node, { "data-state": lane.state, "data-role": lane.role });
    setAll(parts.hit, { y: y - height / 2, width, height });
    setAll(parts.name, { y: y - 1 });
    setText(parts.name, lane.id.length > 13 ? `${lane.id.slice(0, 12)}…` : lane.id);
    setAll(parts.role, { y: y + 10 });
    setText(parts.role, roleWords(lane));
    const spans = lane.spans.map((span, index) => ({ span, index })).filter(({ span }) => span.to === null || span.to[axis] > span.from[axis]);
    parts.spans.update(spans, (item) => item.index, (group, { span }) => {
      const from = x(span.from[axis]);
      const to = x(span.to ? span.to[axis] : Math.max(now[axis], span.from[axis]));
      this.drawSpan(group, span, from, to, y);
    });
    const marks = lane.marks.filter((mark) => GLYPHS[mark.kind]).map((mark, index) => ({ mark, index }));
    parts.marks.update(marks, (item) => item.index, (text, { mark }) => {
      const right = ENDED.has(mark.kind);
      setAll(text, { x: x(mark.at[axis]) + (right ? 9 : 0), y: ABOVE.has(mark.kind) ? y - BAR / 2 - 1 : y + (right ? 4.5 : BAR / 2 + 4), "data-mark": mark.kind });
      setText(text, GLYPHS[mark.kind]);
    });
    setAll(parts.facts, { x: factsX, y: y - 1, "data-some": lane.recovered > 0 || lane.adopted > 0 || null });
    setText(parts.facts, this.facts(lane, narrow));
    setAll(parts.facts2, { x: factsX, y: y + 10 });
    setText(parts.facts2, lane.ttftMs === null ? "" : `TTFT ${duration(lane.ttftMs)}${narrow ? "" : ` · ${plural(lane.output, "token")} out`}`);
  }
  drawSpan(group, span, left, right, y) {
    const [rect, text] = group.childNodes;
    const wide = Math.max(span.to ? 1.5 : 3, right - left - (span.phase === "prefill" ? 1 : 0));
    const thin = span.phase === "waiting" || span.phase === "held" || span.phase === "preempted";
    const tall = thin ? 10 : BAR;
    setAll(rect, {
      x: left, y: y - tall / 2, width: wide, height: tall, rx: Math.min(3, wide / 2), "data-phase": span.phase, "data-open": span.to === null || null,
      "data-failed": span.failed || null,
      fill: span.phase === "held" || span.phase === "preempted" ? `url(#${this.view.uid}-${span.phase})` : null,
    });
    const tokens = span.tokens || span.planned || 0;
    const held = `held behind ${span.behind}`;
    const long = { held: span.blocks ? `${held} for ${countRange(span.blocks[0], span.blocks[1], "block")}` : held, waiting: "waiting", preempted: "preempted", prefill: `prefill ${number(tokens)}`, decode: `decode ${number(tokens)}` }[span.phase];
    const brief = span.phase === "prefill" || span.phase === "decode" ? number(tokens) : span.phase === "held" ? held : "";
    const fits = (words) => words.length * 6.1 + 8 < wide;
    const words = fits(long) ? long : fits(brief) ? brief : "";
    setAll(text, { x: left + wide / 2, y: y + 3.7, "data-phase": span.phase, class: "mvl-span-text" });
    setText(text, words);
  }
  drawArrows({ arrows, lanes }, { axis, x, yOf }) {
    const places = new Map(lanes.map((lane, i) => [lane.id, yOf(i)]));
    this.links.update(arrows.map((arrow, index) => ({ arrow, index })), (item) => item.index, (group, { arrow }) => {
      const ys = arrow.to.map((id) => places.get(id)).filter((y) => y !== undefined);
      const from = places.get(arrow.from);
      const at = x(arrow.at[axis]);
      const key = `${at.toFixed(1)}|${from}|${ys.join()}`;
      if (group.dataset.key === key) return;
      group.dataset.key = key;
      setAll(group, { "data-kind": arrow.kind });
      if (from === undefined || !ys.length) {
        group.replaceChildren();
        return;
      }
      group.replaceChildren(
        s("path", { d: `M${at} ${from} V${Math.max(...ys)} M${at} ${from} V${Math.min(from, ...ys)}` }),
        s("circle", { cx: at, cy: from, r: 3.5 }),
        ...ys.map((y) => arrow.kind === "beside" ? s("circle", { class: "mvl-ring", cx: at, cy: y, r: 3.5 }) : s("path", { class: "mvl-arrowhead", d: `M${at - 1} ${y - 4.5} l8 4.5 l-8 4.5 z` })),
      );
    });
  }
  facts(lane, narrow) {
    if (lane.forked) return narrow ? `as ${lane.sampleOf}` : `the prompt of ${lane.sampleOf}`;
    if (lane.recovered === null) return "–";
    if (!lane.adopted) return `${number(lane.recovered)} of ${number(lane.prompt)}${narrow ? "" : " recovered"}`;
    if (narrow) return `${number(lane.recovered)} + ${number(lane.adopted)} of ${number(lane.prompt)}`;
    return lane.recovered ? `${number(lane.recovered)} rec., ${number(lane.adopted)} adopted` : `${number(lane.adopted)} of ${number(lane.prompt)} adopted`;
  }
  label(scene) {
    return `Timeline. ${scene.lanes.map((lane) => `${lane.id} ${lane.role === "alone" ? "" : `${lane.role} `}${STATE_WORDS[lane.state]}, ${
      lane.forked ? this.facts(lane, false) : `${lane.recovered || 0} of ${lane.prompt} tokens recovered${lane.adopted ? `, ${lane.adopted} adopted` : ""}`}`).join("; ")}`;
  }
}
