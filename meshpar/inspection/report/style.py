"""How the page looks: sober, in the reader's own font, light or dark as the reader's machine is."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --panel: #f5f6f8; --ink: #1b212b; --soft: #59626f; --rule: #dde1e7; --track: #eceff3;
  --good: #1d7a4f; --bad: #b3261e; --accent: #3a6ea5; --form: #8d97a5;
  --all_gather: #3f78b5; --reduce_scatter: #d58a33; --all_reduce: #349678; --all_to_all: #8a63b3;
  --ragged_all_to_all: #b07fcb; --collective_permute: #c4566f; --collective_broadcast: #7c8794; --other: #7c8794;
  --m0: #2f5f93; --m1: #5f93c4; --m2: #2f8a80; --m3: #7fb8a4; --m4: #a9793c; --m5: #d3ad6b;
  --rest: #aab3bf; --outputs: #8a63b3; --temporaries: #c9824a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14181e; --panel: #1c222a; --ink: #e4e8ee; --soft: #9aa5b3; --rule: #303844; --track: #262d37;
    --good: #5cc592; --bad: #f2857c; --accent: #6a9fd6; --form: #7c8897;
    --all_gather: #6a9fd6; --reduce_scatter: #e0a052; --all_reduce: #52b897; --all_to_all: #b08ad6;
    --ragged_all_to_all: #cda5e3; --collective_permute: #e07c92; --collective_broadcast: #97a2b0; --other: #97a2b0;
    --m0: #5a8fc7; --m1: #8fbbe3; --m2: #4fb0a5; --m3: #96cbb9; --m4: #c2935a; --m5: #e3c48b;
    --rest: #5d6774; --outputs: #b08ad6; --temporaries: #dd9a66;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--ground); color: var(--ink); overflow-wrap: anywhere;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", Arial, sans-serif;
}
main { max-width: 1080px; margin: 0 auto; padding: 28px 24px 64px; }
h1 { font-size: 22px; font-weight: 600; margin: 0; }
h2 { font-size: 16px; font-weight: 600; margin: 40px 0 4px; }
p { margin: 0 0 12px; }
.soft { color: var(--soft); }
.small { font-size: 13px; }
code, .mono { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "Liberation Mono", monospace; font-size: 13px; }
.line { font-size: 14px; }
.line .number { white-space: normal; }
.number { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap; }
.verdict { border-left: 4px solid; padding: 8px 14px; margin: 18px 0 0; background: var(--panel); font-weight: 600; }
.verdict.fits { border-color: var(--good); color: var(--good); }
.verdict.lacks { border-color: var(--bad); color: var(--bad); }
.tiles { display: grid; grid-template-columns: repeat(3, 1fr); gap: 12px; margin: 20px 0 0; padding: 0; }
.tile { background: var(--panel); border-radius: 6px; padding: 12px 16px; }
.tile dt { color: var(--soft); font-size: 13px; }
.tile dd { margin: 0; font-size: 21px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile dd.soft { font-size: 13px; font-weight: 400; }
svg { display: block; width: 100%; overflow: visible; }
.row { margin: 12px 0 0; }
.line { display: flex; flex-wrap: wrap; justify-content: space-between; gap: 0 16px; margin-bottom: 4px; }
.track { fill: var(--track); }
.sent { fill: var(--accent); }
.form { fill: var(--form); }
.mark { fill: var(--ink); }
.hatch { fill: url(#hatch); }
#hatch path { stroke: var(--ground); stroke-width: 3; }
.block .bar { fill-opacity: 0.85; }
.block:hover .bar { fill-opacity: 1; }
.block text { font-size: 11px; fill: #10151c; font-weight: 600; pointer-events: none; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 12px 0 0; padding: 0; list-style: none; }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px; }
.swatch.branch { background: repeating-linear-gradient(45deg, var(--soft) 0 3px, var(--track) 3px 6px); }
table { width: 100%; border-collapse: collapse; margin: 8px 0 0; font-size: 14px; }
th { text-align: left; font-weight: 500; color: var(--soft); font-size: 13px; }
th.number { text-align: right; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--rule); vertical-align: baseline; }
th:last-child, td:last-child { padding-right: 0; }
td.word, td.number { white-space: nowrap; width: 1%; }
td.word { max-width: 260px; overflow: hidden; text-overflow: ellipsis; }
td.where { width: 26%; }
table.short { max-width: 520px; }
table.short td.word { width: auto; max-width: none; white-space: normal; }
.finding { border-left: 3px solid var(--reduce_scatter); padding: 2px 0 2px 14px; margin: 12px 0 0; }
@media (max-width: 700px) {
  main { padding: 20px 14px 40px; }
  .tiles { grid-template-columns: 1fr; gap: 8px; }
  .wide { display: none; }
  table.short { max-width: none; }
  table.short td.word { flex: 1; }
  table.short td.number { min-width: 70px; }
  thead { display: none; }
  table, tbody { display: block; }
  tr { display: flex; flex-wrap: wrap; gap: 0 14px; border-bottom: 1px solid var(--rule); padding: 7px 0; }
  td, td.word, td.number, td.where { border: 0; padding: 0; width: auto; max-width: none; white-space: normal; }
  td:empty { display: none; }
  td.what, td.where { flex: 1 0 100%; }
}
"""
