// Elements, made in one expression.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export const element = (tag, attributes = {}, children = []) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, children = []) => fill(document.createElementNS(SVG, tag), attributes, children);
