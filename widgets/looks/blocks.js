// How a block looks, and why it is what it is: the same in every view.
//
// Knows state and scene. Must not know which view asks.

import { short } from "../words/words.js";

export const BLOCK_WORDS = {
  free: "free, no content",
  owned: "owned, being filled",
  copy: "owned, a private copy",
  used: "published, in use",
  kept: "published, nobody holds it",
  uncomputed: "published, but not computed",
};

export function blockLook(block, id, scene) {
  if (block.state === "free") return "free";
  if (block.state === "owned") return scene.twins.has(id) ? "copy" : "owned";
  if (scene.uncomputed.has(id)) return "uncomputed";
  return block.refCount > 0 ? "used" : "kept";
}

function holders(model, id) {
  const found = [];
  for (const [name, request] of model.state.requests) {
    const index = request.blockIds.indexOf(id);
    if (index >= 0) found.push({ name, index });
  }
  return found;
}

/** Why a block is what it is, as lines of text. `recording.event(seq)` gives the arrival that holds its token ids. */
export function explainBlock(recording, model, id) {
  const block = model.state.blocks.get(id);
  if (!block) return [`Block ${id}`];
  const look = blockLook(block, id, model.scene);
  const facts = block.hash ? model.scene.hashes.get(block.hash) : null;
  const held = holders(model, id);
  const note = model.scene.notes.get(id);
  const shared = look === "owned" && block.refCount > 1;
  const lines = [`Block ${id}: ${shared ? "owned, shared by samples of one prompt" : BLOCK_WORDS[look]}`];
  lines.push(
    held.length
      ? `ref_count ${block.refCount}: in the table of ${held.map((x) => `${x.name} (logical block ${x.index})`).join(", ")}`
      : `ref_count ${block.refCount}: in no block table`,
  );
  if (block.hash) {
    lines.push(`hash ${short(block.hash)}${facts ? `, parent ${facts.parent ? short(facts.parent) : "root"}` : ""}`);
    if (facts && facts.salt) lines.push(`extra keys: ${facts.salt}`);
  } else if (look !== "free") {
    lines.push("no hash: nobody else can find it");
  }
  if (shared) lines.push("who writes into it first takes a copy");
  if (model.scene.copies.has(id)) lines.push(`copied on write from block ${model.scene.copies.get(id)}`);
  if (look === "uncomputed") lines.push("whoever finds it reads K/V that was never written");
  const adopters = model.scene.lanes.filter((lane) => lane.adoptedBlocks.includes(id)).map((lane) => lane.id);
  if (adopters.length) lines.push(`adopted in mid-prefill by ${adopters.join(", ")}`);
  if (model.scene.twins.has(id)) lines.push(`the same content is published in block ${model.scene.twins.get(id)}`);
  if (facts && facts.arrivalSeq >= 0) {
    const arrival = recording.event(facts.arrivalSeq);
    const size = model.scene.config ? model.scene.config.block_size : 16;
    const tokens = arrival ? arrival.prompt_token_ids.slice(facts.index * size, (facts.index + 1) * size) : [];
    if (tokens.length) lines.push(`token ids ${tokens.slice(0, 8).join(" ")}${tokens.length > 8 ? " …" : ""}`);
  }
  if (note) lines.push(`${note.what}${note.by ? ` ${note.what === "evicted" ? "for" : "by"} ${note.by}` : ""}, since step ${note.step}`);
  if (look === "kept" || look === "free") {
    const at = model.state.freeQueue.indexOf(id);
    if (at >= 0) lines.push(`place ${at + 1} of ${model.state.freeQueue.length} in the free queue`);
  }
  return lines;
}
