// What became of the blocks, beside their state: the published hashes with their parents, private copies, copies on
// write, blocks that were published too early, and the last thing that happened to each.
//
// Knows events and lanes. Must not know the story, or how a block is drawn. Python follows the uncomputed blocks in
// uncomputed.py.

import { newSaltText } from "../words/words.js";
import { laneFor } from "./lanes.js";

export function initialBlocks() {
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
export function foldBlocks(scene, event) {
  const apply = BLOCK_FOLDS[event.kind];
  if (apply) apply(scene, event);
}
