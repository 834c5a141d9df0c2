"""A headless Chromium that opens a page and tells what became of it."""

import functools
import html
import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")

# Nothing of the browser's own leaves the machine, so that whatever does is the page's.
FLAGS = [
    "--headless", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom",
]  # fmt: skip

# Waits until the page says that it has drawn; then what is there, and which texts lie on each other.
PROBE = """
<script>
function texts(plot) {
  const found = [...plot.querySelectorAll("text")].map(text => {
    const {left, right, top, bottom} = text.getBoundingClientRect();
    return {text: text.textContent, left, right, top, bottom};
  });
  return found.filter(box => box.right > box.left && box.bottom > box.top);
}
function collisions(boxes) {
  const found = [];
  for (let i = 0; i < boxes.length; i++) for (let j = 0; j < i; j++) {
    const [a, b] = [boxes[i], boxes[j]];
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (wide > 2 && high > 3) found.push(a.text + " / " + b.text);
  }
  return found;
}
function marks(plot) {
  const shapes = [...plot.querySelectorAll(".trace path, .trace .point path")];
  return shapes.filter(shape => shape.getBoundingClientRect().width > 1).length;
}
function tell() {
  if (!document.documentElement.dataset.drawn) return setTimeout(tell, 50);
  const plots = [...document.querySelectorAll(".plot")].map(plot => {
    const box = plot.getBoundingClientRect();
    const outside = texts(plot).filter(text => text.left < box.left - 1 || text.right > box.right + 1);
    return {name: plot.id, marks: marks(plot), collisions: collisions(texts(plot)), outside: outside.map(o => o.text)};
  });
  const found = {
    theme: document.documentElement.dataset.theme, plots,
    overflow_px: document.documentElement.scrollWidth - innerWidth,
    background: getComputedStyle(document.body).backgroundColor,
  };
  const box = document.createElement("pre");
  box.id = "probe";
  box.textContent = JSON.stringify(found);
  document.body.append(box);
}
tell();
</script>
"""


@dataclass(frozen=True)
class Seen:
    """Messages on the console, addresses that were asked for, and what the probe tells, if it got there."""

    console: list
    requests: list
    probe: dict | None


@functools.cache
def browser():
    """The program, or None where there is none that runs."""
    for name in NAMES:
        path = shutil.which(name)
        if path and subprocess.run([path, "--version"], capture_output=True, timeout=60, check=False).returncode == 0:
            return path
    return None


def look_at(text, folder, *, dark=False, width_px=1366):
    """Open the page in a window of this width, where somebody prefers light or dark."""
    page = Path(folder) / "page.html"
    page.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    with tempfile.TemporaryDirectory() as profile:
        net_log = Path(profile) / "net.json"
        own = [f"--user-data-dir={profile}", f"--window-size={width_px},768", f"--log-net-log={net_log}"]
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        command = [browser(), *FLAGS, *own, scheme, page.as_uri()]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr
        requests = asked_for(net_log.read_text(encoding="utf-8"))
    found = re.search(r'<pre id="probe">(.*?)</pre>', result.stdout, re.DOTALL)
    console = [line for line in result.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(console, requests, json.loads(html.unescape(found[1])) if found else None)


def asked_for(net_log):
    """Addresses of a net log that are somewhere else."""
    return sorted(set(re.findall(r'"url":\s*"((?:https?|wss?):[^"]*)"', net_log)))


def complaints(seen, names, *, theme):
    """What is wrong with a page that should have drawn the pictures of these names."""
    wrong = [f"console: {line}" for line in seen.console] + [f"asked for {address}" for address in seen.requests]
    if seen.probe is None:
        return [*wrong, "nothing was drawn"]
    drawn = {plot["name"]: plot for plot in seen.probe["plots"]}
    wrong += [f"{name} is missing" for name in names if name not in drawn]
    wrong += [f"{name} is empty" for name, plot in drawn.items() if not plot["marks"]]
    wrong += [f"{name}: texts collide: {plot['collisions']}" for name, plot in drawn.items() if plot["collisions"]]
    wrong += [f"{name}: texts stick out: {plot['outside']}" for name, plot in drawn.items() if plot["outside"]]
    if seen.probe["overflow_px"] > 0:
        wrong.append(f"{seen.probe['overflow_px']} px wider than the window")
    if seen.probe["theme"] != theme:
        wrong.append(f"theme {seen.probe['theme']}")
    return wrong
