// What each request did over time, as lanes, and the arrows between them. Python folds the same lanes in lanes.py.
//
// Knows events and the clock. Must not know blocks (beyond those that a request adopted), the story, or how a lane is
// drawn.

import { saltText } from "../words/words.js";
import { place } from "./clock.js";

const MAX_LANES = 24;
export const ENDED = new Set(["finished", "aborted", "failed"]);

export function initialLanes() {
  return {
    lanes: [],
    laneOf: new Map(), // id -> index in lanes
    arrows: [],
  };
}

export const laneFor = (scene, id) => scene.lanes[scene.laneOf.get(id)];
export const lastSpan = (lane) => lane.spans[lane.spans.length - 1];

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
export function foldLanes(scene, event) {
  const ofMany = OF_MANY_LANES[event.kind];
  if (ofMany) ofMany(scene, event);
  const ofOne = OF_ONE_LANE[event.kind];
  const lane = ofOne && laneFor(scene, event.request_id);
  if (lane) ofOne(lane, event, place(scene, event));
}
