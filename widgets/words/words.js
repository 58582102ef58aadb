// Words that several views share: numbers, durations, lists of names, and what keeps blocks apart.
//
// Knows values. Must not know events, the page, or who says the words. Python says the same in words.py.

export const number = (value) => Math.round(value).toLocaleString("en-US");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;
export const duration = (ms) => (ms >= 10000 ? `${(ms / 1000).toFixed(1)} s` : ms >= 10 ? `${number(ms)} ms` : `${ms.toFixed(1)} ms`);

export function names(ids) {
  if (ids.length === 0) return "nobody";
  if (ids.length === 1) return ids[0];
  if (ids.length <= 4) return `${ids.slice(0, -1).join(", ")} and ${ids[ids.length - 1]}`;
  return `${ids[0]}, ${ids[1]} … ${ids[ids.length - 1]} (${ids.length} requests)`;
}

export const countRange = (first, last, word) => (first === last ? `${word} ${number(first)}` : `${word}s ${number(first)} to ${number(last)}`);

/** The first digits of a hash: enough to tell it from others. */
export const short = (hash) => (hash ? hash.slice(0, 8) : "none");

/** What keeps blocks apart, in words. A multimodal key says which tokens its item takes up. */
export const saltText = (extraKeys) => extraKeys.map(([kind, value, first, count]) => {
  const where = first === undefined ? "" : count === 1 ? ` at token ${first}` : ` at tokens ${first} to ${first + count - 1}`;
  return `${kind.replace(/_/g, " ")} ${value}${where}`;
}).join(", ");

/** The same for the keys that logical block `index` is the first of its chain to have. */
export const newSaltText = (extraKeys, index, size) => saltText(extraKeys.filter(([, , first = 0]) => Math.floor(first / size) === index));
