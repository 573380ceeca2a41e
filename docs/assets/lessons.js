/* Interactive parts of the lessons. The functions in `formulas` are those of the package (planner/formulas, the laws and
   causes of measure, batch and learning rate of train), number for number: tests/unit/test_lessons.py compares them in a
   browser. Nothing is loaded from elsewhere. */
"use strict";
(() => {
  const CALL_S = 2.7e-5, HOP_S = 3.6e-6, NODE_HOP_S = 8.6e-6, LINK_SHARE = 0.71, NETWORK_SHARE = 0.81, OVERLAP = 0.6;
  const H100 = {flopsS: 989e12 * 0.803 * 0.93, bytesS: 3350e9 * 0.63, halfTiles: 19, ragged: 0.54};  // bf16
  const VOCAB = 50304, CONTEXT_BYTES = 1e9, FRAGMENTS = 0.08;
  const BYTES = {  // per parameter: weights, gradients, optimiser states; of an activation; of a cast copy of a weight
    fp32: [4, 4, 8, 4, 0],
    "bf16 by autocast": [4, 4, 8, 2, 2],
    "bf16 with fp32 master weights": [2, 4, 12, 2, 0],
    "pure bf16": [2, 2, 4, 2, 0],
  };
  const NOTABLE = 0.1, UNEVEN = 1.15;

  const formulas = {
    /** Ranks whose links all have `bytesS`. */
    ring(size, bytesS) { return {size, bytesS, hopS: HOP_S, treeS: Math.log2(Math.max(size, 2)) * HOP_S}; },
    /** Ranks in nodes of `perNode`: a ring is as fast as the slowest link on its way. */
    group(size, perNode, link, network) {
      const inNode = Math.min(size, perNode), nodes = Math.ceil(size / inNode);
      if (nodes === 1) return formulas.ring(size, link * LINK_SHARE);
      const shared = network * NETWORK_SHARE * inNode / perNode;
      return {
        size,
        bytesS: inNode > 1 ? Math.min(link * LINK_SHARE, shared) : shared,
        hopS: (HOP_S * (inNode - 1) + NODE_HOP_S) / inNode,
        treeS: Math.log2(nodes) * NODE_HOP_S + (inNode - 1) * HOP_S,
      };
    },
    allReduce(bytes, {size, bytesS, hopS, treeS}) {
      if (size === 1) return 0;
      return CALL_S + Math.min(2 * (size - 1) * hopS, 2 * treeS) + 2 * (size - 1) / size * bytes / bytesS;
    },
    /** A reduce-scatter takes as long. */
    allGather(bytes, {size, bytesS, hopS}) {
      return size === 1 ? 0 : CALL_S + (size - 1) * hopS + (size - 1) / size * bytes / bytesS;
    },
    /** To the neighbour: in the node, or in the next one if each has one rank. */
    send(bytes, perNode, link, network) {
      return perNode > 1 ? HOP_S + bytes / (link * LINK_SHARE) : NODE_HOP_S + bytes / (network * NETWORK_SHARE);
    },
    exposed(comm, compute) { return comm - OVERLAP * Math.min(comm, compute); },
    /** Seconds of a matrix product in bf16 on an H100: the slower of arithmetic and memory. */
    product(rows, inner, outer) {
      const tiles = Math.ceil(rows / 128) * Math.ceil(outer / 128);
      const odd = (side) => { let divisor = 1; while (divisor < 64 && side % (2 * divisor) === 0) divisor *= 2; return Math.log2(64 / divisor) / 3; };
      const share = tiles / (tiles + H100.halfTiles) * H100.ragged ** Math.max(odd(inner), odd(outer));
      const moved = 2 * (rows * inner + inner * outer + rows * outer);
      return Math.max(2 * rows * inner * outer / (H100.flopsS * share), moved / H100.bytesS);
    },
    /** Forward pass of a feed-forward part on `ranks` of a node: its two products, and the sum of their results. */
    feedForward(tokens, width, ranks, link) {
      const products = formulas.product(tokens, width, 4 * width / ranks) + formulas.product(tokens, 4 * width / ranks, width);
      return {products, sum: formulas.allReduce(2 * tokens * width, formulas.group(ranks, ranks, link, link))};
    },
    /** Bytes of a training step of a GPT on one device, by term; of activations all are kept, some, or inputs of layers. */
    training(layers, width, length, samples, precision, recompute) {
      const [weights, gradients, states, element, cast] = BYTES[precision], edge = length * width;
      const params = layers * (12 * width ** 2 + 13 * width) + (VOCAB + length + 2) * width;
      const kept = {none: layers * 17, selective: layers * 6.5, full: layers + 17}[recompute] + 3;
      const activations = samples * element * kept * edge, logits = samples * length * VOCAB * (element + 8);
      return [
        ...[weights, gradients, states, cast].map((each) => params * each),
        activations, logits, CONTEXT_BYTES + FRAGMENTS * (activations + logits),
      ];
    },
    equation(batch, ranks, micro) {
      const passes = Math.max(1, Math.ceil(Math.ceil(batch / ranks) / micro));
      const each = Math.floor(batch / (ranks * passes)), uneven = batch % (ranks * passes);
      const shown = uneven ? `≈ ${each} to ${each + 1}` : `= ${each}`;
      return `${batch} global ${shown} per pass × ${ranks} rank${ranks > 1 ? "s" : ""} × ${passes} accumulated`;
    },
    /** The mean over all samples, of sums and counts of ranks. */
    mean(sums, counts) { return sums.reduce((a, b) => a + b) / counts.reduce((a, b) => a + b); },
    /** A step of four ranks, of which one computes `slow` times as long, and what `measure` says holds it back. */
    profile(compute, slow, comm, load, workers) {
      const computes = [compute, compute, compute * slow, compute], longest = compute * slow;
      const travelling = formulas.exposed(comm, longest), data = Math.max(0, load / workers - longest - travelling);
      const exposed = computes.map((own) => longest - own + travelling);
      const waiting = exposed.reduce((a, b) => a + b) / 4 - Math.min(...exposed);
      const over = (longest + data) / (compute + data), step = data + longest + travelling;
      const lost = {communication: travelling, "slow rank": over >= UNEVEN ? longest - compute : waiting, input: data};
      const [cause, most] = Object.entries(lost).sort(([, a], [, b]) => b - a)[0];
      return {step, data, computes, exposed, waiting, travelling, over, cause: most < NOTABLE * step ? "none" : cause};
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
      const comm = formulas.allReduce(bytes, formulas.ring(n, bytesPerS)), share = computeS / n;
      const exposed = formulas.exposed(comm, share);
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
  const canvas = (box, answer, width, height, label) => {
    box.querySelector("svg")?.remove();
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("role", "img");
    svg.setAttribute("aria-label", label);
    answer.before(svg);
    return svg;
  };
  const seconds = (s) => s >= 1 ? `${s.toPrecision(3)} s` : s >= 1e-3 ? `${(s * 1e3).toPrecision(3)} ms` : `${(s * 1e6).toPrecision(3)} µs`;
  const bytes = (b) => b >= 1e9 ? `${(b / 1e9).toPrecision(3)} GB` : b >= 1e6 ? `${(b / 1e6).toPrecision(3)} MB` : `${(b / 1e3).toPrecision(3)} kB`;
  const percent = (share) => `${(100 * share).toFixed(0)} %`;

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

  /** Draw parts of a bar after each other, and return where the last one ends. */
  const stack = (svg, x, y, height, widths, kinds) => {
    widths.forEach((width, k) => {
      draw(svg, "rect", {x, y, width: Math.max(width, 0), height, class: kinds[k]});
      x += width;
    });
    return x;
  };

  /** Return where a text fits behind a bar that ends at x, beside a line at `edge`. */
  const beside = (x, edge) => (x < edge && x + 70 > edge ? edge : x) + 8;

  /** Name the kinds of a bar below it, with their colours. */
  const legend = (svg, x, y, names, kinds) => names.forEach((name, k) => {
    draw(svg, "rect", {x, y: y - 11, width: 11, height: 11, class: kinds[k]});
    draw(svg, "text", {x: x + 16, y}, name);
    x += 30 + 7.2 * name.length;
  });

  /** Each adds its controls and returns what draws it: `add` a control, `sheet` to draw on, `tell` the answer. */
  const widgets = {
    ring(add, sheet, tell) {
      const ranks = add("ranks", slider([2, 3, 4, 5, 6, 8], 4, String));
      const size = add("gradients", slider([1, 8, 40, 100, 500, 2000, 28000], 100, (v) => bytes(v * 1e6)));
      const link = add("link", slider(LINKS, 16, (v) => `${v} GB/s`));
      const at = add("step", {values: Array.from({length: 15}, (_, k) => k), start: 0, show: String});
      return () => {
        const n = ranks(), last = 2 * (n - 1), step = Math.min(at(), last);
        // After s steps of the reduce-scatter rank r has summed s + 1 ranks into chunk r - s; then sums travel on.
        const summed = Array.from({length: n}, (_, r) => Array.from({length: n}, (_, c) => {
          let count = 1;
          for (let s = 1; s <= Math.min(step, n - 1); s++) if ((r - s + n) % n === c) count = s + 1;
          for (let s = n; s <= step; s++) if ((r - (s - n) + n) % n === c) count = n;
          return step >= n - 1 && (r + 1) % n === c ? n : count;
        }));
        const svg = sheet(640, 40 + 44 * n, `ring all-reduce over ${n} ranks after ${step} of ${last} steps`);
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
        const time = formulas.allReduce(size() * 1e6, formulas.ring(n, link() * 1e9));
        tell(`Each rank sends 2 · (${n} − 1) / ${n} of ${bytes(size() * 1e6)}: ${bytes(2 * (n - 1) / n * size() * 1e6)} in ${seconds(time)}.`);
      };
    },

    memory(add, sheet, tell) {
      const params = add("parameters", slider([0.1, 0.35, 1, 3, 7, 13, 30, 70], 7, (v) => `${v} billion`));
      const ranks = add("ranks", slider(powers(0, 10), 8, String));
      const precision = add("numbers", Object.keys(BYTES));
      const device = add("device", slider([16, 24, 40, 80, 141, 192], 80, (v) => `${v} GB`));
      return () => {
        const rows = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3, FSDP"].map((name, stage) => [name, formulas.states(params() * 1e9, ranks(), stage, precision())]);
        const most = Math.max(device() * 1e9, ...rows.map(([, parts]) => parts.reduce((a, b) => a + b)));
        const svg = sheet(640, 230, "memory of each rank by strategy"), edge = 110 + 400 * device() * 1e9 / most;
        rows.forEach(([name, parts], k) => {
          draw(svg, "text", {x: 0, y: 38 + 46 * k}, name);
          const x = stack(svg, 110, 20 + 46 * k, 28, parts.map((part) => 400 * part / most), ["part", "done", "other"]);
          const total = parts.reduce((a, b) => a + b);
          draw(svg, "text", {x: beside(x, edge), y: 38 + 46 * k}, `${bytes(total)}${total > device() * 1e9 ? "  does not fit" : ""}`);
        });
        draw(svg, "line", {x1: edge, y1: 8, x2: edge, y2: 205, class: "edge"});
        legend(svg, 110, 224, ["weights", "gradients", "optimiser states", "activations come on top"], ["part", "done", "other", "empty"]);
        const fits = rows.find(([, parts]) => parts.reduce((a, b) => a + b) <= device() * 1e9);
        tell(fits ? `The simplest that fits, before activations: ${fits[0]}.` : "None fits: more ranks, fewer bits, or offloading to the host.");
      };
    },

    pipeline(add, sheet, tell) {
      const stages = add("stages", slider([2, 3, 4, 6, 8], 4, String));
      const micro = add("micro-batches", slider([1, 2, 3, 4, 6, 8, 12, 16, 24, 32], 8, String));
      const schedule = add("schedule", ["gpipe", "1f1b"]);
      return () => {
        const p = stages(), m = micro(), lanes = simulate(p, m, schedule());
        const end = Math.max(...lanes.flat().map((work) => work.end));
        const svg = sheet(640, 30 + 30 * p, `pipeline of ${p} stages and ${m} micro-batches`);
        lanes.forEach((lane, stage) => {
          draw(svg, "text", {x: 0, y: 32 + 30 * stage}, `stage ${stage}`);
          for (const work of lane) {
            const x = 70 + 560 * work.start / end, width = 560 * (work.end - work.start) / end;
            draw(svg, "rect", {x, y: 16 + 30 * stage, width: Math.max(width - 1, 0.5), height: 22, class: work.back ? "done" : "part"});
            if (width > 14) draw(svg, "text", {x: x + width / 2, y: 32 + 30 * stage, "text-anchor": "middle"}, work.batch + 1);
          }
        });
        const kept = schedule() === "gpipe" ? m : Math.min(m, p);
        tell(`Bubble ${(100 * formulas.bubble(p, m)).toFixed(1)} % = (${p} − 1) / (${m} + ${p} − 1). The first stage holds the activations of ${kept} micro-batch${kept > 1 ? "es" : ""}.`);
      };
    },

    links(add, sheet, tell) {
      const compute = add("compute of a step, one device", slider([5, 10, 20, 50, 100, 200, 500, 1000], 50, (v) => `${v} ms`));
      const size = add("gradients", slider([1, 8, 40, 100, 500, 2000, 28000], 40, (v) => bytes(v * 1e6)));
      const link = add("link", slider(LINKS, 0.78, (v) => `${v} GB/s`));
      return () => {
        const counts = [1, 2, 4, 8, 16], rows = counts.map((n) => formulas.step(n, compute() / 1e3, size() * 1e6, link() * 1e9));
        const svg = sheet(640, 220, "speed-up on 1 to 16 devices");
        rows.forEach((row, k) => {
          const width = 420 * row.speedup / 16;
          draw(svg, "text", {x: 0, y: 38 + 38 * k}, `${counts[k]} device${k ? "s" : ""}`);
          draw(svg, "rect", {x: 90, y: 20 + 38 * k, width: 420 * counts[k] / 16, height: 26, class: "empty"});
          draw(svg, "rect", {x: 90, y: 20 + 38 * k, width, height: 26, class: row.speedup < 1 ? "other" : "done"});
          const ratio = k ? `, R ${row.ratio.toPrecision(2)}` : "";
          draw(svg, "text", {x: 96 + Math.max(width, 420 * counts[k] / 16), y: 38 + 38 * k}, `${row.speedup.toFixed(2)}×${ratio}`);
        });
        const four = rows[2];
        tell(four.speedup < 1
          ? `Four devices are slower than one (${four.speedup.toFixed(2)}×): sending takes ${seconds(four.comm)}, computing ${seconds(compute() / 4e3)}.`
          : `Four devices are ${four.speedup.toFixed(2)}× as fast. R = compute / communication = ${four.ratio.toPrecision(2)}; from 3 on it pays well.`);
      };
    },

    laws(add, sheet, tell) {
      const serial = add("not divided", slider([0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], 0.05, (v) => `${100 * v} %`));
      const ranks = add("ranks", slider(powers(0, 10), 16, String));
      return () => {
        const svg = sheet(640, 240, "Amdahl and Gustafson");
        const most = 1024, x = (n) => 40 + 560 * Math.log2(n) / 10, y = (s) => 210 - 190 * Math.log2(Math.max(s, 1)) / 10;
        const curve = (law, kind) => draw(svg, "polyline", {class: kind, points: powers(0, 10).map((n) => `${x(n)},${y(law(n))}`).join(" ")});
        curve((n) => n, "edge");
        curve((n) => formulas.gustafson(serial(), n), "line-other");
        curve((n) => formulas.amdahl(serial(), n), "line");
        for (const n of [1, 4, 16, 64, 256, most]) draw(svg, "text", {x: x(n), y: 230, "text-anchor": "middle"}, n);
        for (const law of [formulas.amdahl, formulas.gustafson]) draw(svg, "circle", {cx: x(ranks()), cy: y(law(serial(), ranks())), r: 5, class: "done"});
        const same = formulas.amdahl(serial(), ranks()), grown = formulas.gustafson(serial(), ranks());
        tell(`${ranks()} ranks: ${same.toFixed(2)}× with the same work (${(100 * same / ranks()).toFixed(0)} % efficiency, at most ${serial() ? (1 / serial()).toFixed(0) + "×" : "any"}), ${grown.toFixed(1)}× with work that grows.`);
      };
    },

    batch(add, sheet, tell) {
      const base = 256, samples = 1281167, lr = 0.1;  // of ResNet-50 on ImageNet
      const batch = add("batch", slider(powers(5, 15), 2048, (v) => v.toLocaleString("en")));
      const warmup = add("warm-up", slider([0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5], 0.05, (v) => `${100 * v} %`));
      const scaling = add("scaling", ["linear", "sqrt", "none"]);
      const schedule = add("schedule", ["cosine", "linear", "constant"]);
      return () => {
        const growth = batch() / base, shares = Array.from({length: 201}, (_, k) => k / 200);
        const rate = (share) => formulas.learningRate(lr, growth, scaling(), schedule(), warmup(), share);
        const before = (share) => formulas.learningRate(lr, 1, "none", schedule(), 0, share);
        const peak = rate(warmup()), most = Math.max(peak, lr), x = (share) => 60 + 560 * share, y = (value) => 205 - 180 * value / most;
        const svg = sheet(640, 240, "learning rate over the run");
        const curve = (law, kind) => draw(svg, "polyline", {class: kind, points: shares.map((share) => `${x(share)},${y(law(share))}`).join(" ")});
        curve(before, "edge");
        curve(rate, "line");
        draw(svg, "text", {x: 0, y: y(peak) + 4}, peak.toPrecision(2));
        if (Math.abs(y(peak) - y(lr)) > 14) draw(svg, "text", {x: 0, y: y(lr) + 4}, lr);
        draw(svg, "text", {x: 60, y: 232}, `learning rate over the run; dashed: the batch of ${base} that ${lr} was chosen for`);
        const steps = Math.ceil(samples / batch());
        tell(`Learning rate ${peak.toPrecision(3)} for a batch of ${batch().toLocaleString("en")}: ${steps.toLocaleString("en")} updates for an epoch of ImageNet, in place of ${Math.ceil(samples / base).toLocaleString("en")}.`);
      };
    },

    gradient(add, sheet, tell) {
      const ranks = add("ranks", slider([1, 2, 3, 4, 6, 8], 4, String));
      const batch = add("global batch", slider([8, 12, 16, 24, 32, 64, 128], 32, String));
      const micro = add("most in a pass", slider([1, 2, 4, 8, 16, 32], 8, String));
      const longest = add("longest text", slider([1, 1.5, 2, 4, 8], 2, (v) => `${v} × shortest`));
      return () => {
        const n = ranks(), each = Array.from({length: n}, (_, r) => {
          const late = n > 1 ? r / (n - 1) : 0, samples = Math.floor(batch() / n) + (r < batch() % n ? 1 : 0);
          return {samples, count: samples * 10 * (1 + (longest() - 1) * late), mean: 1 - 0.75 * late};
        });
        const most = Math.max(...each.map((rank) => rank.count));
        const svg = sheet(640, 20 + 34 * n, `gradients of ${n} ranks`);
        each.forEach(({samples, count, mean}, r) => {
          draw(svg, "text", {x: 0, y: 32 + 34 * r}, `rank ${r}`);
          draw(svg, "rect", {x: 60, y: 14 + 34 * r, width: 300 * count / most, height: 26, class: "empty"});
          draw(svg, "rect", {x: 60, y: 14 + 34 * r, width: 300 * count / most * mean, height: 26, class: "part"});
          draw(svg, "text", {x: 370, y: 32 + 34 * r}, `${samples} samples, ${count.toFixed(0)} tokens, mean ${mean.toFixed(2)}`);
        });
        const exact = formulas.mean(each.map((rank) => rank.mean * rank.count), each.map((rank) => rank.count));
        const naive = formulas.mean(each.map((rank) => rank.mean), each.map(() => 1)), off = naive / exact - 1;
        const verdict = Math.abs(off) < 5e-4 ? "the same, since all counts are" : `${(100 * off).toFixed(1)} % off`;
        tell(`${formulas.equation(batch(), n, micro())}. Sum of gradients / sum of tokens: ${exact.toFixed(3)}. Mean of the means: ${naive.toFixed(3)}, ${verdict}.`);
      };
    },

    tensor(add, sheet, tell) {
      const ranks = add("ranks", slider([1, 2, 4, 8, 16], 4, String));
      const width = add("width", slider(powers(9, 14), 4096, (v) => v.toLocaleString("en")));
      const tokens = add("tokens in a pass", slider(powers(6, 15), 4096, (v) => v.toLocaleString("en")));
      const link = add("link", slider(LINKS, 450, (v) => `${v} GB/s`));
      return () => {
        const n = ranks(), price = (of) => formulas.feedForward(tokens(), width(), of, link() * 1e9);
        const alone = price(1).products, {products, sum} = price(n), most = Math.max(alone, products + sum);
        const svg = sheet(640, 240, `two matrices divided among ${n} ranks`);
        draw(svg, "text", {x: 0, y: 62}, "act(x · A) · B");
        for (let r = 0; r < n; r++) {
          const kind = r ? "empty" : "part", gap = n > 8 ? 1 : 2;
          draw(svg, "rect", {x: 130 + 240 / n * r, y: 30, width: 240 / n - gap, height: 60, class: kind});
          draw(svg, "rect", {x: 460, y: 8 + 104 / n * r, width: 60, height: 104 / n - gap, class: kind});
        }
        draw(svg, "text", {x: 130, y: 108}, "A, by columns");
        draw(svg, "text", {x: 530, y: 62}, "B, by rows");
        [["1 rank", [alone]], [`${n} rank${n > 1 ? "s" : ""}`, [products, sum]]].forEach(([name, parts], k) => {
          draw(svg, "text", {x: 0, y: 152 + 36 * k}, name);
          const x = stack(svg, 70, 134 + 36 * k, 26, parts.map((part) => 440 * part / most), ["done", "other"]);
          draw(svg, "text", {x: x + 8, y: 152 + 36 * k}, seconds(parts.reduce((a, b) => a + b)));
        });
        legend(svg, 70, 226, ["rank 0", "products", "sum of the results"], ["part", "done", "other"]);
        tell(`${n} rank${n > 1 ? "s are" : " is"} ${(alone / (products + sum)).toFixed(2)}× as fast as one, forward, and each holds 1/${n} of the weights; the sum is ${percent(sum / (products + sum))} of the time.`);
      };
    },

    bytes(add, sheet, tell) {
      const models = [["GPT-2", 12, 768], ["GPT-2 medium", 24, 1024], ["GPT-2 XL", 48, 1600], ["7B", 32, 4096], ["13B", 40, 5120]];
      const model = add("model", slider([0, 1, 2, 3, 4], 2, (k) => models[k][0]));
      const samples = add("tokens in a pass", slider(powers(0, 7), 8, (v) => `${v} × 1,024`));
      const precision = add("numbers", Object.keys(BYTES));
      const device = add("device", slider([16, 24, 40, 80, 141, 192], 80, (v) => `${v} GB`));
      const kinds = ["part", "done", "other", "cast", "kept", "logits", "empty"];
      return () => {
        const [, layers, width] = models[model()], total = (parts) => parts.reduce((a, b) => a + b);
        const rows = Object.entries({none: "all", selective: "some", full: "inputs of layers"}).map(([recompute, name]) => [
          name, formulas.training(layers, width, 1024, samples(), precision(), recompute),
        ]);
        const most = Math.max(device() * 1e9, ...rows.map(([, parts]) => total(parts)));
        const svg = sheet(640, 200, "memory of a training step by what is kept of its activations");
        const edge = 120 + 390 * device() * 1e9 / most;
        draw(svg, "text", {x: 0, y: 14}, "activations kept");
        rows.forEach(([name, parts], k) => {
          draw(svg, "text", {x: 0, y: 46 + 40 * k}, name);
          const x = stack(svg, 120, 28 + 40 * k, 28, parts.map((part) => 390 * part / most), kinds);
          draw(svg, "text", {x: beside(x, edge), y: 46 + 40 * k}, bytes(total(parts)));
        });
        draw(svg, "line", {x1: edge, y1: 8, x2: edge, y2: 142, class: "edge"});
        legend(svg, 0, 166, ["weights", "gradients", "optimiser states", "weights in 16 bits", "activations", "logits"], kinds);
        legend(svg, 0, 190, ["driver, fragments; the dashed line is the device"], ["empty"]);
        const [, whole] = rows[0], fits = rows.find(([, parts]) => total(parts) <= device() * 1e9);
        tell(`Weights, gradients and states: ${bytes(total(whole.slice(0, 3)))}; activations: ${bytes(whole[4])}. ${!fits ? "None fits: fewer samples, more devices." : fits === rows[0] ? "Everything fits." : `It fits if only ${fits[0] === "some" ? "some activations" : "the inputs of layers"} are kept.`}`);
      };
    },

    collectives(add, sheet, tell) {
      const own = (r, p) => (r === p ? "part" : "empty");
      const cells = {  // what a rank has of each part, before and after: its own, sums, or nothing
        "all-reduce": [() => "part", () => "done"],
        "reduce-scatter": [() => "part", (r, p) => (r === p ? "done" : "empty")],
        "all-gather": [own, () => "part"],
        "send to the neighbour": [own, (r, p) => (p === (r + 3) % 4 ? "part" : "empty")],
      };
      const operation = add("operation", Object.keys(cells));
      const ranks = add("ranks", slider(powers(1, 8), 16, String));
      const perNode = add("ranks of a node", slider(powers(0, 3), 8, String));
      const size = add("message", slider([1e3, 1e4, 1e5, 1e6, 5e6, 25e6, 1e8, 1e9, 1e10], 25e6, bytes));
      const link = add("link in a node", slider(LINKS, 450, (v) => `${v} GB/s`));
      const network = add("network", slider([0.125, 1.25, 3, 12.5, 25, 50, 100, 400], 50, (v) => `${v} GB/s`));
      return () => {
        const speeds = [link() * 1e9, network() * 1e9], group = formulas.group(ranks(), perNode(), ...speeds);
        const price = {
          "all-reduce": (b) => formulas.allReduce(b, group), "send to the neighbour": (b) => formulas.send(b, perNode(), ...speeds),
        }[operation()] ?? ((b) => formulas.allGather(b, group));
        const svg = sheet(640, 210, `${operation()}: what ranks have before and after, and its time by size`);
        cells[operation()].forEach((kind, side) => {
          draw(svg, "text", {x: 140 * side, y: 28}, side ? "after" : "before, 4 ranks");
          for (let r = 0; r < 4; r++) for (let p = 0; p < 4; p++) {
            draw(svg, "rect", {x: 140 * side + 28 * p, y: 40 + 32 * r, width: 25, height: 28, class: kind(r, p)});
          }
        });
        legend(svg, 0, 194, ["own", "sum of all"], ["part", "done"]);
        const x = (b) => 330 + 290 * (Math.log10(b) - 3) / 7, y = (s) => 170 - 150 * (Math.log10(s) + 5.2) / 8.2;
        const curve = (law, kind) => draw(svg, "polyline", {class: kind, points: Array.from({length: 71}, (_, k) => 10 ** (3 + k / 10)).map((b) => `${x(b)},${y(law(b))}`).join(" ")});
        curve(() => price(0), "edge");
        curve(price, "line");
        draw(svg, "circle", {cx: x(size()), cy: y(price(size())), r: 5, class: "other"});
        for (const [b, name] of [[1e3, "1 kB"], [1e6, "1 MB"], [1e9, "1 GB"]]) draw(svg, "text", {x: x(b), y: 194, "text-anchor": "middle"}, name);
        for (const [s, name] of [[1e-5, "10 µs"], [1e-3, "1 ms"], [1e-1, "0.1 s"], [10, "10 s"]]) draw(svg, "text", {x: 322, y: y(s) + 4, "text-anchor": "end"}, name);
        const time = price(size()), nodes = Math.ceil(ranks() / perNode());
        tell(`${bytes(size())} over ${ranks()} ranks on ${nodes} node${nodes > 1 ? "s" : ""}: ${seconds(time)}, of which ${percent(price(0) / time)} is latency (dashed).`);
      };
    },

    profile(add, sheet, tell) {
      const compute = add("compute", slider([5, 10, 20, 50, 100, 200], 50, (v) => `${v} ms`));
      const slow = add("of rank 2", slider([1, 1.05, 1.1, 1.2, 1.5, 2], 1.5, (v) => `${v} × that`));
      const comm = add("communication", slider([1, 2, 5, 10, 20, 50, 100], 10, (v) => `${v} ms`));
      const load = add("loading a step", slider([1, 10, 20, 50, 100, 200, 500, 1000], 100, (v) => `${v} ms`));
      const workers = add("workers", slider([1, 2, 4, 8, 16], 2, String));
      return () => {
        const found = formulas.profile(...[compute(), slow(), comm(), load()].map((v, k) => (k === 1 ? v : v / 1e3)), workers());
        const {step, data, computes, exposed, travelling, cause} = found, kinds = ["other", "part", "done", "empty"];
        const svg = sheet(640, 190, "a step on four ranks");
        computes.forEach((own, r) => {
          draw(svg, "text", {x: 0, y: 28 + 36 * r}, `rank ${r}`);
          const parts = [data, own, travelling, exposed[r] - travelling].map((s) => 440 * s / step);
          stack(svg, 60, 10 + 36 * r, 26, parts, kinds);
          draw(svg, "text", {x: 508, y: 28 + 36 * r}, `exposed ${seconds(exposed[r])}`);
        });
        legend(svg, 60, 176, ["input", "compute", "communication", "waiting for rank 2"], kinds);
        const enough = Math.ceil(load() / 1e3 / (step - data));
        tell(`A step of ${seconds(step)}: ${{
          none: "no cause takes a tenth of it.",
          input: `samples come too late. ${enough} workers would do.`,
          communication: `links are slow for this step: ${percent(travelling / step)} of it is exposed on all ranks.`,
          "slow rank": "rank 2 is late: it has the least exposed communication, since the others wait for it.",
        }[cause]}`);
      };
    },
  };

  const start = () => document.querySelectorAll("[data-lesson]").forEach((box) => {
    if (box.dataset.ready) return;
    box.dataset.ready = "yes";
    const answer = Object.assign(document.createElement("p"), {className: "answer"});
    answer.setAttribute("aria-live", "polite");
    const add = (label, kind) => control(box, label, kind, () => paint());
    const sheet = (width, height, label) => canvas(box, answer, width, height, label);
    const paint = widgets[box.dataset.lesson](add, sheet, (text) => { answer.textContent = text; });
    box.append(answer);
    paint();
  });
  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
