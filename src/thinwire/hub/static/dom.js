// Elements without markup: whatever a stranger may have named becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; strings become text nodes. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Sets or takes away an attribute, and leaves the document alone where nothing changes. */
export function setAttribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** Sets the text of an element that holds nothing else. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function byId(id) {
  return document.getElementById(id);
}

/**
 * Makes the children of `parent` those of `items`, in order, and keeps the ones that are there:
 * with 1000 replicas only what changed touches the document.
 */
export function keep(parent, items, { key, create, update }) {
  const kept = (parent.keptChildren ??= new Map());
  const wanted = new Set();
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    if (wanted.has(name)) continue;
    wanted.add(name);
    let child = kept.get(name);
    if (!child) {
      child = create(item);
      kept.set(name, child);
    }
    update(child, item);
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
  }
  for (const [name, child] of kept) {
    if (wanted.has(name)) continue;
    child.remove();
    kept.delete(name);
  }
}
