"use strict";

// Markdown to elements, with `textContent` alone: HTML in an answer is shown as it is written.
// What models write of CommonMark and GitHub's tables; no images, no footnotes, no HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+(.*?)[ \t]*#*$/;
const RULE = /^ {0,3}([-*_])([ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])( +|$)/;
const DELIMITERS = /^ *\|?( *:?-+:? *\|)+( *:?-+:? *)?$/;
const INLINE = new RegExp([
  "\\\\(?<escaped>[!-/:-@[-`{-~])",
  "(?<ticks>`+)(?<code>[^`]|[^`][^]*?[^`])\\k<ticks>(?!`)",
  "\\*\\*(?=\\S)(?<strong>[^]*?\\S)\\*\\*(?!\\*)",
  "(?<!\\w)__(?=\\S)(?<strong2>[^]*?\\S)__(?!\\w)",
  "\\*(?=[^\\s*])(?<em>[^]*?[^\\s*])\\*(?!\\*)",
  "(?<!\\w)_(?=[^\\s_])(?<em2>[^]*?[^\\s_])_(?!\\w)",
  "~~(?=\\S)(?<del>[^]*?\\S)~~",
  "\\[(?<label>[^\\]\\n]{1,500})\\]\\((?<target>[^\\s()]*(?:\\([^\\s()]*\\)[^\\s()]*)*)\\)",
  "(?<url>https?:\\/\\/[^\\s<>\"`]*[^\\s<>\"`.,;:!?)\\]'*_])",
].join("|"), "g");
const DEEPEST = 20;  // of lists and quotes in each other
const LONGEST_INLINE = 10000;  // of a paragraph; longer ones stay plain, as matching is quadratic

function element(name, children = [], properties = {}) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// The lines of each top-level block of `text`.
function split(lines) {
  const blocks = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) {
      at++;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end));
    at = end;
  }
  return blocks;
}

function blockEnd(lines, at) {
  const fence = lines[at].match(FENCE);
  if (fence) {
    const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}[ \\t]*$`);
    const end = lines.findIndex((line, number) => number > at && closing.test(line));
    return end < 0 ? lines.length : end + 1;
  }
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return at + 1;
  let end = at + 1;
  if (ITEM.test(lines[at])) {
    const kind = (line) => /^ *\d/.test(line), [, indent] = lines[at].match(ITEM);
    const belongs = (line) => ITEM.test(line)
      ? kind(line) === kind(lines[at]) || line.search(/\S/) > indent.length + 1
      : /^\s/.test(line);
    while (end < lines.length) {
      const next = lines[end].trim() ? end : lines.findIndex((line, number) => number > end && line.trim());
      if (next < 0) break;
      if (next > end ? !belongs(lines[next]) : !belongs(lines[next]) && begins(lines, next)) break;
      end = next + 1;
    }
    return end;
  }
  const inside = QUOTE.test(lines[at])
    ? (line) => QUOTE.test(line)
    : isTable(lines, at)
      ? (line) => line.includes("|")
      : (line, number) => line.trim() && !begins(lines, number);
  while (end < lines.length && inside(lines[end], end)) end++;
  return end;
}

// Whether a paragraph ends before this line.
function begins(lines, at) {
  const line = lines[at];
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)
    || /^ {0,3}([-*+]|1[.)]) +\S/.test(line) || isTable(lines, at);
}

function isTable(lines, at) {
  return lines[at].includes("|") && DELIMITERS.test(lines[at + 1] ?? "");
}

function block(lines, depth = 0) {
  const [first] = lines;
  const fence = first.match(FENCE), heading = first.match(HEADING);
  if (fence) return codeBlock(lines, fence[1]);
  if (heading) return element("h" + heading[1].length, inline(heading[2]));
  if (RULE.test(first)) return element("hr");
  if (isTable(lines, 0)) return table(lines);
  if (depth < DEEPEST && QUOTE.test(first)) {
    return element("blockquote", markdown(lines.map((line) => line.replace(QUOTE, "")), depth + 1));
  }
  if (depth < DEEPEST && ITEM.test(first)) return list(lines, depth + 1);
  return element("p", inline(lines.map((line) => line.trim()).join("\n")));
}

function codeBlock(lines, fence) {
  const ended = lines.length > 1 && lines.at(-1).trim().startsWith(fence);
  const text = lines.slice(1, ended ? -1 : undefined).join("\n");
  const pre = element("pre", [element("code", [text])]);
  return element("div", [pre, button("Copy", (self) => copy(text, self))], { className: "block" });
}

function table([head, delimiters, ...rows]) {
  const cells = (row) => row.trim().replace(/^\||\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(delimiters).map((cell) =>
    cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "end") : "start");
  const line = (row, name) => element("tr", cells(row).slice(0, sides.length).map((cell, column) => {
    const made = element(name, inline(cell));
    made.style.textAlign = sides[column];
    return made;
  }));
  const parts = [element("thead", [line(head, "th")]), element("tbody", rows.map((row) => line(row, "td")))];
  return element("div", [element("table", parts)], { className: "table" });
}

function list(lines, depth) {
  const [, indent, mark] = lines[0].match(ITEM);
  const made = element(/\d/.test(mark) ? "ol" : "ul");
  if (made.tagName === "OL") made.start = parseInt(mark, 10);
  const items = [];
  for (const line of lines) {
    const found = line.match(ITEM);
    if (found && found[1].length <= indent.length + 1) items.push([line.slice(found[0].length)]);
    else items.at(-1).push(line);
  }
  for (const [first, ...rest] of items) {
    const inner = Math.min(...rest.filter((line) => line.trim()).map((line) => line.search(/\S/)));
    const content = markdown([first, ...rest.map((line) => line.slice(inner))], depth);
    const alone = content.length && content[0].tagName === "P" && !rest.some((line) => !line.trim());
    made.append(element("li", alone ? [...content[0].childNodes, ...content.slice(1)] : content));
  }
  return made;
}

function inline(text) {
  if (text.length > LONGEST_INLINE) return [text];
  const nodes = [];
  let end = 0;
  for (const { 0: whole, index, groups: found } of text.matchAll(INLINE)) {
    nodes.push(text.slice(end, index), span(whole, found));
    end = index + whole.length;
  }
  nodes.push(text.slice(end));
  return nodes;
}

function span(whole, found) {
  if (found.escaped) return found.escaped;
  if (found.code) return element("code", [found.code.replace(/^ (.*) $/s, "$1")]);
  const strong = found.strong ?? found.strong2, em = found.em ?? found.em2;
  if (strong) return element("strong", inline(strong));
  if (em) return element("em", inline(em));
  if (found.del) return element("del", inline(found.del));
  if (found.url) return link([found.url], found.url);
  return /^(https?|mailto):/i.test(found.target) ? link(inline(found.label), found.target) : whole;
}

function link(children, href) {
  return element("a", children, { href, target: "_blank", rel: "noopener noreferrer" });
}

// Elements of `lines`.
function markdown(lines, depth) {
  return split(lines).map((found) => block(found, depth));
}

// Show `text` in `container`. Blocks that have not changed since the last time stay, so that what
// a reader has selected in an answer stays selected while the rest arrives.
function showMarkdown(container, text) {
  const blocks = split(text.split("\n")), sources = blocks.map((lines) => lines.join("\n"));
  const before = container.sources ?? [];
  let same = 0;
  while (same < sources.length && sources[same] === before[same]) same++;
  const changed = blocks.slice(same).map((found) => block(found));
  while (container.childNodes.length > same) container.lastChild.remove();
  container.append(...changed);
  container.sources = sources;
}
