// Adds to drawings that are complete without it: a cursor with the values under it (pointer, touch, arrow keys), zoom over x
// (drag, buttons, plus and minus), legend entries that switch their series on and off, and open folds on paper.
(() => {
  "use strict";
  const SVG = document.querySelector("svg")?.namespaceURI;
  const CLOSEST = 1e-9; // of the whole range
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

  const drawing = (tag, attributes) => {
    const made = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
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

  const roundStep = (rough) => {
    const magnitude = 10 ** Math.floor(Math.log10(rough));
    return magnitude * [1, 2, 2.5, 5, 10].find((step) => step * magnitude >= rough * (1 - 1e-9));
  };

  const ticksOf = (low, high, share) => {
    const step = roundStep((high - low) / 5), ticks = [];
    for (let k = Math.ceil(low / step - 1e-9); k <= Math.floor(high / step + 1e-9); k++) ticks.push(k * step);
    const largest = Math.max(...ticks.map(Math.abs), 0);
    const [scale, unit] = share ? [0.01, "\u202f%"]
      : [[1e12, "\u202fT"], [1e9, "\u202fG"], [1e6, "\u202fM"], [1e4, "\u202fk"]].find(([least]) => largest >= least) ?? [1, ""];
    const divisor = scale === 1e4 ? 1e3 : scale;
    let digits = Math.max(0, -Math.floor(Math.log10(step / divisor) + 1e-9));
    if (Math.abs((step / divisor) * 10 ** digits - Math.round((step / divisor) * 10 ** digits)) > 1e-6) digits++;
    const label = (v) => digits > 6 ? String(Number(v.toPrecision(3)))
      : (v / divisor).toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }) + unit;
    return ticks.map((v) => [v, label(v)]);
  };

  const enliven = (plot) => {
    const chart = JSON.parse(plot.querySelector("script").textContent);
    const svg = plot.querySelector("svg"), cursor = svg.querySelector(".cursor"), drawn = svg.querySelector(".drawn");
    const clip = svg.querySelector("clipPath rect"), frame = ["x", "width"].map((name) => clip.getAttribute(name));
    let picture = null, steps = null; // made when they are first needed: pages have many charts
    const [left, top, right, bottom] = chart.box, log = chart.x[2], whole = { x: chart.x.slice(0, 2), y: chart.y };
    let view = whole;
    const scale = log ? Math.log : (v) => v;
    const pixelX = (x) => left + (scale(Math.max(x, log ? view.x[0] : x)) - scale(view.x[0])) / (scale(view.x[1]) - scale(view.x[0])) * (right - left);
    const pixelY = (y) => bottom - (y - view.y[0]) / (view.y[1] - view.y[0]) * (bottom - top);
    const valueX = (pixel) => {
      const share = (pixel - left) / (right - left), [low, high] = view.x;
      return log ? low * (high / low) ** share : low + share * (high - low);
    };
    const hidden = new Set();
    const known = chart.series.map((series) => series.points.filter((point) => point[1] !== null));
    const tip = element("div", { className: "tip", hidden: true });
    tip.setAttribute("aria-live", "polite");
    plot.append(tip);
    plot.tabIndex = 0;
    plot.setAttribute("role", "group");
    const title = plot.parentElement.querySelector("h3").textContent;
    plot.setAttribute("aria-label", `${title}: chart. Left and right arrow keys read its values${chart.zoom ? "; plus and minus zoom, 0 shows all" : ""}.`);
    let at = null, from = null;

    const clear = () => { at = null; tip.hidden = true; cursor.replaceChildren(); };

    const show = (x) => {
      const shown = chart.series
        .map((series, index) => ({ series, index, point: known[index][nearest(known[index], x)] }))
        .filter(({ index, point }) => !hidden.has(index) && point);
      if (!shown.length) return clear();
      const anchor = shown.reduce((a, b) => Math.abs(b.point[0] - x) < Math.abs(a.point[0] - x) ? b : a).point[0];
      if (anchor < view.x[0] || anchor > view.x[1]) return clear();
      const close = shown.filter(({ point }) => Math.abs(pixelX(point[0]) - pixelX(anchor)) < 12);
      at = anchor;
      const line = drawing("path", { d: `M${pixelX(anchor)} ${top}V${bottom}` });
      const dots = close.filter(({ point }) => point[1] >= view.y[0] && point[1] <= view.y[1])
        .map(({ series, point }) => drawing("circle", { class: `c${series.color}`, cx: pixelX(point[0]), cy: pixelY(point[1]), r: 4 }));
      cursor.replaceChildren(line, ...dots);
      tip.replaceChildren(
        element("div", {}, `${write[chart.formats[0]](anchor)} ${chart.labels[0].replace(/[,(].*/, "").trim()}`),
        ...close.map(({ series, point }) => element("div", { className: `c${series.color}` },
          element("i", {}), element("span", { textContent: series.name }), element("b", { textContent: write[chart.formats[1]](point[1]) }))),
      );
      tip.hidden = false;
      const ratio = svg.clientWidth / svg.viewBox.baseVal.width, place = pixelX(anchor) * ratio;
      const flip = place + 12 + tip.offsetWidth > plot.clientWidth;
      tip.style.left = `${Math.max(0, flip ? place - 12 - tip.offsetWidth : place + 12)}px`;
      tip.style.top = `${top * ratio}px`;
    };

    const curve = (series, index) => {
      const group = drawing("g", { class: `series ${series.style} c${series.color}${hidden.has(index) ? " off" : ""}`, "data-series": index });
      let path = "", pen = "M";
      for (const [x, y] of series.points) {
        if (y === null) { pen = "M"; continue; }
        path += `${pen}${pixelX(x).toFixed(1)} ${pixelY(y).toFixed(1)}`;
        pen = "L";
      }
      if (series.style !== "dots") group.append(drawing("path", { class: "curve", d: path }));
      const inside = known[index].filter(([x]) => x >= view.x[0] && x <= view.x[1]);
      const gap = (at) => (series.points[at]?.[1] ?? null) === null;
      const marked = series.style === "dots" || (series.style === "line" && inside.length < 40) ? inside
        : series.points.filter((point, at) => !gap(at) && gap(at - 1) && gap(at + 1) && point[0] >= view.x[0] && point[0] <= view.x[1]);
      group.append(...marked.map(([x, y]) => drawing("circle", { cx: pixelX(x), cy: pixelY(y), r: 3.5 })));
      return group;
    };

    const axes = () => {
      const label = (x, y, anchor, said, name) => Object.assign(drawing("text", { x, y, "text-anchor": anchor, ...(name ? { class: name } : {}) }), { textContent: said });
      const parts = [label(left - 8, 14, "start", chart.labels[1], "axis"), label(right, bottom + 40, "end", chart.labels[0], "axis")];
      for (const [y, said] of ticksOf(...view.y, chart.formats[1] === "share")) {
        parts.push(drawing("path", { class: "grid", d: `M${left} ${pixelY(y)}H${right}` }), label(left - 8, pixelY(y) + 4, "end", said));
      }
      for (const [x, said] of ticksOf(...view.x, chart.formats[0] === "share")) {
        parts.push(drawing("path", { class: "tick", d: `M${pixelX(x)} ${bottom}v5` }), label(pixelX(x), bottom + 19, pixelX(x) > right - 16 ? "end" : "middle", said));
      }
      parts.push(drawing("path", { class: "base", d: `M${left} ${bottom}H${right}` }));
      for (const x of chart.divisions.filter((one) => one > view.x[0] && one < view.x[1])) {
        parts.push(drawing("path", { class: "division", d: `M${pixelX(x)} ${top}V${bottom}` }));
      }
      for (const [y, said] of chart.marks.filter(([value]) => value > view.y[0] && value < view.y[1])) {
        parts.push(drawing("path", { class: "mark", d: `M${left} ${pixelY(y)}H${right}` }), label(right - 4, pixelY(y) - 6, "end", said, "note"));
      }
      return parts;
    };

    const zoom = (low, high) => {
      const [first, last] = whole.x, range = Math.max(high - low, (last - first) * CLOSEST);
      if (range >= (last - first) * 0.999) return unzoom();
      low = Math.min(Math.max(low, first), last - range);
      const ys = known.flatMap((points, index) => hidden.has(index) ? [] : points.filter(([x]) => x >= low && x <= low + range).map((point) => point[1]));
      if (!ys.length) return;
      picture ??= drawn.innerHTML;
      let bottomY = Math.min(...ys), topY = Math.max(...ys);
      const room = 0.06 * (topY - bottomY) || 0.1 * Math.abs(topY) || 1;
      bottomY = chart.zero ? Math.min(0, bottomY) : bottomY - room;
      view = { x: [low, low + range], y: [bottomY, topY + room] };
      const curves = drawing("g", { "clip-path": `url(#${clip.parentElement.id})` });
      curves.append(...chart.series.map(curve));
      drawn.replaceChildren(...axes(), curves);
      clip.setAttribute("x", left);
      clip.setAttribute("width", right - left);
      plot.classList.add("zoomed");
      clear();
    };

    const unzoom = () => {
      view = whole;
      if (picture !== null) drawn.innerHTML = picture;
      ["x", "width"].forEach((name, index) => clip.setAttribute(name, frame[index]));
      drawn.querySelectorAll("[data-series]").forEach((one) => one.classList.toggle("off", hidden.has(Number(one.dataset.series))));
      plot.classList.remove("zoomed");
      clear();
    };

    const magnify = (factor) => {
      const middle = at ?? (view.x[0] + view.x[1]) / 2, kept = at;
      zoom(middle - (middle - view.x[0]) / factor, middle + (view.x[1] - middle) / factor);
      if (kept !== null) show(kept);
    };

    const inside = (event) => {
      const box = svg.getBoundingClientRect();
      return (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
    };
    const clamp = (pixel) => Math.min(Math.max(pixel, left), right);
    plot.addEventListener("pointermove", (event) => {
      if (from === null) return show(valueX(inside(event)));
      const [a, b] = [from, clamp(inside(event))].sort((one, other) => one - other);
      clear();
      cursor.replaceChildren(drawing("rect", { class: "chosen", x: a, y: top, width: b - a, height: bottom - top }));
    });
    plot.addEventListener("pointerdown", (event) => {
      show(valueX(inside(event)));
      if (chart.zoom && event.pointerType === "mouse" && event.button === 0) {
        from = clamp(inside(event));
        plot.setPointerCapture(event.pointerId);
      }
    });
    plot.addEventListener("pointerup", (event) => {
      if (from === null) return;
      const [a, b] = [from, clamp(inside(event))].sort((one, other) => one - other);
      from = null;
      if (b - a > 8) zoom(valueX(a), valueX(b)); else show(valueX(b));
    });
    plot.addEventListener("pointercancel", () => { from = null; clear(); });
    plot.addEventListener("dblclick", () => { if (chart.zoom) unzoom(); });
    plot.addEventListener("pointerleave", () => { if (from === null) clear(); });
    plot.addEventListener("blur", clear);
    plot.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const act = { "+": () => magnify(2), "=": () => magnify(2), "-": () => magnify(0.5), 0: unzoom }[event.key];
      const jump = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (event.key === "Escape") clear();
      if (act && chart.zoom) { event.preventDefault(); act(); }
      if (jump === undefined) return;
      event.preventDefault();
      steps ??= [...new Set(known.flatMap((points) => points.map((point) => point[0])))].sort((a, b) => a - b);
      const first = steps.findIndex((x) => x >= view.x[0]);
      const now = at === null ? (jump > 0 ? first - 1 : steps.length) : steps.indexOf(at);
      const next = steps[Math.min(Math.max(now + jump, 0), steps.length - 1)], range = view.x[1] - view.x[0];
      if (next < view.x[0] || next > view.x[1]) zoom(next - range / 2, next + range / 2);
      show(next);
    });

    const button = (said, name, act) => {
      const made = element("button", { type: "button", textContent: said, onclick: act });
      made.setAttribute("aria-label", `${name}: ${title}`);
      return made;
    };
    const save = () => {
      const quoted = (word) => `"${String(word).replaceAll('"', '""')}"`;
      const lines = [["series", ...chart.labels].map(quoted).join(",")];
      for (const { name, points } of chart.series) for (const [x, y] of points) lines.push(`${quoted(name)},${x},${y ?? ""}`);
      const href = "data:text/csv;charset=utf-8," + encodeURIComponent(lines.join("\n") + "\n");
      element("a", { href, download: `${plot.parentElement.id}.csv` }).click();
    };
    const tools = element("div", { className: "tools" });
    if (chart.zoom) tools.append(button("+", "Zoom in", () => magnify(2)), button("\u2212", "Zoom out", () => magnify(0.5)),
      button("all", "Show all", unzoom));
    tools.append(button("CSV", "Download the numbers", save));
    plot.before(tools);

    for (const entry of plot.parentElement.querySelectorAll(".legend li")) {
      const index = Number(entry.dataset.series);
      const button = element("button", { type: "button" }, ...entry.childNodes);
      button.setAttribute("aria-pressed", "true");
      button.addEventListener("click", () => {
        const off = !hidden.delete(index);
        if (off) hidden.add(index);
        button.setAttribute("aria-pressed", String(!off));
        drawn.querySelector(`[data-series="${index}"]`).classList.toggle("off", off);
        clear();
      });
      entry.append(button);
    }
  };

  document.querySelectorAll("[data-plot]").forEach(enliven);
  for (const entry of document.querySelectorAll("[data-switches] li")) {
    const name = entry.textContent, button = element("button", { type: "button" }, ...entry.childNodes);
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      for (const other of document.querySelectorAll("figure .legend button")) {
        if (other.textContent === name && (other.getAttribute("aria-pressed") === "true") !== on) other.click();
      }
    });
    entry.append(button);
  }
  const closed = new Set();
  addEventListener("beforeprint", () => document.querySelectorAll("section > details:not([open]), .figures > div > details:not([open])").forEach((fold) => { closed.add(fold); fold.open = true; }));
  addEventListener("afterprint", () => { closed.forEach((fold) => { fold.open = false; }); closed.clear(); });
})();
