/* Interactive parts of the lessons. The functions in `formulas` are those of the package (planner/formulas, the laws of
   measure, the learning rate of train), number for number: tests/unit/test_lessons.py compares them in a browser. Nothing is loaded from elsewhere. */
"use strict";
(() => {
  const CALL_S = 2.7e-5, HOP_S = 3.6e-6, OVERLAP = 0.6;
  const BYTES = {  // per parameter: weights, gradients, optimiser states
    fp32: [4, 4, 8], "bf16 by autocast": [4, 4, 8], "bf16 with fp32 master weights": [2, 4, 12], "pure bf16": [2, 2, 4],
  };

  const formulas = {
    /** Seconds of a ring all-reduce of `bytes` over n ranks with `bytesPerS` on each link. */
    allReduce(n, bytes, bytesPerS) {
      if (n === 1) return 0;
      const latency = Math.min(2 * (n - 1) * HOP_S, 2 * Math.log2(Math.max(n, 2)) * HOP_S);
      return CALL_S + latency + 2 * (n - 1) / n * bytes / bytesPerS;
    },
    /** Bytes on each rank: weights, gradients, states; stage 0 is plain data parallelism. */
    states(params, ranks, stage, precision) {
      const [weights, gradients, states] = BYTES[precision];
      const cut = (level) => (stage >= level ? ranks : 1);
      return [params * weights / cut(3), params * gradients / cut(2), params * states / cut(1)];
    },
    /** Share of a step that a stage of a pipeline waits. */
    bubble(stages, microBatches) { return (stages - 1) / (microBatches + stages - 1); },
    /** Time of a step of data parallelism whose compute takes `computeS` on one rank. */
    step(n, computeS, bytes, bytesPerS) {
      const comm = formulas.allReduce(n, bytes, bytesPerS), share = computeS / n;
      const exposed = comm - OVERLAP * Math.min(comm, share);
      return {comm, exposed, step: share + exposed, speedup: computeS / (share + exposed), ratio: n > 1 ? share / comm : Infinity};
    },
    amdahl(serial, n) { return 1 / (serial + (1 - serial) / n); },
    gustafson(serial, n) { return serial + (1 - serial) * n; },
    /** Learning rate after a share of the run, for a batch of `growth` times the one that `lr` was chosen for. */
    learningRate(lr, growth, scaling, schedule, warmup, share) {
      const peak = lr * {none: 1, sqrt: Math.sqrt(growth), linear: growth}[scaling];
      if (share < warmup) return peak * share / warmup;
      const done = Math.min(1, (share - warmup) / (1 - warmup));
      return peak * {constant: 1, linear: 1 - done, cosine: (1 + Math.cos(Math.PI * done)) / 2}[schedule];
    },
  };
  window.lessons = formulas;

  const SVG = "http://www.w3.org/2000/svg";
  const draw = (parent, tag, attributes, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    parent.append(node);
    return node;
  };
  const canvas = (box, width, height, label) => {
    box.querySelector("svg")?.remove();
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    box.append(svg);
    return svg;
  };
  const seconds = (s) => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
  const bytes = (b) => b >= 1e9 ? `${(b / 1e9).toPrecision(3)} GB` : `${(b / 1e6).toPrecision(3)} MB`;

  /** Add a labelled slider or choice, and return a function that reads it. */
  const control = (box, label, kind, changed) => {
    const row = document.createElement("label"), shown = document.createElement("output");
    let input;
    if (Array.isArray(kind)) {
      input = document.createElement("select");
      kind.forEach((choice) => input.add(new Option(choice, choice)));
    } else {
      input = Object.assign(document.createElement("input"), {type: "range", min: 0, max: kind.values.length - 1, step: 1, value: kind.start});
    }
    const read = () => (Array.isArray(kind) ? input.value : kind.values[Number(input.value)]);
    const show = () => { shown.textContent = Array.isArray(kind) ? "" : kind.show(read()); };
    input.addEventListener("input", () => { show(); changed(); });
    row.append(label, input, shown);
    box.append(row);
    show();
    return read;
  };
  const slider = (values, start, show) => ({values, start: values.indexOf(start), show});
  const powers = (low, high) => Array.from({length: high - low + 1}, (_, k) => 2 ** (low + k));
  const LINKS = [0.1, 0.25, 0.5, 0.78, 1, 2, 5, 10, 16, 32, 64, 128, 300, 450];

  const widgets = {
    ring(box, answer) {
      const ranks = control(box, "ranks", slider([2, 3, 4, 5, 6, 8], 4, String), () => reset());
      const size = control(box, "gradients", slider([1, 8, 40, 100, 500, 2000, 28000], 100, (v) => bytes(v * 1e6)), () => reset());
      const link = control(box, "link", slider(LINKS, 16, (v) => `${v} GB/s`), () => reset());
      const at = control(box, "step", {values: Array.from({length: 15}, (_, k) => k), start: 0, show: String}, () => paint());
      const reset = () => paint();
      const paint = () => {
        const n = ranks(), last = 2 * (n - 1), step = Math.min(at(), last);
        // After s steps of the reduce-scatter rank r has summed s + 1 ranks into chunk r - s; then sums travel on.
        const summed = Array.from({length: n}, (_, r) => Array.from({length: n}, (_, c) => {
          let count = 1;
          for (let s = 1; s <= Math.min(step, n - 1); s++) if ((r - s + n) % n === c) count = s + 1;
          for (let s = n; s <= step; s++) if ((r - (s - n) + n) % n === c) count = n;
          return step >= n - 1 && (r + 1) % n === c ? n : count;
        }));
        const svg = canvas(box, 640, 40 + 44 * n, `ring all-reduce over ${n} ranks after ${step} of ${last} steps`);
        for (let r = 0; r < n; r++) {
          draw(svg, "text", {x: 0, y: 52 + 44 * r}, `rank ${r}`);
          for (let c = 0; c < n; c++) {
            const width = 540 / n, share = summed[r][c] / n;
            draw(svg, "rect", {x: 70 + c * width, y: 30 + 44 * r, width: width - 6, height: 34, rx: 4, class: "empty"});
            draw(svg, "rect", {x: 70 + c * width, y: 30 + 44 * r + 34 * (1 - share), width: width - 6, height: 34 * share, rx: 4, class: share === 1 ? "done" : "part"});
            draw(svg, "text", {x: 70 + c * width + width / 2 - 3, y: 52 + 44 * r, "text-anchor": "middle"}, `${summed[r][c]}/${n}`);
          }
        }
        draw(svg, "text", {x: 70, y: 18}, `chunks: how many ranks' gradients each holds, after step ${step} of ${last}`);
        const time = formulas.allReduce(n, size() * 1e6, link() * 1e9);
        answer.textContent = `Each rank sends 2 · (${n} − 1) / ${n} of ${bytes(size() * 1e6)}: ${bytes(2 * (n - 1) / n * size() * 1e6)} in ${seconds(time)}.`;
      };
      paint();
    },

    memory(box, answer) {
      const params = control(box, "parameters", slider([0.1, 0.35, 1, 3, 7, 13, 30, 70], 7, (v) => `${v} billion`), () => paint());
      const ranks = control(box, "ranks", slider(powers(0, 10), 8, String), () => paint());
      const precision = control(box, "numbers", Object.keys(BYTES), () => paint());
      const device = control(box, "device", slider([16, 24, 40, 80, 141, 192], 80, (v) => `${v} GB`), () => paint());
      const paint = () => {
        const rows = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"].map((name, stage) => [name, formulas.states(params() * 1e9, ranks(), stage, precision())]);
        const most = Math.max(device() * 1e9, ...rows.map(([, parts]) => parts.reduce((a, b) => a + b)));
        const svg = canvas(box, 640, 230, "memory of each rank by strategy");
        rows.forEach(([name, parts], k) => {
          let x = 110;
          draw(svg, "text", {x: 0, y: 38 + 46 * k}, name);
          parts.forEach((part, i) => {
            const width = 400 * part / most;
            draw(svg, "rect", {x, y: 20 + 46 * k, width, height: 28, class: ["part", "done", "other"][i]});
            x += width;
          });
          const total = parts.reduce((a, b) => a + b);
          draw(svg, "text", {x: x + 8, y: 38 + 46 * k}, `${bytes(total)}${total > device() * 1e9 ? "  does not fit" : ""}`);
        });
        const edge = 110 + 400 * device() * 1e9 / most;
        draw(svg, "line", {x1: edge, y1: 8, x2: edge, y2: 205, class: "edge"});
        draw(svg, "text", {x: 110, y: 222}, "weights · gradients · optimiser states; the line is the device; activations come on top");
        const fits = rows.find(([, parts]) => parts.reduce((a, b) => a + b) <= device() * 1e9);
        answer.textContent = fits ? `The simplest that fits, before activations: ${fits[0]}.` : "None fits: more ranks, fewer bits, or offloading to the host.";
      };
      paint();
    },

    pipeline(box, answer) {
      const stages = control(box, "stages", slider([2, 3, 4, 6, 8], 4, String), () => paint());
      const micro = control(box, "micro-batches", slider([1, 2, 3, 4, 6, 8, 12, 16, 24, 32], 8, String), () => paint());
      const schedule = control(box, "schedule", ["gpipe", "1f1b"], () => paint());
      const paint = () => {
        const p = stages(), m = micro(), lanes = simulate(p, m, schedule());
        const end = Math.max(...lanes.flat().map((work) => work.end));
        const svg = canvas(box, 640, 30 + 30 * p, `pipeline of ${p} stages and ${m} micro-batches`);
        lanes.forEach((lane, stage) => {
          draw(svg, "text", {x: 0, y: 32 + 30 * stage}, `stage ${stage}`);
          for (const work of lane) {
            const x = 70 + 560 * work.start / end, width = 560 * (work.end - work.start) / end;
            draw(svg, "rect", {x, y: 16 + 30 * stage, width: Math.max(width - 1, 0.5), height: 22, class: work.back ? "done" : "part"});
            if (width > 14) draw(svg, "text", {x: x + width / 2, y: 32 + 30 * stage, "text-anchor": "middle"}, work.batch + 1);
          }
        });
        const kept = schedule() === "gpipe" ? m : Math.min(m, p);
        answer.textContent = `Bubble ${(100 * formulas.bubble(p, m)).toFixed(1)} % = (${p} − 1) / (${m} + ${p} − 1). The first stage holds the activations of ${kept} micro-batch${kept > 1 ? "es" : ""}.`;
      };
      /** Forward takes 1, backward 2; each stage does what its schedule lists as soon as its input is there. */
      const simulate = (p, m, kind) => {
        const orders = Array.from({length: p}, (_, s) => {
          const warm = kind === "gpipe" ? m : Math.min(m, p - s), order = [];
          for (let b = 0; b < warm; b++) order.push([b, false]);
          for (let b = warm; b < m; b++) order.push([b - warm, true], [b, false]);
          for (let b = m - warm; b < m; b++) order.push([b, true]);
          return order;
        });
        const ends = new Map(), lanes = orders.map(() => []), next = orders.map(() => 0), free = orders.map(() => 0);
        for (let left = 2 * m * p; left > 0;) {
          for (let s = 0; s < p; s++) {
            if (next[s] >= orders[s].length) continue;
            const [batch, back] = orders[s][next[s]];
            const needs = back ? (s === p - 1 ? `${s}f${batch}` : `${s + 1}b${batch}`) : s === 0 ? null : `${s - 1}f${batch}`;
            if (needs !== null && !ends.has(needs)) continue;
            const start = Math.max(free[s], needs === null ? 0 : ends.get(needs)), end = start + (back ? 2 : 1);
            lanes[s].push({batch, back, start, end});
            ends.set(`${s}${back ? "b" : "f"}${batch}`, end);
            free[s] = end;
            next[s] += 1;
            left -= 1;
          }
        }
        return lanes;
      };
      paint();
    },

    links(box, answer) {
      const compute = control(box, "compute of a step, one device", slider([5, 10, 20, 50, 100, 200, 500, 1000], 50, (v) => `${v} ms`), () => paint());
      const size = control(box, "gradients", slider([1, 8, 40, 100, 500, 2000, 28000], 40, (v) => bytes(v * 1e6)), () => paint());
      const link = control(box, "link", slider(LINKS, 0.78, (v) => `${v} GB/s`), () => paint());
      const paint = () => {
        const counts = [1, 2, 4, 8, 16], rows = counts.map((n) => formulas.step(n, compute() / 1e3, size() * 1e6, link() * 1e9));
        const svg = canvas(box, 640, 220, "speed-up on 1 to 16 devices");
        rows.forEach((row, k) => {
          const width = 420 * row.speedup / 16;
          draw(svg, "text", {x: 0, y: 38 + 38 * k}, `${counts[k]} device${k ? "s" : ""}`);
          draw(svg, "rect", {x: 90, y: 20 + 38 * k, width: 420 * counts[k] / 16, height: 26, class: "empty"});
          draw(svg, "rect", {x: 90, y: 20 + 38 * k, width, height: 26, class: row.speedup < 1 ? "other" : "done"});
          const ratio = k ? `, R ${row.ratio.toPrecision(2)}` : "";
          draw(svg, "text", {x: 96 + Math.max(width, 420 * counts[k] / 16), y: 38 + 38 * k}, `${row.speedup.toFixed(2)}×${ratio}`);
        });
        const four = rows[2];
        answer.textContent = four.speedup < 1
          ? `Four devices are slower than one (${four.speedup.toFixed(2)}×): sending takes ${seconds(four.comm)}, computing ${seconds(compute() / 4e3)}.`
          : `Four devices are ${four.speedup.toFixed(2)}× as fast. R = compute / communication = ${four.ratio.toPrecision(2)}; from 3 on it pays well.`;
      };
      paint();
    },

    laws(box, answer) {
      const serial = control(box, "share that does not divide", slider([0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], 0.05, (v) => `${100 * v} %`), () => paint());
      const ranks = control(box, "ranks", slider(powers(0, 10), 16, String), () => paint());
      const paint = () => {
        const svg = canvas(box, 640, 240, "Amdahl and Gustafson");
        const most = 1024, x = (n) => 40 + 560 * Math.log2(n) / 10, y = (s) => 210 - 190 * Math.log2(Math.max(s, 1)) / 10;
        const curve = (law, kind) => draw(svg, "polyline", {class: kind, points: powers(0, 10).map((n) => `${x(n)},${y(law(n))}`).join(" ")});
        curve((n) => n, "edge");
        curve((n) => formulas.gustafson(serial(), n), "line-other");
        curve((n) => formulas.amdahl(serial(), n), "line");
        for (const n of [1, 4, 16, 64, 256, most]) draw(svg, "text", {x: x(n), y: 230, "text-anchor": "middle"}, n);
        for (const law of [formulas.amdahl, formulas.gustafson]) draw(svg, "circle", {cx: x(ranks()), cy: y(law(serial(), ranks())), r: 5, class: "done"});
        const same = formulas.amdahl(serial(), ranks()), grown = formulas.gustafson(serial(), ranks());
        answer.textContent = `${ranks()} ranks: ${same.toFixed(2)}× with the same work (${(100 * same / ranks()).toFixed(0)} % efficiency, at most ${serial() ? (1 / serial()).toFixed(0) + "×" : "any"}), ${grown.toFixed(1)}× with work that grows.`;
      };
      paint();
    },

    batch(box, answer) {
      const base = 256, samples = 1281167, lr = 0.1;  // of ResNet-50 on ImageNet
      const batch = control(box, "batch", slider(powers(5, 15), 2048, (v) => v.toLocaleString("en")), () => paint());
      const warmup = control(box, "warm-up", slider([0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], 0.05, (v) => `${100 * v} %`), () => paint());
      const scaling = control(box, "scaling", ["linear", "sqrt", "none"], () => paint());
      const schedule = control(box, "schedule", ["cosine", "linear", "constant"], () => paint());
      const paint = () => {
        const growth = batch() / base, shares = Array.from({length: 201}, (_, k) => k / 200);
        const rate = (share) => formulas.learningRate(lr, growth, scaling(), schedule(), warmup(), share);
        const before = (share) => formulas.learningRate(lr, 1, "none", schedule(), 0, share);
        const peak = rate(warmup()), most = Math.max(peak, lr), x = (share) => 60 + 560 * share, y = (value) => 205 - 180 * value / most;
        const svg = canvas(box, 640, 240, "learning rate over the run");
        const curve = (law, kind) => draw(svg, "polyline", {class: kind, points: shares.map((share) => `${x(share)},${y(law(share))}`).join(" ")});
        curve(before, "edge");
        curve(rate, "line");
        draw(svg, "text", {x: 0, y: y(peak) + 4}, peak.toPrecision(2));
        if (Math.abs(y(peak) - y(lr)) > 14) draw(svg, "text", {x: 0, y: y(lr) + 4}, lr);
        draw(svg, "text", {x: 60, y: 232}, `learning rate over the run; dashed: the batch of ${base} that ${lr} was chosen for`);
        const steps = Math.ceil(samples / batch());
        answer.textContent = `Learning rate ${peak.toPrecision(3)} for a batch of ${batch().toLocaleString("en")}: ${steps.toLocaleString("en")} updates for an epoch of ImageNet, in place of ${Math.ceil(samples / base).toLocaleString("en")}.`;
      };
      paint();
    },
  };

  const start = () => document.querySelectorAll("[data-lesson]").forEach((box) => {
    if (box.dataset.ready) return;
    box.dataset.ready = "yes";
    const answer = Object.assign(document.createElement("p"), {className: "answer"});
    answer.setAttribute("aria-live", "polite");
    widgets[box.dataset.lesson](box, answer);
    box.append(answer);
  });
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
