// Counters over all requests: tokens queried, recovered, adopted and computed; blocks published and evicted.
//
// Knows events alone.

export function initialTotals() {
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
export function foldTotals(scene, event) {
  const apply = TOTAL_FOLDS[event.kind];
  if (apply) apply(scene.totals, event);
}
