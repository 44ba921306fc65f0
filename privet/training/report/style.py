"""How the page looks: light, dark, on a phone and on paper."""

CSS = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1b1f24;--soft:#57606a;--rule:#d5dae0;--panel:#f5f7f9;--alarm:#b3261e;
--alarm-panel:#fdecea;--line-0:#1f6f5c;--line-1:#8a6d3b;--line-2:#3b5b92;--line-3:#a23b72;--line-4:#5a7d1f;--line-5:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--paper:#14181c;--ink:#e4e8ec;--soft:#9aa4ae;--rule:#333b43;--panel:#1c2228;
--alarm:#ff8a80;--alarm-panel:#3a1d1b;--line-0:#62c6a8;--line-1:#d6ae6a;--line-2:#8fb0ee;--line-3:#e48abb;--line-4:#a8cc66;
--line-5:#b0b0b0}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0 auto;max-width:56rem;padding:2.5rem 1.25rem 4rem;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;overflow-wrap:break-word}
h1{font-size:1.7rem;line-height:1.2;margin:0}
h2{font-size:1.15rem;margin:2.75rem 0 .6rem;padding-top:.75rem;border-top:1px solid var(--rule)}
p{margin:.6rem 0;max-width:44rem}
.about,.small{color:var(--soft)}
.small{font-size:.875rem}
.guarantee{margin:1.5rem 0;padding:1.1rem 1.25rem;background:var(--panel);border-left:4px solid var(--line-0)}
.guarantee .figure{font-size:1.6rem;line-height:1.25;margin:0 0 .4rem;font-variant-numeric:tabular-nums}
.guarantee p:last-child{margin-bottom:0}
.alarm{border-left-color:var(--alarm);background:var(--alarm-panel)}
.alarm strong{color:var(--alarm)}
.table{overflow-x:auto;margin-bottom:1.25rem}
.sign{display:none}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:.35rem .9rem .35rem 0;text-align:left;vertical-align:top;border-bottom:1px solid var(--rule)}
th{font-weight:600}
thead th{color:var(--soft);font-size:.875rem}
tbody th{font-weight:400}
.facts tbody th{color:var(--soft);width:13rem}
td.n,th.n{text-align:right;padding-right:0;padding-left:.9rem;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,21rem),1fr));gap:1.25rem 2rem;margin:1rem 0}
figure{margin:0;break-inside:avoid}
figcaption{font-weight:600;font-size:.9375rem;margin-bottom:.3rem}
figure>svg{display:block;width:100%;height:auto;stroke-linejoin:round;font-family:inherit}
.legend{display:flex;flex-wrap:wrap;gap:.1rem 1.1rem;list-style:none;margin:.3rem 0 0;padding:0;font-size:.8125rem}
.legend svg{width:26px;height:6px;margin-right:.4rem;vertical-align:middle}
ul.gaps{padding-left:1.2rem;max-width:44rem}
ul.gaps li{margin:.3rem 0}
pre{margin:.6rem 0;padding:.9rem 1rem;background:var(--panel);overflow-x:auto;font-size:.8125rem;line-height:1.45}
code,pre{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace}
@media(max-width:30rem){body{padding-top:1.5rem}.facts tbody th{width:8rem}}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--rule:#bbb;--panel:#fff;--alarm:#b3261e;--alarm-panel:#fff;
--line-0:#1f6f5c;--line-1:#8a6d3b;--line-2:#3b5b92;--line-3:#a23b72;--line-4:#5a7d1f;--line-5:#6b6b6b;color-scheme:light}
body{font-size:10.5pt;padding:0;max-width:none}h2{break-after:avoid}tr,li,.guarantee{break-inside:avoid}
.guarantee{border:1px solid #000;border-left-width:4px}.plots{grid-template-columns:1fr 1fr}
pre{white-space:pre-wrap;border:1px solid var(--rule)}
.sign{display:block;margin-top:3rem;padding-bottom:2.5rem;border-bottom:1px solid #000;break-inside:avoid}}
"""
