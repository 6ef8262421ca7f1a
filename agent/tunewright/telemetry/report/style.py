"""The look of the report: no fonts, scripts or pictures from elsewhere; light, dark and print."""

STYLE = """
:root{color-scheme:light dark;--page:#f4f4f1;--card:#fff;--ink:#141413;--soft:#55544f;--line:#dcdbd4;--grid:#e9e8e2;
--new:#1f66c1;--old:#8a5a00;--new-fill:#2a78d6;--old-fill:#c98500;--good:#0b6b0b;--bad:#b3261e;--warn:#7a5200;
--good-bg:#e4f4e2;--bad-bg:#fbe7e5;--warn-bg:#fdf1d6;--plain-bg:#ecebe6;--s1:#2a78d6;--s2:#1baf7a;--s3:#c98500;
--s4:#8d8b84;--code:#f1f0eb}
@media (prefers-color-scheme:dark){:root{--page:#111110;--card:#1b1b1a;--ink:#f3f2ee;--soft:#b9b8b0;--line:#3a3936;
--grid:#2b2a28;--new:#79b2f5;--old:#e8b04a;--new-fill:#4a94ec;--old-fill:#d99a2b;--good:#6fd06c;--bad:#ff9a90;
--warn:#f3c25c;--good-bg:#15301a;--bad-bg:#3d1a17;--warn-bg:#372a0d;--plain-bg:#2e2d2a;--s1:#4a94ec;--s2:#2fbf8a;
--s3:#d99a2b;--s4:#8d8b84;--code:#252422}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,
"Liberation Sans","DejaVu Sans",sans-serif;overflow-wrap:break-word}
main,header,footer{max-width:62rem;margin:0 auto;padding:0 1rem}
header{padding-top:2rem}footer{padding:1rem 1rem 3rem;color:var(--soft);font-size:.875rem}
h1{font-size:1.625rem;line-height:1.2;margin:.2rem 0 .3rem}h2{font-size:1.1875rem;margin:0 0 .6rem;line-height:1.3}
h3{font-size:1rem;margin:1.3rem 0 .4rem}p{margin:.4rem 0}ul{margin:.4rem 0;padding-left:1.2rem}li{margin:.2rem 0}
a{color:var(--new)}.soft,.note{color:var(--soft)}.note{font-size:.875rem}
nav{margin:.8rem 0 0;font-size:.875rem}nav ul{list-style:none;padding:0;display:flex;flex-wrap:wrap;gap:.2rem .9rem}
section{background:var(--card);border:1px solid var(--line);border-radius:.75rem;padding:1.1rem 1.2rem;margin:1rem 0}
section.answer{border-top:4px solid var(--new-fill)}
.headline{font-size:1.25rem;font-weight:600;line-height:1.35;margin:.2rem 0 .6rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.7rem;margin:.9rem 0;padding:0}
.tiles div{background:var(--page);border-radius:.5rem;padding:.6rem .8rem}
.tiles dt{color:var(--soft);font-size:.8125rem}.tiles dd{margin:0;font-size:1.25rem;font-weight:600;line-height:1.3}
.tiles small{display:block;font-size:.8125rem;font-weight:400;color:var(--soft)}
.badge{display:inline-block;border-radius:1rem;padding:.05rem .6rem;font-size:.8125rem;font-weight:600;
white-space:nowrap;background:var(--plain-bg)}
.badge.good{background:var(--good-bg);color:var(--good)}.badge.bad{background:var(--bad-bg);color:var(--bad)}
.badge.warn{background:var(--warn-bg);color:var(--warn)}
.scroll{overflow-x:auto;margin:.6rem 0}.scroll:focus-visible,a:focus-visible,summary:focus-visible{
outline:2px solid var(--new-fill);outline-offset:2px}
table{border-collapse:collapse;width:100%;font-size:.875rem}
caption{text-align:left;color:var(--soft);font-size:.8125rem;padding-bottom:.3rem}
th,td{text-align:left;vertical-align:top;padding:.35rem .7rem .35rem 0;border-bottom:1px solid var(--line);
min-width:3.5rem}
thead th{color:var(--soft);font-weight:600;white-space:nowrap}tbody th{font-weight:500}
.num{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font-family:ui-monospace,"SFMono-Regular",Menlo,"Liberation Mono","DejaVu Sans Mono",monospace;
font-size:.875em}
td code,th code{overflow-wrap:anywhere}
pre{background:var(--code);border-radius:.5rem;padding:.7rem .9rem;overflow-x:auto;margin:.5rem 0}
figure{margin:.8rem 0;max-width:40rem}figure svg{display:block;width:100%;height:auto}
figcaption{font-size:.8125rem;color:var(--soft);margin-top:.2rem}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:0 1.4rem}
:is(#rounds,#failures,#decisions,#phases) caption{position:absolute;width:1px;height:1px;overflow:hidden;
clip-path:inset(50%)}
svg text{font-size:13px;fill:var(--soft);font-family:inherit}svg .ink{fill:var(--ink)}
svg .grid{stroke:var(--grid)}svg .axis{stroke:var(--line)}
svg .new{fill:var(--new-fill);stroke:var(--new-fill)}svg .old{fill:var(--old-fill);stroke:var(--old-fill)}
svg text.new{fill:var(--new);stroke:none}svg text.old{fill:var(--old);stroke:none}
svg .slo{stroke:var(--bad);fill:var(--bad)}svg text.slo{stroke:none}svg .line{fill:none;stroke-width:2}
svg .dash{stroke-dasharray:6 4}svg .hollow{fill:var(--card);stroke-width:2}svg .dead{stroke:var(--bad);stroke-width:2}
svg .bar{fill:var(--s1)}svg .bar2{fill:var(--s2)}svg .loss{fill:var(--bad)}svg .whisker{stroke:var(--ink)}
svg .front{stroke:var(--s2)}svg .s1{fill:var(--s1)}svg .s2{fill:var(--s2)}svg .s3{fill:var(--s3)}svg .s4{fill:var(--s4)}
details{margin:.5rem 0}summary{cursor:pointer;color:var(--soft)}
@media (max-width:30rem){thead th{white-space:normal}
figure{overflow:clip;overflow-clip-margin:.9rem}figure svg{overflow:visible}
svg text{font-size:17px}svg .ink{font-size:14.5px}
section{padding:.9rem .9rem}.tiles{grid-template-columns:1fr 1fr}h1{font-size:1.375rem}}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#444;--line:#bbb;--grid:#ddd;
--new:#1f66c1;--old:#8a5a00;--new-fill:#2a78d6;--old-fill:#c98500;--good:#0b6b0b;--bad:#b3261e;--warn:#7a5200;
--good-bg:#fff;--bad-bg:#fff;--warn-bg:#fff;--plain-bg:#fff;--s1:#2a78d6;--s2:#1baf7a;--s3:#c98500;--code:#f6f6f6}
body{font-size:11pt}nav,.download{display:none}section{break-inside:auto;border-color:#bbb}
figure,tr,.tiles{break-inside:avoid}.scroll{overflow:visible}.badge{border:1px solid currentColor}}
"""
