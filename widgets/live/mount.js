// A finished log in a plain page, without a kernel.
//
// Knows recordings and pages.

import { LabPage, PANELS } from "./page.js";
import { Recording } from "./recording.js";

/** Show a finished log in a plain page. Returns a function that takes it away. */
export function mount(root, events, { show = Object.keys(PANELS), title = "", paced = false, perRace = false } = {}) {
  const recording = new Recording(perRace);
  recording.append(events.length ? events[0].seq : 0, events);
  const page = new LabPage(root, recording, { show, title, paced });
  return () => page.destroy();
}
