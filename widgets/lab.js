// The entry: what a notebook (the default export) and a plain page (`mount`) load, with the folds for tests.
//
// `python -m widgets.bundle` writes this file and all that it imports as one module, static/lab.js, and the styles beside
// them as static/lab.css. Here live views and the console meet; neither knows the other.

import { Console } from "./console/console.js";
import { asDict, fromDict } from "./fold/dict.js";
import { foldScene, initialScene } from "./fold/scene.js";
import { fold, initialState, replay } from "./fold/state.js";
import { mount } from "./live/mount.js";
import { LabPage } from "./live/page.js";
import { Player } from "./live/player.js";
import { Recording } from "./live/recording.js";
import { widget } from "./live/widget.js";
import { storyText } from "./story/sentences.js";

export { asDict, fold, foldScene, fromDict, initialScene, initialState, LabPage, mount, Player, Recording, replay, storyText };

export default widget((page, controls, send) => new Console(page, controls, send));
