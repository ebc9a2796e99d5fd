"""The page's style sheet: light and dark, no external resource."""

CSS = """
:root { color-scheme: light dark;
  --page:#f6f6f3; --card:#ffffff; --ink:#1c1d1f; --soft:#63666b; --faint:#9a9da3; --rule:#e4e4df; --grid:#ececE8;
  --good:#12805c; --good-bg:#e6f4ee; --bad:#c0322b; --bad-bg:#fbe9e7; --warn:#96690a; --warn-bg:#fbf2dc;
  --c1:#3a5ccc; --c2:#d9822b; --c3:#12805c; --c4:#8a4fbf; --c5:#0e8fa8; --c6:#b4b7bd; }
@media (prefers-color-scheme: dark) { :root {
  --page:#131416; --card:#1b1d20; --ink:#e9eaec; --soft:#a2a6ad; --faint:#6f747c; --rule:#2b2e33; --grid:#26292d;
  --good:#4cc38a; --good-bg:#132a21; --bad:#ff7a70; --bad-bg:#361918; --warn:#e6b450; --warn-bg:#2e2512;
  --c1:#8aa4ff; --c2:#f0a35e; --c3:#4cc38a; --c4:#c194ee; --c5:#58c7dc; --c6:#6f747c; } }
* { box-sizing:border-box }
body { margin:0; background:var(--page); color:var(--ink); line-height:1.5; font-size:15px;
  font-family:ui-sans-serif,system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;
  -webkit-font-smoothing:antialiased; font-variant-numeric:tabular-nums }
main { max-width:1120px; margin:0 auto; padding:44px 24px 72px }
header { display:flex; flex-wrap:wrap; align-items:baseline; gap:6px 14px; margin-bottom:20px }
h1 { font-size:22px; margin:0; letter-spacing:-.01em; font-weight:650; overflow-wrap:anywhere }
h2 { font-size:17px; margin:52px 0 14px; letter-spacing:-.005em; font-weight:650 }
h3 { font-size:13px; margin:0 0 8px; font-weight:600; color:var(--soft) }
p { margin:0 0 10px; max-width:74ch } .note { color:var(--soft); font-size:13.5px }
.chip { font-size:12px; font-weight:600; padding:2px 9px; border-radius:99px; background:var(--grid);
  color:var(--soft) }
.chip.stopped { background:var(--bad-bg); color:var(--bad) }
.chip.running, .chip.native { background:var(--warn-bg); color:var(--warn) }
.facts { width:100%; color:var(--soft); font-size:13.5px; display:flex; flex-wrap:wrap; gap:2px 18px }
.facts b { font-weight:500; color:var(--faint); margin-right:5px }
.card { background:var(--card); border:1px solid var(--rule); border-radius:12px; padding:18px 20px }
.verdict { padding:30px 32px 26px; border:0; border-radius:14px }
.verdict.good { background:var(--good-bg) } .verdict.bad { background:var(--bad-bg) }
.verdict.unknown { background:var(--warn-bg) }
.verdict .big { font-size:clamp(28px,4.6vw,46px); text-wrap:balance; line-height:1.08; letter-spacing:-.028em;
  font-weight:700; margin:0 0 12px }
.verdict.good .big { color:var(--good) } .verdict.bad .big { color:var(--bad) }
.verdict.unknown .big { color:var(--warn) }
.verdict ul { margin:0; padding:0; list-style:none } .verdict li { max-width:90ch }
.verdict li + li { color:var(--soft); margin-top:3px }
.tiles { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(150px,100%),1fr)); gap:12px; margin-top:12px }
.tile { padding:13px 16px; min-width:0 }
.tile .v { font-size:20px; font-weight:620; letter-spacing:-.015em; overflow-wrap:anywhere }
.tile .k { font-size:12.5px; color:var(--soft); overflow-wrap:anywhere }
.tile .from { color:var(--faint); font-weight:450; font-size:15px; white-space:nowrap }
.grid2 { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(440px,100%),1fr)); gap:14px }
.grid3 { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(300px,100%),1fr)); gap:14px; margin-top:14px }
svg { display:block; width:100%; height:auto; overflow:visible }
.tick { font-size:11px; fill:var(--faint) } .grid3 .tick { font-size:12px }
.grid { stroke:var(--grid); stroke-width:1 }
.line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round } .area { opacity:.1; stroke:none }
.line.c1 { stroke:var(--c1) } .line.c2 { stroke:var(--c2) } .line.c3 { stroke:var(--c3) }
.line.c4 { stroke:var(--c4) }
.line.c5 { stroke:var(--c5) }
.c1 { fill:var(--c1) } .c2 { fill:var(--c2) } .c3 { fill:var(--c3) } .c4 { fill:var(--c4) } .c5 { fill:var(--c5) }
.c6 { fill:var(--c6) } .bar.good { fill:var(--good) } .bar.bad { fill:var(--bad) } .bar.none { fill:var(--c6) }
.line { fill:none !important } .dot { stroke:var(--card); stroke-width:1.5 } .dot.hidden { opacity:0 }
.dot.hidden:hover, .dot:hover, .bar:hover { opacity:.75 }
.legend { display:flex; flex-wrap:wrap; gap:2px 16px; font-size:12.5px; color:var(--soft); margin-top:6px }
.legend i { display:inline-block; width:9px; height:9px; border-radius:3px; margin-right:6px }
.legend .c1 { background:var(--c1) } .legend .c2 { background:var(--c2) } .legend .c3 { background:var(--c3) }
.legend .c4 { background:var(--c4) } .legend .c5 { background:var(--c5) } .legend .c6 { background:var(--c6) }
.legend .good { background:var(--good) } .legend .bad { background:var(--bad) } .legend .none { background:var(--c6) }
.scroll { overflow:auto; max-height:520px; padding:0 }
table { border-collapse:collapse; width:100%; font-size:13px }
td, th { padding:6px 14px; text-align:right; white-space:nowrap }
th { position:sticky; top:0; background:var(--card); color:var(--soft); font-weight:600;
  border-bottom:1px solid var(--rule) }
tbody tr + tr td { border-top:1px solid var(--grid) } tbody tr:hover td { background:var(--page) }
table.left td, table.left th { text-align:left } table.left td.n, table.left th.n { text-align:right }
.zero { color:var(--good); font-weight:600 } .some { color:var(--bad); font-weight:700 }
.unknown { color:var(--warn) }
code { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace; font-size:12.5px }
dl { display:grid; grid-template-columns:max-content 1fr; gap:5px 20px; margin:0; font-size:14px }
dt { color:var(--soft) } dd { margin:0; overflow-wrap:anywhere; min-width:0 }
dd details { margin:0 } dd td { white-space:normal; overflow-wrap:anywhere; padding:3px 14px 3px 0 }
details { margin-top:14px } summary { cursor:pointer; color:var(--soft); font-size:13.5px }
footer { margin-top:56px; color:var(--faint); font-size:12.5px }
@media print { .scroll { max-height:none } body { background:#fff } }
"""
