"""A real Chromium for tests of pages: found on the machine, silent, and nothing it does goes unnoticed."""

import shutil
from contextlib import contextmanager

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
SILENT = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
PHONE, DESKTOP = 375, 1280


class Visit:
    """An open page, and what went wrong on it."""

    def __init__(self, page):
        self.page, self.errors, self.requests = page, [], []
        page.on("console", lambda said: self.errors.append(said.text) if said.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("requestfailed", lambda request: self.errors.append(f"failed: {request.url}"))
        page.on("request", lambda request: self.requests.append(request.url))

    def count(self, selector):
        return self.page.locator(selector).count()

    def opened_in(self):
        """Milliseconds from navigation until everything is drawn, by the clock; the next frame has been painted."""
        return self.page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        )

    def is_as_wide_as_its_window(self):
        return self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def cost_of(browser, path, *, width=DESKTOP):
    """Seconds that opening a page takes the browser's main thread, by what for; CPU time, whatever else the machine does."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    try:
        wire = page.context.new_cdp_session(page)
        wire.send("Performance.enable", {"timeDomain": "threadTicks"})

        def spent():
            return {one["name"]: one["value"] for one in wire.send("Performance.getMetrics")["metrics"]}

        before = spent()
        page.goto(path.as_uri())
        Visit(page).opened_in()
        return {name.removesuffix("Duration"): value - before[name] for name, value in spent().items()
                if name in ("TaskDuration", "ScriptDuration", "LayoutDuration", "RecalcStyleDuration")}  # fmt: skip
    finally:
        page.close()


@contextmanager
def visit(browser, path, *, width=DESKTOP, scheme="light"):
    """A page opened from its file; nothing may have gone wrong by the time it is left."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    try:
        seen = Visit(page)
        page.goto(path.as_uri())
        yield seen
        assert seen.errors == []
        assert seen.requests == [path.as_uri()], "a page is one file"
    finally:
        page.close()
