"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const at = (id) => document.getElementById(id);
  const topics = [...Array(data.k).keys()].sort((a, b) => data.shares[b] - data.shares[a] || a - b);
  const MOST_TERMS = 15, MOST_FOUND = 6, NAMING = 0.3, SPEAKS = 50;
  let weight = NAMING, theme = null, shown = null;

  /* Texts of documents and terms reach the page as text nodes alone. */
  function make(tag, name, text, more) {
    const element = document.createElement(tag);
    if (name) element.className = name;
    if (text !== undefined) element.textContent = text;
    if (tag === "button") element.type = "button";
    return Object.assign(element, more || {});
  }
  const add = (parent, ...children) => { parent.append(...children); return parent; };
  const one = (text) => text.replace(/\s+/g, " ").trim() || "(blank)";
  const colour = (topic) => data.colours[topic % data.colours.length];
  function ink(hex) {
    const [r, g, b] = [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));
    return 0.299 * r + 0.587 * g + 0.114 * b > 150 ? "#111827" : "#ffffff";
  }
  const percent = (v) => (v >= 0.0995 ? (100 * v).toFixed(0) : v >= 0.00995 ? (100 * v).toFixed(1) : v >= 0.0000995 ? (100 * v).toPrecision(2) : "0") + " %";
  const times = (v) => (v >= 9.95 ? Math.round(v).toLocaleString("en") : v.toPrecision(2)) + "×";
  const whole = (v) => Math.round(v).toLocaleString("en");

  function ranked(topic, by) {
    const [terms, p] = data.tops[topic];
    const few = 1 / data.terms;
    return terms.map((term, i) => {
      const lift = p[i] / Math.max(data.everywhere[term], 1e-30);
      let score = by * Math.log(Math.max(p[i], 1e-30)) + (1 - by) * Math.log(Math.max(lift, 1e-30));
      if (by < 1 && p[i] < few) score -= 1000;
      return { term, p: p[i], lift, score };
    }).sort((a, b) => b.score - a.score || b.p - a.p);
  }
  const labels = data.labels, places = new Map(data.vocabulary.map((term, i) => [term, i]));

  function badge(topic) {
    const made = make("span", "badge", String(topic));
    made.style.background = colour(topic);
    made.style.color = ink(colour(topic));
    return made;
  }
  function track(parts) {
    const made = make("i");
    parts.forEach(([share, hex]) => {
      const part = make("b");
      part.style.width = Math.min(100, 100 * share).toFixed(2) + "%";
      part.style.background = hex;
      made.append(part);
    });
    return made;
  }
  const label = (text) => make("span", "label", one(text), { title: text });
  const figure = (text, title) => make("span", "number", text, title ? { title } : {});

  /* ---- the list ---- */
  const rows = new Map();
  function list() {
    const box = at("list");
    topics.forEach((topic) => {
      const row = make("button", "topic", undefined, { onclick: () => go("topic", topic), tabIndex: -1 });
      row.setAttribute("role", "option");
      add(row, badge(topic), label(labels[topic]), make("span", "share", percent(data.shares[topic])));
      rows.set(topic, row);
      box.append(row);
    });
    box.addEventListener("keydown", (event) => {
      const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const now = shown && shown.kind === "topic" ? topics.indexOf(shown.which) : -1;
      go("topic", topics[Math.max(0, Math.min(topics.length - 1, now + step))]);
    });
  }
  function mark(on, bright) {
    rows.forEach((row, topic) => {
      row.classList.toggle("on", on.has(topic));
      row.setAttribute("aria-selected", on.has(topic));
      row.classList.toggle("pale", !!bright && !bright.has(topic));
    });
    const first = [...on, ...(bright || [])][0];
    if (first !== undefined) {
      const box = at("list"), row = rows.get(first);
      const top = row.offsetTop - box.offsetTop;
      if (top < box.scrollTop || top + row.offsetHeight > box.scrollTop + box.clientHeight) box.scrollTop = top - box.clientHeight / 3;
    }
  }

  /* ---- all documents ---- */
  function stripes() {
    const canvas = at("stripes"), columns = data.stripes;
    const ratio = Math.min(2, window.devicePixelRatio || 1);
    canvas.width = Math.max(1, Math.round(canvas.clientWidth * ratio));
    canvas.height = Math.max(1, Math.round(canvas.clientHeight * ratio));
    const context = canvas.getContext("2d");
    context.clearRect(0, 0, canvas.width, canvas.height);
    const bright = shown && shown.kind === "topic" ? shown.which : null;
    columns.forEach((shares, i) => {
      const left = Math.floor((i * canvas.width) / columns.length), right = Math.floor(((i + 1) * canvas.width) / columns.length);
      let below = canvas.height;
      for (let j = 0; j < shares.length; j += 2) {
        const high = (shares[j + 1] / 1000) * canvas.height;
        context.globalAlpha = bright === null || bright === shares[j] ? 1 : 0.22;
        context.fillStyle = colour(shares[j]);
        context.fillRect(left, below - high, Math.max(1, right - left), high);
        below -= high;
      }
    });
  }
  function under(event) {
    const box = at("stripes").getBoundingClientRect(), columns = data.stripes;
    const column = columns[Math.min(columns.length - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * columns.length)))];
    let left = 1000 * (1 - (event.clientY - box.top) / box.height);
    for (let j = 0; j < column.length; j += 2) {
      left -= column[j + 1];
      if (left <= 0) return column[j];
    }
    return null;
  }

  /* ---- what is chosen ---- */
  function back(box) {
    if (shown.kind !== "topic") box.append(make("button", "back", "← all topics", { onclick: () => go("topic", topics[0]) }));
  }
  function bars(box, topic) {
    const best = ranked(topic, weight).slice(0, MOST_TERMS);
    const most = best.reduce((m, t) => Math.max(m, t.p), 0) || 1;
    box.replaceChildren(...best.map((t) => {
      const text = data.vocabulary[t.term];
      const inside = Math.min(1, (data.shares[topic] * t.p) / Math.max(data.everywhere[t.term], 1e-30));
      const row = make("button", "bar", undefined, { onclick: () => go("term", t.term), title: text + ": " + percent(inside) + " of its use is in this topic" });
      return add(row, label(text), track([[t.p / most, colour(topic)]]), figure(percent(t.p)), figure(times(t.lift)));
    }));
  }
  function topicView(box, topic) {
    add(box, add(make("div", "head"), badge(topic), make("h2", "", labels[topic])));
    const facts = [percent(data.shares[topic]) + " of " + (data.byWords ? "all words" : "the documents")];
    if (data.coherence) facts.push("coherence " + data.coherence[topic].toFixed(2) + " (NPMI of 10 terms, −1 to 1)");
    box.append(make("p", "told", facts.join(" · ")));
    const slider = make("input", "", undefined, { type: "range", min: "0", max: "0.95", step: "0.05", value: String(1 - weight), id: "weight" });
    slider.setAttribute("aria-label", "from the most probable to the most distinctive terms");
    const terms = make("div", "terms");
    slider.addEventListener("input", () => { weight = 1 - slider.value; bars(terms, topic); });
    add(box, make("h3", "", "Terms"), add(make("div", "slide"), make("span", "", "probable"), slider, make("span", "", "distinctive")));
    const names = add(make("div", "bar names"), make("span"), make("span"), figure("in topic", "probability of the term in the topic"), figure("lift", "how many times more probable than overall"));
    add(box, names, terms);
    bars(terms, topic);
    if (data.similar[topic].length) {
      add(box, make("h3", "", "Similar topics"), add(make("div", "chips"), ...data.similar[topic].map(([other, overlap]) =>
        add(make("button", "chip", undefined, { onclick: () => go("topic", other), title: labels[other] }), badge(other), label(labels[other].split(", ").slice(0, 3).join(", ")), figure(percent(overlap), "overlap of terms")))));
    }
    if (data.topDocuments[topic].length) {
      add(box, make("h3", "", "Documents that speak for it"), make("p", "told", (data.lengths ? "By their words beyond those of any other topic." : "By their share beyond that of any other topic.") + (data.texts ? " Underlined: words used mostly by one topic, in its colour." : "")), ...data.topDocuments[topic].map((which) => documentBar(which, topic)));
    }
    if (data.between[topic].length) {
      add(box, make("h3", "", "Documents between it and another topic"), ...data.between[topic].map((which) => documentBar(which, topic)));
    }
  }
  function documentBar(which, topic) {
    const parts = [];
    const mixture = data.mixtures[which];
    let share = 0;
    for (let i = 0; i < mixture.length; i += 2) {
      if (mixture[i] === topic) share = mixture[i + 1] / 1000;
      parts.push([mixture[i + 1] / 1000, colour(mixture[i])]);
    }
    const words = data.lengths ? whole(share * data.lengths[which]) + " of " + whole(data.lengths[which]) + " words" : "";
    const row = add(make("button", "bar three", undefined, { onclick: () => go("document", which), title: words }), label(data.names[which]), track(parts), figure(share >= 0.995 && data.lengths ? whole(data.lengths[which]) + " words" : percent(share), words));
    return data.texts ? add(make("div", "told-of"), row, spoken(which)) : row;
  }
  /* The text, with the words that are mostly used by one topic underlined in its colour. */
  function spoken(which) {
    const box = make("p", "text");
    data.texts[which].split(/([\p{L}\p{N}_]+)/u).forEach((word, i) => {
      const uses = i % 2 ? data.uses[places.get(word.toLowerCase())] : undefined;
      if (!uses || !uses.length || uses[1] < SPEAKS) return box.append(word);
      const mark = make("u", "", word, { title: percent(uses[1] / 100) + " of its use is in topic " + uses[0] + ": " + labels[uses[0]] });
      mark.style.textDecorationColor = colour(uses[0]);
      box.append(mark);
    });
    return box;
  }
  function topicBar(topic, share, most) {
    const row = make("button", "bar three", undefined, { onclick: () => go("topic", topic), title: labels[topic] });
    const name = add(make("span", "label"), badge(topic), document.createTextNode(" " + labels[topic]));
    return add(row, name, track([[share / most, colour(topic)]]), figure(percent(share)));
  }
  function documentView(box, which) {
    back(box);
    add(box, add(make("div", "head"), make("h2", "", one(data.names[which]))));
    if (data.texts) box.append(spoken(which));
    const mixture = data.mixtures[which], pairs = [];
    for (let i = 0; i < mixture.length; i += 2) pairs.push([mixture[i], mixture[i + 1] / 1000]);
    box.append(make("p", "told", (data.lengths ? whole(data.lengths[which]) + " words · " : "") + pairs.length + (pairs.length === 1 ? " topic" : " topics") + " of at least 1 %"));
    const mix = make("div", "mix");
    pairs.forEach(([topic, share]) => {
      const part = make("b", "", undefined, { title: "topic " + topic + ", " + percent(share) });
      part.style.width = 100 * share + "%";
      part.style.background = colour(topic);
      mix.append(part);
    });
    add(box, mix, ...pairs.map(([topic, share]) => topicBar(topic, share, 1)));
    return new Set(pairs.map(([topic]) => topic));
  }
  function termView(box, term) {
    back(box);
    add(box, add(make("div", "head"), make("h2", "", one(data.vocabulary[term]))));
    const uses = data.uses[term], pairs = [];
    for (let i = 0; i < uses.length; i += 2) pairs.push([uses[i], uses[i + 1] / 100]);
    box.append(make("p", "told", percent(data.everywhere[term]) + " of all words, one in " + whole(1 / Math.max(data.everywhere[term], 1e-30))));
    add(box, make("h3", "", "Topics that use it"), make("p", "told", "How much of its use is in each topic; below 3 % not shown."), ...pairs.map(([topic, share]) => topicBar(topic, share, 1)));
    if (!pairs.length) box.append(make("p", "told", "No topic stands out."));
    return new Set(pairs.map(([topic]) => topic));
  }
  function show(kind, which) {
    shown = { kind, which };
    const box = at("chosen");
    box.replaceChildren();
    if (kind === "topic") { topicView(box, which); mark(new Set([which])); }
    if (kind === "document") mark(new Set(), documentView(box, which));
    if (kind === "term") mark(new Set(), termView(box, which));
    stripes();
    root.dataset.shown = kind + "-" + which;
  }
  function go(kind, which) {
    const there = "#" + kind + "-" + which;
    if (location.hash !== there) history.pushState(null, "", there);
    show(kind, which);
    at("found").hidden = true;
    const box = at("chosen").getBoundingClientRect();
    if (box.top < 0 || box.top > window.innerHeight * 0.6) at("chosen").scrollIntoView({ block: "start" });
  }
  function fromAddress() {
    const found = /^#(topic|document|term)-(\d+)$/.exec(location.hash);
    const limits = { topic: data.k, document: data.names.length, term: data.vocabulary.length };
    if (found && +found[2] < limits[found[1]]) show(found[1], +found[2]);
    else show("topic", topics[0]);
  }

  /* ---- search ---- */
  const lower = { term: data.vocabulary.map((t) => t.toLowerCase()), document: data.names.map((t) => t.toLowerCase()) };
  function matches(kind, asked) {
    const starts = [], holds = [];
    lower[kind].forEach((text, i) => {
      const place = text.indexOf(asked);
      if (place === 0) starts.push(i); else if (place > 0) holds.push(i);
    });
    if (kind === "term") for (const group of [starts, holds]) group.sort((a, b) => (lower.term[b] === asked) - (lower.term[a] === asked) || data.everywhere[b] - data.everywhere[a]);
    return starts.concat(holds);
  }
  function search() {
    const box = at("found"), asked = at("find").value.trim().toLowerCase();
    box.replaceChildren();
    box.hidden = !asked;
    at("find").setAttribute("aria-expanded", String(!box.hidden));
    if (!asked) return;
    for (const [kind, title, all] of [["term", "terms", data.terms], ["document", "documents", data.documents]]) {
      const found = matches(kind, asked), held = lower[kind].length;
      const among = held < all ? ", among the " + whole(held) + " kept of " + whole(all) : "";
      box.append(make("p", "", found.length ? whole(found.length) + " " + title + among : "no " + title.slice(0, -1) + among));
      found.slice(0, MOST_FOUND).forEach((which) => {
        const uses = kind === "term" ? data.uses[which] : data.mixtures[which];
        const row = make("button", "", undefined, { onclick: () => go(kind, which) });
        row.setAttribute("role", "option");
        const first = make("span");
        for (let i = 0; i < Math.min(6, uses.length); i += 2) first.append(badge(uses[i]), " ");
        box.append(add(row, make("span", "", one(kind === "term" ? data.vocabulary[which] : data.names[which])), first));
      });
    }
    const first = box.querySelector("button");
    if (first) first.classList.add("on");
  }
  at("find").addEventListener("input", search);
  at("find").addEventListener("focus", search);
  at("find").addEventListener("keydown", (event) => {
    const options = [...at("found").querySelectorAll("button")];
    const now = options.findIndex((option) => option.classList.contains("on"));
    const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") at("found").hidden = true;
    if (event.key === "Enter" && options[now]) options[now].click();
    if (!step || !options.length) return;
    event.preventDefault();
    options.forEach((option) => option.classList.remove("on"));
    const next = options[Math.max(0, Math.min(options.length - 1, now + step))];
    next.classList.add("on");
    next.scrollIntoView({ block: "nearest" });
  });
  document.addEventListener("click", (event) => { if (!event.target.closest(".search")) at("found").hidden = true; });

  /* ---- light and dark ---- */
  function paint() {
    root.dataset.theme = theme || (dark.matches ? "dark" : "light");
  }
  at("theme").addEventListener("click", () => { theme = root.dataset.theme === "dark" ? "light" : "dark"; paint(); });
  dark.addEventListener("change", paint);
  window.addEventListener("beforeprint", () => { root.dataset.theme = "light"; });
  window.addEventListener("afterprint", paint);
  window.matchMedia("print").addEventListener("change", (event) => { if (event.matches) root.dataset.theme = "light"; else paint(); });
  window.addEventListener("popstate", fromAddress);
  window.addEventListener("resize", stripes);
  at("stripes").addEventListener("click", (event) => { const topic = under(event); if (topic !== null) go("topic", topic); });
  at("stripes").addEventListener("mousemove", (event) => { const topic = under(event); at("stripes").title = topic === null ? "" : "topic " + topic + ": " + labels[topic]; });

  paint();
  at("topics-told").textContent = "by share of " + (data.byWords ? "words" : "documents");
  at("strip-told").textContent = "side by side, those of like mixture together";
  list();
  fromAddress();
  root.dataset.drawn = String(data.k);
})();
