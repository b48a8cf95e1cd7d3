# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-kimi-k3 project
"""How the page looks, in light and in dark. A Python file, because the wheel carries no other."""

STYLE = """
:root { color-scheme: light dark;
  --ground: #fcfcfb; --raised: #f1f1ee; --ink: #1d1f20; --soft: #5b6063; --line: #d9dad6;
  --one: #1f6f8b; --two: #c0722c; --wash: #1f6f8b33; }
@media (prefers-color-scheme: dark) { :root {
  --ground: #17191b; --raised: #212427; --ink: #e8e9e6; --soft: #a3a8ab; --line: #383c40;
  --one: #5fb3d0; --two: #e09a56; --wash: #5fb3d033; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 19px; margin: 36px 0 4px; }
p { margin: 4px 0 12px; max-width: 75ch; }
.lead { color: var(--soft); }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 16px 0; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; overflow-wrap: anywhere; }
.notice { border-left: 4px solid var(--two); background: var(--raised); padding: 10px 14px; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(200px, 1fr)); gap: 12px;
  list-style: none; padding: 0; margin: 20px 0; }
.cards li { background: var(--raised); border-radius: 8px; padding: 12px 16px; }
.cards b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.cards span { color: var(--soft); font-size: 13px; }
.figure, .scroll { overflow-x: auto; }
svg { display: block; max-width: none; }
svg text { fill: var(--soft); font-size: 12px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); }
.bar0, .cell { fill: var(--one); }
.bar1 { fill: var(--two); }
.key0 { color: var(--one); }
.key1 { color: var(--two); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums;
  font-size: 14px; }
th, td { text-align: right; padding: 3px 10px; border-bottom: 1px solid var(--line);
  white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; }
tbody th { font-weight: 500; }
tbody tr:hover { background: var(--raised); }
th.name, td.name { text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 260px; }
td.barred { position: relative; min-width: 110px; }
td.barred i { position: absolute; left: 6px; top: 3px; bottom: 3px; background: var(--wash);
  border-radius: 2px; max-width: calc(100% - 12px); }
td.barred span { position: relative; }
@media print { main { max-width: none; padding: 0; } .figure, .scroll { overflow: visible; } }
"""
