// The bar under the title: pause, beat by beat, scrub, speed. The engine goes on meanwhile.
//
// Knows a player and its recording. Must not know what the views draw.

import { h, icon, setAll, setText } from "../drawing/elements.js";
import { number } from "../words/words.js";

export class PlayerBar {
  constructor(view) {
    this.view = view;
    const { player } = view;
    const button = (label, name, act) => h("button", { type: "button", class: "mvl-round", "aria-label": label, title: label, onclick: () => {
      act();
      view.invalidate();
    } }, icon(name));
    this.playButton = button("Pause", "pause", () => {
      if (player.mode === "paused") player.play(performance.now());
      else player.seek(player.position, "paused");
    });
    this.slider = h("input", { type: "range", min: 0, max: 0, value: 0, "aria-label": "Time: event of the log", oninput: () => {
      player.seek(Number(this.slider.value));
      view.invalidate();
    } });
    this.where = h("output", { class: "mvl-where" });
    this.live = h("button", { type: "button", class: "mvl-live", onclick: () => {
      player.goLive();
      view.invalidate();
    } }, "live");
    this.speed = h("select", { "aria-label": "Speed of playing, steps a second", onchange: () => {
      player.beatsPerSecond = 2 * Number(this.speed.value);
    } }, ...[[0, "auto speed"], [0.5, "½ step/s"], [1, "1 step/s"], [2, "2 steps/s"], [5, "5 steps/s"], [20, "20 steps/s"]].map(([value, text]) => h("option", { value }, text)));
    this.node = h("div", { class: "mvl-player", role: "group", "aria-label": "Time" },
      button("Back to the start of the race", "start", () => player.seek(player.raceStart())),
      button("One beat back", "back", () => player.back()), this.playButton, button("One beat on", "on", () => player.forward()),
      this.slider, this.where, this.speed, this.live);
  }
  draw({ scene }) {
    const { player, recording } = this.view;
    const paused = player.mode === "paused";
    const face = paused ? "play" : "pause";
    if (this.face !== face) {
      this.face = face;
      this.playButton.replaceChildren(icon(face));
    }
    setAll(this.playButton, { "aria-label": paused ? "Play" : "Pause", title: paused ? "Play" : "Pause" });
    setAll(this.slider, { min: recording.base, max: recording.end });
    if (document.activeElement !== this.slider || player.mode !== "paused") this.slider.value = String(player.position);
    setText(this.where, player.mode === "live" ? `step ${number(scene.step)}` : `step ${number(scene.step)} · event ${number(player.position)} of ${number(recording.end)}`);
    setAll(this.live, { "aria-pressed": String(player.mode === "live") });
    setText(this.live, { live: "● live", playing: "▷ playing", paused: "go live" }[player.mode]);
  }
}
