// What the views show beside the state: the clock, lanes, blocks, counters and story, folded event by event.
//
// Knows the parts and their order: each may read what those before it have folded. Must not know the page.

import { foldBlocks, initialBlocks } from "./blocks.js";
import { foldClock, initialClock } from "./clock.js";
import { foldLanes, initialLanes } from "./lanes.js";
import { foldStory, initialStory } from "./story.js";
import { foldTotals, initialTotals } from "./totals.js";

/**
 * The scene before the first event. `perRace` starts afresh when a request arrives at an idle engine; otherwise lanes
 * stay (the last 24) and idle time is cut out of the time axis.
 */
export function initialScene(perRace = false) {
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
export function foldScene(scene, event) {
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
