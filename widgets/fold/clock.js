// When things happened: the two time axes, and which requests are in the engine.
//
// Knows events and the clock's own fields of the scene. Must not know lanes or blocks.
//
// Milliseconds count from the first arrival, without the time in which no request was there. On the step axis step n
// lies between n - 1 and n: scheduling at its left end, results at its right end.

export function initialClock() {
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
export function place(scene, event) {
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
export function foldClock(scene, event) {
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
