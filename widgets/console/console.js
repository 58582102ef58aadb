// The controls of a race. What is chosen goes to the kernel as one message; sentences come back and are shown.
//
// Knows its fields and how to send. Must not know what a command does; only of the scene whether a request is active.

import { h, setText } from "../drawing/elements.js";

export class Console {
  constructor(view, { title, fields }, send) {
    this.fields = {};
    const groups = new Map();
    for (const field of fields) {
      const id = `${view.uid}-${field.name}`;
      const input = field.choices
        ? h("select", { id, name: field.name }, ...field.choices.map(([value, text]) => h("option", { value, selected: value === field.value || null }, text)))
        : h("input", { id, name: field.name, type: "number", min: field.min, max: field.max, step: field.step || 1, value: field.value });
      input.addEventListener("change", () => this.settle());
      this.fields[field.name] = input;
      const node = h("div", { class: "mvl-field", "data-field": field.name }, h("label", { for: id }, field.label), input);
      if (!groups.has(field.group)) groups.set(field.group, h("fieldset", {}, h("legend", {}, field.group)));
      groups.get(field.group).append(node);
    }
    const act = (name, text, extra = {}) => h("button", { type: "button", "data-do": name, ...extra, onclick: () => send(name === "fire" ? { do: name, options: this.options() } : { do: name }) }, text);
    this.status = h("span", { class: "mvl-status", role: "status", "aria-live": "polite" }, "");
    this.error = h("p", { class: "mvl-error", role: "alert", hidden: true });
    this.meter = h("progress", { max: 1, value: 0, hidden: true, "aria-label": "Loading" });
    this.node = h("div", { class: "mvl-console" },
      h("div", { class: "mvl-title" }, title),
      h("form", { class: "mvl-form", onsubmit: (event) => event.preventDefault() }, ...groups.values()),
      h("div", { class: "mvl-actions" },
        act("fire", "Fire", { class: "mvl-primary" }), act("abort_leader", "Abort leader"), act("reset_cache", "Reset cache"), this.meter, this.status),
      this.error);
    this.settle();
  }
  options() {
    return Object.fromEntries(Object.entries(this.fields).map(([name, input]) => [name, input.type === "number" ? (input.value === "" ? null : Number(input.value)) : input.value]));
  }
  /** Grey out what has no effect with the other choices. */
  settle() {
    const off = (name, condition) => {
      if (this.fields[name]) this.fields[name].disabled = condition;
    };
    const value = (name) => this.fields[name] && this.fields[name].value;
    off("shared_tokens", value("prompts") !== "shared");
    off("release", value("coordination") !== "single-flight");
  }
  say({ text, level, progress }) {
    const bad = level === "error";
    if (bad) {
      setText(this.error, text);
      this.error.hidden = false;
      setText(this.status, "");
    } else {
      setText(this.status, text);
      if (level !== "progress") this.error.hidden = true;
    }
    this.node.dataset.level = level;
    this.meter.hidden = progress === null || progress === undefined;
    if (!this.meter.hidden) this.meter.value = progress;
  }
  draw({ scene }) {
    this.node.dataset.busy = String(scene.active.size > 0);
  }
}
