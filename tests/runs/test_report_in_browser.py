"""The report in Chromium, at two widths, light and dark; skipped if Chromium is not installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess

import pytest

from jetrl.runs.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
WIDTHS, THEMES = (390, 1280), ("light", "dark")

# What each page measures of itself: sizes as a reader sees them, in CSS pixels.
MEASURE = """<script>onload = () => {
  const sizes = [], cut = [], narrow = [], seen = el => el.getBoundingClientRect();
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const el = walker.currentNode.parentElement, words = walker.currentNode.data.trim();
    if (!words || !seen(el).width || el.tagName == "SCRIPT") continue;
    const m = el.getScreenCTM ? el.getScreenCTM() : {a: 1, b: 0};
    sizes.push([parseFloat(getComputedStyle(el).fontSize) * Math.hypot(m.a, m.b), words]);
    const svg = el.closest("svg"), box = seen(el);
    if (svg && (box.left < seen(svg).left - 3 || box.right > seen(svg).right + 3)) cut.push(words);
  }
  for (const cell of document.querySelectorAll("td, th"))
    if (cell.innerText.length > 8 && seen(cell).width < 70) narrow.push(cell.innerText);
  for (const box of document.querySelectorAll("html, .scroll"))
    if (box.scrollWidth > box.clientWidth + 1) narrow.push("wider than its box: " + box.className);
  const colors = getComputedStyle(document.body);
  parent.postMessage({smallest: sizes.sort((a, b) => a[0] - b[0])[0], cut, narrow,
    texts: sizes.length, page: colors.backgroundColor, ink: colors.color}, "*");
}</script>"""
COLLECT = "<script>onmessage = m => document.body.append(JSON.stringify(m.data), '\\n')</script>"


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_every_text_can_be_read_and_no_table_breaks(make_run, tmp_path):
    source = write_report(make_run(sft=5)).read_text(encoding="utf-8")
    source = re.sub('<meta http-equiv="Content-Security-Policy".*', MEASURE, source)
    frames = ""
    for theme in THEMES:
        media = "all" if theme == "dark" else "not all"
        page = source.replace("@media (prefers-color-scheme: dark)", f"@media {media}")
        (tmp_path / f"{theme}.html").write_text(page, encoding="utf-8")
        for width in WIDTHS:
            frames += f'<iframe src="{theme}.html" style="width:{width}px;height:900px"></iframe>'
    outer = tmp_path / "outer.html"
    outer.write_text(f"<!DOCTYPE html><body>{COLLECT}{frames}", encoding="utf-8")
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'user'}", outer.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [
        json.loads(line) for line in re.findall(r"^.*?(\{\"smallest.*\})$", shown, re.MULTILINE)
    ]
    assert len(found) == len(WIDTHS) * len(THEMES), shown[-2000:]
    assert len({(one["page"], one["ink"]) for one in found}) == len(THEMES)
    for one in found:
        assert one["texts"] > 200
        assert one["smallest"][0] >= 11.0, one
        assert (one["cut"], one["narrow"]) == ([], [])
