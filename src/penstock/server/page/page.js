// What a Penstock server does, as it does it. Needs no build and no other file. Text of others is only ever set as text.

/**
 * @typedef {{blocks: Record<string, number> | null, usable: boolean | null}} Tier
 * @typedef {[from: string, to: string, bytes: number, inFlight: number]} Flow
 * @typedef {{version: string, started_s: number, models: string[], tiers: string[], block_tokens: number,
 *   max_model_len: number, bounds_s: {first_token: number[], between_tokens: number[]}}} Facts
 * @typedef {{at: number, status: string, requests: Record<string, number>, finished: Record<string, number>,
 *   refused: Record<string, number>, prompt_tokens: Record<string, number>, generated_tokens: number,
 *   tiers: Record<string, Tier>, flows: Flow[], first_token: number[], between_tokens: number[], retractions: number,
 *   failures: Record<string, number> | null, checksum_failures: Record<string, number> | null,
 *   skipped_saves: Record<string, number> | null, findings: Record<string, number>,
 *   drafts: [number[], number[]] | null, experts: Experts | null}} Figures
 * @typedef {{num_slots: number, num_experts: number, hit: number, missed: number, guessed: number, guesses_used: number,
 *   copied_bytes: number, waited_s: number}} Experts
 * @typedef {Record<string, number>} Source
 * @typedef {{id: string, route: string, arrived_s: number, state: string, ended: boolean, prompt_tokens: number,
 *   source: Source | null, first_s: number | null, tokens: number | null, total_s: number | null}} Row
 * @typedef {{id: string, route: string, arrived_s: number, matched_s: number, states: [string, number][],
 *   num_omitted: number, prompt_tokens: number, source: Source | null, loaded_s: number, first_s: number | null,
 *   ended_s: number | null, finish: string | null,
 *   totals: [written: number, drafted: number, accepted: number] | null}} Life
 * @typedef {{name: string, from: number, to: number}} Phase
 */

const SOURCES = ["device", "host", "ssd", "remote", "computed"];
/** @type {Record<string, string>} */
const PLACES = { device: "device memory", host: "host memory", ssd: "disk", remote: "shared store", states: "kept states", "ssd states": "states on disk", "remote states": "states in the store" };
const UNKNOWN = "–";
const MOST_ROWS = 200; // as the server
const MOST_SAID = 60; // messages in the chat
const BIN_S = 5;
const MOST_BINS = 60;
const SILENT_S = 5;
const HUNG_S = 30;
const SVG = "http://www.w3.org/2000/svg";

// ------------------------------------------------------------------------------------------------ elements, words

/** @param {string} id @returns {any} */
const at = (id) => document.getElementById(id);

/** @param {string} tag @param {string} [className] @param {string} [text] @returns {any} */
function make(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

/** Only where it differs: a screen reader is told of changes. @param {any} element @param {string | number} text */
function say(element, text) {
  if (element.textContent !== String(text)) element.textContent = String(text);
}

/** As many children as there are items, made once and used again.
 * @template T @param {any} parent @param {T[]} items @param {() => any} add @param {(child: any, item: T) => void} show */
function each(parent, items, add, show) {
  while (parent.children.length > items.length) parent.lastChild.remove();
  while (parent.children.length < items.length) parent.append(add());
  items.forEach((item, index) => show(parent.children[index], item));
}

const numbers = new Intl.NumberFormat("en");
/** @param {number | null | undefined} value */
const number = (value) => (value === null || value === undefined ? UNKNOWN : numbers.format(Math.round(value)));

/** @param {number | null | undefined} seconds */
function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds < 0.9995) return `${Number((seconds * 1e3).toFixed(seconds < 0.0095 ? 1 : 0))} ms`;
  return seconds < 120 ? `${Number(seconds.toFixed(seconds < 10 ? 2 : 1))} s` : `${Math.round(seconds / 60)} min`;
}

/** @param {number} bytes */
function size(bytes) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let index = 0;
  for (; bytes >= 1000 && index < units.length - 1; index++) bytes /= 1000;
  return `${bytes >= 100 || index === 0 ? Math.round(bytes) : bytes.toFixed(1)} ${units[index]}`;
}

/** @param {number} seconds since 1970 */
const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

/** @param {Source} source */
const found = (source) => SOURCES.slice(0, -1).filter((name) => source[name]);
/** @param {Record<string, number> | number[]} counts */
const sum = (counts) => Object.values(counts).reduce((total, one) => total + one, 0);

// -------------------------------------------------------------------------------------------------------- memory

/** What the page remembers. All of it is bounded. */
class Memory {
  constructor() {
    /** Of BIN_S seconds each; null: not known. @type {{start: number, tokens: number[] | null}[]} */
    this.bins = [];
    /** @type {Figures[]} the last seconds, for rates */
    this.recent = [];
    /** @type {Figures[]} one per bin */
    this.sampled = [];
  }

  /** @param {Figures} figures */
  add(figures) {
    const newest = this.recent[this.recent.length - 1];
    const before = newest && figures.at - newest.at < 2 * BIN_S ? newest : null; // after a gap it is not known when tokens came
    this.recent = before ? [...this.recent.slice(-4), figures] : [figures];
    const start = Math.floor(figures.at / BIN_S) * BIN_S;
    let last = this.bins[this.bins.length - 1];
    if (!last || last.start < start) {
      for (let next = last ? last.start + BIN_S : start; next < start; next += BIN_S) this.bins.push({ start: next, tokens: null });
      last = { start, tokens: SOURCES.map(() => 0) };
      this.bins = [...this.bins, last].slice(-MOST_BINS);
      this.sampled = [...this.sampled, figures].slice(-MOST_BINS);
    }
    const tokens = last.tokens;
    if (before && tokens) {
      SOURCES.forEach((name, index) => {
        tokens[index] += Math.max(0, (figures.prompt_tokens[name] ?? 0) - (before.prompt_tokens[name] ?? 0));
      });
    }
  }

  /** Bytes a second, from one tier to another. @param {string} from @param {string} to */
  rate(from, to) {
    return this.speed((one) => one.flows.find((flow) => flow[0] === from && flow[1] === to)?.[2] ?? 0);
  }

  /** A second, of a total; null: not known yet. @param {(one: Figures) => number} total */
  speed(total) {
    const first = this.recent[0];
    const last = this.recent[this.recent.length - 1];
    return last.at > first.at ? (total(last) - total(first)) / (last.at - first.at) : null;
  }
}

// ---------------------------------------------------------------------------------------------------------- tiers

const WATER = ["active", "reserved", "pinned", "idle", "used"]; // from the bottom

/** @param {Figures} figures @param {Facts} facts @param {Memory} memory */
function showTiers(figures, facts, memory) {
  const names = Object.keys(figures.tiers).sort((a, b) => Number(!facts.tiers.includes(a)) - Number(!facts.tiers.includes(b)));
  each(at("tiers"), names, addTier, (item, name) => {
    const tier = figures.tiers[name];
    const isFenced = tier.usable === false;
    item.className = `tier ${name}${isFenced ? " fenced" : ""}`;
    const hasPipe = name !== "device" && facts.tiers.includes(name);
    showPipe(item.firstChild, hasPipe ? [name === "host" ? "device" : "host", name] : null, figures, memory);
    const [tank, title, level, counts] = item.lastChild.children;
    say(title, PLACES[name] ?? name);
    const blocks = tier.blocks;
    tank.classList.toggle("unsized", !blocks);
    const total = blocks ? sum(blocks) : 0;
    const filled = blocks ? total - (blocks.free ?? 0) : 0;
    for (const water of tank.children) {
      const share = total ? ((blocks?.[water.dataset.state] ?? 0) / total) * 100 : 0;
      water.style.height = share ? `max(3px, ${share}%)` : "0";
      water.hidden = !share;
    }
    const shown = blocks ? `${percent(filled, total)} full` : "usable";
    say(level, isFenced ? "fenced off" : shown);
    const states = blocks ? Object.entries(blocks).filter(([, num]) => num).map(([state, num]) => `${number(num)} ${state}`) : [];
    const size = blocks ? `of ${number(total)} ${facts.tiers.includes(name) ? "blocks" : "states"}: ${states.join(", ")}` : "a store sets its own limit";
    say(counts, isFenced ? "does not answer; treated as empty until a probe succeeds" : size);
    tank.setAttribute("aria-label", `${PLACES[name] ?? name}: ${level.textContent}, ${counts.textContent}`);
  });
}

/** @param {number} part @param {number} whole */
function percent(part, whole) {
  const share = whole ? (part / whole) * 100 : 0;
  return part && share < 1 ? "under 1 %" : `${Math.floor(share)} %`;
}

function addTier() {
  const item = make("li");
  const pipe = make("div", "pipe");
  for (const way of ["there", "back"]) {
    const flow = make("div", `flow ${way}`);
    flow.append(make("b"), make("div", "channel"), make("strong"), make("span"));
    pipe.append(flow);
  }
  const place = make("div", "place");
  const tank = make("div", "tank");
  tank.setAttribute("role", "img");
  for (const state of WATER) {
    const water = make("div", `water ${state}`);
    water.dataset.state = state;
    tank.append(water);
  }
  place.append(tank, make("h3"), make("p", "level"), make("p"));
  item.append(pipe, place);
  return item;
}

/** @param {any} pipe @param {string[] | null} ends @param {Figures} figures @param {Memory} memory */
function showPipe(pipe, ends, figures, memory) {
  pipe.hidden = !ends;
  if (!ends) return;
  [ends, [ends[1], ends[0]]].forEach(([from, to], index) => {
    const [title, channel, rate, note] = pipe.children[index].children;
    const flow = figures.flows.find((one) => one[0] === from && one[1] === to);
    const speed = memory.rate(from, to);
    say(title, index ? `${to} ← ${from}` : `${from} → ${to}`);
    channel.classList.toggle("moving", Boolean(speed || flow?.[3]));
    say(rate, speed === null ? UNKNOWN : speed ? `${size(speed)}/s` : "still");
    say(note, flow?.[3] ? `${flow[3]} in flight` : `${size(flow?.[2] ?? 0)} so far`);
  });
}

// ---------------------------------------------------------------------------------------------------------- plots

/** @param {string} tag @param {Record<string, string | number>} attributes */
function draw(tag, attributes) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  return made;
}

/** A table that says the same as a plot. @param {string[]} titles */
function makeTable(titles) {
  const details = make("details");
  const table = make("table");
  const head = make("tr");
  for (const title of titles) {
    const cell = make("th", "", title);
    cell.scope = "col";
    head.append(cell);
  }
  const thead = make("thead");
  thead.append(head);
  table.append(thead, make("tbody"));
  details.append(make("summary", "", "As a table"), table);
  return details;
}

/** Nothing while it is closed. @param {any} details @param {(string | number)[][]} rows */
function fillTable(details, rows) {
  if (!details.open) return;
  const addRow = () => make("tr");
  each(details.querySelector("tbody"), rows, addRow, (row, cells) => each(row, cells, () => make("td"), say));
}

/** @param {any} place */
function sourcesPlot(place) {
  const svg = draw("svg", { class: "plot", viewBox: `0 0 ${MOST_BINS} 100`, preserveAspectRatio: "none", role: "img" });
  const known = svg.appendChild(draw("path", { class: "known" }));
  const paths = SOURCES.map((name) => svg.appendChild(draw("path", { class: name })));
  const most = make("span");
  const above = make("p", "axis");
  above.append(most);
  const axis = make("p", "axis");
  const gaps = make("span", "", "hatched: not watched");
  axis.append(make("span", "", "5 min ago"), gaps, make("span", "", "now"));
  const legend = make("p", "legend");
  const table = makeTable(["at", ...SOURCES]);
  place.append(above, svg, axis, legend, table);
  return (/** @type {Memory} */ memory, /** @type {Figures} */ figures) => {
    const bins = memory.bins;
    const highest = Math.max(1, ...bins.map((bin) => (bin.tokens ? sum(bin.tokens) : 0)));
    const first = bins.length - MOST_BINS;
    const level = bins.map(() => 0);
    const watched = bins.flatMap((bin, place) => (bin.tokens ? [`M${place - first} 0h1v100h-1z`] : []));
    known.setAttribute("d", watched.join(""));
    gaps.hidden = watched.length === MOST_BINS;
    SOURCES.forEach((_, index) => {
      let line = "";
      bins.forEach((bin, place) => {
        const height = bin.tokens ? (bin.tokens[index] / highest) * 96 : 0;
        if (height) line += `M${place - first} ${100 - level[place]}h1v${-height}h-1z`;
        level[place] += height;
      });
      paths[index].setAttribute("d", line);
    });
    say(most, `up to ${number(highest / BIN_S)} tokens a second`);
    const seen = SOURCES.map((_, index) => bins.reduce((total, bin) => total + (bin.tokens?.[index] ?? 0), 0));
    const shown = SOURCES.filter((name, index) => seen[index] || figures.prompt_tokens[name] || name === "computed");
    each(legend, shown, addKey, (key, name) => {
      key.firstChild.className = `key ${name}`;
      say(key.lastChild, `${name} ${number(seen[SOURCES.indexOf(name)])}`);
    });
    svg.setAttribute("aria-label", `Prompt tokens since this page was opened, 5 minutes at most: ${legend.textContent}`);
    fillTable(table, bins.slice(-12).map((bin) => [clock(bin.start), ...(bin.tokens ?? SOURCES.map(() => UNKNOWN))]));
  };
}

function addKey() {
  const key = make("span");
  key.append(make("span", "key"), make("span"));
  return key;
}

/** @param {any} place @param {"first_token" | "between_tokens"} name */
function histogram(place, name) {
  const bars = make("div", "bars");
  bars.setAttribute("role", "img");
  const ticks = make("div", "ticks");
  ticks.setAttribute("aria-hidden", "true");
  const note = make("p", "legend");
  const table = makeTable(["at most", "since the start", "last 5 minutes"]);
  place.append(bars, ticks, note, table);
  const addBar = () => {
    const bar = make("div", "bar");
    bar.append(make("i"), make("i"));
    return bar;
  };
  return (/** @type {Memory} */ memory, /** @type {Figures} */ figures, /** @type {Facts} */ facts) => {
    const bounds = facts.bounds_s[name].map(duration);
    const labels = [...bounds, "more"];
    const all = figures[name];
    const before = memory.sampled[0]?.[name] ?? all;
    const recent = all.map((count, index) => count - before[index]);
    const most = [Math.max(1, ...all), Math.max(1, ...recent)];
    each(bars, all, addBar, () => {});
    all.forEach((count, index) => {
      const [long, short] = bars.children[index].children;
      long.style.height = `${(count / most[0]) * 100}%`;
      short.style.height = `${(recent[index] / most[1]) * 100}%`;
    });
    each(ticks, labels, () => make("span"), say);
    labels.forEach((_, index) => (ticks.children[index].style.visibility = index % 3 === 1 ? "visible" : "hidden"));
    const which = sum(recent) ? recent : all;
    const when = sum(recent) ? "Last 5 minutes" : "Since the start";
    const said = (/** @type {number} */ share) => {
      const bound = bounds[boundAt(which, share)];
      return bound === undefined ? `over ${bounds[bounds.length - 1]}` : `at most ${bound}`;
    };
    const half = sum(which) ? `${when}: ${number(sum(which))}, half of them ${said(0.5)}, 95 % ${said(0.95)}.` : "None yet.";
    say(note, `${half} Wide: since the start. Narrow: last 5 minutes.`);
    bars.setAttribute("aria-label", note.textContent);
    fillTable(table, labels.map((label, index) => [label, all[index], recent[index]]));
  };
}

/** The first bound below which that share lies. @param {number[]} counts @param {number} share */
function boundAt(counts, share) {
  let left = sum(counts) * share;
  return counts.findIndex((count) => (left -= count) <= 0);
}

// -------------------------------------------------------------------------------------------------------- numbers

/** @param {any} list @param {[string, string, string][]} entries: name, value, class */
function showList(list, entries) {
  const add = () => {
    const entry = make("div");
    entry.append(make("dt"), make("dd"));
    return entry;
  };
  each(list, entries, add, (entry, [name, value, className]) => {
    entry.className = className;
    say(entry.firstChild, name);
    say(entry.lastChild, value);
  });
}

/** @param {Figures} figures @param {Memory} memory */
function showNumbers(figures, memory) {
  showList(at("states"), Object.entries(figures.requests).map(([state, num]) => [state, number(num), num ? "on" : ""]));
  const ends = [...Object.entries(figures.finished), ...Object.entries(figures.refused).map(([status, num]) => [`HTTP ${status}`, num])];
  const speed = memory.speed((one) => one.generated_tokens);
  /** @type {[string, string, string][]} */
  const counted = ends.map(([reason, num]) => [`ended: ${reason}`, number(Number(num)), ""]);
  showList(at("ends"), [["output tokens a second", number(speed), ""], ...counted]);
  /** @type {[string, string, string][]} */
  const troubles = [["retractions", number(figures.retractions), ""]];
  for (const [name, tier] of Object.entries(figures.tiers)) {
    if (tier.usable !== null) troubles.push([`breaker of ${name}`, tier.usable ? "closed: in use" : "open: fenced off", tier.usable ? "" : "bad"]);
  }
  /** @param {string} what @param {Record<string, number> | null} counts */
  const add = (what, counts) => {
    if (counts === null) return;
    if (!sum(counts)) troubles.push([what, "0", ""]);
    for (const [name, num] of Object.entries(counts)) if (num) troubles.push([`${what}: ${name}`, number(num), "bad"]);
  };
  add("failed transfers", figures.failures);
  add("wrong checksums", figures.checksum_failures);
  add("saves left out", figures.skipped_saves);
  if (Object.keys(figures.findings).length) add("sanitizer", figures.findings);
  showList(at("failures"), troubles);
  at("drafts-section").hidden = !figures.drafts;
  if (figures.drafts) showDrafts(figures.drafts);
  at("experts-section").hidden = !figures.experts;
  if (figures.experts) showExperts(figures.experts);
}

/** @param {[number[], number[]]} drafts */
function showDrafts([verified, kept]) {
  const place = at("drafts");
  if (!place.firstChild) place.append(make("dl", "list"));
  const entries = verified.map((num, index) => [`draft ${index + 1}`, num ? `${percent(kept[index], num)} of ${number(num)} kept` : "none yet", ""]);
  showList(place.firstChild, /** @type {[string, string, string][]} */ (entries));
}

/** @param {Experts} experts */
function showExperts(experts) {
  const wanted = experts.hit + experts.missed;
  showList(at("experts"), [
    ["room on the device", `${number(experts.num_slots)} of ${number(experts.num_experts)}`, ""],
    ["found there", wanted ? `${percent(experts.hit, wanted)} of ${number(wanted)} wanted` : "none yet", ""],
    ["guesses", experts.guessed ? `${percent(experts.guesses_used, experts.guessed)} of ${number(experts.guessed)} used` : "none yet", ""],
    ["copied to the device", size(experts.copied_bytes), ""],
    ["steps waited", duration(experts.waited_s), ""],
  ]);
}

// ------------------------------------------------------------------------------------------------------- requests

class Requests {
  constructor() {
    /** @type {Map<string, Row>} */
    this.rows = new Map();
    this.chosen = "";
    this.chosenRow = "";
    at("rows").addEventListener("click", (/** @type {any} */ event) => {
      const id = event.target.closest("button")?.dataset.id;
      if (id) this.choose(id);
    });
    at("rows").addEventListener("keydown", (/** @type {any} */ event) => this.move(event));
  }

  /** @param {Row[]} rows @param {boolean} isAll */
  take(rows, isAll) {
    if (isAll) this.rows.clear();
    for (const row of rows) this.rows.set(row.id, row);
    const sorted = [...this.rows.values()].sort((a, b) => Number(a.ended) - Number(b.ended) || b.arrived_s - a.arrived_s);
    this.rows = new Map(sorted.slice(0, MOST_ROWS).map((row) => [row.id, row]));
  }

  /** Rows of the table are used again for other requests; the focus stays on its request. */
  show() {
    const focused = /** @type {any} */ (document.activeElement)?.dataset?.id;
    const rows = [...this.rows.values()];
    at("no-rows").hidden = rows.length > 0;
    each(at("rows"), rows, addRow, (element, row) => showRow(element, row, row.id === this.chosen));
    if (focused) at("rows").querySelector(`button[data-id="${CSS.escape(focused)}"]`)?.focus({ preventScroll: true });
    const row = this.rows.get(this.chosen); // one of the chat may be here later
    if (row && (!row.ended || JSON.stringify(row) !== this.chosenRow)) {
      this.chosenRow = JSON.stringify(row);
      showLife(this.chosen);
    }
  }

  /** @param {string} id */
  choose(id) {
    this.chosen = id;
    this.chosenRow = "";
    this.show();
  }

  /** @param {any} event */
  move(event) {
    const step = { ArrowDown: 1, ArrowUp: -1 }[/** @type {string} */ (event.key)];
    const row = event.target.closest("tr");
    if (!step || !row) return;
    event.preventDefault();
    (step > 0 ? row.nextSibling : row.previousSibling)?.querySelector("button").focus();
  }
}

function addRow() {
  const row = make("tr");
  for (let index = 0; index < 6; index++) row.append(make("td"));
  const button = make("button");
  button.type = "button";
  row.children[0].append(button);
  const mix = make("span", "mix");
  mix.setAttribute("aria-hidden", "true");
  for (const name of SOURCES) mix.append(make("i", name));
  row.children[2].append(make("span"), mix);
  return row;
}

/** @param {any} element @param {Row} row @param {boolean} isChosen */
function showRow(element, row, isChosen) {
  const [arrived, state, prompt, first, answer, total] = element.children;
  element.className = isChosen ? "chosen" : "";
  const button = arrived.firstChild;
  button.dataset.id = row.id;
  button.setAttribute("aria-pressed", String(isChosen));
  say(button, clock(row.arrived_s));
  button.setAttribute("aria-label", `${clock(row.arrived_s)}, ${row.route}`);
  say(state, row.ended ? `ended: ${row.state}` : row.state);
  const cached = row.source ? row.prompt_tokens - (row.source.computed ?? 0) : null;
  say(prompt.firstChild, cached === null ? number(row.prompt_tokens) : `${number(row.prompt_tokens)}, ${percent(cached, row.prompt_tokens)} cached`);
  SOURCES.forEach((name, index) => {
    prompt.lastChild.children[index].style.width = `${((row.source?.[name] ?? 0) / row.prompt_tokens) * 100}%`;
  });
  say(first, duration(row.first_s));
  say(answer, row.tokens === null ? UNKNOWN : `${number(row.tokens)} tokens`);
  say(total, duration(row.total_s));
}

// ---------------------------------------------------------------------------------------------------- one life

/** Its phases in order; `now` is the end of one that runs. @param {Life} life @param {number} now @returns {Phase[]} */
function phasesOf(life, now) {
  const end = life.ended_s ?? now;
  /** @type {Phase[]} */
  const phases = [{ name: "matched", from: 0, to: life.matched_s }];
  life.states.forEach(([state, from], index) => {
    const to = life.states[index + 1]?.[1] ?? end;
    const first = life.first_s ?? end;
    if (state !== "running") phases.push({ name: state, from, to });
    else {
      if (from < first) phases.push({ name: "computing", from, to: Math.min(first, to) });
      if (to > first) phases.push({ name: "decoding", from: Math.max(first, from), to });
    }
  });
  return phases.filter((phase) => phase.to > phase.from);
}

/** The life in a few sentences. @param {Life} life @param {Phase[]} phases */
function story(life, phases) {
  const time = (/** @type {string} */ name) => phases.filter((one) => one.name === name).reduce((total, one) => total + one.to - one.from, 0);
  const said = [`Waited ${duration(time("waiting"))}.`];
  const source = life.source;
  if (!source) said.push(`Prompt of ${number(life.prompt_tokens)} tokens; where its KV comes from is not known yet.`);
  else {
    const from = found(source).map((name) => `${number(source[name])} in ${PLACES[name]}`);
    said.push(from.length ? `Of ${number(life.prompt_tokens)} prompt tokens matched: ${from.join(", ")}.` : "No prompt token matched.");
    const loaded = found(source).filter((name) => name !== "device");
    if (loaded.length) said.push(`Loaded ${number(loaded.reduce((total, name) => total + source[name], 0))} tokens in ${duration(life.loaded_s)}.`);
    said.push(`Computed ${number(source.computed ?? 0)} in ${duration(time("computing"))}.`);
  }
  if (life.first_s !== null) said.push(`First token after ${duration(life.first_s)}.`);
  if (time("retracted")) said.push(`Retracted for ${duration(time("retracted"))}.`);
  if (life.totals) {
    const [written, verified, kept] = life.totals;
    said.push(`Decoded ${number(written)} tokens in ${duration(time("decoding"))}.`);
    if (verified) said.push(`Of ${number(verified)} drafts ${number(kept)} were kept.`);
  }
  if (life.num_omitted) said.push(`${number(life.num_omitted)} later changes of its state were not kept.`);
  said.push(life.finish ? `Ended: ${life.finish}.` : "It still runs.");
  return said.join(" ");
}

/** @param {string} id */
async function showLife(id) {
  const place = at("life");
  if (!place.firstChild) {
    const list = make("ol", "phases");
    list.setAttribute("aria-label", "Timeline");
    place.append(make("h3"), make("p", "hint"), list);
  }
  place.hidden = false;
  const [title, told, list] = place.children;
  let reply;
  try {
    reply = await fetch(`page/requests/${encodeURIComponent(id)}`, { headers: withKey() });
  } catch {
    return; // the stream says that the connection is gone
  }
  if (requests.chosen !== id) return;
  if (!reply.ok) {
    say(title, `Request ${id}`);
    say(told, "The server no longer knows this request.");
    each(list, [], () => make("li"), () => {});
    return;
  }
  /** @type {Life} */
  const life = await reply.json();
  const now = Math.max((page.figures?.at ?? 0) - life.arrived_s, ...life.states.map((one) => one[1]));
  const phases = phasesOf(life, now);
  const whole = life.ended_s ?? now;
  say(title, `${life.route || "request"} at ${clock(life.arrived_s)} · ${life.id}`);
  say(told, story(life, phases));
  each(list, phases, addPhase, (item, phase) => {
    const bar = item.children[1].firstChild;
    item.className = phase.name;
    say(item.firstChild, phase.name);
    bar.style.left = `${(phase.from / whole) * 100}%`;
    bar.style.width = `${((phase.to - phase.from) / whole) * 100}%`;
    say(item.lastChild, duration(phase.to - phase.from));
  });
}

function addPhase() {
  const item = make("li");
  const track = make("span", "track");
  track.append(make("i"));
  item.append(make("span"), track, make("b"));
  return item;
}

// ----------------------------------------------------------------------------------------------------------- chat

class Chat {
  constructor() {
    /** @type {{role: string, content: string}[]} */
    this.messages = [];
    this.last = ["", ""]; // what was sent and what is shown of it
    /** @type {AbortController | null} */
    this.running = null;
    at("ask").addEventListener("submit", (/** @type {Event} */ event) => {
      event.preventDefault();
      this.ask(at("question").value.trim());
    });
    at("question").addEventListener("keydown", (/** @type {KeyboardEvent} */ event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        at("ask").requestSubmit();
      }
    });
    at("again").addEventListener("click", () => {
      this.messages = [];
      this.add("hint", "New chat, the same question:");
      this.send(this.last[0], this.last[1]);
    });
    at("try").addEventListener("click", () => {
      at("example").checked = true;
      this.ask("Who opened the gate at night?");
    });
    at("stop").addEventListener("click", () => this.running?.abort());
  }

  /** @param {string} className @param {string} text */
  add(className, text) {
    const said = at("said");
    while (said.children.length >= MOST_SAID) said.firstChild.remove();
    const item = make("li", className, text);
    said.append(item);
    said.scrollTop = said.scrollHeight;
    return item;
  }

  /** @param {string} question */
  async ask(question) {
    if (!question || this.running) return;
    at("question").value = "";
    if (!at("example").checked || this.messages.length) return this.send(question, question);
    const story = await (await fetch("page/example.txt")).text();
    this.send(`${story}\n\nAnswer with one sentence from the text: ${question}`, `A story, and: ${question}`);
  }

  /** @param {string} content @param {string} shown of it */
  async send(content, shown) {
    if (this.running) return;
    this.last = [content, shown];
    at("try").hidden = true;
    this.add("asked", shown);
    const answer = this.add("answer", "");
    const body = make("span");
    const from = make("span", "from", "asked; no token yet");
    answer.append(body, from);
    this.running = new AbortController();
    this.busy(true);
    const messages = [...this.messages, { role: "user", content }];
    try {
      const text = await this.stream(messages, body, from, this.running.signal);
      this.messages = [...messages, { role: "assistant", content: text }];
    } catch (error) {
      from.classList.add("wrong");
      say(from, this.running.signal.aborted ? "stopped" : String(/** @type {any} */ (error).message ?? error));
    }
    this.running = null;
    this.busy(false);
  }

  /** @param {boolean} isBusy */
  busy(isBusy) {
    at("send").disabled = isBusy;
    at("again").disabled = isBusy;
    at("stop").hidden = !isBusy;
  }

  /** @param {{role: string, content: string}[]} messages @param {any} body @param {any} from @param {AbortSignal} signal */
  async stream(messages, body, from, signal) {
    const asked = performance.now();
    const request = { model: page.facts?.models[0], messages, stream: true, stream_options: { include_usage: true }, temperature: 0, max_tokens: 96 };
    const headers = { ...withKey(), "content-type": "application/json" };
    const reply = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(request), signal });
    if (!reply.ok) throw new Error(await messageOf(reply));
    let first = 0;
    let text = "";
    for await (const data of eventsOf(reply)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content;
      if (piece) {
        first ||= performance.now() - asked;
        text += piece;
        say(body, text);
        at("said").scrollTop = at("said").scrollHeight;
      }
      if (event.usage) {
        tell(from, event.usage, first ? first / 1e3 : null);
        requests.choose(`${event.id.replace(/^chatcmpl-/, "")}-0`);
      }
    }
    return text;
  }
}

/** Where the KV of an answered prompt came from. @param {any} place @param {any} usage @param {number | null} first */
function tell(place, usage, first) {
  const source = usage.prompt_tokens_details.kv_source;
  const total = number(usage.prompt_tokens);
  const from = found(source).map((name) => `${number(source[name])} of ${total} prompt tokens from ${PLACES[name]}`);
  place.className = `from ${found(source)[0] ?? "computed"}`;
  const told = from.length ? from.join(", ") : `all ${total} prompt tokens computed`;
  place.replaceChildren(make("b", "", told), `; first token after ${duration(first)}`);
}

// ----------------------------------------------------------------------------------------------------- connection

const KEY = "penstock-key";
/** @returns {Record<string, string>} */
function withKey() {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** @param {Response} reply */
async function messageOf(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

/** The data of server-sent events. @param {Response} reply @returns {AsyncGenerator<string>} */
async function* eventsOf(reply) {
  const reader = /** @type {ReadableStream<Uint8Array>} */ (reply.body).getReader();
  const decoder = new TextDecoder();
  let left = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (left + decoder.decode(value, { stream: true })).split("\n\n");
    left = /** @type {string} */ (events.pop());
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

class Page {
  constructor() {
    /** @type {Facts | null} */
    this.facts = null;
    /** @type {Figures | null} */
    this.figures = null; // the last that are known
    this.memory = new Memory();
    this.isPaused = false;
    this.heard = 0; // performance.now() of the last event
    this.plots = [sourcesPlot(at("sources")), histogram(at("first"), "first_token"), histogram(at("between"), "between_tokens")];
  }

  /** @param {any} event */
  take(event) {
    this.heard = performance.now();
    if (event.facts) {
      if (this.facts && this.facts.started_s !== event.facts.started_s) this.memory = new Memory(); // another server
      this.facts = /** @type {Facts} */ (event.facts);
      const names = event.facts.models;
      say(at("model"), names.length > 1 ? `${names[0]} and ${names.length - 1} more names` : names[0]);
      say(at("about"), `Penstock ${event.facts.version}. Blocks of ${event.facts.block_tokens} tokens, contexts of ${number(event.facts.max_model_len)}. Totals are since ${new Date(event.facts.started_s * 1000).toLocaleString("en-GB")}.`);
    }
    requests.take(event.all ?? event.changed, Boolean(event.all));
    if (!event.figures.requests) {
      this.tell("lost", `The engine does not answer: ${event.figures.status}. Showing ${this.shown()}.`);
      return;
    }
    this.figures = /** @type {Figures} */ (event.figures);
    this.memory.add(this.figures);
    if (this.isPaused) return;
    this.tell("live", this.figures.status === "ready" ? "Live" : this.figures.status, clock(this.figures.at));
    this.show();
  }

  show() {
    if (!this.figures || !this.facts) return;
    showTiers(this.figures, this.facts, this.memory);
    for (const plot of this.plots) plot(this.memory, this.figures, this.facts);
    showNumbers(this.figures, this.memory);
    requests.show();
  }

  shown() {
    return this.figures ? `figures of ${clock(this.figures.at)}` : "nothing yet";
  }

  /** @param {"live" | "lost" | "waiting"} state @param {string} text @param {string} [retry] not read aloud */
  tell(state, text, retry = "") {
    document.body.className = state;
    say(at("link-text"), text);
    say(at("retry"), retry);
  }

  /** @param {boolean} isPaused */
  pause(isPaused) {
    this.isPaused = isPaused;
    at("pause").setAttribute("aria-pressed", String(isPaused));
    if (isPaused) this.tell("waiting", `Paused, showing ${this.shown()}`);
    else this.show();
  }

  /** Until the key is refused: follow the server, and begin again when the connection is gone. */
  async follow() {
    for (let attempt = 0; ; attempt++) {
      const control = new AbortController();
      const watch = setInterval(() => this.lookForNews(control), 1000);
      let why = "Connection lost";
      this.heard = performance.now();
      at("forget").hidden = !sessionStorage.getItem(KEY);
      try {
        const reply = await fetch("page/events", { headers: withKey(), signal: control.signal });
        if (reply.status === 401) return this.askForKey();
        if (!reply.ok) why = await messageOf(reply);
        else {
          at("main").hidden = false;
          for await (const data of eventsOf(reply)) {
            attempt = 0;
            this.take(JSON.parse(data));
          }
        }
      } catch (error) {
        if (error instanceof SyntaxError) why = "The server sent what is no event";
      } finally {
        clearInterval(watch);
        control.abort();
      }
      for (let left = Math.min(30, 2 ** Math.min(attempt, 5)); left > 0; left--) {
        this.tell("lost", `${why}, showing ${this.shown()}`, `, retrying in ${left} s`);
        await new Promise((resolve) => setTimeout(resolve, 1000));
      }
    }
  }

  /** @param {AbortController} control */
  lookForNews(control) {
    const silent_s = (performance.now() - this.heard) / 1e3;
    if (silent_s > HUNG_S) control.abort();
    else if (silent_s > SILENT_S) this.tell("lost", `No news from the server, showing ${this.shown()}`, `, for ${Math.round(silent_s)} s`);
  }

  askForKey() {
    const wasWrong = sessionStorage.getItem(KEY);
    sessionStorage.removeItem(KEY);
    at("main").hidden = true;
    at("forget").hidden = true;
    at("key").hidden = false;
    this.tell("waiting", wasWrong ? "The server refused that key" : "A key is needed");
    at("key-input").focus();
  }
}

const requests = new Requests();
const page = new Page();
new Chat();
each(at("tank-legend"), [...WATER.slice(0, 4), "free"], addKey, (key, state) => {
  key.firstChild.className = `key ${state}`;
  say(key.lastChild, { active: "active: in use", reserved: "reserved: for a step", pinned: "pinned: by a transfer or snapshot", idle: "idle or used: cached", free: "free" }[state] ?? state);
});
at("pause").addEventListener("click", () => page.pause(!page.isPaused));
at("forget").addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  location.reload();
});
at("key").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, at("key-input").value);
  at("key-input").value = "";
  at("key").hidden = true;
  page.follow();
});
page.tell("waiting", "Connecting");
page.follow();
