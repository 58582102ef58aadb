// The sentences of the story, one for each kind of entry.
//
// Knows the entries of ../fold/story.js. Must not know events, or the page.

import { duration, names, number, plural, short } from "../words/words.js";

/** What a block holds in place of what was asked for, from the first token that differs. */
function difference(asked, holds) {
  const first = asked.findIndex((token, i) => token !== holds[i]);
  const some = (tokens) => tokens.slice(first, first + 4).join(" ") + (tokens.length > first + 4 ? " …" : "");
  return first < 0 ? "it holds the same tokens after another beginning" : `it holds token ids ${some(holds)} in place of ${some(asked)}`;
}

const POLICY_WORDS = {
  "on-completion": "when their request ends", incremental: "as soon as they are full", "at-allocation": "before they are computed",
};

const STORY = {
  start: () => "The engine is ready: all blocks are free, nothing is published.",
  policies: (ids, d) => {
    const wait = {
      "single-flight": `equal prompts share one flight, released ${d.release.replace(/-/g, " ")}`,
      "shared-prefix": "a request is held while another computes its next block",
      "wait-or-recompute": "a request is held while another computes its next block, if that is sooner than computing it too",
    }[d.coordination] || "every request works on its own";
    return `New rules: blocks are published ${POLICY_WORDS[d.publication] || d.publication}; ${wait}.`;
  },
  deferred: (ids, d) => `${names(ids)} will arrive when ${d.after} has generated token ${d.token}.`,
  arrived: (ids, d) => `${names(ids)} ${ids.length > 1 ? "arrive, each" : "arrives"} with ${plural(d.tokens, "prompt token")}${d.salt ? ` and ${d.salt}` : ""}${d.rank ? `, priority ${d.rank}` : ""}.`,
  opened: (ids) => `Nobody in flight has ${ids.length > 1 ? "these prompts" : "this prompt"}, so ${names(ids)} ${ids.length > 1 ? "lead" : "leads"}.`,
  joined: (ids, d) => `${names(ids)} ${ids.length > 1 ? "ask" : "asks"} exactly what ${d.leader} asks, so ${ids.length > 1 ? "they are" : "it is"} held behind it.`,
  released: (ids, d) => {
    const why = { prefill: `${d.leader}'s prompt is published`, cached: "their prompt is cached now", finished: `${d.leader} has ended`, aborted: `${d.leader} was aborted`, failed: `${d.leader} failed`, published: `${d.leader} has published the awaited block`, ended: `${d.leader} has ended`, preempted: `${d.leader} was preempted` }[d.reason];
    return ids.length ? `${why}, so ${names(ids)} ${ids.length > 1 ? "are" : "is"} released.` : `${why}; nobody was held behind it.`;
  },
  handed: (ids, d) => `${d.from} ended before its prompt was published: ${names(ids)}, the oldest follower, leads now.`,
  sampleheld: (ids, d) => `${names(ids)} ${ids.length > 1 ? "are more samples" : "is another sample"} of ${d.first}'s prompt, held until that is computed once for all.`,
  sampleleads: (ids, d) => `${d.from} ended before its prompt was computed: ${names(ids)}, its next sample, computes it now.`,
  forked: (ids, d) => `The prompt is computed: ${names(ids)} ${ids.length > 1 ? "run" : "runs"} on the same ${plural(d.blocks, "block")} as ${d.first}.`,
  copied: (ids, d) => `${names(ids)} is about to write into block ${d.source}, which other samples read: it takes a copy, block ${d.block} (${plural(d.tokens, "token")} of K/V copied).`,
  adopted: (ids, d) => `${names(ids)} ${ids.length > 1 ? "look" : "looks"} again and ${ids.length > 1 ? "adopt" : "adopts"} ${plural(d.blocks, "block")} (${plural(d.tokens, "token")})${ids.length > 1 ? " each" : ""} that others have published meanwhile.`,
  awaited: (ids, d) => `${d.leader} is computing block ${number(d.block)} of ${names(ids)}, so ${ids.length > 1 ? "they are" : "it is"} held behind it${d.wait === null ? "" : `: first token in ${duration(d.wait)}, or in ${duration(d.recompute)} if ${ids.length > 1 ? "each" : "it"} computed too`}.`,
  beside: (ids, d) => `${d.leader} is computing block ${number(d.block)} of ${names(ids)} as well, but ${ids.length > 1 ? "they do" : "it does"} not wait: first token in ${duration(d.recompute)}, or in ${duration(d.wait)} behind ${d.leader}.`,
  hollow: (ids, d) => `${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""} that ${d.by} has published and ${
    d.gone ? "never computed: what is read there is whatever was there before" : "not computed yet: right only if this step writes them before they are read"}.`,
  collision: (ids, d) => `Two contents, one hash: block ${d.block} has the hash (${short(d.hash)}) that ${names(ids)} ${ids.length > 1 ? "ask" : "asks"} for, but ${difference(d.asked, d.holds)}. The check of token ids refuses it; without, its K/V would have been served.`,
  left: (ids) => `${names(ids)} ${ids.length > 1 ? "leave the flight; the others wait" : "leaves the flight; the others wait"} on.`,
  lookup: (ids, d) => {
    const many = ids.length > 1;
    if (d.resumed) return `${names(ids)} ${many ? "come" : "comes"} back and ${many ? "find" : "finds"} ${plural(d.recovered, "token")} of ${many ? "their" : "its"} own work.`;
    if (d.recovered > 0) return `${names(ids)} ${many ? "recover" : "recovers"} ${number(d.recovered)} of ${plural(d.queried, "prompt token")}${many ? " each" : ""} from the cache; ${number(d.queried - d.recovered)} ${d.queried - d.recovered === 1 ? "is" : "are"} left to compute.`;
    if (d.cold) return `${names(ids)} ${many ? "find" : "finds"} nothing, although ${d.twin} is computing the same tokens: none of its blocks is published yet.`;
    return `${names(ids)} ${many ? "find" : "finds"} nothing in the cache: ${plural(d.queried, "token")}${many ? " each" : ""} to compute.`;
  },
  prefill: (ids, d) => {
    const end = d.start + d.tokens;
    const part = end < d.prompt || d.start > 0;
    const what = `${plural(d.tokens, "token")}${ids.length > 1 ? " each" : ""}`;
    return part
      ? `${names(ids)} ${ids.length > 1 ? "compute" : "computes"} ${end >= d.prompt ? "the last " : ""}${what} of the prompt${end >= d.prompt ? "" : `, up to ${number(end)} of ${number(d.prompt)}`}.`
      : `${names(ids)} ${ids.length > 1 ? "compute" : "computes"} the whole prompt: ${what}.`;
  },
  stepfailed: (ids, d) => `The step failed and counts for nothing: ${d.error}`,
  first: (ids, d) => `${ids.length > 1 ? "First tokens" : "First token"} of ${names(ids)}, ${duration(d.ms)} after arrival.`,
  preempted: (ids, d) => `No block is free: ${names(ids)}, the ${d.order === "priority" ? "least important" : "newest"}, ${ids.length > 1 ? "give their" : "gives its"} blocks up and ${ids.length > 1 ? "wait" : "waits"} at the head of ${d.order === "priority" ? "its priority" : "the line"} (${plural(d.tokens, "token")} to compute again).`,
  finished: (ids, d) => `${names(ids)} ${ids.length > 1 ? "are" : "is"} done after ${plural(d.output, "output token")}${ids.length > 1 ? " each" : ""}.`,
  aborted: (ids) => `${names(ids)} ${ids.length > 1 ? "were" : "was"} aborted.`,
  failed: (ids, d) => `${names(ids)} failed: ${d.reason}`,
  evicted: (ids, d) => `${plural(d.blocks, "published block")} nobody holds ${d.blocks === 1 ? "is" : "are"} forgotten to make room for ${names(ids)}.`,
  allocated: (ids, d) => d.grows
    ? `The last block is full: ${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${d.blocks === 1 ? "one more" : `${number(d.blocks)} more`}${ids.length > 1 ? " each" : ""}.`
    : `${names(ids)} ${ids.length > 1 ? "take" : "takes"} ${plural(d.blocks, "new block")}${ids.length > 1 ? " each" : ""}.`,
  published: (ids, d) => {
    const tokens = d.size ? ` (${plural(d.blocks * d.size, "token")})` : "";
    if (d.early) {
      return `${names(ids)} ${ids.length > 1 ? "publish" : "publishes"} ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""}${tokens} before computing ${d.blocks === 1 && ids.length === 1 ? "it" : "them"}: others can find what is not there yet.`;
    }
    return ids.length > 1
      ? `${names(ids)} publish ${plural(d.blocks, "block")} each${tokens}: others can find them now.`
      : `${names(ids)} publishes ${plural(d.blocks, "block")}${tokens}: others can find ${d.blocks === 1 ? "it" : "them"} now.`;
  },
  duplicated: (ids, d) => `${names(ids)} computed ${plural(d.blocks, "block")}${ids.length > 1 ? " each" : ""} that others had already published: ${d.blocks === 1 && ids.length === 1 ? "it stays a private copy" : "they stay private copies"}.`,
  freed: (ids, d) => {
    const parts = [];
    if (d.kept) parts.push(`${number(d.kept)} stay findable`);
    if (d.front) parts.push(`${number(d.front)} without a hash ${d.front === 1 ? "is" : "are"} reused first`);
    if (d.held) parts.push(`${number(d.held)} ${d.held === 1 ? "is" : "are"} still held by others`);
    return `${names(ids)} ${ids.length > 1 ? "release their" : "releases its"} blocks${ids.length > 1 ? ", each" : ""}: ${parts.join(", ") || "none"}.`;
  },
  reset: (ids, d) => `The cache is reset: ${plural(d.blocks, "published block")} forgotten.`,
};

/** The sentence of one story entry. */
export const storyText = (entry) => STORY[entry.kind](entry.ids, entry.data);
