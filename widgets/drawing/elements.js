// Small helpers for HTML and SVG nodes that are reused.
//
// Knows the document. Must not know what is drawn.

const SVG = "http://www.w3.org/2000/svg";

/** Make an HTML element: attributes by name, `on…` as listeners, children as nodes or text. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  setAll(node, attributes);
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same for SVG. */
export function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  setAll(node, attributes);
  node.append(...children);
  return node;
}

export function setAll(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === null || value === undefined || value === false) node.removeAttribute(name);
    else {
      const text = value === true ? "" : String(value);
      if (node.getAttribute(name) !== text) node.setAttribute(name, text);
    }
  }
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Children of one parent, reused by key: `update` brings them to the given items, in order. */
export class Keyed {
  constructor(parent, create) {
    this.parent = parent;
    this.create = create;
    this.nodes = new Map();
  }
  update(items, keyOf, change) {
    const kept = new Map();
    let before = this.parent.firstChild;
    for (const item of items) {
      const key = keyOf(item);
      const node = this.nodes.get(key) || this.create(item);
      kept.set(key, node);
      change(node, item);
      if (node === before) before = before.nextSibling;
      else this.parent.insertBefore(node, before);
    }
    for (const [key, node] of this.nodes) if (kept.get(key) !== node) node.remove();
    this.nodes = kept;
  }
}

export function panel(name, title, aside, ...body) {
  return h(
    "section", { class: `mvl-panel mvl-${name}`, "aria-label": title },
    h("header", {}, h("h4", {}, title), ...(aside ? [aside] : [])), ...body,
  );
}

const ICONS = {
  start: "M3 2.5v9M11.5 2.5 5 7l6.5 4.5z", back: "M10 2.5 3.5 7l6.5 4.5z", on: "M4 2.5 10.5 7 4 11.5z",
  pause: "M4.2 2.5v9M9.8 2.5v9", play: "M3.5 2 11.5 7 3.5 12z",
};

export function icon(name) {
  return s("svg", { viewBox: "0 0 14 14", width: 14, height: 14, "aria-hidden": "true", class: `mvl-icon mvl-icon-${name}` }, s("path", { d: ICONS[name] }));
}
