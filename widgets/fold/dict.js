// The state as plain JSON values and back: the same values as `State.as_dict()` in Python.
//
// Knows the fields of a state. Must not know events.

/** The state as plain JSON values: the same as `State.as_dict()` in Python. */
export function asDict(state) {
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
export function fromDict(data) {
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
