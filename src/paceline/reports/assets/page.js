"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const printing = window.matchMedia("print");
  let chosen = null;  // kept for a page that loads itself again
  try { chosen = sessionStorage.getItem("theme"); } catch { /* not allowed here */ }
  let charts = [];

  const colour = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const series = (i) => colour("s" + (i % 8));
  const faded = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");
  const short = (v) => Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(1).replace(".0e", "e") : +v.toPrecision(4);
  const xy = (points) => points.map(([x, y]) => ({ x, y }));

  function axis(title, more) {
    return Object.assign({
      title: { display: true, text: title, color: colour("faint") },
      grid: { color: colour("line") }, border: { color: colour("line") },
      ticks: { color: colour("faint"), maxRotation: 0, callback: (v) => short(v) },
    }, more);
  }

  function options(x, y, tooltip, more) {
    return Object.assign({
      animation: false, responsive: true, devicePixelRatio: Math.max(2, window.devicePixelRatio), maintainAspectRatio: false, parsing: false, normalized: true,
      interaction: { mode: "nearest", intersect: false, axis: "xy" },
      scales: { x, y },
      plugins: {
        legend: {
          display: true, position: "bottom",
          labels: { color: colour("ink"), usePointStyle: true, boxWidth: 10, padding: 16,
            sort: (a, b) => a.datasetIndex - b.datasetIndex, filter: (item) => !item.text.startsWith("_") },
        },
        tooltip: { callbacks: tooltip, filter: (item) => !item.dataset.label.startsWith("_") },
      },
    }, more);
  }

  function spans() {
    return {
      id: "spans",
      afterDatasetsDraw(chart) {
        const context = chart.ctx;
        chart.data.datasets.forEach((set, i) => {
          if (!set.spans || !chart.isDatasetVisible(i)) return;
          context.save();
          context.strokeStyle = set.borderColor;
          context.lineWidth = 1.5;
          set.data.forEach((p) => {
            if (!(p.high > p.low)) return;
            const x = chart.scales.x.getPixelForValue(p.x);
            const [a, b] = [p.low, p.high].map((v) => chart.scales.y.getPixelForValue(v));
            context.beginPath();
            context.moveTo(x, a); context.lineTo(x, b);
            for (const y of [a, b]) { context.moveTo(x - 4, y); context.lineTo(x + 4, y); }
            context.stroke();
          });
          context.fillStyle = colour("ink");
          context.font = "12px system-ui, sans-serif";
          set.data.forEach((p, at) => {
            const twins = set.data.filter((q) => q.x === p.x);
            if (twins.length < 2) return;
            const above = twins.every((q) => q === p || q.y <= p.y);
            const y = chart.scales.y.getPixelForValue(p.y) + (above ? -8 : 16);
            const x = chart.scales.x.getPixelForValue(p.x) + 9;
            if (twins.indexOf(p) < 4) context.fillText(p.label, x, twins.length === 2 ? y : y + 4 * (at % 2));
          });
          context.restore();
        });
      },
    };
  }

  function scaling(d) {
    const sets = [{
      label: "ideal", data: xy([[1, 1], [d.reach, d.reach]]), borderColor: colour("faint"), borderDash: [6, 5], borderWidth: 1.5,
      pointRadius: 0, pointHitRadius: 0, pointStyle: "line", order: -2,
    }];
    const several = d.lines.length > 1;
    d.lines.forEach((line, i) => {
      const c = series(i);
      if (line.fit.length) {
        const band = (k) => line.fit.map((p) => ({ x: p[0], y: p[k] }));
        sets.push({ label: "_low", data: band(2), borderWidth: 0, pointRadius: 0, pointHitRadius: 0 });
        sets.push({ label: "_high", data: band(3), borderWidth: 0, pointRadius: 0, pointHitRadius: 0, fill: "-1", backgroundColor: faded(c, 0.16) });
        sets.push({ label: (several ? line.name + ", " : "") + line.law, data: band(1), borderColor: c, borderWidth: 1.5, pointRadius: 0, pointStyle: "line" });
      }
      sets.push({ label: line.name, data: line.points, spans: true, showLine: false, borderColor: c, backgroundColor: c, pointRadius: 5, pointHoverRadius: 7, order: -1 });
      if (line.plan.length) {
        sets.push({ label: (several ? line.name + ", " : "") + "planned", data: xy(line.plan), showLine: false, borderColor: colour("ink"), backgroundColor: "transparent", pointStyle: "rectRot", pointRadius: 6, borderWidth: 2, order: -1 });
      }
    });
    return {
      type: "line", plugins: [spans()], data: { datasets: sets },
      options: options(
        axis(d.unit, { type: "linear", min: 0, max: d.reach, ticks: { color: colour("faint"), precision: 0 } }),
        axis("speed-up", { type: "linear", min: 0, max: d.top, ticks: { color: colour("faint"), includeBounds: false, callback: short } }),
        {
          title: (items) => (items.length ? items[0].raw.label || items[0].parsed.x + " " + d.unit : ""),
          label: (item) => item.dataset.label + ": " + short(item.parsed.y) + "×" +
            (item.raw.high > item.raw.low ? " (" + short(item.raw.low) + " to " + short(item.raw.high) + ")" : ""),
          afterLabel: (item) => item.raw.source || "",
        }),
    };
  }

  function marks(values) {
    return {
      id: "marks",
      afterDatasetsDraw(chart) {
        const context = chart.ctx;
        const thick = chart.getDatasetMeta(0).data[0] ? chart.getDatasetMeta(0).data[0].height : 20;
        context.save();
        context.strokeStyle = colour("ink");
        context.lineWidth = 3;
        values.forEach((value, i) => {
          if (!value) return;
          const x = chart.scales.x.getPixelForValue(value);
          const y = chart.scales.y.getPixelForValue(i);
          context.beginPath();
          context.moveTo(x, y - thick / 2 - 3); context.lineTo(x, y + thick / 2 + 3);
          context.stroke();
        });
        context.restore();
      },
    };
  }

  function bars(d) {
    const unit = d.unit.split(" ")[0];
    const sets = Object.entries(d.terms).map(([name, values]) => ({
      label: d.names[name], data: values, backgroundColor: colour(name), barPercentage: 0.75, pointStyle: "rectRounded",
    }));
    const set = options(
      axis(d.unit, { stacked: true, beginAtZero: true, suggestedMax: Math.max(0, ...d.plan.map((v) => v || 0)) * 1.02 }),
      axis("", { stacked: true, type: "category", labels: d.labels, grid: { display: false }, title: { display: false },
        ticks: { color: colour("ink"), autoSkip: false } }),
      {
        label: (item) => item.dataset.label + ": " + short(item.parsed.x) + " " + unit,
        footer: (items) => (items.length && d.plan[items[0].dataIndex] ? "planned: " + short(d.plan[items[0].dataIndex]) + " " + unit : ""),
      }, { indexAxis: "y", parsing: true, interaction: { mode: "index", axis: "y", intersect: false } });
    if (d.plan.some((v) => v)) {
      sets.push({ label: "planned", data: [], pointStyle: "line", rotation: 90, borderWidth: 3, borderColor: colour("ink"), backgroundColor: colour("ink") });
    }
    set.plugins.legend.display = sets.length > 1;
    return { type: "bar", plugins: [marks(d.plan)], data: { labels: d.labels, datasets: sets }, options: set };
  }

  // the loss of a topic model is a sum over all documents: many digits, of which the last ones change
  const full = (v) => (Math.abs(v) >= 1e4 ? v.toLocaleString("en", { maximumSignificantDigits: 7 }) : v && Math.abs(v) < 1e-3 ? short(v) : String(+v.toPrecision(6)));
  const tens = () => ({ color: colour("faint"), maxRotation: 0, callback: (v) => (Math.abs(Math.log10(v) - Math.round(Math.log10(v))) < 1e-6 ? short(v) : "") });
  const decades = (found) => {
    if (!found.length) return { min: 1e-9, max: 1e-6 };
    const low = found.reduce((a, b) => Math.min(a, b)), high = found.reduce((a, b) => Math.max(a, b));
    return { min: 10 ** Math.floor(Math.log10(low)), max: 10 ** Math.ceil(Math.log10(high * 1.2)) };
  };

  function lines(d) {
    const count = d.lines.length;
    const wide = d.overlaid && count <= 6 ? Math.min(count, 4) : 0;
    const sets = d.lines.map((line, i) => ({
      label: line.name, data: line.points.map(([x, y, at]) => ({ x, y, from: at ? line.file + " line " + at : line.file || "" })),
      borderColor: series(i), backgroundColor: series(i), borderWidth: 1.5 + 3.5 * Math.max(0, wide - 1 - i), order: count - i,
      pointRadius: d.marked && line.points.length <= 40 ? 3 : 0, pointHitRadius: 6, pointStyle: d.marked ? "circle" : "line",
    }));
    const x = { type: "linear", ticks: { color: colour("faint"), maxRotation: 0, precision: 0, callback: short } };
    const y = d.log_y ? { type: "logarithmic", ...decades(d.lines.flatMap((line) => line.points.map((p) => p[1]))), ticks: tens() }
      : { type: "linear", beginAtZero: Boolean(d.from_zero), ticks: { color: colour("faint"), maxRotation: 0, callback: full } };
    const set = options(axis(d.unit, x), axis(d.label, y), {
      title: (items) => (items.length ? d.unit + " " + items[0].parsed.x : ""),
      label: (item) => item.dataset.label + ": " + full(item.parsed.y),
      afterLabel: (item) => item.raw.from,
    });
    set.plugins.legend.display = (count > 1 || Boolean(d.overlaid)) && count <= 24;
    set.plugins.legend.labels.filter = (item, { datasets }) => datasets[item.datasetIndex].data.length > 0;
    Object.assign(set.plugins.legend.labels, d.marked ? { boxHeight: 7, boxWidth: 7 } : {});
    return { type: "line", data: { datasets: sets }, options: set };
  }

  // a point for each trial of a sweep, the best first
  function scatter(d) {
    const at = d.points.map(([x, y, trial]) => ({ x, y, trial }));
    const sets = [
      { label: "best", data: at.slice(0, 1), pointRadius: 8, borderWidth: 3, borderColor: series(1), backgroundColor: "transparent", order: -1 },
      { label: "trials", data: at, pointRadius: 4.5, borderWidth: 0, borderColor: series(0), backgroundColor: faded(series(0), 0.75) },
    ];
    const scale = d.log ? Math.log : (v) => v, back = d.log ? Math.exp : (v) => v;
    const tried = [...new Set(at.map((p) => p.x))].sort((a, b) => a - b);
    const [low, high] = [tried[0], tried[tried.length - 1]].map(scale);
    const edge = 0.05 * (high - low) || 0.5;
    const told = tried.filter((v, i) => !i || scale(v) - scale(tried[i - 1]) > (high - low) / 12);
    const x = axis(d.unit, {
      type: d.log ? "logarithmic" : "linear", min: back(low - edge), max: back(high + edge),
      afterBuildTicks: (built) => { built.ticks = told.map((value) => ({ value })); },
      ticks: { color: colour("faint"), autoSkip: false, maxRotation: 0, callback: (v) => cut(d.words[v] || String(short(v))) },
    });
    return {
      type: "scatter", data: { datasets: sets },
      options: options(x, axis(d.label, { type: "linear", grace: "8%" }), {
        title: (items) => (items.length ? "trial " + items[0].raw.trial : ""),
        label: (item) => d.unit + " " + (d.words[item.parsed.x] || short(item.parsed.x)) + ": " + short(item.parsed.y),
      }, { normalized: false }),
    };
  }
  const cut = (text) => (text.length > 18 ? "…" + text.slice(-17) : text);  // the end tells paths apart

  const makers = { scaling, bars, lines, scatter };

  function draw() {
    charts.forEach((chart) => chart.destroy());
    charts = [];
    document.querySelectorAll("canvas[data-exhibit]").forEach((canvas) => {
      const shown = data[canvas.dataset.exhibit];
      charts.push(new Chart(canvas, makers[shown.kind](shown)));
    });
    root.dataset.drawn = String(charts.length);
  }

  function theme(forced) {
    const now = forced || (printing.matches ? "light" : chosen || (dark.matches ? "dark" : "light"));
    if (root.dataset.theme === now && charts.length) return;
    root.dataset.theme = now;
    draw();
  }

  document.getElementById("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try { sessionStorage.setItem("theme", chosen); } catch { /* not allowed here */ }
    theme();
  });
  dark.addEventListener("change", () => theme());
  printing.addEventListener("change", () => theme());
  let opened = [];
  window.addEventListener("beforeprint", () => {
    theme("light");
    opened = [...document.querySelectorAll("details:not([open]):not(.sources)")];
    opened.forEach((details) => { details.open = true; });
  });
  window.addEventListener("afterprint", () => {
    theme();
    opened.forEach((details) => { details.open = false; });
  });
  theme();
})();
