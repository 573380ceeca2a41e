"use strict";
// Settings were planned by Python; here they are looked up, money is multiplied, and a row is chosen as rows.py does.
const data = JSON.parse(document.getElementById("data").textContent);
const AS_FAST = 1.05; // rows.py
const RECOMMENDED = "recommended";
const shared = { deadline: data.deadlines_h.indexOf(data.wishes.deadline_h), values: {} };
if (shared.deadline < 0) shared.deadline = data.deadlines_h.length; // none

// ── amounts

function amount(value) { // show.py
  if (value === null) return "-";
  if (value < 0.095) return String(Number(value.toPrecision(2)));
  return value < 99.95 ? value.toFixed(2) : Math.round(value).toLocaleString("en-US");
}
const multiple = (v) => (v < 9.995 ? v.toFixed(2) : v < 99.95 ? v.toFixed(1) : Math.round(v).toLocaleString("en-US")) + "×";
const hoursText = (h) => (h < 1 ? `${Math.round(h * 60)} min` : h < 48 ? `${h} h` : `${h / 24} days`);
const plural = (n) => (n === 1 ? "1 device" : `${n.toLocaleString("en-US")} devices`);
const least = (rows, value) => rows.reduce((best, row) => (best && value(best) <= value(row) ? best : row), null);

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "circle", "text", "path", "g", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

const refreshers = [];

/** A labelled slider or, with `options`, a switch; `shown` returns what stands beside a slider. */
function control(into, id, name, most, get, set, shown, step = 1, options = null) {
  const input = options ? element("select", { id, "aria-label": name }) : element("input", { type: "range", min: 0, max: most, step, id, "aria-label": name });
  const output = element("output");
  input.addEventListener("input", () => { set(Number(input.value)); draw(); });
  into.append(element("label", {}, element("span", {}, name), output, input));
  refreshers.push(() => {
    if (options) input.replaceChildren(...options().map((text, place) => element("option", { value: place }, text)));
    else { output.textContent = shown(); input.disabled = most === 0; }
    input.value = get();
  });
}

// ── a panel for each cluster

class Panel {
  constructor(plan, place) {
    this.plan = plan;
    this.suffix = place ? `-${place + 1}` : "";
    this.root = element("div", { class: "panel" });
    this.root.append(document.getElementById("panel").content.cloneNode(true));
    for (const part of this.root.querySelectorAll("[data-id]")) part.id = part.dataset.id + this.suffix;
    document.getElementById("panels").append(this.root);
    this.state = { devices: plan.devices.indexOf(plan.chosen), price: plan.price ?? 0, layout: RECOMMENDED };
    this.part("cluster").textContent = plan.name === plan.shape ? plan.name : `${plan.name}: ${plan.shape}`;
    const state = this.state, own = this.part("own");
    control(own, `set-devices${this.suffix}`, "devices", plan.devices.length - 1, () => state.devices, (v) => { state.devices = v; },
      () => plan.devices[state.devices].toLocaleString("en-US"));
    control(own, `set-layout${this.suffix}`, "layout", 0, () => this.layouts().indexOf(state.layout), (v) => { state.layout = this.layouts()[v]; },
      null, 1, () => this.layouts());
    control(own, `set-price${this.suffix}`, "price, USD per device and hour", Math.max(10, Math.ceil(4 * (plan.price ?? 0))), () => state.price,
      (v) => { state.price = v; }, () => (state.price ? state.price.toFixed(2) : "not known"), 0.01);
  }

  part(name) { return this.root.querySelector(`[data-id="${name}"]`); }

  get devices() { return this.plan.devices[this.state.devices]; }

  setting() {
    let place = 0;
    for (const axis of this.plan.axes) {
      const at = axis.values.indexOf(shared.values[axis.key]);
      if (at < 0) return { words: [], impossible: `${axis.name} ${shared.values[axis.key]} is not for ${this.plan.shape}` };
      place = place * axis.values.length + at;
    }
    return this.plan.settings[place];
  }

  /** Names of the layouts that some number of devices has, after the recommended one. */
  layouts() {
    const rows = Object.values(this.setting().rows ?? {}).flat();
    const names = [RECOMMENDED, ...new Set(rows.map((row) => row.layout))];
    if (!names.includes(this.state.layout)) this.state.layout = RECOMMENDED;
    return names;
  }

  rowsOf(found) {
    const { plan, state } = this;
    return plan.devices.filter((n) => found.rows?.[n]).map((devices) => {
      const layouts = found.rows[devices], row = layouts.find((one) => one.layout === state.layout) ?? layouts[0];
      const paidDevices = plan.one_machine ? 1 : devices;
      const usd = row.hours === null || !state.price ? null : row.hours * paidDevices * state.price;
      const spot = row.hours === null || plan.spot === null ? null : row.hours * paidDevices * plan.spot;
      return { ...row, devices, paid: row.run_s * paidDevices, usd, spot };
    });
  }

  // ── the choice, as in rows.py

  missed(row) {
    const deadline = data.deadlines_h[shared.deadline] ?? null, { budget_usd, min_efficiency } = data.wishes;
    if (deadline !== null && row.hours !== null && row.hours > deadline) return "too late";
    if (budget_usd !== null && row.usd !== null && row.usd > budget_usd) return "over budget";
    if (min_efficiency !== null && row.efficiency < min_efficiency) return `below ${(100 * min_efficiency).toFixed(0)} %`;
    return "";
  }

  choose(rows) {
    const kept = rows.filter((row) => !this.missed(row)), late = shared.deadline < data.deadlines_h.length;
    const best = {
      fastest: least(rows, (r) => r.run_s), cheapest: least(rows, (r) => r.paid),
      efficient: least(rows, (r) => -r.efficiency), knee: least(rows, (r) => r.run_s * r.paid), kept,
    };
    if (!rows.length) return { ...best, chosen: null };
    if (!kept.length && !late) return { ...best, chosen: data.wishes.budget_usd !== null ? best.cheapest : best.efficient };
    if (kept.length && late) return { ...best, chosen: least(kept, (r) => r.paid) };
    const pool = kept.length ? kept : rows, soonest = Math.min(...pool.map((r) => r.run_s));
    return { ...best, chosen: pool.find((r) => r.run_s <= soonest * AS_FAST) };
  }

  verdict(row, rows, best) {
    if (this.missed(row) || rows.length === 1) return this.missed(row);
    const names = ["fastest", ...(this.plan.one_machine ? [] : ["cheapest", "knee"])].filter((name) => best[name] === row);
    if (names.length) return names.slice(0, 2).join(", ");
    if (gainsNothing(row, rows)) return this.plan.one_machine ? "slower" : "no advantage";
    return row.devices > best.knee.devices ? "past the knee" : "pays";
  }

  // ── drawing

  /** One bar of parts up to `full`, with a mark at `limit`; below it the key. */
  bar(id, parts, full, limit) {
    const bars = element("svg", { viewBox: "0 0 400 44", role: "img" }), key = element("div", { class: "key" });
    let from = 0;
    parts.forEach(([name, value, text], place) => {
      const colour = `var(--c${Math.min(place, 8)})`, width = (400 * value) / full;
      bars.append(element("rect", { x: from, y: 8, width, height: 28, style: `fill: ${colour}` }, element("title", {}, `${name}: ${text}`)));
      key.append(element("i", { style: `background: ${colour}` }), element("span", {}, name), element("b", {}, text));
      from += width;
    });
    if (limit) {
      const x = (400 * limit) / full;
      bars.append(element("line", { x1: x - 1, x2: x - 1, y1: 0, y2: 44, style: "stroke: var(--bad); stroke-width: 3" }));
    }
    this.part(id).replaceChildren(bars, key);
  }

  front(rows, best, shown) {
    const money = this.state.price > 0 && rows.some((r) => r.usd !== null);
    const xs = (r) => r.run_s, ys = (r) => (money ? r.usd : r.paid);
    const wide = Math.max(280, this.part("front").clientWidth), box = { left: 62, right: wide - 10, top: 16, bottom: 220 };
    const scale = (values, low, high) => {
      const [least, most] = [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
      return (v) => (most - least < 1e-9 ? (low + high) / 2 : low + ((Math.log(v) - least) / (most - least)) * (high - low));
    };
    const soonest = Math.min(...rows.map(xs)), latest = Math.max(...rows.map(xs)), due = 3600 * data.deadlines_h[shared.deadline];
    const near = rows[0].hours !== null && due > soonest / 20 && due < latest * 20; // else it is off the picture
    const x = scale([...rows.map(xs), ...(near ? [due] : [])], box.left + 25, box.right - 45), y = scale(rows.map(ys), box.bottom - 25, box.top + 20);
    const svg = element("svg", { viewBox: `0 0 ${wide} 262`, role: "img" });
    const line = (a) => svg.append(element("line", { style: "stroke: var(--line)", ...a }));
    line({ x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom });
    line({ x1: box.left, x2: box.left, y1: box.top, y2: box.bottom });
    const slowest = least(rows, (r) => -r.run_s), dearest = least(rows, (r) => -ys(r)), lowest = least(rows, ys);
    const label = (text, a) => svg.append(element("text", { ...a, style: `fill: var(--faint); ${a.style ?? ""}` }, text));
    const long = (row) => (row.hours === null ? row.step : row.long);
    label(long(best.fastest), { x: x(xs(best.fastest)), y: 238, "text-anchor": "middle" });
    if (slowest !== best.fastest) label(long(slowest), { x: x(xs(slowest)), y: 238, "text-anchor": "middle" });
    label(rows[0].hours === null ? `time of a ${data.step}` : "time of the run", { x: (box.left + box.right) / 2, y: 256, "text-anchor": "middle" });
    const worth = (row) => (money ? amount(row.usd) : multiple(row.paid / best.cheapest.paid));
    label(worth(lowest), { x: 56, y: y(ys(lowest)) + 4, "text-anchor": "end" });
    if (dearest !== lowest) label(worth(dearest), { x: 56, y: y(ys(dearest)) + 4, "text-anchor": "end" });
    label(money ? "USD" : "cost", { x: 4, y: 12 });
    const edge = rows.filter((r) => !gainsNothing(r, rows));
    svg.append(element("path", { d: edge.map((r, i) => `${i ? "L" : "M"}${x(xs(r))} ${y(ys(r))}`).join(""), style: "fill: none; stroke: var(--accent); stroke-width: 2" }));
    if (near) line({ x1: x(due), x2: x(due), y1: box.top, y2: box.bottom, style: "stroke: var(--bad); stroke-dasharray: 4 4" });
    for (const row of rows) {
      const [cx, cy] = [x(xs(row)), y(ys(row))];
      const fill = this.missed(row) ? "var(--c8)" : edge.includes(row) ? "var(--accent)" : "var(--c8)";
      if (row === shown) svg.append(element("circle", { cx, cy, r: 10, style: "fill: none; stroke: var(--ink); stroke-width: 2" }));
      svg.append(element("circle", { cx, cy, r: 6, style: `fill: ${fill}` }, element("title", {}, `${plural(row.devices)}: ${row.long}, ${worth(row)}`)));
      svg.append(element("text", { x: cx + 12, y: cy - 6 }, `${row === best.chosen ? "✓ " : ""}${row.devices.toLocaleString("en-US")}`));
    }
    this.part("front").replaceChildren(svg);
    const notes = ["A point is a number of devices: ring = shown above, ✓ = recommended."];
    if (edge.length > 1) notes.push("On the line nothing is both faster and cheaper.");
    if (near) notes.push("Dashed: the deadline.");
    this.part("front-note").textContent = notes.join(" ");
  }

  table(found, rows, best, shown) {
    const { plan, state } = this, money = state.price > 0, costs = !plan.one_machine && rows.length > 1;
    const columns = [["", "text"], ["devices", "text"], ["layout", "text"], [data.step, "wide"], ["speed-up", "mid"], ["eff.", "wide"], ["time", ""],
      ["kWh", "wide"], ...(money ? [["USD", ""]] : []), ...(costs ? [["cost", "wide"]] : []), ["verdict", "text"]];
    const head = element("tr", {}, ...columns.map(([name, kind]) => element("th", { class: kind }, name)));
    const lines = plan.devices.map((n) => {
      const row = rows.find((r) => r.devices === n);
      if (!row) {
        return element("tr", { class: "out", "data-devices": n }, element("td", { class: "text" }, "✗"), element("td", { class: "text" }, String(n)),
          element("td", { class: "text", colspan: columns.length - 2 }, (found.reasons?.[n] ?? [])[0] ?? "not possible"));
      }
      const cells = ["", n.toLocaleString("en-US"), row.layout, row.step, row.speedup, row.efficient, row.long, row.kwh,
        ...(money ? [amount(row.usd)] : []), ...(costs ? [multiple(row.paid / best.cheapest.paid)] : []), this.verdict(row, rows, best)];
      if (row === best.chosen) cells[0] = "✓";
      const kind = [row === best.chosen ? "chosen" : "", row === shown ? "shown" : ""].join(" ").trim();
      return element("tr", { class: kind, "data-devices": n, "data-step": row.step_s, "data-usd": row.usd ?? "", "data-bytes": row.total_bytes },
        ...cells.map((cell, place) => element("td", { class: columns[place][1] }, cell)));
    });
    for (const line of lines) line.addEventListener("click", () => { state.devices = plan.devices.indexOf(Number(line.dataset.devices)); draw(); });
    this.part("rows").replaceChildren(element("tbody", {}, head, ...lines));
  }

  answer(id, text, note = "", mood = "") {
    this.part(id).textContent = text;
    this.part(id).className = `value ${mood}`;
    this.part(`${id}-note`).textContent = note;
  }

  answers(found, best, row) {
    const n = this.devices, reasons = found.reasons?.[n] ?? [];
    if (row) {
      const error = `${row.room} on each, up to ${row.most}`;
      this.answer("fit", row.tight ? "May not" : "Yes", `${plural(n)}, ${row.layout}: ${error}`, row.tight ? "bad" : "good");
      this.answer("long", row.hours === null ? `${row.step} per ${data.step}` : row.long, row.hours === null ? "the number of samples is not known" : `${row.step} per ${data.step}, ${row.speedup} the speed of ${found.base}`);
      const spot = row.spot === null ? "" : "on spot instances", usd = row.usd ?? row.spot;
      const note = usd === null ? "set a price" : `${row.kwh} kWh${spot && `; ${row.usd === null ? "" : `${amount(row.spot)} USD `}${spot}`}`;
      this.answer("money", usd === null ? "-" : `${amount(usd)} USD`, note);
      const parts = [...row.time].sort((a, b) => b[1] - a[1]), share = Math.round((100 * parts[0][1]) / row.step_s);
      this.answer("back", data.times[parts[0][0]], `${share} % of a ${data.step}${parts[1] ? `; then ${data.times[parts[1][0]]}, ${parts[1][2]}` : ""}`);
    } else {
      this.answer("fit", "No", `${plural(n)}: ${reasons[0] ?? "not possible"}`, "bad");
      for (const id of ["long", "money"]) this.answer(id, "-", "does not fit");
      this.answer("back", "memory", reasons[0] ?? "");
    }
    const taken = best.chosen;
    if (!taken) { this.answer("take", "Nothing fits", (found.advice ?? []).join(" "), "bad"); return; }
    const asked = shared.deadline < data.deadlines_h.length || data.wishes.budget_usd !== null || data.wishes.min_efficiency !== null;
    const why = !best.kept.length ? "nothing meets the requirements; this comes nearest" : asked ? "best that meets the requirements"
      : taken === best.fastest ? "fastest" : "within 5 % of the fastest, with the fewest devices";
    this.answer("take", plural(taken.devices), `${taken.layout}: ${why}; ${taken.long}${taken.usd === null ? "" : `, ${amount(taken.usd)} USD`}`, best.kept.length ? "good" : "bad");
  }

  draw() {
    const { plan, state } = this, found = this.setting(), rows = this.rowsOf(found), best = this.choose(rows), n = this.devices;
    const row = rows.find((r) => r.devices === n);
    this.part("impossible").hidden = !found.impossible;
    this.part("impossible").lastElementChild.textContent = found.impossible ?? "";
    this.part("time-head").textContent = `Time of a ${data.step}`;
    this.answers(found, best, row);
    if (row) {
      this.bar("memory", row.memory, Math.max(row.total_bytes, row.capacity_bytes), row.capacity_bytes);
      this.bar("time", row.time.map(([name, value, text]) => [data.times[name], value, text]), row.step_s);
      this.part("memory-note").textContent = `${row.room}; red: the capacity of a device.`;
      this.part("time-note").textContent = `${row.step} on ${plural(n)}: ${row.layout}. ${found.links}`;
    } else {
      const near = found.nearest?.[n];
      this.part("memory").replaceChildren();
      this.part("time").replaceChildren();
      if (near) this.bar("memory", near.memory, near.total_bytes, near.capacity_bytes);
      this.part("memory-note").textContent = near ? `Nearest: ${near.layout} needs ${near.room}; red: the capacity of a device.` : "Not possible.";
      this.part("time-note").textContent = "Does not fit.";
    }
    if (rows.length) this.front(rows, best, row); else for (const id of ["front", "front-note"]) this.part(id).replaceChildren();
    this.table(found, rows, best, row);
    this.part("base").textContent = found.base ? `Speed-ups are over ${found.base}${plan.one_machine ? "" : "; cost is over the cheapest"}. Click a row to see it above.` : "";
    const reasons = found.reasons?.[n] ?? [];
    this.part("reasons").replaceChildren(...(reasons.length ? reasons : ["All layouts that were tried fit."]).map((text) => element("li", {}, text)));
    const more = [`--cluster ${plan.name}`, ...found.words, `--devices ${n}`];
    if (state.price !== (plan.price ?? 0)) more.push(`${plan.take_spot ? "--spot-price" : "--price"} ${state.price}`);
    if (shared.deadline < data.deadlines_h.length) more.push(`--deadline ${data.deadlines_h[shared.deadline]}h`);
    this.part("command").textContent = [data.command, ...more].join(" ");
    this.part("apply").textContent = row ? row.apply : "nothing fits";
    return { panel: this, found, best };
  }
}

const gainsNothing = (row, rows) => rows.some((other) => other.run_s <= row.run_s && other.paid < row.paid);

/** One line that compares what each cluster would take. */
function compare(drawn) {
  const taken = drawn.filter(({ best }) => best.chosen).map(({ panel, best }) => ({ name: panel.plan.name, ...best.chosen }));
  const line = document.getElementById("verdict");
  line.hidden = drawn.length < 2;
  const words = taken.map((row) => `${row.name} (${plural(row.devices)}): ${row.hours === null ? row.step : row.long}${row.usd === null ? "" : `, ${amount(row.usd)} USD`}`);
  const fastest = least(taken, (r) => r.run_s), cheapest = taken.every((r) => r.usd !== null) ? least(taken, (r) => r.usd) : null;
  const best = !fastest ? "Nothing fits" : cheapest && cheapest !== fastest ? `${fastest.name} is the fastest, ${cheapest.name} the cheapest`
    : `${fastest.name} is the fastest${cheapest ? " and the cheapest" : ""}`;
  line.textContent = `${best}. ${words.join("; ")}.`;
}

function draw() {
  for (const refresh of refreshers) refresh();
  const drawn = panels.map((panel) => panel.draw());
  document.getElementById("headline").textContent = drawn[0].found.headline ?? "";
  compare(drawn);
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}

// ── settings of the run, shared by all clusters

for (const axis of data.clusters[0].axes) {
  const values = data.clusters.flatMap((plan) => plan.axes.find((other) => other.key === axis.key)?.values ?? []).filter((v, i, all) => all.indexOf(v) === i);
  shared.values[axis.key] = axis.now;
  const words = typeof axis.now === "string"; // a switch
  control(document.getElementById("controls"), `set-${axis.name}`, axis.unit ? `${axis.name}, ${axis.unit}` : axis.name, values.length - 1,
    () => values.indexOf(shared.values[axis.key]), (v) => { shared.values[axis.key] = values[v]; },
    () => shared.values[axis.key].toLocaleString("en-US"), 1, words ? () => values : null);
}
control(document.getElementById("controls"), "set-deadline", "deadline", data.deadlines_h.length, () => shared.deadline, (v) => { shared.deadline = v; },
  () => (data.deadlines_h[shared.deadline] === undefined ? "none" : hoursText(data.deadlines_h[shared.deadline])));

const theme = document.documentElement.dataset, wantsDark = window.matchMedia("(prefers-color-scheme: dark)");
theme.theme = wantsDark.matches ? "dark" : "light";
wantsDark.addEventListener("change", () => { theme.theme = wantsDark.matches ? "dark" : "light"; });
document.getElementById("theme").addEventListener("click", () => { theme.theme = theme.theme === "dark" ? "light" : "dark"; });
const panels = data.clusters.map((plan, place) => new Panel(plan, place));
draw();
window.addEventListener("resize", draw);
