// What just happened and why, as entries: a kind, the requests, the facts. Events of one step that say the same are
// one entry.
//
// Knows events and the scene after them. Must not know the sentences (../story/sentences.js makes them).

import { place } from "./clock.js";
import { laneFor } from "./lanes.js";

const MAX_STORY = 200;
const UNMERGED_FIELDS = new Set(["twin"]);

export function initialStory() {
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
export function foldStory(scene, event) {
  const entryOf = ENTRIES[event.kind];
  const entry = entryOf ? entryOf(scene, event) : null;
  if (entry) report(scene, event, ...entry);
}
