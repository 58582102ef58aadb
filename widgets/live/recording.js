// All events so far, and the state and scene after any of them.
//
// Knows the two folds and the order of events. Must not know the page, or who asks. Snapshots on the way keep a jump
// back short: the events after the nearest one are folded again.

import { place } from "../fold/clock.js";
import { fromDict } from "../fold/dict.js";
import { foldScene, initialScene } from "../fold/scene.js";
import { fold, initialState } from "../fold/state.js";

const SNAPSHOT_EVERY = 1000;
const MAX_EVENTS = 60000;
const ARRIVING = new Set([
  "engine_started", "policies_changed", "request_arrived", "request_deferred", "flight_opened", "flight_joined",
]);

class Model {
  constructor(state, scene) {
    this.state = state;
    this.scene = scene;
  }
  fold(event) {
    fold(this.state, event);
    foldScene(this.scene, event);
  }
  copy() {
    return new Model(structuredClone(this.state), structuredClone(this.scene));
  }
}

/** All events so far, the model at their end, and snapshots on the way. Numbers are the engine's `seq`. */
export class Recording {
  constructor(perRace = false) {
    this.perRace = perRace;
    this.listeners = new Set();
    this.clear();
  }
  clear() {
    this.events = [];
    this.base = 0; // seq of events[0]
    this.head = new Model(initialState(), initialScene(this.perRace));
    this.snapshots = [{ seq: 0, model: this.head.copy() }];
    this.raceEnds = new Map(); // race -> {ms, step} at its last event, so that an axis can stand still
    this.heardAt = 0;
    this.version = (this.version || 0) + 1;
  }
  get end() {
    return this.base + this.events.length;
  }
  /** Take events that begin at number `from`. Returns false if some are missing in between. */
  append(from, events, nowMs = 0) {
    if (from > this.end) return false;
    const fresh = events.slice(this.end - from);
    for (const event of fresh) {
      this.events.push(event);
      this.head.fold(event);
      this.raceEnds.set(this.head.scene.race, place(this.head.scene, event));
      if (this.end % SNAPSHOT_EVERY === 0) this.snapshots.push({ seq: this.end, model: this.head.copy() });
    }
    if (this.events.length > MAX_EVENTS && this.snapshots.length > 2) {
      this.snapshots.shift();
      this.events.splice(0, this.snapshots[0].seq - this.base);
      this.base = this.snapshots[0].seq;
    }
    if (fresh.length) {
      this.heardAt = nowMs;
      for (const listener of this.listeners) listener();
    }
    return true;
  }
  /** Begin at a checkpoint instead of at the first event. */
  load(checkpoint) {
    this.clear();
    this.base = checkpoint.seq;
    const scene = this.head.scene;
    scene.config = checkpoint.config;
    Object.assign(scene, { seq: checkpoint.seq - 1, step: checkpoint.step, computedStep: checkpoint.step, ms: checkpoint.ms });
    scene.idleMs = checkpoint.ms;
    for (const [hash, facts] of Object.entries(checkpoint.hashes)) {
      scene.hashes.set(hash, { ...facts, arrivalSeq: -1, step: checkpoint.step, seq: facts.seq });
    }
    for (const [id, facts] of Object.entries(checkpoint.uncomputed)) scene.uncomputed.set(Number(id), facts);
    this.head.state = fromDict(checkpoint.state);
    this.snapshots = [{ seq: checkpoint.seq, model: this.head.copy() }];
    for (const listener of this.listeners) listener();
  }
  /** The model after all events below `seq`: a copy that the caller may fold on. */
  modelAt(seq) {
    let best = this.snapshots[0];
    for (const snapshot of this.snapshots) if (snapshot.seq <= seq) best = snapshot;
    const model = best.model.copy();
    for (let i = best.seq; i < seq; i++) model.fold(this.events[i - this.base]);
    return model;
  }
  event(seq) {
    return this.events[seq - this.base];
  }
  /** Whether the picture should stand still between events `seq - 1` and `seq`: after scheduling, after a step. */
  isBeat(seq) {
    if (seq <= this.base || seq >= this.end) return true;
    const before = this.event(seq - 1);
    const after = this.event(seq);
    if (before.kind === "step_scheduled" || before.step !== after.step) return true;
    return ARRIVING.has(after.kind) !== ARRIVING.has(before.kind);
  }
}
