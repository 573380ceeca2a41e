"use strict";
// The settings were planned by Python; here they are looked up, money is multiplied, and a row is chosen as rows.py does.
const plan = JSON.parse(document.getElementById("data").textContent);
const AS_FAST = 1.05; // rows.py
const $ = (id) => document.getElementById(id);
const at = Object.fromEntries(plan.axes.map((axis) => [axis.key, axis.values.indexOf(axis.now)]));
const own = { devices: plan.devices.indexOf(plan.chosen), price: plan.price ?? 0, deadline: plan.deadlines_h.indexOf(plan.wishes.deadline_h) };
if (own.deadline < 0) own.deadline = plan.deadlines_h.length; // none

// ── the choice, as in rows.py

function setting() {
  let place = 0;
  for (const axis of plan.axes) place = place * axis.values.length + at[axis.key];
  return plan.settings[place];
}

function rowsOf(found) {
  return plan.devices.filter((n) => found.rows?.[n]).map((devices) => {
    const row = found.rows[devices];
    const paidDevices = plan.one_machine ? 1 : devices;
    const usd = row.hours === null || !own.price ? null : row.hours * paidDevices * own.price;
    const spot = row.hours === null || plan.spot === null ? null : row.hours * paidDevices * plan.spot;
    return { ...row, devices, paid: row.run_s * paidDevices, usd, spot };
  });
}

function missed(row) {
  const deadline = plan.deadlines_h[own.deadline] ?? null, { budget_usd, min_efficiency } = plan.wishes;
  if (deadline !== null && row.hours !== null && row.hours > deadline) return "too late";
  if (budget_usd !== null && row.usd !== null && row.usd > budget_usd) return "over budget";
  if (min_efficiency !== null && row.efficiency < min_efficiency) return `below ${(100 * min_efficiency).toFixed(0)} %`;
  return "";
}

const least = (rows, value) => rows.reduce((best, row) => (best && value(best) <= value(row) ? best : row), null);

function choose(rows) {
  const kept = rows.filter((row) => !missed(row)), late = own.deadline < plan.deadlines_h.length;
  const best = {
    fastest: least(rows, (r) => r.run_s), cheapest: least(rows, (r) => r.paid),
    efficient: least(rows, (r) => -r.efficiency), knee: least(rows, (r) => r.run_s * r.paid), kept,
  };
  if (!rows.length) return { ...best, chosen: null };
  if (!kept.length && !late) return { ...best, chosen: plan.wishes.budget_usd !== null ? best.cheapest : best.efficient };
  if (kept.length && late) return { ...best, chosen: least(kept, (r) => r.paid) };
  const pool = kept.length ? kept : rows, soonest = Math.min(...pool.map((r) => r.run_s));
  return { ...best, chosen: pool.find((r) => r.run_s <= soonest * AS_FAST) };
}

const gainsNothing = (row, rows) => rows.some((other) => other.run_s <= row.run_s && other.paid < row.paid);

function verdict(row, rows, best) {
  if (missed(row) || rows.length === 1) return missed(row);
  const names = ["fastest", ...(plan.one_machine ? [] : ["cheapest", "knee"])].filter((name) => best[name] === row);
  if (names.length) return names.slice(0, 2).join(", ");
  if (gainsNothing(row, rows)) return plan.one_machine ? "slower" : "gains nothing";
  return row.devices > best.knee.devices ? "past the knee" : "pays";
}

// ── amounts

function amount(value) { // amounts.py
  if (value === null) return "-";
  if (value < 0.095) return String(Number(value.toPrecision(2)));
  return value < 99.95 ? value.toFixed(2) : Math.round(value).toLocaleString("en-US");
}
const multiple = (v) => (v < 9.995 ? v.toFixed(2) : v < 99.95 ? v.toFixed(1) : Math.round(v).toLocaleString("en-US")) + "×";
const hoursText = (h) => (h < 1 ? `${Math.round(h * 60)} min` : h < 48 ? `${h} h` : `${h / 24} days`);
const plural = (n) => (n === 1 ? "1 device" : `${n.toLocaleString("en-US")} devices`);

// ── drawing

function element(tag, attributes = {}, ...children) {
  const svg = ["svg", "rect", "line", "circle", "text", "path", "g", "title"].includes(tag);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** One bar of parts up to `full`, with a mark at `limit`; below it the key. */
function bar(id, parts, full, limit) {
  const bars = element("svg", { viewBox: "0 0 400 44", role: "img" }), key = element("div", { class: "key" });
  let from = 0;
  parts.forEach(([name, value, text], place) => {
    const colour = `background: var(--c${Math.min(place, 8)})`, width = (400 * value) / full;
    bars.append(element("rect", { x: from, y: 8, width, height: 28, style: `fill: var(--c${Math.min(place, 8)})` },
      element("title", {}, `${name}: ${text}`)));
    key.append(element("i", { style: colour }), element("span", {}, name), element("b", {}, text));
    from += width;
  });
  if (limit) {
    const x = (400 * limit) / full;
    bars.append(element("line", { x1: x - 1, x2: x - 1, y1: 0, y2: 44, style: "stroke: var(--bad); stroke-width: 3" }));
  }
  $(id).replaceChildren(bars, key);
}

function front(rows, best, shown) {
  const money = own.price > 0 && rows.some((r) => r.usd !== null);
  const xs = (r) => r.run_s, ys = (r) => (money ? r.usd : r.paid);
  const wide = Math.max(280, $("front").clientWidth), box = { left: 62, right: wide - 10, top: 16, bottom: 220 };
  const scale = (values, low, high) => {
    const [least, most] = [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
    return (v) => (most - least < 1e-9 ? (low + high) / 2 : low + ((Math.log(v) - least) / (most - least)) * (high - low));
  };
  const soonest = Math.min(...rows.map(xs)), latest = Math.max(...rows.map(xs)), due = 3600 * plan.deadlines_h[own.deadline];
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
  label(rows[0].hours === null ? `time of a ${plan.step}` : "time of the run", { x: (box.left + box.right) / 2, y: 256, "text-anchor": "middle" });
  const worth = (row) => (money ? amount(row.usd) : multiple(row.paid / best.cheapest.paid));
  label(worth(lowest), { x: 56, y: y(ys(lowest)) + 4, "text-anchor": "end" });
  if (dearest !== lowest) label(worth(dearest), { x: 56, y: y(ys(dearest)) + 4, "text-anchor": "end" });
  label(money ? "USD" : "cost", { x: 4, y: 12 });
  const edge = rows.filter((r) => !gainsNothing(r, rows));
  svg.append(element("path", { d: edge.map((r, i) => `${i ? "L" : "M"}${x(xs(r))} ${y(ys(r))}`).join(""), style: "fill: none; stroke: var(--accent); stroke-width: 2" }));
  if (near) line({ x1: x(due), x2: x(due), y1: box.top, y2: box.bottom, style: "stroke: var(--bad); stroke-dasharray: 4 4" });
  for (const row of rows) {
    const [cx, cy] = [x(xs(row)), y(ys(row))];
    const fill = missed(row) ? "var(--c8)" : edge.includes(row) ? "var(--accent)" : "var(--c8)";
    if (row === shown) svg.append(element("circle", { cx, cy, r: 10, style: "fill: none; stroke: var(--ink); stroke-width: 2" }));
    svg.append(element("circle", { cx, cy, r: 6, style: `fill: ${fill}` }, element("title", {}, `${plural(row.devices)}: ${row.long}, ${worth(row)}`)));
    svg.append(element("text", { x: cx + 12, y: cy - 6 }, `${row === best.chosen ? "✓ " : ""}${row.devices.toLocaleString("en-US")}`));
  }
  $("front").replaceChildren(svg);
  const said = ["Each point is a number of devices: the ring is the one above, ✓ the one to take."];
  if (edge.length > 1) said.push("On the line nothing is both faster and cheaper.");
  if (near) said.push("The dashed line is the deadline.");
  $("front-note").textContent = said.join(" ");
}

function table(found, rows, best, shown) {
  const money = own.price > 0, costs = !plan.one_machine && rows.length > 1;
  const heads = ["", "devices", "layout", plan.step, "speed-up", "eff.", "time", "kWh", ...(money ? ["USD"] : []), ...(costs ? ["cost"] : []), "verdict"];
  const text = ["", "devices", "layout", "verdict"];
  const head = element("tr", {}, ...heads.map((name) => element("th", text.includes(name) ? { class: "text" } : {}, name)));
  const lines = plan.devices.map((n) => {
    const row = rows.find((r) => r.devices === n);
    if (!row) {
      return element("tr", { class: "out", "data-devices": n }, element("td", { class: "text" }, "✗"), element("td", { class: "text" }, String(n)),
        element("td", { class: "text", colspan: heads.length - 2 }, (found.reasons?.[n] ?? [])[0] ?? "not possible"));
    }
    const cells = ["", n.toLocaleString("en-US"), row.layout, row.step, row.speedup, row.efficient, row.long, row.kwh,
      ...(money ? [amount(row.usd)] : []), ...(costs ? [multiple(row.paid / best.cheapest.paid)] : []), verdict(row, rows, best)];
    if (row === best.chosen) cells[0] = "✓";
    const kind = [row === best.chosen ? "chosen" : "", row === shown ? "shown" : ""].join(" ").trim();
    return element("tr", { class: kind, "data-devices": n, "data-step": row.step_s, "data-usd": row.usd ?? "", "data-bytes": row.total_bytes },
      ...cells.map((cell, place) => element("td", text.includes(heads[place]) ? { class: "text" } : {}, cell)));
  });
  for (const line of lines) line.addEventListener("click", () => { own.devices = plan.devices.indexOf(Number(line.dataset.devices)); draw(); });
  $("rows").replaceChildren(element("tbody", {}, head, ...lines));
}

// ── the answers

function say(id, text, note = "", mood = "") {
  $(id).textContent = text;
  $(id).className = `value ${mood}`;
  $(`${id}-note`).textContent = note;
}

function answers(found, rows, best, row) {
  const n = plan.devices[own.devices], reasons = found.reasons?.[n] ?? [];
  if (row) {
    const error = `${row.room} on each, ± ${(100 * plan.memory_error).toFixed(0)} %`;
    say("fit", row.tight ? "Just" : "Yes", `${plural(n)}, ${row.layout}: ${error}`, row.tight ? "bad" : "good");
    say("long", row.hours === null ? `${row.step} a ${plan.step}` : row.long, row.hours === null ? "the number of samples is not known" : `${row.step} a ${plan.step}, ${row.speedup} the speed of ${found.base}`);
    say("money", row.usd === null ? "-" : `${amount(row.usd)} USD`, row.usd === null ? "move the price" : `${row.kwh} kWh${row.spot === null ? "" : `; ${amount(row.spot)} USD as spot`}`);
    const parts = [...row.time].sort((a, b) => b[1] - a[1]), share = Math.round((100 * parts[0][1]) / row.step_s);
    say("back", plan.times[parts[0][0]], `${share} % of a ${plan.step}${parts[1] ? `; then ${plan.times[parts[1][0]]}, ${parts[1][2]}` : ""}`);
  } else {
    say("fit", "No", `${plural(n)}: ${reasons[0] ?? "not possible"}`, "bad");
    for (const id of ["long", "money"]) say(id, "-", "it does not fit");
    say("back", "memory", reasons[0] ?? "");
  }
  const taken = best.chosen;
  if (!taken) say("take", "Nothing fits", (found.advice ?? []).join(" "), "bad");
  else {
    const asked = own.deadline < plan.deadlines_h.length || plan.wishes.budget_usd !== null || plan.wishes.min_efficiency !== null;
    const why = !best.kept.length ? "nothing keeps to what is asked; this comes nearest" : asked ? "the best that keeps to what is asked"
      : taken === best.fastest ? "the fastest" : "as fast as any within 5 %, with the fewest devices";
    say("take", plural(taken.devices), `${why}; ${taken.long}${taken.usd === null ? "" : `, ${amount(taken.usd)} USD`}. Cheapest: ${best.cheapest.devices}, knee: ${best.knee.devices}`, best.kept.length ? "good" : "bad");
  }
}

function draw() {
  const found = setting(), rows = rowsOf(found), best = choose(rows);
  const n = plan.devices[own.devices], row = rows.find((r) => r.devices === n);
  for (const refresh of controls) refresh();
  $("headline").textContent = found.headline ?? "";
  $("impossible").hidden = !found.impossible;
  $("impossible").lastElementChild.textContent = found.impossible ?? "";
  $("step-word").textContent = plan.step;
  answers(found, rows, best, row);
  if (row) {
    bar("memory", row.memory, Math.max(row.total_bytes, row.capacity_bytes), row.capacity_bytes);
    bar("time", row.time.map(([name, value, text]) => [plan.times[name], value, text]), row.step_s);
    $("memory-note").textContent = `${row.room}; the red line is what a device has.`;
    $("time-note").textContent = `${row.step} in all on ${plural(n)}: ${row.layout}.`;
  } else {
    const near = found.nearest?.[n];
    $("memory").replaceChildren();
    $("time").replaceChildren();
    if (near) bar("memory", near.memory, near.total_bytes, near.capacity_bytes);
    $("memory-note").textContent = near ? `It does not fit: ${near.layout}, which comes nearest, needs ${near.room}; the red line is what a device has.` : "Not possible.";
    $("time-note").textContent = "It does not fit.";
  }
  if (rows.length) front(rows, best, row); else for (const id of ["front", "front-note"]) $(id).replaceChildren();
  table(found, rows, best, row);
  $("base").textContent = found.base ? `Speed-ups are over ${found.base}${plan.one_machine ? "" : "; cost is over the cheapest"}. Click a row to see it above.` : "";
  const reasons = found.reasons?.[n] ?? [];
  $("reasons").replaceChildren(...(reasons.length ? reasons : ["None of the layouts that were tried is out."]).map((text) => element("li", {}, text)));
  const more = [...found.words, `--devices ${n}`];
  if (own.price !== (plan.price ?? 0)) more.push(`${plan.take_spot ? "--spot-price" : "--price"} ${own.price}`);
  if (own.deadline < plan.deadlines_h.length) more.push(`--deadline ${plan.deadlines_h[own.deadline]}h`);
  $("command").textContent = [plan.command, ...more].join(" ");
  $("apply").textContent = row ? row.apply : "nothing fits";
  document.documentElement.dataset.drawn = String(Number(document.documentElement.dataset.drawn ?? 0) + 1);
}

// ── the sliders

const controls = [];

function slider(name, unit, most, get, set, words, step = 1) {
  const input = element("input", { type: "range", min: 0, max: most, step, "aria-label": name, id: `set-${name}` }), output = element("output");
  input.addEventListener("input", () => { set(Number(input.value)); draw(); });
  $("controls").append(element("label", {}, element("span", {}, unit ? `${name}, ${unit}` : name), output, input));
  controls.push(() => { input.value = get(); output.textContent = words(); input.disabled = most === 0; });
}

slider("devices", "", plan.devices.length - 1, () => own.devices, (v) => { own.devices = v; }, () => plan.devices[own.devices].toLocaleString("en-US"));
for (const axis of plan.axes) {
  slider(axis.name, axis.unit, axis.values.length - 1, () => at[axis.key], (v) => { at[axis.key] = v; },
    () => axis.values[at[axis.key]].toLocaleString("en-US"));
}
slider("price", "USD per device and hour", Math.max(10, Math.ceil(4 * (plan.price ?? 0))), () => own.price, (v) => { own.price = v; }, () => (own.price ? own.price.toFixed(2) : "not known"), 0.01);
slider("deadline", "", plan.deadlines_h.length, () => own.deadline, (v) => { own.deadline = v; },
  () => (plan.deadlines_h[own.deadline] === undefined ? "none" : hoursText(plan.deadlines_h[own.deadline])));
draw();
window.addEventListener("resize", draw);
