"""Style and script of compare.html. No network: the page forbids it to itself."""

from sidestream.tracking.drawing import COLORS, DASHES, NEUTRAL, NEUTRAL_ON_DARK, ON_DARK


def _variables(colors: tuple[str, ...]) -> str:
    return " ".join(f"--arm-{n}: {color};" for n, color in enumerate(colors))


def _dashes(n: int) -> str:
    dashes = DASHES[n]
    return "none" if dashes == "-" else " ".join(f"{2 * part:g}" for part in dashes[1])


_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f9; --card: #ffffff; --ink: #16191d; --soft: #59616b; --rule: #dfe3e8; --mark: #eef3fb;
  --hot: #0b5cad;
  {light}
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171b; --card: #1c2026; --ink: #e8eaed; --soft: #a1a9b3; --rule: #333a43; --mark: #222b38;
    --hot: #7db8f2;
    {dark}
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
header, main { max-width: 1240px; margin: 0 auto; padding: 0 24px; }
header { padding-top: 28px; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 14px; text-wrap: balance; overflow-wrap: anywhere; }
h1 .also { color: #b42318; font-weight: 600; }
@media (prefers-color-scheme: dark) { h1 .also { color: #ff9a8f; } }
h2 { font-size: 17px; margin: 0 0 4px; }
h2 + p { margin: 0 0 14px; }
section > p.lead:first-child { margin: 0 0 6px; }
p.lead { color: var(--soft); font-size: 13.5px; }
dl { display: flex; flex-wrap: wrap; gap: 6px 26px; margin: 0 0 22px; font-size: 13.5px; }
dl div { display: flex; gap: 7px; min-width: 0; }
dt { color: var(--soft); }
dd { margin: 0; font-weight: 550; overflow-wrap: anywhere; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px;
  margin: 0 0 18px; }
.scroll { overflow-x: auto; margin: 0 -20px; padding: 0 20px; }
.scroll:focus-visible { outline: 2px solid var(--hot); outline-offset: -2px; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; }
th { font-weight: inherit; }
th, td { padding: 7px 6px; text-align: left; vertical-align: top; white-space: nowrap; }
th.number, td.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { border-bottom: 2px solid var(--rule); padding: 0; vertical-align: bottom; }
thead button {
  all: unset; box-sizing: border-box; width: 100%; padding: 6px; cursor: pointer; color: var(--soft);
  font-weight: 600; font-size: 12.5px; line-height: 1.25; white-space: normal;
}
thead button:hover { color: var(--ink); }
thead button:focus-visible { outline: 2px solid var(--hot); outline-offset: -2px; border-radius: 4px; }
thead button:hover { text-decoration: underline; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
th[aria-sort=ascending] button, th[aria-sort=descending] button { color: var(--ink); }
tbody tr + tr > td { border-top: 1px solid var(--rule); }
tbody tr + tr > th { box-shadow: inset 0 1px var(--rule); }
tbody tr.baseline > td, tbody tr.baseline > th { background: var(--mark); }
tbody th { font-weight: 600; border-left: 4px solid; }
tbody th .choice { display: block; color: var(--ink); }
tbody th .choice span { color: var(--soft); font-weight: 400; }
td small { white-space: normal; min-width: 62px; }
td:not(.number) small { min-width: 110px; }
small { display: block; color: var(--soft); font-size: 11.5px; font-weight: 400; }
.notes { margin: 16px 0 0; padding-left: 18px; color: var(--soft); font-size: 13px; }
.notes li { margin: 3px 0; }
.warning { color: var(--ink); font-weight: 600; }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px; margin: 0 0 10px; padding: 0; list-style: none; }
.key li::before {
  content: ""; display: inline-block; width: 18px; height: 4px; border-radius: 2px; margin-right: 7px;
  vertical-align: middle;  background: currentColor;
}
.key li span { color: var(--ink); }
.pair { display: grid; grid-template-columns: minmax(0, 1fr) minmax(0, 1fr); gap: 18px; margin: 0 0 18px; }
.pair section { margin: 0; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 18px; }
.pictures.large { grid-template-columns: repeat(auto-fit, minmax(min(100%, 480px), 1fr)); }
figure { margin: 0; min-width: 0; }
figcaption { font-size: 13px; margin: 0 0 6px; padding-left: 9px; border-left: 4px solid; }
figcaption span { color: var(--ink); font-weight: 600; overflow-wrap: anywhere; }
figcaption td small { white-space: normal; min-width: 62px; }
td:not(.number) small { min-width: 110px; }
small { display: block; }
figure button { all: unset; display: block; width: 100%; cursor: zoom-in; border-radius: 6px; }
figure button:focus-visible { outline: 2px solid var(--hot); }
figure img { display: block; width: 100%; background: #fff; border-radius: 6px; border: 1px solid var(--rule); }
dialog {
  max-width: 97vw; max-height: 97vh; padding: 10px; border: 1px solid var(--rule); border-radius: 8px; background: #fff;
}
dialog::backdrop { background: rgb(0 0 0 / 60%); }
dialog img { display: block; width: min(1500px, 94vw); cursor: zoom-out; }
svg.chart { display: block; width: 100%; height: auto; font: 13px system-ui, sans-serif; }
svg .grid { stroke: var(--rule); stroke-width: 1; }
svg .zero { stroke: var(--soft); stroke-width: 1.5; }
svg .tick { fill: var(--soft); font-size: 12px; }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .label, svg .value { fill: var(--ink); } svg .value { font-size: 12.5px; font-variant-numeric: tabular-nums; }
svg .line { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; }
svg .line.arm-0 { stroke-dasharray: 7 4; }
svg .train { fill: none; stroke: currentColor; stroke-width: 1; opacity: 0.4; }
svg .band { fill: currentColor; opacity: 0.14; }
svg .dot, svg .bar { fill: currentColor; }
svg .spread { stroke: var(--ink); stroke-width: 1.5; opacity: 0.75; }
svg .interval { stroke: currentColor; stroke-width: 2.5; stroke-linecap: round; }
.narrow { display: none; }
@media (max-width: 760px) {
  header, main { padding: 0 12px; }
  header { padding-top: 18px; }
  h1 { font-size: 20px; }
  section { padding: 14px; }
  .scroll { margin: 0 -14px; padding: 0; }
  .pair { grid-template-columns: minmax(0, 1fr); }
  .wide { display: none; } .narrow { display: block; }
  tbody th { position: sticky; left: 0; background: var(--card); max-width: 42vw; white-space: normal; }
  tbody th .choice { overflow-wrap: break-word; }
  tbody th .choice span { display: block; }
  thead th:first-child { position: sticky; left: 0; background: var(--card); }
}
@media print { section { break-inside: avoid; } }
"""
STYLE = (
    _STYLE.replace("{light}", _variables((NEUTRAL, *COLORS))).replace(
        "{dark}", _variables((NEUTRAL_ON_DARK, *ON_DARK))
    )
    + "\n".join(f".arm-{n} {{ color: var(--arm-{n}); border-color: var(--arm-{n}); }}" for n in range(8))
    + "\n".join(f"svg .line.arm-{n + 1} {{ stroke-dasharray: {_dashes(n)}; }}" for n in range(7))
)

SCRIPT = """
"use strict";
const root = document.documentElement;
window.addEventListener("error", (event) => { root.dataset.error = event.message; });
const table = document.querySelector("table");
const heads = [...table.tHead.rows[0].cells];

function compareCells(one, other, numeric, sign) {
  if (one === "" || other === "") return (one === "") - (other === "");  // what is unknown stays at the end
  return sign * (numeric ? Number(one) - Number(other) : one.localeCompare(other, undefined, { numeric: true }));
}

function sortBy(place, direction) {
  const numeric = heads[place].classList.contains("number");
  const sign = direction === "descending" ? -1 : 1;
  const body = table.tBodies[0];
  const rows = [...body.rows];
  rows.sort((a, b) => compareCells(a.cells[place].dataset.value, b.cells[place].dataset.value, numeric, sign));
  body.append(...rows);
  for (const head of heads) head.removeAttribute("aria-sort");
  heads[place].setAttribute("aria-sort", direction);
}

heads.forEach((head, place) => {
  head.querySelector("button").addEventListener("click", () => {
    sortBy(place, head.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending");
  });
});

function sortByAddress() {  // compare.html#sort=tokens_per_second,desc
  const wanted = /^#sort=(\\w+)(,desc)?$/.exec(location.hash);
  if (!wanted) return;
  const place = heads.findIndex((head) => head.dataset.key === wanted[1]);
  if (place >= 0) sortBy(place, wanted[2] ? "descending" : "ascending");
}
window.addEventListener("hashchange", sortByAddress);
sortByAddress();

const dialog = document.querySelector("dialog");
for (const button of document.querySelectorAll("figure button")) {
  button.addEventListener("click", () => {
    const shown = button.querySelector("img");
    dialog.querySelector("img").src = shown.src;
    dialog.querySelector("img").alt = shown.alt;
    dialog.showModal();
  });
}
dialog.addEventListener("click", () => dialog.close());
root.dataset.ready = "true";
"""
