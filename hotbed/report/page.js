// Adds to drawings that are complete without it: a cursor with the values under it (pointer, touch, arrow keys),
// legend entries that switch their series on and off, and open folds on paper.
(() => {
  "use strict";
  const SVG = document.querySelector("svg")?.namespaceURI;
  const write = {
    count: (v) => v.toLocaleString("en-US", { maximumFractionDigits: 0 }),
    decimal: (v) => v.toFixed(4),
    share: (v) => (100 * v).toFixed(2) + "\u202f%",
    significant: (v) => String(Number(v.toPrecision(4))),
  };

  const element = (tag, properties, ...children) => {
    const made = document.createElement(tag);
    Object.assign(made, properties);
    made.append(...children);
    return made;
  };

  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] < x) low = middle; else high = middle;
    }
    return Math.abs(points[low][0] - x) <= Math.abs(points[high][0] - x) ? low : high;
  };

  const enliven = (plot) => {
    const chart = JSON.parse(plot.querySelector("script").textContent);
    const svg = plot.querySelector("svg"), cursor = plot.querySelector(".cursor");
    const [left, top, right, bottom] = chart.box, [xLow, xHigh, log] = chart.x, [yLow, yHigh] = chart.y;
    const scale = log ? Math.log : (v) => v;
    const pixelX = (x) => left + (scale(Math.max(x, log ? xLow : x)) - scale(xLow)) / (scale(xHigh) - scale(xLow)) * (right - left);
    const pixelY = (y) => bottom - (y - yLow) / (yHigh - yLow) * (bottom - top);
    const valueX = (pixel) => {
      const share = (pixel - left) / (right - left);
      return log ? xLow * (xHigh / xLow) ** share : xLow + share * (xHigh - xLow);
    };
    const hidden = new Set();
    const steps = [...new Set(chart.series.flatMap((series) => series.points.map((point) => point[0])))].sort((a, b) => a - b);
    const tip = element("div", { className: "tip", hidden: true });
    tip.setAttribute("aria-live", "polite");
    plot.append(tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    plot.setAttribute("aria-label", "Chart. Left and right arrow keys read its values.");
    let at = null;

    const clear = () => { at = null; tip.hidden = true; cursor.replaceChildren(); };

    const show = (x) => {
      const shown = chart.series
        .map((series, index) => ({ series, index, point: series.points[nearest(series.points, x)] }))
        .filter(({ index, point }) => !hidden.has(index) && point);
      if (!shown.length) return clear();
      const anchor = shown.reduce((a, b) => Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a).point[0];
      const close = shown.filter(({ point }) => Math.abs(pixelX(point[0]) - pixelX(anchor)) < 12);
      at = anchor;
      const line = document.createElementNS(SVG, "path");
      line.setAttribute("d", `M${pixelX(anchor)} ${top}V${bottom}`);
      const dots = close.filter(({ point }) => point[1] >= yLow && point[1] <= yHigh).map(({ series, point }) => {
        const dot = document.createElementNS(SVG, "circle");
        dot.setAttribute("class", `c${series.color}`);
        dot.setAttribute("cx", pixelX(point[0]));
        dot.setAttribute("cy", pixelY(point[1]));
        dot.setAttribute("r", 4);
        return dot;
      });
      cursor.replaceChildren(line, ...dots);
      tip.replaceChildren(
        element("div", {}, `${write[chart.formats[0]](anchor)} ${chart.label.replace(/[,(].*/, "").trim()}`),
        ...close.map(({ series, point }) => element("div", { className: `c${series.color}` },
          element("i", {}), element("span", { textContent: series.name }), element("b", { textContent: write[chart.formats[1]](point[1]) }))),
      );
      tip.hidden = false;
      const ratio = svg.clientWidth / svg.viewBox.baseVal.width, place = pixelX(anchor) * ratio;
      const flip = place + 12 + tip.offsetWidth > plot.clientWidth;
      tip.style.left = `${Math.max(0, flip ? place - 12 - tip.offsetWidth : place + 12)}px`;
      tip.style.top = `${top * ratio}px`;
    };

    const follow = (event) => {
      const box = svg.getBoundingClientRect();
      show(valueX((event.clientX - box.left) * svg.viewBox.baseVal.width / box.width));
    };
    plot.addEventListener("pointermove", follow);
    plot.addEventListener("pointerdown", follow);
    plot.addEventListener("pointerleave", clear);
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      const jump = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") clear();
      if (jump === undefined) return;
      event.preventDefault();
      const now = at === null ? (jump > 0 ? -1 : steps.length) : steps.indexOf(at);
      show(steps[Math.min(Math.max(now + jump, 0), steps.length - 1)]);
    });

    for (const entry of plot.parentElement.querySelectorAll(".legend li")) {
      const index = Number(entry.dataset.series);
      const button = element("button", { type: "button" }, ...entry.childNodes);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const off = !hidden.delete(index);
        if (off) hidden.add(index);
        button.setAttribute("aria-pressed", String(!off));
        svg.querySelector(`[data-series="${index}"]`).classList.toggle("off", off);
        clear();
      });
      entry.append(button);
    }
  };

  document.querySelectorAll("[data-plot]").forEach(enliven);
  const closed = new Set();
  addEventListener("beforeprint", () => document.querySelectorAll("section > details:not([open]), .figures > div > details:not([open])").forEach((fold) => { closed.add(fold); fold.open = true; }));
  addEventListener("afterprint", () => { closed.forEach((fold) => { fold.open = false; }); closed.clear(); });
})();
