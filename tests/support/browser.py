"""Pages as headless Chromium lays them out: what sticks out of them, at a width."""

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
#: Without a word to the network, and nothing of the user's.
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage",
    "--allow-file-access-from-files", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
#: For a page with frames, each of a page to look at, which are made as wide as is asked. An element sticks out if its
#: right edge is beyond the page's, or that of an element around it that hides the rest; one that scrolls may hold wider
#: ones, but a table that has to scroll at 1300 pixels sticks out, too.
LOOK = """
function outOf(frame, width) {
  frame.style.width = `${width}px`;
  const root = frame.contentDocument.documentElement, found = [];
  const say = (what, got, limit) => found.push(`${what}: ${Math.round(got)} of ${Math.round(limit)} pixels`);
  if (root.scrollWidth > root.clientWidth) say("the page", root.scrollWidth, root.clientWidth);
  function walk(around, limit, scrolls) {
    for (const element of around.children) {
      const box = element.getBoundingClientRect();
      const isFree = scrolls && (width < 1300 || element.tagName !== "TABLE");
      if (box.width && box.height && box.right > limit + 1 && !isFree)
        say(`<${element.tagName.toLowerCase()}> ${element.textContent.trim().slice(0, 40)}`, box.right, limit);
      else if (element.childElementCount && !scrolls) {
        const shows = frame.contentWindow.getComputedStyle(element).overflowX;
        walk(element, shows === "visible" ? limit : box.right, shows === "auto" || shows === "scroll");
      }
    }
  }
  walk(frame.contentDocument.body, root.clientWidth, false);
  return found;
}
window.onload = () => {
  const frames = [...document.querySelectorAll("iframe")], said = document.createElement("pre");
  said.textContent = JSON.stringify(frames.map((frame) => WIDTHS.map((width) => outOf(frame, width))));
  document.body.replaceChildren(said);
};
"""


def sticking_out(pages: list[Path], widths: tuple[int, ...]) -> dict[str, list[str]]:
    """Page and width in pixels -> what sticks out there, if anything does."""
    assert CHROMIUM is not None
    frames = "".join(f'<iframe src="{page.resolve().as_uri()}"></iframe>' for page in pages)
    script = f"<script>const WIDTHS = {list(widths)};{LOOK}</script>"
    with tempfile.TemporaryDirectory() as folder:
        look = Path(folder, "look.html")
        style = "<style>iframe { border: 0; height: 800px; visibility: hidden }</style>"
        look.write_text(style + script + frames, encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}/user", "--dump-dom", look.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = re.search(r"<pre>(.*)</pre>", done.stdout, re.DOTALL)
    assert said, f"{CHROMIUM} ended with {done.returncode}: {done.stderr[-2000:]}"
    found = [out for outs in json.loads(html.unescape(said[1])) for out in outs]
    names = [f"{page} at {width} pixels" for page in pages for width in widths]
    return {name: out for name, out in zip(names, found, strict=True) if out}
