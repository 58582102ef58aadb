// The views as an anywidget: events come from the kernel, what the page misses is asked for.
//
// Knows the messages of publisher.py, recordings and pages. Must not know what a console says or sends.

import { LabPage } from "./page.js";
import { Recording } from "./recording.js";

/**
 * An anywidget: one recording for each model, one page for each view of it. `makeConsole(page, controls, send)` makes the
 * controls of a page whose model has some.
 */
export const widget = (makeConsole) => () => {
  let recording;
  let epoch = -1;
  let lastStatus = null;
  const pages = new Set();
  return {
    initialize({ model }) {
      recording = new Recording(model.get("per_race"));
      const page = `${Math.random()}`;
      let asked = 0;
      const want = (seq) => model.send({ want: seq, page, asked: ++asked });
      // The first message may lie in the queue of a busy kernel. Later ones go to a subshell and are heard at once.
      let timer;
      const begin = (tries) => {
        if (epoch >= 0 || tries === 0) return;
        want(0);
        timer = setTimeout(() => begin(tries - 1), 300);
      };
      const onMessage = (message) => {
        if (message.type === "status") {
          lastStatus = message;
          for (const page of pages) if (page.console) page.console.say(message);
          return;
        }
        if (message.type === "closed") return;
        if (message.epoch < epoch) return;
        if (message.epoch > epoch) {
          epoch = message.epoch;
          recording.clear();
        }
        if (message.type === "checkpoint") recording.load(message);
        else if (message.type === "events" && !recording.append(message.from, message.events, performance.now())) want(recording.end);
      };
      model.on("msg:custom", onMessage);
      begin(40);
      return () => {
        clearTimeout(timer);
        model.off("msg:custom", onMessage);
      };
    },
    render({ model, el }) {
      const controls = model.get("controls") || {};
      const page = new LabPage(el, recording, {
        show: model.get("show"), title: model.get("title"), paced: model.get("paced"),
        makeConsole: (made) => (controls.fields ? makeConsole(made, controls, (message) => model.send(message)) : null),
      });
      pages.add(page);
      if (lastStatus && page.console) page.console.say(lastStatus);
      return () => {
        pages.delete(page);
        page.destroy();
      };
    },
  };
};
