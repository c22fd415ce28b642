"""A real browser for the tests of pages."""

import contextlib
import html
import http.server
import json
import re
import shutil
import subprocess
import threading
import time

import pytest

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def needs_browser(test):
    """Mark a test that runs in a browser."""
    missing = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")
    return pytest.mark.browser(missing(test))


def browse(page, profile, *options):
    """The page's document after its script ran in a real browser, and what the browser's console said."""
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--allow-file-access-from-files",
        "--enable-logging=stderr",
        f"--user-data-dir={profile}",
        "--window-size=1280,900",
        "--virtual-time-budget=10000",
        *options,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


class _Late(http.server.BaseHTTPRequestHandler):
    """Answers after a tenth of a second."""

    def do_GET(self):
        time.sleep(0.1)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def late_server():
    """Yield the address of a server that answers late.

    The browser's virtual time stands still while a page waits for an answer. Frames come in real time, so a page that waits
    for a frame asks this server.
    """
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Late) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()


DRIVER = """<body><iframe width=1280 height=3000 src="%s"></iframe><script>
document.querySelector("iframe").onload = async ({ target }) => {
  const view = target.contentWindow, page = view.document;
  const pause = () => new Promise((done) => setTimeout(done, 40));
  const frames = () => fetch("%s", { mode: "no-cors" });
  const figure = (title) =>
    [...page.querySelectorAll("figure")].find((f) => f.querySelector("h3").textContent === title);
  const mouse = (over, kind, share) => {
    const at = over.getBoundingClientRect();
    const place = { clientX: at.left + share * at.width, clientY: at.top + at.height / 2 };
    const how = { bubbles: true, movementX: 1, ...place };
    over.dispatchEvent(new view.MouseEvent(kind, how));
  };
  const over = (title) => figure(title).querySelector(".u-over");
  // The text at the pointer and the number of the card, after the pointer came to a share of the width.
  const hover = async (title, share) => {
    mouse(over(title), "mouseenter", share);
    mouse(over(title), "mousemove", share);
    await pause();
    const tip = figure(title).querySelector(".tip");
    const said = tip.hidden ? null : [...tip.children].map((row) => row.textContent);
    return [said, figure(title).querySelector(".now").textContent];
  };
  // The number of pixels of a canvas in about the color of a CSS variable.
  const inked = (canvas, name) => {
    const { width, height } = canvas;
    const copy = Object.assign(document.createElement("canvas"), { width, height });
    const brush = copy.getContext("2d", { willReadFrequently: true });
    brush.drawImage(canvas, 0, 0);
    const { data } = brush.getImageData(0, 0, width, height);
    const text = view.getComputedStyle(page.documentElement).getPropertyValue(name).trim();
    const want = [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
    let count = 0;
    for (let i = 0; i < data.length; i += 4) {
      const near = want.every((channel, k) => Math.abs(channel - data[i + k]) < 12);
      count += near && data[i + 3] > 200;
    }
    return count;
  };
  await pause();
  let told;
  try {
    told = await (async () => { %s })();
  } catch (error) {
    told = { failed: String(error.stack) };
  }
  const said = document.createElement("pre");
  said.id = "told";
  said.textContent = JSON.stringify(told);
  document.body.append(said);
};
</script>"""


def drive(report, script, *options):
    """The value that ``script`` returns about a report that is open in a browser, which must not complain."""
    folder = report.parent.parent
    driver = folder / "driver.html"
    with late_server() as address:
        text = DRIVER % (f"{report.parent.name}/{report.name}", address, script)
        driver.write_text(text, encoding="utf-8")
        dom, console = browse(driver, folder / "profile", *options)
    assert console == [], console
    told = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
    assert told, dom[-500:]
    return json.loads(html.unescape(told[1]))
