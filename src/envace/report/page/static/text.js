"use strict";
// Text of models and tasks is data: it goes into the page as text nodes only, and what a reader could not see is shown
// as an escape. Nothing here or elsewhere sets HTML.

const LONGEST = 4000; // characters shown at first

// Control characters but tab and newline, bidirectional controls, invisible and joining characters, lone surrogates.
const HIDDEN =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff]/g;

/** el("p", {class: "a", title: "b"}, "text", node, ...): children that are no nodes become text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null).map((c) => (c instanceof Node ? c : String(c))));
  return node;
}

const escaped = (character) => "‹U+" + character.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0") + "›";

/** Text as one line, hidden characters as escapes: for labels. */
function plain(value) {
  return String(value ?? "").replace(HIDDEN, escaped);
}

/** Appends text, each hidden character as a marked escape. */
function appendVisible(parent, text) {
  let from = 0;
  for (const match of text.matchAll(HIDDEN)) {
    if (match.index > from) parent.append(text.slice(from, match.index));
    parent.append(el("span", { class: "hidden-character" }, escaped(match[0])));
    from = match.index + 1;
  }
  parent.append(text.slice(from));
}

/** Where to cut: never between the halves of a surrogate pair. */
function cutAt(text, length) {
  const code = text.charCodeAt(length - 1);
  return code >= 0xd800 && code <= 0xdbff ? length - 1 : length;
}

/** A block of text; a long one shows its beginning and a button for all of it. */
function textBlock(text) {
  const body = el("pre", { dir: "ltr" });
  if (text.length <= LONGEST) {
    appendVisible(body, text);
    return body;
  }
  appendVisible(body, text.slice(0, cutAt(text, LONGEST)));
  const more = el("button", { class: "more" }, `show all ${text.length.toLocaleString("en")} characters`);
  more.addEventListener("click", () => {
    body.replaceChildren();
    appendVisible(body, text);
    more.remove();
  });
  return el("div", {}, body, more);
}

function show(value, digits = 4) {
  if (value === null || value === undefined) return "unknown";
  return typeof value === "number" ? String(Number(value.toPrecision(digits))) : plain(value);
}
