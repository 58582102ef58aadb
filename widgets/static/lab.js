// Written by python -m widgets.bundle from the modules beside this folder: change those, not this file.

// ---- drawing/elements.js ----------------------------------------------------------------------------------

// Small helpers for HTML and SVG nodes that are reused.
//
// Knows the document. Must not know what is drawn.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element: attributes by name, `on…` as listeners, children as nodes or text. */
function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAll(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same for SVG. */
function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  setAll(node, attributes);
  node.append(...children);
  return node;
}

function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else {
      const text = value === true ? "" : String(value);
      if (node.getAttribute(name) !== text) node.setAttribute(name, text);
    }
  }
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Children of one parent, reused by key: `update` brings them to the given items, in order. */
class Keyed {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.nodes = new Map();
  }
  update(items, keyOf, change) {
    const kept = new Map();
    let before = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      const node = this.nodes.get(key) || this.create(item);
      kept.set(key, node);
      change(node, item);
      if (node === before) before = before.nextSibling;
      else this.parent.insertBefore(node, before);
    }
    for (const [key, node] of this.nodes) if (kept.get(key) !== node) node.remove();
    this.nodes = kept;
  }
}

function panel(name, title, aside, ...body) {
  return h(
    "section", { class: `mvl-panel mvl-${name}`, "aria-label": title },
    h("header", {}, h("h4", {}, title), ...(aside ? [aside] : [])), ...body,
  );
}

const ICONS = {
  start: "M3 2.5v9M11.5 2.5 5 7l6.5 4.5z", back: "M10 2.5 3.5 7l6.5 4.5z", on: "M4 2.5 10.5 7 4 11.5z",
  pause: "M4.2 2.5v9M9.8 2.5v9", play: "M3.5 2 11.5 7 3.5 12z",
};

function icon(name) {
  return s("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true", class: `mvl-icon mvl-icon-${name}` }, s("path", { d: ICONS[name] }));
}

// ---- console/console.js -----------------------------------------------------------------------------------

// The controls of a race. What is chosen goes to the kernel as one message; sentences come back and are shown.
//
// Knows its fields and how to send. Must not know what a command does; only of the scene whether a request is active.


class Console {
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

// ---- fold/dict.js -----------------------------------------------------------------------------------------

// The state as plain JSON values and back: the same values as `State.as_dict()` in Python.
//
// Knows the fields of a state. Must not know events.

/** The state as plain JSON values: the same as `State.as_dict()` in Python. */
function asDict(state) {
  const object = (map, value) => Object.fromEntries([...map].map(([key, item]) => [String(key), value(item)]));
  return {
    blocks: object(state.blocks, (b) => ({ state: b.state, ref_count: b.refCount, block_hash: b.hash })),
    free_queue: [...state.freeQueue],
    prefix_index: object(state.prefixIndex, (id) => id),
    requests: object(state.requests, (r) => ({
      state: r.state,
      arrival: r.arrival,
      num_prompt_tokens: r.numPrompt,
      num_computed_tokens: r.numComputed,
      num_recovered_tokens: r.numRecovered,
      num_adopted_tokens: r.numAdopted,
      num_preemptions: r.numPreemptions,
      output_token_ids: [...r.output],
      block_ids: [...r.blockIds],
      rank: r.rank,
    })),
    waiting: [...state.waiting],
    running: [...state.running],
    flights: object(state.flights, (f) => ({ leader_id: f.leader, follower_ids: [...f.followers] })),
    released_request_ids: [...state.released].sort(),
    samples: object(state.samples, (held) => [...held]),
    awaiting: object(new Map([...state.awaiting].sort()), (leader) => leader),
  };
}

/** The state that `asDict` wrote. */
function fromDict(data) {
  const map = (object, key, value) => new Map(Object.entries(object).map(([k, v]) => [key(k), value(v)]));
  const same = (value) => value;
  return {
    blocks: map(data.blocks, Number, (b) => ({ state: b.state, refCount: b.ref_count, hash: b.block_hash })),
    freeQueue: [...data.free_queue],
    prefixIndex: map(data.prefix_index, same, same),
    requests: map(data.requests, same, (r) => ({
      state: r.state,
      arrival: r.arrival,
      numPrompt: r.num_prompt_tokens,
      numComputed: r.num_computed_tokens,
      numRecovered: r.num_recovered_tokens,
      numAdopted: r.num_adopted_tokens,
      numPreemptions: r.num_preemptions,
      output: [...r.output_token_ids],
      blockIds: [...r.block_ids],
      rank: r.rank,
    })),
    waiting: [...data.waiting],
    running: [...data.running],
    flights: map(data.flights, Number, (f) => ({ leader: f.leader_id, followers: [...f.follower_ids] })),
    released: new Set(data.released_request_ids),
    samples: map(data.samples, same, (held) => [...held]),
    awaiting: map(data.awaiting, same, same),
  };
}

// ---- words/words.js ---------------------------------------------------------------------------------------

// Words that several views share: numbers, durations, lists of names, and what keeps blocks apart.
//
// Knows values. Must not know events, the page, or who says the words. Python says the same in words.py.

const number = (value) => Math.round(value).toLocaleString("en-US");
const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
const duration = (ms) => (ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 10 ? `${number(ms)} ms` : `${ms.toFixed(1)} ms`);

function names(ids) {
  if (ids.length === 0) return "nobody";
  if (ids.length === 1) return ids[0];
  if (ids.length <= 4) return `${ids.slice(0, -1).join(", ")} and ${ids[ids.length - 1]}`;
  return `${ids[0]}, ${ids[1]} … ${ids[ids.length - 1]} (${ids.length} requests)`;
}

const countRange = (first, last, word) => (first === last ? `${word} ${number(first)}` : `${word}s ${number(first)} to ${number(last)}`);

/** The first digits of a hash: enough to tell it from others. */
const short = (hash) => (hash ? hash.slice(0, 8) : "none");

/** What keeps blocks apart, in words. A multimodal key says which tokens its item takes up. */
const saltText = (extraKeys) => extraKeys.map(([kind, value, first, count]) => {
  const where = first === undefined ? "" : count === 1 ? ` at token ${first}` : ` at tokens ${first} to ${first + count - 1}`;
  return `${kind.replace(/_/g, " ")} ${value}${where}`;
}).join(", ");

/** The same for the keys that logical block `index` is the first of its chain to have. */
const newSaltText = (extraKeys, index, size) => saltText(extraKeys.filter(([, , first = 0]) => Math.floor(first / size) === index));

// ---- fold/clock.js ----------------------------------------------------------------------------------------

// When things happened: the two time axes, and which requests are in the engine.
//
// Knows events and the clock's own fields of the scene. Must not know lanes or blocks.
//
// Milliseconds count from the first arrival, without the time in which no request was there. On the step axis step n
// lies between n - 1 and n: scheduling at its left end, results at its right end.

function initialClock() {
  return {
    race: 0,
    computedStep: 0,
    origin: null, // {ms, step} that lies at 0 on the two axes
    idleMs: null, // when the engine fell idle
    active: new Set(), // ids of requests that have not ended
  };
}

const rawStep = (scene, event) => (event.step === scene.computedStep ? event.step : Math.max(0, event.step - 1));

/** Where an event lies on the two axes. */
function place(scene, event) {
  const step = rawStep(scene, event);
  const origin = scene.origin || { ms: event.ms, step };
  return { ms: Math.max(0, event.ms - origin.ms), step: Math.max(0, step - origin.step) };
}

/** A request comes to an engine that may be idle. Returns whether a new race begins. */
function wakeUp(scene, event) {
  if (scene.active.size > 0) return false;
  if (scene.origin !== null && !scene.perRace) {
    scene.origin.ms += event.ms - scene.idleMs;
    return false;
  }
  scene.origin = { ms: event.ms, step: rawStep(scene, event) };
  if (scene.perRace) scene.race += 1;
  return scene.perRace;
}

/** Move the clock (in place), before anything else is placed on it. Returns whether a new race begins. */
function foldClock(scene, event) {
  switch (event.kind) {
    case "request_deferred":
    case "request_arrived": {
      const isNewRace = wakeUp(scene, event);
      scene.active.add(event.request_id);
      return isNewRace;
    }
    case "chunk_computed":
    case "step_failed":
      scene.computedStep = event.step;
      return false;
    case "request_finished":
    case "request_aborted":
    case "request_failed":
      scene.active.delete(event.request_id);
      if (scene.active.size === 0) scene.idleMs = event.ms;
      return false;
    default:
      return false;
  }
}

// ---- fold/lanes.js ----------------------------------------------------------------------------------------

// What each request did over time, as lanes, and the arrows between them. Python folds the same lanes in lanes.py.
//
// Knows events and the clock. Must not know blocks (beyond those that a request adopted), the story, or how a lane is
// drawn.


const MAX_LANES = 24;
const ENDED = new Set(["finished", "aborted", "failed"]);

function initialLanes() {
  return {
    lanes: [],
    laneOf: new Map(), // id -> index in lanes
    arrows: [],
  };
}

const laneFor = (scene, id) => scene.lanes[scene.laneOf.get(id)];
const lastSpan = (lane) => lane.spans[lane.spans.length - 1];

function openSpan(lane, phase, at, extra = {}) {
  lane.spans.push({ phase, from: at, to: null, tokens: 0, ...extra });
}

function closeSpan(lane, at) {
  const last = lastSpan(lane);
  if (last && last.to === null) last.to = at;
}

function textKey(values, extra) {
  let hash = 2166136261;
  for (const value of values) hash = Math.imul(hash ^ value, 16777619);
  return `${values.length}:${hash >>> 0}:${JSON.stringify(extra)}`;
}

function newLane(scene, event) {
  const size = scene.config ? scene.config.block_size : 16;
  return {
    id: event.request_id,
    arrivalSeq: event.seq,
    arrivalMs: event.ms,
    state: "waiting",
    role: "alone",
    behind: "",
    awaitedSeq: -1, // the event with which its last wait for a shared prefix began
    sampleOf: "",
    forked: false, // runs on the blocks of the first sample
    keys: event.extra_keys,
    salt: saltText(event.extra_keys),
    key: textKey(event.prompt_token_ids, event.extra_keys),
    firstKey: textKey(event.prompt_token_ids.slice(0, size), event.extra_keys),
    prompt: event.prompt_token_ids.length,
    queried: 0,
    recovered: null,
    adopted: 0,
    adoptedBlocks: [], // those of its table that it adopted
    computed: 0, // tokens from the start that have K/V
    choice: null, // {leader, block, wait, recompute}: it computes beside another
    output: 0,
    ttftMs: null,
    endMs: null,
    reason: "",
    spans: [],
    marks: [],
  };
}

/** With many lanes, the oldest that has ended makes room for a new one. */
function dropOne(scene) {
  const drop = scene.lanes.findIndex((lane) => ENDED.has(lane.state));
  if (drop < 0) return;
  const [gone] = scene.lanes.splice(drop, 1);
  scene.arrows = scene.arrows.filter((arrow) => arrow.from !== gone.id && !arrow.to.includes(gone.id));
  scene.laneOf = new Map(scene.lanes.map((lane, i) => [lane.id, i]));
}

/** Begin to wait for another, or go on to wait for a later block of the same one. Returns whether it is new. */
function holdLane(lane, at, behind, block = null) {
  const last = lastSpan(lane);
  if (last && last.to === null && last.behind === behind && last.blocks && block !== null) {
    last.blocks = [Math.min(last.blocks[0], block), Math.max(last.blocks[1], block)];
    return false;
  }
  lane.state = "held";
  lane.behind = behind;
  closeSpan(lane, at);
  openSpan(lane, "held", at, { behind, blocks: block === null ? null : [block, block] });
  return true;
}

/** Need not wait for another any more; for a row, yet. */
function releaseLane(lane, at) {
  lane.state = "waiting";
  lane.behind = "";
  closeSpan(lane, at);
  openSpan(lane, "waiting", at);
}

/** Let `to` be what `from` was; those held behind the one are held behind the other. */
function handOver(scene, event, role) {
  const { from_id: from, to_id: to } = event;
  const at = place(scene, event);
  const heir = laneFor(scene, to);
  if (heir) {
    for (const lane of scene.lanes) {
      if (lane === heir || lane.state !== "held" || lane.behind !== from || lane.role !== heir.role) continue;
      if (lane.sampleOf) lane.sampleOf = to;
      holdLane(lane, at, to);
    }
    heir.role = role;
    heir.sampleOf = "";
    heir.marks.push({ kind: "leads", at });
    releaseLane(heir, at);
  }
  scene.arrows.push({ kind: "handover", at, from, to: [to] });
}

function releaseAll(scene, event) {
  const at = place(scene, event);
  for (const id of event.request_ids) {
    const lane = laneFor(scene, id);
    if (!lane) continue;
    releaseLane(lane, at);
    lane.marks.push({ kind: "released", at });
  }
  if (event.request_ids.length) scene.arrows.push({ kind: "release", at, from: event.leader_id, to: [...event.request_ids] });
}

function endLane(lane, event, at, how, reason) {
  lane.state = how;
  lane.reason = reason;
  lane.endMs = event.ms - lane.arrivalMs;
  closeSpan(lane, at);
  lane.marks.push({ kind: how, at });
}

/** Events of one request that is on a lane: what they do to the lane. */
const OF_ONE_LANE = {
  flight_joined(lane, e, at) {
    lane.role = "follower";
    holdLane(lane, at, e.leader_id);
  },
  sample_held(lane, e, at) {
    lane.role = "sample";
    lane.sampleOf = e.first_id;
    holdLane(lane, at, e.first_id);
  },
  block_copied(lane, e, at) {
    lane.marks.push({ kind: "copied", at });
  },
  blocks_adopted(lane, e, at) {
    lane.adopted += e.num_tokens;
    lane.computed += e.num_tokens;
    lane.adoptedBlocks.push(...e.block_ids);
    lane.marks.push({ kind: "adopted", at });
  },
  prefix_awaited(lane, e, at) {
    lane.role = "held";
    if (holdLane(lane, at, e.leader_id, e.block_index)) lane.awaitedSeq = e.seq;
  },
  recompute_chosen(lane, e) {
    lane.choice = { leader: e.leader_id, block: e.block_index, wait: e.wait_ms, recompute: e.recompute_ms };
  },
  request_admitted(lane, e, at) {
    lane.state = "running";
    closeSpan(lane, at);
  },
  prefix_looked_up(lane, e, at) {
    lane.computed = e.num_recovered_tokens;
    if (!e.resumed) {
      lane.recovered = e.num_recovered_tokens;
      lane.queried = e.num_queried_tokens;
    }
    if (e.num_recovered_tokens > 0) lane.marks.push({ kind: "recovered", at, tokens: e.num_recovered_tokens });
  },
  chunk_computed(lane, e, at) {
    const last = lastSpan(lane);
    if (last && last.to === null) last.tokens += e.num_tokens;
    closeSpan(lane, at);
    lane.computed = e.start + e.num_tokens;
  },
  token_out(lane, e, at) {
    lane.output += 1;
    if (e.index !== 0) return;
    lane.ttftMs = e.ms - lane.arrivalMs;
    lane.marks.push({ kind: "first", at });
  },
  request_preempted(lane, e, at) {
    lane.state = "preempted";
    lane.computed = 0;
    closeSpan(lane, at);
    openSpan(lane, "preempted", at);
  },
  request_finished(lane, e, at) { endLane(lane, e, at, "finished", e.reason); },
  request_aborted(lane, e, at) { endLane(lane, e, at, "aborted", ""); },
  request_failed(lane, e, at) { endLane(lane, e, at, "failed", e.error); },
  blocks_freed(lane) { lane.adoptedBlocks = []; },
};

/** Events that begin a lane, or concern several. */
const OF_MANY_LANES = {
  request_arrived(c, e) {
    if (c.lanes.length >= MAX_LANES) dropOne(c);
    const lane = newLane(c, e);
    openSpan(lane, "waiting", place(c, e));
    c.laneOf.set(lane.id, c.lanes.length);
    c.lanes.push(lane);
  },
  flight_opened(c, e) {
    const lane = laneFor(c, e.leader_id);
    if (lane) lane.role = "leader";
  },
  flight_released: releaseAll,
  prefix_released: releaseAll,
  flight_handed_over(c, e) { handOver(c, e, "leader"); },
  sample_leads(c, e) { handOver(c, e, "alone"); },
  samples_forked(c, e) {
    const at = place(c, e);
    const first = laneFor(c, e.request_id);
    for (const id of e.sample_ids) {
      const lane = laneFor(c, id);
      if (!lane) continue;
      lane.state = "running";
      lane.behind = "";
      lane.forked = true;
      lane.computed = first ? first.computed : lane.prompt;
      closeSpan(lane, at);
    }
    c.arrows.push({ kind: "fork", at, from: e.request_id, to: [...e.sample_ids] });
  },
  prefix_awaited(c, e) {
    const leader = laneFor(c, e.leader_id);
    if (leader && leader.role === "alone") leader.role = "leader";
  },
  recompute_chosen(c, e) {
    c.arrows.push({ kind: "beside", at: place(c, e), from: e.leader_id, to: [e.request_id] });
  },
  step_scheduled(c, e) {
    const at = place(c, e);
    for (const [id, , tokens, phase] of e.rows) {
      const lane = laneFor(c, id);
      if (!lane) continue;
      const last = lastSpan(lane);
      if (phase === "decode" && last && last.phase === "decode") last.to = null; // decode steps make one bar
      else openSpan(lane, phase, at, { planned: tokens });
    }
  },
  step_failed(c, e) {
    for (const lane of c.lanes) {
      if (lane.state === "running" && lastSpan(lane) && lastSpan(lane).to === null) {
        closeSpan(lane, place(c, e));
        lastSpan(lane).failed = true;
      }
    }
  },
};

/** Apply one event to the lanes (in place). The clock has it already. */
function foldLanes(scene, event) {
  const ofMany = OF_MANY_LANES[event.kind];
  if (ofMany) ofMany(scene, event);
  const ofOne = OF_ONE_LANE[event.kind];
  const lane = ofOne && laneFor(scene, event.request_id);
  if (lane) ofOne(lane, event, place(scene, event));
}

// ---- fold/blocks.js ---------------------------------------------------------------------------------------

// What became of the blocks, beside their state: the published hashes with their parents, private copies, copies on
// write, blocks that were published too early, and the last thing that happened to each.
//
// Knows events and lanes. Must not know the story, or how a block is drawn. Python follows the uncomputed blocks in
// uncomputed.py.


function initialBlocks() {
  return {
    hashes: new Map(), // published hash -> {parent, block, index, by, arrivalSeq, step, seq, salt, label}
    notes: new Map(), // block id -> {step, by, what}
    twins: new Map(), // private copy -> block that is found in its place
    copies: new Map(), // block copied on write -> block that it was copied from
    uncomputed: new Map(), // published block that nobody has computed -> {by, end}: whose, and up to which token
    evicted: { seq: -1, step: -1, blocks: [] },
  };
}

function noteAll(scene, event, ids, what, by = event.request_id) {
  for (const id of ids) scene.notes.set(id, { step: event.step, by, what });
}

const BLOCK_FOLDS = {
  block_copied(c, e) {
    c.copies.set(e.block_id, e.source_block_id);
    noteAll(c, e, [e.block_id], `copied from block ${e.source_block_id}`);
  },
  blocks_adopted(c, e) { noteAll(c, e, e.block_ids, "adopted"); },
  hash_collision(c, e) { noteAll(c, e, [e.block_id], "not served: same hash, other tokens, asked for"); },
  chunk_computed(c, e) {
    for (const [id, { by, end }] of c.uncomputed) {
      if (by === e.request_id && end <= e.start + e.num_tokens) c.uncomputed.delete(id);
    }
  },
  blocks_hit(c, e) { noteAll(c, e, e.block_ids, "found in the index"); },
  blocks_evicted(c, e) {
    e.block_hashes.forEach((hash) => c.hashes.delete(hash));
    noteAll(c, e, e.block_ids, "evicted");
    for (const id of e.block_ids) c.uncomputed.delete(id);
    const fresh = c.evicted.step !== e.step;
    c.evicted = { seq: e.seq, step: e.step, blocks: fresh ? [...e.block_ids] : [...c.evicted.blocks, ...e.block_ids] };
  },
  blocks_allocated(c, e) { noteAll(c, e, e.block_ids, "allocated"); },
  blocks_published(c, e) {
    const lane = laneFor(c, e.request_id);
    const size = c.config ? c.config.block_size : 16;
    e.block_hashes.forEach((hash, i) => {
      const end = (e.indices[i] + 1) * size;
      if (lane && lane.computed < end) c.uncomputed.set(e.block_ids[i], { by: e.request_id, end });
      c.hashes.set(hash, {
        parent: e.parent_hashes[i],
        block: e.block_ids[i],
        index: e.indices[i],
        by: e.request_id,
        arrivalSeq: lane ? lane.arrivalSeq : -1,
        step: e.step,
        seq: e.seq,
        salt: lane ? lane.salt : "",
        label: lane ? newSaltText(lane.keys, e.indices[i], size) : "",
      });
      c.twins.delete(e.block_ids[i]);
    });
    noteAll(c, e, e.block_ids, "published");
  },
  blocks_duplicated(c, e) {
    e.block_ids.forEach((id, i) => c.twins.set(id, e.twin_block_ids[i]));
  },
  blocks_freed(c, e) {
    const freed = [...e.to_front, ...e.to_back];
    for (const id of freed) {
      c.twins.delete(id);
      c.copies.delete(id);
    }
    noteAll(c, e, freed, "released");
  },
  cache_reset(c, e) {
    c.hashes = new Map();
    c.uncomputed = new Map();
    noteAll(c, e, e.block_ids, "forgotten at the reset", "");
  },
};

/** Apply one event to what became of the blocks (in place). The lanes have it already. */
function foldBlocks(scene, event) {
  const apply = BLOCK_FOLDS[event.kind];
  if (apply) apply(scene, event);
}

// ---- fold/story.js ----------------------------------------------------------------------------------------

// What just happened and why, as entries: a kind, the requests, the facts. Events of one step that say the same are
// one entry.
//
// Knows events and the scene after them. Must not know the sentences (../story/sentences.js makes them).


const MAX_STORY = 200;
const UNMERGED_FIELDS = new Set(["twin"]);

function initialStory() {
  return { story: [] };
}

function ending(how, reasonOf) {
  return (c, e) => {
    const lane = laneFor(c, e.request_id);
    return [how, [e.request_id], { reason: reasonOf(e), output: lane ? lane.output : 0 }];
  };
}

function released(c, e) {
  return ["released", e.request_ids, { leader: e.leader_id, reason: e.reason }];
}

/** Another request that computes the same first block right now, "" if there is none. */
function runningTwin(scene, lane) {
  const same = scene.lanes.find(
    (other) => other !== lane && other.state === "running" && other.firstKey === lane.firstKey,
  );
  return same ? same.id : "";
}

/** What an event adds to the story: [kind, ids of requests, facts], or null. */
const ENTRIES = {
  engine_started: () => ["start", [], {}],
  policies_changed: (c, e) => ["policies", [], { publication: e.publication, coordination: e.coordination, release: e.release }],
  request_deferred: (c, e) => ["deferred", [e.request_id], { after: e.after_request_id, token: e.output_token }],
  request_arrived: (c, e) => {
    const lane = laneFor(c, e.request_id);
    return ["arrived", [e.request_id], { tokens: lane.prompt, salt: lane.salt, rank: e.rank }];
  },
  flight_opened: (c, e) => ["opened", [e.leader_id], {}],
  flight_joined: (c, e) => ["joined", [e.request_id], { leader: e.leader_id }],
  flight_released: released,
  flight_handed_over: (c, e) => ["handed", [e.to_id], { from: e.from_id }],
  flight_left: (c, e) => ["left", [e.request_id], {}],
  sample_held: (c, e) => ["sampleheld", [e.request_id], { first: e.first_id }],
  sample_leads: (c, e) => ["sampleleads", [e.to_id], { from: e.from_id }],
  samples_forked: (c, e) => ["forked", e.sample_ids, { first: e.request_id, blocks: e.block_ids.length }],
  block_copied: (c, e) => ["copied", [e.request_id], { source: e.source_block_id, block: e.block_id, tokens: e.num_tokens }],
  blocks_adopted: (c, e) => ["adopted", [e.request_id], { tokens: e.num_tokens, blocks: e.block_ids.length }],
  prefix_awaited: (c, e) => {
    const lane = laneFor(c, e.request_id);
    if (lane && lane.awaitedSeq !== e.seq) return null; // the same wait, for a later block
    return ["awaited", [e.request_id], { leader: e.leader_id, block: e.block_index, wait: e.wait_ms, recompute: e.recompute_ms }];
  },
  prefix_released: released,
  recompute_chosen: (c, e) => [
    "beside", [e.request_id], { leader: e.leader_id, block: e.block_index, wait: e.wait_ms, recompute: e.recompute_ms },
  ],
  hash_collision: (c, e) => [
    "collision", [e.request_id], { block: e.block_id, hash: e.block_hash, asked: e.token_ids, holds: e.held_token_ids },
  ],
  prefix_looked_up: (c, e) => {
    const lane = laneFor(c, e.request_id);
    const twin = lane && e.num_recovered_tokens === 0 ? runningTwin(c, lane) : "";
    return ["lookup", [e.request_id], {
      queried: e.num_queried_tokens, recovered: e.num_recovered_tokens, resumed: e.resumed, cold: twin !== "", twin,
    }];
  },
  chunk_computed: (c, e) => {
    if (e.phase !== "prefill") return null;
    const lane = laneFor(c, e.request_id);
    const end = e.start + e.num_tokens;
    return ["prefill", [e.request_id], { tokens: e.num_tokens, start: e.start, prompt: lane ? lane.prompt : end }];
  },
  step_failed: (c, e) => ["stepfailed", [], { error: e.error }],
  token_out: (c, e) => {
    const lane = laneFor(c, e.request_id);
    return lane && e.index === 0 ? ["first", [e.request_id], { ms: lane.ttftMs }] : null;
  },
  request_preempted: (c, e) => ["preempted", [e.request_id], {
    tokens: e.num_computed_tokens, order: c.config ? c.config.scheduling : "",
  }],
  request_finished: ending("finished", (e) => e.reason),
  request_aborted: ending("aborted", () => ""),
  request_failed: ending("failed", (e) => e.error),
  blocks_hit: (c, e) => {
    const hollow = e.block_ids.filter((id) => c.uncomputed.has(id));
    if (!hollow.length) return null;
    const { by } = c.uncomputed.get(hollow[0]);
    return ["hollow", [e.request_id], { blocks: hollow.length, by, gone: !c.active.has(by) }];
  },
  blocks_evicted: (c, e) => ["evicted", [e.request_id], { blocks: e.block_ids.length }],
  blocks_allocated: (c, e) => {
    const lane = laneFor(c, e.request_id);
    return ["allocated", [e.request_id], { blocks: e.block_ids.length, grows: Boolean(lane && lane.output > 0) }];
  },
  blocks_published: (c, e) => {
    const lane = laneFor(c, e.request_id);
    const size = c.config ? c.config.block_size : 16;
    const early = Boolean(lane) && e.indices.some((index) => lane.computed < (index + 1) * size);
    return ["published", [e.request_id], {
      blocks: e.block_ids.length, size: c.config ? size : 0, policy: c.config ? c.config.publication : "", early,
    }];
  },
  blocks_duplicated: (c, e) => ["duplicated", [e.request_id], { blocks: e.block_ids.length }],
  blocks_freed: (c, e) => {
    // The eviction policy chose the end of the queue; a block can be found if it has a hash.
    const findable = new Set([...c.hashes.values()].map((entry) => entry.block));
    return ["freed", [e.request_id], {
      kept: [...e.to_front, ...e.to_back].filter((id) => findable.has(id)).length,
      front: e.to_front.filter((id) => !findable.has(id)).length,
      held: e.still_held.length,
    }];
  },
  cache_reset: (c, e) => ["reset", [], { blocks: e.block_ids.length }],
};

function report(scene, event, kind, ids, data) {
  const facts = Object.entries(data).filter(([name]) => !UNMERGED_FIELDS.has(name));
  const key = `${kind}|${event.step}|${JSON.stringify(facts.map(([, value]) => (kind === "first" ? "" : value)))}`;
  for (let i = scene.story.length - 1; i >= 0 && i >= scene.story.length - 12; i--) {
    const entry = scene.story[i];
    if (entry.step !== event.step) break;
    if (entry.key === key && ids.length && entry.ids.length && !entry.ids.includes(ids[0])) {
      entry.ids.push(...ids);
      return;
    }
  }
  scene.story.push({ seq: event.seq, step: event.step, ms: place(scene, event).ms, kind, key, ids: [...ids], data });
  if (scene.story.length > MAX_STORY) scene.story.splice(0, scene.story.length - MAX_STORY);
}

/** Add to the story what one event says (in place). Lanes and blocks have the event already. */
function foldStory(scene, event) {
  const entryOf = ENTRIES[event.kind];
  const entry = entryOf ? entryOf(scene, event) : null;
  if (entry) report(scene, event, ...entry);
}

// ---- fold/totals.js ---------------------------------------------------------------------------------------

// Counters over all requests: tokens queried, recovered, adopted and computed; blocks published and evicted.
//
// Knows events alone.

function initialTotals() {
  return { totals: { queried: 0, recovered: 0, adopted: 0, computed: 0, published: 0, evicted: 0, preempted: 0 } };
}

const TOTAL_FOLDS = {
  blocks_adopted(t, e) { t.adopted += e.num_tokens; },
  prefix_looked_up(t, e) {
    if (e.resumed) return; // its own work, counted when it was looked up first
    t.queried += e.num_queried_tokens;
    t.recovered += e.num_recovered_tokens;
  },
  chunk_computed(t, e) {
    if (e.phase === "prefill") t.computed += e.num_tokens;
  },
  request_preempted(t) { t.preempted += 1; },
  blocks_evicted(t, e) { t.evicted += e.block_ids.length; },
  blocks_published(t, e) { t.published += e.block_ids.length; },
};

/** Apply one event to the counters (in place). */
function foldTotals(scene, event) {
  const apply = TOTAL_FOLDS[event.kind];
  if (apply) apply(scene.totals, event);
}

// ---- fold/scene.js ----------------------------------------------------------------------------------------

// What the views show beside the state: the clock, lanes, blocks, counters and story, folded event by event.
//
// Knows the parts and their order: each may read what those before it have folded. Must not know the page.


/**
 * The scene before the first event. `perRace` starts afresh when a request arrives at an idle engine; otherwise lanes
 * stay (the last 24) and idle time is cut out of the time axis.
 */
function initialScene(perRace = false) {
  return {
    perRace,
    config: null,
    seq: -1,
    step: 0,
    ms: 0,
    ...initialClock(),
    ...initialLanes(),
    ...initialBlocks(),
    ...initialTotals(),
    ...initialStory(),
  };
}

function foldConfig(scene, event) {
  if (event.kind === "engine_started") scene.config = { ...event };
  else if (event.kind === "policies_changed") {
    const { publication, coordination, release } = event;
    Object.assign(scene.config, { publication, coordination, release });
  }
}

/** Apply one event to the scene (in place) and return it. */
function foldScene(scene, event) {
  foldConfig(scene, event);
  if (foldClock(scene, event)) Object.assign(scene, initialLanes(), initialTotals());
  foldLanes(scene, event);
  foldBlocks(scene, event);
  foldTotals(scene, event);
  foldStory(scene, event);
  scene.seq = event.seq;
  scene.step = event.step;
  scene.ms = event.ms;
  return scene;
}

// ---- fold/state.js ----------------------------------------------------------------------------------------

// The engine's state, folded from its log: the same fold as minivllm/log/replay.py.
//
// Knows events. Must not know the page, or what a view adds to the state (scene.js does that).

/** The engine before its first event. */
function initialState() {
  return {
    blocks: new Map(), // id -> {state, refCount, hash}
    freeQueue: [], // block ids, head (reused next) first
    prefixIndex: new Map(), // hash -> block id
    requests: new Map(), // id -> request
    waiting: [],
    running: [],
    flights: new Map(), // id -> {leader, followers}
    released: new Set(),
    samples: new Map(), // id of the first sample -> ids of those held behind it
    awaiting: new Map(), // id of a request held for a shared prefix -> behind whom
  };
}

const remove = (list, item) => {
  const at = list.indexOf(item);
  if (at >= 0) list.splice(at, 1);
};

function newRequest(state, arrival, numPrompt, rank) {
  return {
    state, arrival, numPrompt, numComputed: 0, numRecovered: 0, numAdopted: 0, numPreemptions: 0, output: [], blockIds: [], rank,
  };
}

/**
 * Put a request into the waiting list: by rank, within a rank preempted ones first (the newest at their head), then
 * by arrival.
 */
function enqueue(state, id) {
  const newest = state.requests.get(id);
  const later = (other) => {
    if (other.rank !== newest.rank) return other.rank > newest.rank;
    if (newest.state === "preempted") return true;
    return other.state !== "preempted" && other.arrival > newest.arrival;
  };
  const at = state.waiting.findIndex((other) => later(state.requests.get(other)));
  state.waiting.splice(at < 0 ? state.waiting.length : at, 0, id);
}

function hold(state, id) {
  state.requests.get(id).state = "held";
  remove(state.waiting, id);
}

function unhold(state, id) {
  state.requests.get(id).state = "waiting";
  enqueue(state, id);
}

function endRequest(state, id, how) {
  state.requests.get(id).state = how;
  remove(state.waiting, id);
  remove(state.running, id);
  state.released.delete(id);
  state.awaiting.delete(id);
  for (const [first, held] of state.samples) {
    remove(held, id);
    if (!held.length) state.samples.delete(first);
  }
}

/** Count blocks up that enter one more block table; those in the free queue leave it. */
function share(state, ids) {
  for (const id of ids) {
    state.blocks.get(id).refCount += 1;
    remove(state.freeQueue, id);
  }
}

/** A block popped from the free queue, for one request to fill. */
function own(state, id) {
  const block = state.blocks.get(id);
  block.state = "owned";
  block.refCount = 1;
  remove(state.freeQueue, id);
}

const FOLDS = {
  engine_started(s, e) {
    s.blocks = new Map();
    for (let id = 1; id <= e.num_blocks; id++) s.blocks.set(id, { state: "free", refCount: 0, hash: "" });
    s.freeQueue = [...s.blocks.keys()];
  },
  request_deferred(s, e) {
    s.requests.set(e.request_id, newRequest("deferred", -1, 0, 0));
  },
  request_arrived(s, e) {
    s.requests.set(e.request_id, newRequest("waiting", e.arrival, e.prompt_token_ids.length, e.rank));
    enqueue(s, e.request_id);
  },
  request_admitted(s, e) {
    s.requests.get(e.request_id).state = "running";
    remove(s.waiting, e.request_id);
    s.running.push(e.request_id);
  },
  prefix_looked_up(s, e) {
    const request = s.requests.get(e.request_id);
    request.numComputed = e.num_recovered_tokens;
    if (!e.resumed) request.numRecovered = e.num_recovered_tokens;
  },
  chunk_computed(s, e) {
    s.requests.get(e.request_id).numComputed = e.start + e.num_tokens;
  },
  token_out(s, e) {
    s.requests.get(e.request_id).output.push(e.token_id);
  },
  request_preempted(s, e) {
    const request = s.requests.get(e.request_id);
    request.state = "preempted";
    request.numComputed = 0;
    request.numPreemptions += 1;
    remove(s.running, e.request_id);
    enqueue(s, e.request_id);
  },
  request_finished(s, e) { endRequest(s, e.request_id, "finished"); },
  request_aborted(s, e) { endRequest(s, e.request_id, "aborted"); },
  request_failed(s, e) { endRequest(s, e.request_id, "failed"); },
  blocks_hit(s, e) {
    share(s, e.block_ids);
    s.requests.get(e.request_id).blockIds.push(...e.block_ids);
  },
  blocks_evicted(s, e) {
    e.block_ids.forEach((id, i) => {
      const block = s.blocks.get(id);
      block.state = "free";
      block.hash = "";
      s.prefixIndex.delete(e.block_hashes[i]);
    });
  },
  blocks_allocated(s, e) {
    for (const id of e.block_ids) own(s, id);
    s.requests.get(e.request_id).blockIds.push(...e.block_ids);
  },
  blocks_published(s, e) {
    e.block_ids.forEach((id, i) => {
      const block = s.blocks.get(id);
      block.state = "published";
      block.hash = e.block_hashes[i];
      s.prefixIndex.set(e.block_hashes[i], id);
    });
  },
  blocks_freed(s, e) {
    for (const id of [...e.to_front, ...e.to_back, ...e.still_held]) s.blocks.get(id).refCount -= 1;
    // A Set keeps the order in which its members came, as the free queue does.
    s.freeQueue = [...new Set([...e.to_front, ...s.freeQueue, ...e.to_back])];
    for (const id of [...e.to_front, ...e.to_back]) {
      const block = s.blocks.get(id);
      if (!block.hash) block.state = "free"; // never published: nothing that others could read
    }
    s.requests.get(e.request_id).blockIds = [];
  },
  cache_reset(s, e) {
    for (const id of e.block_ids) {
      const block = s.blocks.get(id);
      s.prefixIndex.delete(block.hash);
      block.state = "free";
      block.hash = "";
    }
  },
  flight_opened(s, e) {
    s.flights.set(e.flight_id, { leader: e.leader_id, followers: [] });
  },
  flight_joined(s, e) {
    s.flights.get(e.flight_id).followers.push(e.request_id);
    hold(s, e.request_id);
  },
  flight_released(s, e) {
    s.flights.delete(e.flight_id);
    if (e.reason === "prefill" || e.reason === "cached") s.released.add(e.leader_id);
    for (const id of e.request_ids) {
      s.released.add(id);
      unhold(s, id);
    }
  },
  flight_handed_over(s, e) {
    const flight = s.flights.get(e.flight_id);
    flight.leader = e.to_id;
    remove(flight.followers, e.to_id);
    unhold(s, e.to_id);
  },
  flight_left(s, e) {
    remove(s.flights.get(e.flight_id).followers, e.request_id);
  },
  block_copied(s, e) {
    s.blocks.get(e.source_block_id).refCount -= 1;
    own(s, e.block_id);
    const table = s.requests.get(e.request_id).blockIds;
    table[table.indexOf(e.source_block_id)] = e.block_id;
  },
  blocks_adopted(s, e) {
    const request = s.requests.get(e.request_id);
    share(s, e.block_ids);
    request.blockIds.push(...e.block_ids);
    request.numComputed += e.num_tokens;
    request.numAdopted += e.num_tokens;
  },
  sample_held(s, e) {
    if (!s.samples.has(e.first_id)) s.samples.set(e.first_id, []);
    s.samples.get(e.first_id).push(e.request_id);
    hold(s, e.request_id);
  },
  sample_leads(s, e) {
    const rest = s.samples.get(e.from_id).filter((id) => id !== e.to_id);
    s.samples.delete(e.from_id);
    if (rest.length) s.samples.set(e.to_id, rest);
    unhold(s, e.to_id);
  },
  samples_forked(s, e) {
    for (const id of e.sample_ids) {
      const request = s.requests.get(id);
      request.state = "running";
      request.numComputed = s.requests.get(e.request_id).numComputed;
      request.blockIds = [...e.block_ids];
      s.running.push(id);
      share(s, e.block_ids);
    }
    s.samples.delete(e.request_id);
  },
  prefix_awaited(s, e) {
    if (!s.awaiting.has(e.request_id)) hold(s, e.request_id);
    s.awaiting.set(e.request_id, e.leader_id);
  },
  prefix_released(s, e) {
    for (const id of e.request_ids) {
      s.awaiting.delete(id);
      unhold(s, id);
    }
  },
};

/** Apply one event to `state` (in place) and return it. Kinds that move nothing are passed over. */
function fold(state, event) {
  const apply = FOLDS[event.kind];
  if (apply) apply(state, event);
  return state;
}

/** The state after all of `events`. */
function replay(events) {
  return events.reduce(fold, initialState());
}

// ---- looks/blocks.js --------------------------------------------------------------------------------------

// How a block looks, and why it is what it is: the same in every view.
//
// Knows state and scene. Must not know which view asks.


const BLOCK_WORDS = {
  free: "free, no content",
  owned: "owned, being filled",
  copy: "owned, a private copy",
  used: "published, in use",
  kept: "published, nobody holds it",
  uncomputed: "published, but not computed",
};

function blockLook(block, id, scene) {
  if (block.state === "free") return "free";
  if (block.state === "owned") return scene.twins.has(id) ? "copy" : "owned";
  if (scene.uncomputed.has(id)) return "uncomputed";
  return block.refCount > 0 ? "used" : "kept";
}

function holders(model, id) {
  const found = [];
  for (const [name, request] of model.state.requests) {
    const index = request.blockIds.indexOf(id);
    if (index >= 0) found.push({ name, index });
  }
  return found;
}

/** Why a block is what it is, as lines of text. `recording.event(seq)` gives the arrival that holds its token ids. */
function explainBlock(recording, model, id) {
  const block = model.state.blocks.get(id);
  if (!block) return [`Block ${id}`];
  const look = blockLook(block, id, model.scene);
  const facts = block.hash ? model.scene.hashes.get(block.hash) : null;
  const held = holders(model, id);
  const note = model.scene.notes.get(id);
  const shared = look === "owned" && block.refCount > 1;
  const lines = [`Block ${id}: ${shared ? "owned, shared by samples of one prompt" : BLOCK_WORDS[look]}`];
  lines.push(
    held.length
      ? `ref_count ${block.refCount}: in the table of ${held.map((x) => `${x.name} (logical block ${x.index})`).join(", ")}`
      : `ref_count ${block.refCount}: in no block table`,
  );
  if (block.hash) {
    lines.push(`hash ${short(block.hash)}${facts ? `, parent ${facts.parent ? short(facts.parent) : "root"}` : ""}`);
    if (facts && facts.salt) lines.push(`extra keys: ${facts.salt}`);
  } else if (look !== "free") {
    lines.push("no hash: nobody else can find it");
  }
  if (shared) lines.push("who writes into it first takes a copy");
  if (model.scene.copies.has(id)) lines.push(`copied on write from block ${model.scene.copies.get(id)}`);
  if (look === "uncomputed") lines.push("whoever finds it reads K/V that was never written");
  const adopters = model.scene.lanes.filter((lane) => lane.adoptedBlocks.includes(id)).map((lane) => lane.id);
  if (adopters.length) lines.push(`adopted in mid-prefill by ${adopters.join(", ")}`);
  if (model.scene.twins.has(id)) lines.push(`the same content is published in block ${model.scene.twins.get(id)}`);
  if (facts && facts.arrivalSeq >= 0) {
    const arrival = recording.event(facts.arrivalSeq);
    const size = model.scene.config ? model.scene.config.block_size : 16;
    const tokens = arrival ? arrival.prompt_token_ids.slice(facts.index * size, (facts.index + 1) * size) : [];
    if (tokens.length) lines.push(`token ids ${tokens.slice(0, 8).join(" ")}${tokens.length > 8 ? " …" : ""}`);
  }
  if (note) lines.push(`${note.what}${note.by ? ` ${note.what === "evicted" ? "for" : "by"} ${note.by}` : ""}, since step ${note.step}`);
  if (look === "kept" || look === "free") {
    const at = model.state.freeQueue.indexOf(id);
    if (at >= 0) lines.push(`place ${at + 1} of ${model.state.freeQueue.length} in the free queue`);
  }
  return lines;
}

// ---- chain/chain.js ---------------------------------------------------------------------------------------

// The hash chain: the published blocks from parent to child. Long runs without a branch are folded.
//
// Knows state and scene. Must not know other views.


class ChainPanel {
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

// ---- counters/counters.js ---------------------------------------------------------------------------------

// The counters: tokens recovered and computed, TTFT, requests by state, free blocks, the step.
//
// Knows state and scene. Must not know other views.


class CountersPanel {
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

// ---- flights/flights.js -----------------------------------------------------------------------------------

// Who computes for whom now: open flights, samples of one prompt, shared prefixes, each with those held behind it.
//
// Knows state and lanes. Must not know other views.


class FlightsPanel {
  constructor() {
    this.body = h("div", { class: "mvl-flights-body" });
    this.rows = new Keyed(this.body, () => {
      const node = h("div", { class: "mvl-flight" });
      node.parts = [h("span", { class: "mvl-flight-id" }), h("b", {}), h("span", { class: "mvl-flight-arrow", "aria-hidden": "true" }, "⟵"), h("span", {})];
      node.append(...node.parts);
      return node;
    });
    this.empty = h("p", { class: "mvl-empty" });
    this.released = h("p", { class: "mvl-note" });
    this.node = panel("flights", "Flights", null, this.body, this.empty, this.released);
  }
  draw({ state, scene }) {
    const rows = [...state.flights].map(([id, flight]) => ({ key: `f${id}`, title: `flight ${id}`, leader: flight.leader, does: "leads", held: flight.followers }));
    for (const [first, held] of state.samples) rows.push({ key: `s${first}`, title: "samples", leader: first, does: "computes the prompt", held });
    const waits = new Map();
    for (const [id, leader] of state.awaiting) waits.set(leader, [...(waits.get(leader) || []), id]);
    for (const [leader, held] of waits) {
      const blocks = held.map((id) => {
        const span = laneFor(scene, id) && lastSpan(laneFor(scene, id));
        return span && span.blocks ? `${id} (block ${number(span.blocks[1])})` : id;
      });
      rows.push({ key: `p${leader}`, title: "prefix", leader, does: "computes blocks", held: blocks });
    }
    this.rows.update(rows, (row) => row.key, (node, row) => {
      const [id, leader, arrow, held] = node.parts;
      setText(id, row.title);
      setText(leader, `${row.leader} ${row.does}`);
      setAll(leader, { "data-request": row.leader });
      arrow.hidden = !row.held.length;
      setText(held, row.held.length ? `held: ${row.held.join(", ")}` : "nobody is held");
    });
    this.empty.hidden = rows.length > 0;
    setText(this.empty, {
      "single-flight": "No flight is open.", "shared-prefix": "Nobody waits for a shared prefix.", "wait-or-recompute": "Nobody waits for a shared prefix.",
    }[scene.config && scene.config.coordination] || "No coordination: every request is on its own.");
    setText(this.released, state.released.size ? `Released, not ended yet: ${[...state.released].sort().join(", ")}` : "");
  }
}

// ---- pool/pool.js -----------------------------------------------------------------------------------------

// The block pool: a grid of all blocks, each with its look and its ref_count.
//
// Knows state and scene. Must not know other views. Every view has `node` and `draw(model, now)`; `model` is
// {state, scene}, `now` the end of the time axes.


const MAX_CELLS = 1024;

class PoolPanel {
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

// ---- looks/requests.js ------------------------------------------------------------------------------------

// How a request is named: its role and state, whom it waits for, and all that a tooltip says of it.
//
// Knows state and scene. Must not know which view asks.


const STATE_WORDS = {
  waiting: "waiting", held: "held", running: "running", preempted: "preempted", finished: "done", aborted: "aborted", failed: "failed",
};

/** Role and state, short enough to stand beside a lane. */
function roleWords(lane) {
  const state = STATE_WORDS[lane.state] || lane.state;
  if (lane.role === "alone" || lane.role === lane.state) return state;
  return `${lane.role === "held" ? "was held" : lane.role} · ${state}`;
}

/** Whom a held request waits for, and for which blocks. */
function heldWords(lane) {
  const last = lastSpan(lane);
  const blocks = last && last.blocks ? ` for ${countRange(last.blocks[0], last.blocks[1], "block")}` : "";
  return `held behind ${lane.behind}${blocks}`;
}

/** What a request is and does, as lines of text. */
function explainRequest(model, id) {
  const lane = laneFor(model.scene, id);
  const request = model.state.requests.get(id);
  if (!lane || !request) return [id];
  const lines = [`${id}: ${roleWords(lane).replace(" ·", ",")}`];
  const last = lastSpan(lane);
  if (lane.state === "held" && last && last.blocks) lines.push(`waits for ${lane.behind}, which computes its block ${number(last.blocks[1])}`);
  else if (lane.state === "held") lines.push(`waits for ${lane.behind}, which computes the same prompt${lane.sampleOf ? " for all its samples" : ""}`);
  else if (lane.forked) lines.push(`a sample: runs on the prompt that ${lane.sampleOf} computed`);
  lines.push(`${plural(lane.prompt, "prompt token")}, ${number(request.numComputed)} with K/V, ${plural(lane.output, "output token")}`);
  if (lane.recovered !== null) lines.push(`${number(lane.recovered)} of ${number(lane.queried)} tokens recovered from the cache`);
  if (lane.adopted) lines.push(`${plural(lane.adopted, "token")} adopted in mid-prefill`);
  if (lane.choice) {
    const { leader, block, wait, recompute } = lane.choice;
    lines.push(`computes block ${number(block)} beside ${leader}: first token in ${duration(recompute)}, or in ${duration(wait)} if it waited`);
  }
  lines.push(request.blockIds.length ? `${plural(request.blockIds.length, "block")} in its table` : "no block in its table");
  if (lane.ttftMs !== null) lines.push(`TTFT ${duration(lane.ttftMs)}`);
  if (lane.salt) lines.push(`extra keys: ${lane.salt}`);
  return lines;
}

// ---- result/result.js -------------------------------------------------------------------------------------

// The result of a race: what each request recovered, and all of them together.
//
// Knows lanes and counters. Must not know other views.


class ResultPanel {
  constructor() {
    this.list = h("ul", { class: "mvl-results" });
    this.items = new Keyed(this.list, () => h("li", {}));
    this.total = h("p", { class: "mvl-total", "data-result-total": "" });
    this.empty = h("p", { class: "mvl-empty" }, "Fire a race to see what each request recovers.");
    this.node = panel("result", "Result", null, this.empty, this.total, this.list);
  }
  draw({ scene }) {
    const looked = scene.lanes.filter((lane) => lane.recovered !== null || lane.forked);
    const over = scene.lanes.length > 0 && scene.active.size === 0;
    this.empty.hidden = looked.length > 0;
    this.node.dataset.over = String(over);
    this.items.update(looked, (lane) => lane.arrivalSeq, (node, lane) => {
      const role = lane.role === "alone" ? "" : ` (${lane.role})`;
      const adopted = lane.adopted ? ` and adopted ${number(lane.adopted)}` : "";
      const end = lane.state === "finished" || lane.state === "running" ? "" : `, ${STATE_WORDS[lane.state]}`;
      setAll(node, { "data-result-request": lane.id, "data-recovered": lane.recovered, "data-prompt": lane.prompt, "data-role": lane.role, "data-state": lane.state });
      setText(node, `${lane.id}${role} ${lane.forked
        ? `ran on the prompt of ${lane.sampleOf}` : `recovered ${number(lane.recovered)} of ${number(lane.prompt)} prompt tokens${adopted}`}${end}`);
    });
    const { queried, recovered, computed, adopted } = scene.totals;
    setAll(this.total, { "data-recovered": recovered, "data-queried": queried, "data-over": String(over) });
    setText(this.total, !looked.length ? "" : `${over ? "In all" : "So far"}: ${number(recovered)} of ${number(queried)} prompt tokens recovered, ${adopted ? `${number(adopted)} adopted, ` : ""}${number(computed)} computed.`);
  }
}

// ---- story/sentences.js -----------------------------------------------------------------------------------

// The sentences of the story, one for each kind of entry.
//
// Knows the entries of ../fold/story.js. Must not know events, or the page.


/** What a block holds in place of what was asked for, from the first token that differs. */
function difference(asked, holds) {
  const first = asked.findIndex((token, i) => token !== holds[i]);
  const some = (tokens) => tokens.slice(first, first + 4).join(" ") + (tokens.length > first + 4 ? " …" : "");
  return first < 0 ? "it holds the same tokens after another beginning" : `it holds token ids ${some(holds)} in place of ${some(asked)}`;
}

const POLICY_WORDS = {
  "on-completion": "when their request ends", incremental: "as soon as they are full", "at-allocation": "before they are computed",
};

const STORY = {
  start: () => "The engine is ready: all blocks are free, nothing is published.",
  policies: (ids, d) => {
    const wait = {
      "single-flight": `equal prompts share one flight, released ${d.release.replace(/-/g, " ")}`,
      "shared-prefix": "a request is held while another computes its next block",
      "wait-or-recompute": "a request is held while another computes its next block, if that is sooner than computing it too",
    }[d.coordination] || "every request works on its own";
    return `New rules: blocks are published ${POLICY_WORDS[d.publication] || d.publication}; ${wait}.`;
  },
  deferred: (ids, d) => `${names(ids)} will arrive when ${d.after} has generated token ${d.token}.`,
  arrived: (ids, d) => `${names(ids)} ${ids.length > 1 ? "arrive, each" : "arrives"} with ${plural(d.tokens, "prompt token")}${d.salt ? ` and ${d.salt}` : ""}${d.rank ? `, priority ${d.rank}` : ""}.`,
  opened: (ids) => `Nobody in flight has ${ids.length > 1 ? "these prompts" : "this prompt"}, so ${names(ids)} ${ids.length > 1 ? "lead" : "leads"}.`,
  joined: (ids, d) => `${names(ids)} ${ids.length > 1 ? "ask" : "asks"} exactly what ${d.leader} asks, so ${ids.length > 1 ? "they are" : "it is"} held behind it.`,
  released: (ids, d) => {
    const why = { prefill: `${d.leader}'s prompt is published`, cached: "their prompt is cached now", finished: `${d.leader} has ended`, aborted: `${d.leader} was aborted`, failed: `${d.leader} failed`, published: `${d.leader} has published the awaited block`, ended: `${d.leader} has ended`, preempted: `${d.leader} was preempted` }[d.reason];
    return ids.length ? `${why}, so ${names(ids)} ${ids.length > 1 ? "are" : "is"} released.` : `${why}; nobody was held behind it.`;
  },
  handed: (ids, d) => `${d.from} ended before its prompt was published: ${names(ids)}, the oldest follower, leads now.`,
  sampleheld: (ids, d) => `${names(ids)} ${ids.length > 1 ? "are more samples" : "is another sample"} of ${d.first}'s prompt, held until that is computed once for all.`,
  sampleleads: (ids, d) => `${d.from} ended before its prompt was computed: ${names(ids)}, its next sample, computes it now.`,
  forked: (ids, d) => `The prompt is computed: ${names(ids)} ${ids.length > 1 ? "run" : "runs"} on the same ${plural(d.blocks, "block")} as ${d.first}.`,
  copied: (ids, d) => `${names(ids)} is about to write into block ${d.source}, which other samples read: it takes a copy, block ${d.block} (${plural(d.tokens, "token")} of K/V copied).`,
  adopted: (ids, d) => `${names(ids)} ${ids.length > 1 ? "look" : "looks"} again and ${ids.length > 1 ? "adopt" : "adopts"} ${plural(d.blocks, "block")} (${plural(d.tokens, "token")})${ids.length > 1 ? " each" : ""} that others have published meanwhile.`,
  awaited: (ids, d) => `${d.leader} is computing block ${number(d.block)} of ${names(ids)}, so ${ids.length > 1 ? "they are" : "it is"} held behind it${d.wait === null ? "" : `: first token in ${duration(d.wait)}, or in ${duration(d.recompute)} if ${ids.length > 1 ? "each" : "it"} computed too`}.`,
  beside: (ids, d) => `${d.leader} is computing block ${number(d.block)} of ${names(ids)} as well, but ${ids.length > 1 ? "they do" : "it does"} not wait: first token in ${duration(d.recompute)}, or in ${duration(d.wait)} behind ${d.leader}.`,
  hollow: (ids, d) => `${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""} that ${d.by} has published and ${
    d.gone ? "never computed: what is read there is whatever was there before" : "not computed yet: right only if this step writes them before they are read"}.`,
  collision: (ids, d) => `Two contents, one hash: block ${d.block} has the hash (${short(d.hash)}) that ${names(ids)} ${ids.length > 1 ? "ask" : "asks"} for, but ${difference(d.asked, d.holds)}. The check of token ids refuses it; without, its K/V would have been served.`,
  left: (ids) => `${names(ids)} ${ids.length > 1 ? "leave the flight; the others wait" : "leaves the flight; the others wait"} on.`,
  lookup: (ids, d) => {
    const many = ids.length > 1;
    if (d.resumed) return `${names(ids)} ${many ? "come" : "comes"} back and ${many ? "find" : "finds"} ${plural(d.recovered, "token")} of ${many ? "their" : "its"} own work.`;
    if (d.recovered > 0) return `${names(ids)} ${many ? "recover" : "recovers"} ${number(d.recovered)} of ${plural(d.queried, "prompt token")}${many ? " each" : ""} from the cache; ${number(d.queried - d.recovered)} ${d.queried - d.recovered === 1 ? "is" : "are"} left to compute.`;
    if (d.cold) return `${names(ids)} ${many ? "find" : "finds"} nothing, although ${d.twin} is computing the same tokens: none of its blocks is published yet.`;
    return `${names(ids)} ${many ? "find" : "finds"} nothing in the cache: ${plural(d.queried, "token")}${many ? " each" : ""} to compute.`;
  },
  prefill: (ids, d) => {
    const end = d.start + d.tokens;
    const part = end < d.prompt || d.start > 0;
    const what = `${plural(d.tokens, "token")}${ids.length > 1 ? " each" : ""}`;
    return part
      ? `${names(ids)} ${ids.length > 1 ? "compute" : "computes"} ${end >= d.prompt ? "the last " : ""}${what} of the prompt${end >= d.prompt ? "" : `, up to ${number(end)} of ${number(d.prompt)}`}.`
      : `${names(ids)} ${ids.length > 1 ? "compute" : "computes"} the whole prompt: ${what}.`;
  },
  stepfailed: (ids, d) => `The step failed and counts for nothing: ${d.error}`,
  first: (ids, d) => `${ids.length > 1 ? "First tokens" : "First token"} of ${names(ids)}, ${duration(d.ms)} after arrival.`,
  preempted: (ids, d) => `No block is free: ${names(ids)}, the ${d.order === "priority" ? "least important" : "newest"}, ${ids.length > 1 ? "give their" : "gives its"} blocks up and ${ids.length > 1 ? "wait" : "waits"} at the head of ${d.order === "priority" ? "its priority" : "the line"} (${plural(d.tokens, "token")} to compute again).`,
  finished: (ids, d) => `${names(ids)} ${ids.length > 1 ? "are" : "is"} done after ${plural(d.output, "output token")}${ids.length > 1 ? " each" : ""}.`,
  aborted: (ids) => `${names(ids)} ${ids.length > 1 ? "were" : "was"} aborted.`,
  failed: (ids, d) => `${names(ids)} failed: ${d.reason}`,
  evicted: (ids, d) => `${plural(d.blocks, "published block")} nobody holds ${d.blocks === 1 ? "is" : "are"} forgotten to make room for ${names(ids)}.`,
  allocated: (ids, d) => d.grows
    ? `The last block is full: ${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${d.blocks === 1 ? "one more" : `${number(d.blocks)} more`}${ids.length > 1 ? " each" : ""}.`
    : `${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${plural(d.blocks, "new block")}${ids.length > 1 ? " each" : ""}.`,
  published: (ids, d) => {
    const tokens = d.size ? ` (${plural(d.blocks * d.size, "token")})` : "";
    if (d.early) {
      return `${names(ids)} ${ids.length > 1 ? "publish" : "publishes"} ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""}${tokens} before computing ${d.blocks === 1 && ids.length === 1 ? "it" : "them"}: others can find what is not there yet.`;
    }
    return ids.length > 1
      ? `${names(ids)} publish ${plural(d.blocks, "block")} each${tokens}: others can find them now.`
      : `${names(ids)} publishes ${plural(d.blocks, "block")}${tokens}: others can find ${d.blocks === 1 ? "it" : "them"} now.`;
  },
  duplicated: (ids, d) => `${names(ids)} computed ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""} that others had already published: ${d.blocks === 1 && ids.length === 1 ? "it stays a private copy" : "they stay private copies"}.`,
  freed: (ids, d) => {
    const parts = [];
    if (d.kept) parts.push(`${number(d.kept)} stay findable`);
    if (d.front) parts.push(`${number(d.front)} without a hash ${d.front === 1 ? "is" : "are"} reused first`);
    if (d.held) parts.push(`${number(d.held)} ${d.held === 1 ? "is" : "are"} still held by others`);
    return `${names(ids)} ${ids.length > 1 ? "release their" : "releases its"} blocks${ids.length > 1 ? ", each" : ""}: ${parts.join(", ") || "none"}.`;
  },
  reset: (ids, d) => `The cache is reset: ${plural(d.blocks, "published block")} forgotten.`,
};

/** The sentence of one story entry. */
const storyText = (entry) => STORY[entry.kind](entry.ids, entry.data);

// ---- story/story.js ---------------------------------------------------------------------------------------

// What just happened and why: the sentences, newest first.
//
// Knows the story's entries and their sentences. Must not know events.


// These matter less: they stand back.
const QUIET = new Set(["allocated", "freed", "opened", "start", "policies"]);

class StoryPanel {
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

// ---- tables/tables.js -------------------------------------------------------------------------------------

// The block tables: for each request the physical block of every logical one, and how far it is filled.
//
// Knows state and scene. Must not know other views.


/** How blocks came into a table, where that is out of the ordinary. */
function cameWords(lane, items, scene) {
  const adopted = items.filter((item) => lane.adoptedBlocks.includes(item.id));
  const copied = items.filter((item) => scene.copies.has(item.id));
  const parts = copied.map((item) => `${item.id} is a copy of ${scene.copies.get(item.id)} (❐)`);
  if (adopted.length) parts.push(`${plural(adopted.length, "block")} adopted in mid-prefill (◇)`);
  return parts.join(", ");
}

class TablesPanel {
  constructor(view) {
    this.view = view;
    this.body = h("div", { class: "mvl-tables-body" });
    this.rows = new Keyed(this.body, (lane) => this.row(lane));
    this.empty = h("p", { class: "mvl-empty" }, "No request yet.");
    const aside = h("span", { class: "mvl-aside" }, "logical block 0, 1, 2 … → block id");
    this.node = panel("tables", "Block tables", aside, this.empty, this.body);
  }
  row(lane) {
    const name = h("span", { class: "mvl-name", "data-request": lane.id }, lane.id);
    const chips = h("span", { class: "mvl-chips" });
    const note = h("span", { class: "mvl-note" });
    const node = h("div", { class: "mvl-row" }, name, h("div", {}, chips, note));
    node.parts = {
      chips: new Keyed(chips, (item) => h("span", { class: "mvl-cell mvl-chip", "data-block": item.id }, String(item.id))),
      note,
    };
    return node;
  }
  draw(model) {
    const { state, scene } = model;
    this.empty.hidden = scene.lanes.length > 0;
    const size = scene.config ? scene.config.block_size : 16;
    this.rows.update(scene.lanes, (lane) => lane.arrivalSeq, (node, lane) => {
      const request = state.requests.get(lane.id);
      const mine = request && scene.laneOf.get(lane.id) === scene.lanes.indexOf(lane);
      const items = mine ? request.blockIds.map((id, index) => ({ id, index })) : [];
      node.parts.chips.update(items, (item) => `${item.index}:${item.id}`, (chip, item) => {
        const block = state.blocks.get(item.id);
        const filled = Math.max(0, Math.min(1, (request.numComputed - item.index * size) / size));
        setAll(chip, {
          "data-look": blockLook(block, item.id, scene),
          "data-shared": block.refCount > 1 || null,
          "data-came": lane.adoptedBlocks.includes(item.id) ? "adopted" : scene.copies.has(item.id) ? "copied" : null,
          style: filled < 1 ? `--fill:${Math.round(filled * 100)}%` : null,
        });
      });
      let note = cameWords(lane, items, scene);
      if (!items.length) {
        note = { held: `${heldWords(lane)}: no block yet`, waiting: "waiting: no block yet", preempted: "preempted: gave its blocks up" }[lane.state]
          || (ENDED.has(lane.state) ? `${STATE_WORDS[lane.state]}: gave its blocks back` : "no block yet");
      }
      setText(node.parts.note, note);
    });
  }
}

// ---- timeline/timeline.js ---------------------------------------------------------------------------------

// The timeline: a lane for each request, with its phases, marks and facts, and the arrows between lanes.
//
// Knows lanes. Must not know blocks or other views.


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

class TimelinePanel {
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

// ---- live/highlight.js ------------------------------------------------------------------------------------

// One block or one request, highlighted in all views at once, with a tooltip that says why it is what it is.
//
// Knows the attributes `data-block` and `data-request` that views give to their nodes. Must not know the views.


/** Follows the pointer and the keyboard on a page. `style` and `tip` are nodes for the page to show. */
class Highlight {
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

// ---- live/player.js ---------------------------------------------------------------------------------------

// A cursor over a recording: follows the head, or stands, or plays beat by beat.
//
// Knows recordings. Must not know the page or its buttons: time comes in as a number.

/** Where a view stands. `current` is the {state, scene} to draw. */
class Player {
  constructor(recording, paced) {
    this.recording = recording;
    this.paced = paced; // a log that comes faster than the eye is played, not jumped through
    this.mode = "live"; // live | paused | playing
    this.beatsPerSecond = 0; // 0: as fast as shows a race in about 10 s
    this.cursor = recording.end;
    this.model = null;
    this.nextBeatAt = 0;
    this.version = recording.version;
  }
  get current() {
    return this.mode === "live" ? this.recording.head : this.model;
  }
  get position() {
    return this.mode === "live" ? this.recording.end : this.cursor;
  }
  seek(seq, mode = "paused") {
    const { base, end } = this.recording;
    const target = Math.max(base, Math.min(end, seq));
    if (this.mode !== "live" && this.model && target >= this.cursor) {
      while (this.cursor < target) this.model.fold(this.recording.event(this.cursor++));
    } else {
      this.model = this.recording.modelAt(target);
      this.cursor = target;
    }
    this.mode = mode;
  }
  goLive() {
    this.mode = "live";
    this.model = null;
  }
  forward(mode = "paused") {
    let seq = this.position + 1;
    while (seq < this.recording.end && !this.recording.isBeat(seq)) seq++;
    this.seek(seq, mode);
  }
  back() {
    let seq = this.position - 1;
    while (seq > this.recording.base && !this.recording.isBeat(seq)) seq--;
    this.seek(seq);
  }
  play(nowMs) {
    if (this.position >= this.recording.end) this.seek(this.raceStart(), "playing");
    else this.seek(this.position, "playing");
    this.nextBeatAt = nowMs;
  }
  /** Where the race of the head began: the beat of its first arrival. */
  raceStart() {
    const { base, end, head } = this.recording;
    let seq = Math.max(base, Math.min(end, ...head.scene.lanes.map((lane) => lane.arrivalSeq)));
    while (seq > base && !this.recording.isBeat(seq)) seq--;
    return seq;
  }
  /** Events came in. A paced log starts to play from where the view stood. */
  onEvents(before, nowMs) {
    if (this.version !== this.recording.version) {
      this.version = this.recording.version;
      this.goLive();
      before = this.recording.base;
    }
    if (this.paced && this.mode === "live" && this.recording.head.scene.lanes.length) {
      this.seek(Math.max(before, this.recording.base), "playing");
      this.nextBeatAt = nowMs;
    }
  }
  beatMs() {
    if (this.beatsPerSecond) return 1000 / this.beatsPerSecond;
    const ends = this.recording.raceEnds.get(this.model ? this.model.scene.race : 0);
    const beats = 2 * Math.max(1, ends ? ends.step : 1);
    return Math.max(40, Math.min(900, 10000 / beats));
  }
  /** Play on as far as time says. Returns whether it still moves. */
  tick(nowMs) {
    if (this.mode !== "playing") return false;
    while (this.mode === "playing" && nowMs >= this.nextBeatAt && this.cursor < this.recording.end) {
      this.forward("playing");
      this.nextBeatAt = Math.max(this.nextBeatAt + this.beatMs(), nowMs - 200);
    }
    if (this.cursor >= this.recording.end) this.goLive();
    return this.mode === "playing";
  }
}

// ---- live/player_bar.js -----------------------------------------------------------------------------------

// The bar under the title: pause, beat by beat, scrub, speed. The engine goes on meanwhile.
//
// Knows a player and its recording. Must not know what the views draw.


class PlayerBar {
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

// ---- live/page.js -----------------------------------------------------------------------------------------

// All views over one recording, laid out on one page, and the loop that draws them.
//
// Knows the views by name, and a player. Must not know what a view draws, or where events come from. A console is made
// by whoever makes the page: the page only shows it and draws it with the views.


const PANELS = {
  counters: CountersPanel, timeline: TimelinePanel, pool: PoolPanel, tables: TablesPanel, chain: ChainPanel,
  story: StoryPanel, flights: FlightsPanel, result: ResultPanel,
};
const PAIRS = [["pool", "tables"], ["story", ["result", "flights"]]];

let viewCount = 0;

/** All panels over one recording. `makeConsole(page)` may return controls to show above; `destroy()` releases everything. */
class LabPage {
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

// ---- live/recording.js ------------------------------------------------------------------------------------

// All events so far, and the state and scene after any of them.
//
// Knows the two folds and the order of events. Must not know the page, or who asks. Snapshots on the way keep a jump
// back short: the events after the nearest one are folded again.


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
class Recording {
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

// ---- live/mount.js ----------------------------------------------------------------------------------------

// A finished log in a plain page, without a kernel.
//
// Knows recordings and pages.


/** Show a finished log in a plain page. Returns a function that takes it away. */
function mount(root, events, { show = Object.keys(PANELS), title = "", paced = false, perRace = false } = {}) {
  const recording = new Recording(perRace);
  recording.append(events.length ? events[0].seq : 0, events);
  const page = new LabPage(root, recording, { show, title, paced });
  return () => page.destroy();
}

// ---- live/widget.js ---------------------------------------------------------------------------------------

// The views as an anywidget: events come from the kernel, what the page misses is asked for.
//
// Knows the messages of publisher.py, recordings and pages. Must not know what a console says or sends.


/**
 * An anywidget: one recording for each model, one page for each view of it. `makeConsole(page, controls, send)` makes the
 * controls of a page whose model has some.
 */
const widget = (makeConsole) => () => {
  let recording;
  let epoch = -1;
  let lastStatus = null;
  const pages = new Set();
  return {
    initialize({ model }) {
      recording = new Recording(model.get("per_race"));
      const page = `${Math.random()}`;
      let asked = 0;
      const want = (seq) => model.send({ want: seq, page, asked: ++asked });
      // The first message may lie in the queue of a busy kernel. Later ones go to a subshell and are heard at once.
      let timer;
      const begin = (tries) => {
        if (epoch >= 0 || tries === 0) return;
        want(0);
        timer = setTimeout(() => begin(tries - 1), 300);
      };
      const onMessage = (message) => {
        if (message.type === "status") {
          lastStatus = message;
          for (const page of pages) if (page.console) page.console.say(message);
          return;
        }
        if (message.type === "closed") return;
        if (message.epoch < epoch) return;
        if (message.epoch > epoch) {
          epoch = message.epoch;
          recording.clear();
        }
        if (message.type === "checkpoint") recording.load(message);
        else if (message.type === "events" && !recording.append(message.from, message.events, performance.now())) want(recording.end);
      };
      model.on("msg:custom", onMessage);
      begin(40);
      return () => {
        clearTimeout(timer);
        model.off("msg:custom", onMessage);
      };
    },
    render({ model, el }) {
      const controls = model.get("controls") || {};
      const page = new LabPage(el, recording, {
        show: model.get("show"), title: model.get("title"), paced: model.get("paced"),
        makeConsole: (made) => (controls.fields ? makeConsole(made, controls, (message) => model.send(message)) : null),
      });
      pages.add(page);
      if (lastStatus && page.console) page.console.say(lastStatus);
      return () => {
        pages.delete(page);
        page.destroy();
      };
    },
  };
};

// ---- lab.js -----------------------------------------------------------------------------------------------

// The entry: what a notebook (the default export) and a plain page (`mount`) load, with the folds for tests.
//
// `python -m widgets.bundle` writes this file and all that it imports as one module, static/lab.js, and the styles beside
// them as static/lab.css. Here live views and the console meet; neither knows the other.


export { asDict, fold, foldScene, fromDict, initialScene, initialState, LabPage, mount, Player, Recording, replay, storyText };

export default widget((page, controls, send) => new Console(page, controls, send));
