"""The HTML of a run's page. Its script asks for the state once a second and writes texts, never HTML."""

from __future__ import annotations

import html

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1d22; --paper: #fcfcfb; --soft: #676d78; --line: #dcdfe4; --mark: #0b66c3;
  --warn: #9a4b00; --box: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8ec; --paper: #15171b; --soft: #9aa2b0; --line: #2f343d; --mark: #6cb2ff; --warn: #ffb86b;
    --box: #1c1f25; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 64rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.35rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1rem; margin: 2rem 0 .5rem; color: var(--soft); font-weight: 600; }
#condition { margin: .15rem 0 1.25rem; color: var(--soft); }
table { width: 100%; border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: .4rem .75rem .4rem 0; border-top: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { width: 7rem; font-weight: 600; color: var(--soft); }
tr.more th, tr.more td { border-top: 0; padding-top: 0; }
td { font-variant-numeric: tabular-nums; }
.curves { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1rem; }
figure { margin: 0; padding: .75rem; background: var(--box); border: 1px solid var(--line); border-radius: .5rem; }
figcaption { color: var(--soft); font-size: .875rem; }
figcaption strong { color: var(--ink); }
svg { display: block; width: 100%; height: 6rem; margin-top: .5rem; }
polyline { fill: none; stroke: var(--mark); stroke-width: 2; stroke-linejoin: round;
  vector-effect: non-scaling-stroke; }
ul { list-style: none; margin: 0; padding: 0; }
li { background: var(--box); border: 1px solid var(--line); border-left: 4px solid var(--soft); border-radius: .5rem;
  padding: .6rem .75rem; margin-bottom: .5rem; overflow-wrap: anywhere; }
li.warning, li.unusable { border-left-color: var(--warn); }
li p { margin: .15rem 0 0; color: var(--soft); }
code { display: block; margin-top: .35rem; font: .875rem/1.5 ui-monospace, monospace; color: var(--ink); }
"""

_SCRIPT = """
"use strict";
const at = (id) => document.getElementById(id);
const made = (name, text, kind) => {
  const element = document.createElement(name);
  if (text) element.textContent = text;
  if (kind) element.className = kind;
  return element;
};
const drawn = new Map();
const changed = (id, value) => {
  const text = JSON.stringify(value);
  if (drawn.get(id) === text) return false;
  drawn.set(id, text);
  return true;
};
const showRows = (rows) => {
  if (!changed("rows", rows)) return;
  at("rows").replaceChildren(...rows.map(([label, text]) => {
    const row = made("tr", "", label ? "" : "more");
    const head = made(label ? "th" : "td", label);
    if (label) head.scope = "row";
    row.append(head, made("td", text));
    return row;
  }));
};
const showFindings = (findings) => {
  if (!changed("findings", findings)) return;
  at("findings").replaceChildren(...findings.map((one) => {
    const item = made("li", "", one.kind);
    item.append(made("strong", one.title), ...one.texts.map((text) => made("p", text)));
    if (one.command) item.append(made("code", one.command));
    return item;
  }));
  at("none").hidden = findings.length > 0;
};
const showCurves = (curves) => {
  if (!changed("curves", curves)) return;
  at("curves").replaceChildren(...curves.map((curve) => {
    const figure = made("figure");
    const caption = made("figcaption");
    caption.append(made("strong", curve.name), made("span", " " + curve.text));
    figure.append(caption);
    if (curve.values.length > 1) {
      const space = "http://www.w3.org/2000/svg";
      const picture = document.createElementNS(space, "svg");
      picture.setAttribute("viewBox", "0 0 100 100");
      picture.setAttribute("preserveAspectRatio", "none");
      picture.setAttribute("role", "img");
      picture.setAttribute("aria-label", curve.name + ": " + curve.text);
      const most = Math.max(...curve.values) || 1;
      const line = document.createElementNS(space, "polyline");
      line.setAttribute("points", curve.values.map((value, place) =>
        (100 * place / (curve.values.length - 1)).toFixed(2) + "," + (98 - 96 * value / most).toFixed(2)).join(" "));
      picture.append(line);
      figure.append(picture);
    }
    return figure;
  }));
};
const say = (text) => {
  if (changed("condition", text)) at("condition").textContent = text;
};
const refresh = async () => {
  let over = false;
  try {
    const answer = await fetch("state", {cache: "no-store"});
    if (!answer.ok) throw new Error(String(answer.status));
    const found = await answer.json();
    over = found.condition === "ended" || found.condition === "killed";
    say(over ? "This run is over." : "Updated every second.");
    showRows(found.rows);
    showFindings(found.findings);
    showCurves(found.curves);
  } catch {
    say("No answer: the run has ended, or its page has. What is below may be out of date.");
  }
  if (!over) setTimeout(refresh, 1000);
};
refresh();
"""


def page_html(script: str, nonce: str) -> str:
    """script: how the run's script is called. nonce: of the response's content security policy."""
    title = html.escape(script)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{title} – Flatout</title>
<style nonce="{nonce}">{_STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p id="condition" role="status">Waiting for the first answer.</p>
<noscript><p>This page updates itself with JavaScript. In a terminal: flatout watch.</p></noscript>
<table aria-label="The run"><tbody id="rows"></tbody></table>
<h2>Findings</h2>
<ul id="findings" aria-live="polite"></ul>
<p id="none">None so far.</p>
<h2>Over the run</h2>
<div id="curves" class="curves"></div>
</main>
<script nonce="{nonce}">{_SCRIPT}</script>
</body>
</html>
"""
