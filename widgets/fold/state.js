// The engine's state, folded from its log: the same fold as minivllm/log/replay.py.
//
// Knows events. Must not know the page, or what a view adds to the state (scene.js does that).

/** The engine before its first event. */
export function initialState() {
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
export function fold(state, event) {
  const apply = FOLDS[event.kind];
  if (apply) apply(state, event);
  return state;
}

/** The state after all of `events`. */
export function replay(events) {
  return events.reduce(fold, initialState());
}
