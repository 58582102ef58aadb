// How a request is named: its role and state, whom it waits for, and all that a tooltip says of it.
//
// Knows state and scene. Must not know which view asks.

import { laneFor, lastSpan } from "../fold/lanes.js";
import { countRange, duration, number, plural } from "../words/words.js";

export const STATE_WORDS = {
  waiting: "waiting", held: "held", running: "running", preempted: "preempted", finished: "done", aborted: "aborted", failed: "failed",
};

/** Role and state, short enough to stand beside a lane. */
export function roleWords(lane) {
  const state = STATE_WORDS[lane.state] || lane.state;
  if (lane.role === "alone" || lane.role === lane.state) return state;
  return `${lane.role === "held" ? "was held" : lane.role} · ${state}`;
}

/** Whom a held request waits for, and for which blocks. */
export function heldWords(lane) {
  const last = lastSpan(lane);
  const blocks = last && last.blocks ? ` for ${countRange(last.blocks[0], last.blocks[1], "block")}` : "";
  return `held behind ${lane.behind}${blocks}`;
}

/** What a request is and does, as lines of text. */
export function explainRequest(model, id) {
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
