"""The page in a real browser: no errors, nothing fetched, no sideways scrolling, hover, keys and switches work."""

import shutil
import subprocess

import pytest

from hotbed.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

SILENT = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
]

ACT = """<script>
const said = [];
const plot = document.querySelector("#loss .plot"), tip = plot.querySelector(".tip");
const key = (name) => plot.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
const box = plot.querySelector("svg").getBoundingClientRect();
plot.dispatchEvent(new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 50 }));
said.push("hover " + !tip.hidden + " " + plot.querySelectorAll(".cursor circle").length);
plot.dispatchEvent(new PointerEvent("pointerleave"));
said.push("gone " + tip.hidden);
key("Home"); const first = tip.textContent; key("ArrowRight"); const second = tip.textContent;
said.push("keys " + first.startsWith("100 samples seen") + " " + second.startsWith("200 samples seen"));
const button = document.querySelector("#loss .legend button"); button.click();
const curve = plot.querySelector("[data-series='0']");
said.push("off " + button.getAttribute("aria-pressed") + " " + curve.classList.contains("off"));
button.click();
said.push("on " + button.getAttribute("aria-pressed"));
said.push("fits " + (document.documentElement.scrollWidth <= innerWidth));
said.push("fetched " + performance.getEntriesByType("resource").length);
parent.postMessage(said.join("; "), "*");
</script></body>"""


FRAME = """<!doctype html><title>waiting</title><body><iframe src="page.html" style="width:{width}px;height:900px"></iframe>
<script>addEventListener("message", (event) => {{ document.title = event.data; }});</script></body>"""


@pytest.mark.parametrize("scheme", [0, 1], ids=["dark", "light"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("storage", [False, True], ids=["plain", "tiers"])
def test_in_a_browser(make_run, tiered_run, tmp_path, storage, width, scheme):
    run = make_run(**tiered_run) if storage else make_run()
    (tmp_path / "page.html").write_text(write_report(run).read_text().replace("</body>", ACT))
    frame = tmp_path / "frame.html"  # a window of its own cannot be as narrow as a phone
    frame.write_text(FRAME.format(width=width))
    command = [
        CHROMIUM,
        *SILENT,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,1000",
        f"--blink-settings=preferredColorScheme={scheme}",
        "--virtual-time-budget=2000",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    title = done.stdout.split("<title>")[1].split("</title>")[0]
    assert title == "hover true 2; gone true; keys true true; off false true; on true; fits true; fetched 0"
