"use strict";
// The list of trajectories with its filters, the chosen one beside it, keys, and the hash that keeps the choice.

const ROW = 46;
const $ = (id) => document.getElementById(id);

const Browser = {
  found: [], chosen: -1, mode: "", beside: -1,

  start(runs, index) {
    this.runs = runs;
    this.index = index;
    $("total").textContent = index.length.toLocaleString("en");
    for (const name of ["run", "stage", "split", "status", "tool", "kind"]) $("selects").append(this.select(name));
    $("filters").addEventListener("input", () => this.filter());
    $("filters").addEventListener("reset", () => setTimeout(() => this.filter()));
    $("filters").addEventListener("submit", (event) => event.preventDefault());
    $("list").addEventListener("scroll", () => this.rows());
    new ResizeObserver(() => this.rows()).observe($("list"));
    this.filter();
    readTexts(() => this.words() && this.filter());
  },

  words() {
    return $("search").value.trim().toLowerCase();
  },

  values(entry, name) {
    if (name === "run") return [this.runs[entry.run].name];
    return name === "tool" ? entry.tools : [String(entry[name] ?? "")];
  },

  select(name) {
    const counts = new Map();
    for (const entry of this.index) for (const v of this.values(entry, name)) counts.set(v, (counts.get(v) ?? 0) + 1);
    const options = [...counts].sort((a, b) => (a[0] < b[0] ? -1 : 1)).map(([v, n]) => el("option", { value: v }, `${plain(v) || "none"} (${n})`));
    return el("label", {}, name, el("select", { id: `by-${name}` }, el("option", { value: "\u0000any" }, "any"), ...options));
  },

  /** Searches what has been read so far; `readTexts` calls it again. */
  filter() {
    const words = this.words();
    const selects = ["run", "stage", "split", "status", "tool", "kind"].map((name) => [name, $(`by-${name}`).value]).filter(([, v]) => v !== "\u0000any");
    const ranges = ["reward", "step"].map((name) => [name, $(`${name}-low`).value, $(`${name}-high`).value]).filter(([, low, high]) => low || high);
    const within = (value, low, high) => typeof value === "number" && (!low || value >= Number(low)) && (!high || value <= Number(high));
    const bad = $("bad").checked;
    this.found = [];
    this.index.forEach((entry, i) => {
      if (bad && !entry.bad) return;
      if (!selects.every(([name, value]) => this.values(entry, name).includes(value))) return;
      if (!ranges.every(([name, low, high]) => within(entry[name], low, high))) return;
      if (words && !texts[i]?.includes(words)) return;
      this.found.push(i);
    });
    const isReading = words && texts.length < this.index.length;
    $("count").textContent = `${this.found.length.toLocaleString("en")} of ${this.index.length.toLocaleString("en")} trajectories${isReading ? ", searching …" : ""}`;
    $("sizer").style.height = `${this.found.length * ROW}px`;
    if (!isReading) $("list").scrollTop = 0;
    this.rows();
  },

  rows() {
    const first = Math.max(0, Math.floor($("list").scrollTop / ROW) - 3);
    const last = Math.min(this.found.length, first + Math.ceil($("list").clientHeight / ROW) + 6);
    const rows = [];
    for (let at = first; at < last; at++) {
      const i = this.found[at], entry = this.index[i];
      const row = el("div", { class: "row", role: "option", "aria-selected": String(i === this.chosen), "data-at": i, onclick: () => this.choose(i) },
        el("b", { class: entry.reward === null ? "unknown" : entry.reward >= 1 - 1e-5 ? "good" : "bad" }, entry.reward === null ? "?" : show(entry.reward, 3)),
        el("span", { class: "what" }, plain(entry.start) || plain(entry.task)),
        el("small", {}, `${plain(entry.split)} · step ${plain(entry.step)} · ${plain(entry.status)}${this.runs.length > 1 ? " · " + plain(this.runs[entry.run].name) : ""}${entry.tools.length ? " · " + plain(entry.tools.join(", ")) : ""}`));
      row.style.top = `${at * ROW}px`;
      rows.push(row);
    }
    $("sizer").replaceChildren(...rows);
  },

  /** Others of the same task in the same run, stage and step, with where each one lies among those of its split; in
   * front those that are of one execution with it, as its rehearsals are. */
  partners(i) {
    const of = this.index[i];
    const places = new Map();
    const all = this.index.flatMap((entry, at) => {
      const paired = of.execution !== null && entry.execution === of.execution;
      if (!["run", "stage", "step"].every((key) => entry[key] === of[key]) || !(paired || entry.task === of.task)) return [];
      const place = (places.get(entry.split) ?? 0) + 1;
      places.set(entry.split, place);
      return [{ at, split: entry.split, paired, name: `${plain(entry.split)} ${place} of this task${paired ? ", same execution" : ""}` }];
    });
    return all.filter(({ at }) => at !== i).sort((a, b) => b.paired - a.paired);
  },

  async choose(i, beside = -1) {
    this.chosen = i;
    this.beside = beside;
    this.keep();
    this.rows();
    await this.draw();
  },

  /** The address says what is chosen; Back leaves the page and does not go through every choice. */
  keep() {
    history.replaceState(null, "", `#t=${this.chosen}${this.beside >= 0 ? "&beside=" + this.beside : ""}`);
  },

  async draw() {
    const i = this.chosen, beside = this.beside;
    if (i < 0) return;
    const shown = await Promise.all((beside >= 0 ? [i, beside] : [i]).map(trajectoryAt));
    if (i !== this.chosen || beside !== this.beside) return;
    const order = shown[0].split === "committed" || shown[0].split === "eval-real" ? [...shown].reverse() : shown;
    const partners = this.partners(i);
    const select = el("select", { id: "beside", onchange: (event) => this.choose(i, Number(event.target.value)) },
      el("option", { value: -1 }, "nothing"), ...partners.map((p) => el("option", { value: p.at, selected: p.at === beside }, p.name)));
    const shades = ["logprobs", "ratio"].map((mode) => el("button", { id: mode, "aria-pressed": String(this.mode === mode), onclick: () => this.shade(mode) }, mode));
    const bar = el("div", { class: "bar detail-bar" }, el("button", { onclick: () => this.move(-1) }, "← previous"), el("button", { onclick: () => this.move(1) }, "next →"),
      ...shades, el("label", {}, "side by side with ", select));
    const columns = el("div", { class: order.length > 1 ? "columns two" : "columns" }, ...order.map((t) => trajectoryView(t, this.mode)));
    $("detail").replaceChildren(bar, columns);
    $("detail").scrollTop = 0;
  },

  shade(mode) {
    this.mode = this.mode === mode ? "" : mode;
    this.draw();
  },

  /** A partner of another split: of a rehearsal the committed execution, of a real evaluation the rehearsed one. */
  compare() {
    if (this.beside >= 0) return this.choose(this.chosen);
    const partners = this.partners(this.chosen);
    const other = partners.find((p) => p.split !== this.index[this.chosen].split) ?? partners[0];
    if (other) this.choose(this.chosen, other.at);
  },

  move(by) {
    const at = this.found.indexOf(this.chosen);
    const next = at < 0 ? 0 : Math.min(this.found.length - 1, Math.max(0, at + by));
    if (!this.found.length) return;
    const list = $("list");
    if (next * ROW < list.scrollTop) list.scrollTop = next * ROW;
    else if ((next + 1) * ROW > list.scrollTop + list.clientHeight) list.scrollTop = (next + 1) * ROW - list.clientHeight;
    this.choose(this.found[next]);
  },
};

const TABS = ["curves", "settings", "browser"];

function openTab(name) {
  for (const tab of TABS) {
    $(tab).hidden = tab !== name;
    $(`tab-${tab}`).setAttribute("aria-selected", String(tab === name));
  }
  if (name === "browser") {
    Browser.rows();
    if (Browser.chosen < 0) Browser.move(1);
    else Browser.keep();
  } else history.replaceState(null, "", `#${name}`);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  Curves.draw();
}

function isDark() {
  return (document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
}

const KEYS = {
  1: () => openTab("curves"), 2: () => openTab("settings"), 3: () => openTab("browser"),
  j: () => Browser.move(1), k: () => Browser.move(-1), c: () => Browser.compare(),
  p: () => Browser.shade("logprobs"), r: () => Browser.shade("ratio"),
  "/": () => { openTab("browser"); $("search").focus(); },
  "?": () => $("help").showModal(), t: () => setTheme(isDark() ? "light" : "dark"),
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  const typing = event.target.matches("input:not([type=checkbox]), select");
  if (event.key === "Escape") event.target.blur();
  else if (!typing && KEYS[event.key]) {
    event.preventDefault();
    if ("jkcpr".includes(event.key) && $("browser").hidden) openTab("browser");
    else KEYS[event.key]();
  }
}

function fromHash() {
  const chosen = /^#t=(\d+)(?:&beside=(\d+))?$/.exec(location.hash);
  if (chosen && Number(chosen[1]) < Browser.index.length) {
    const beside = chosen[2] === undefined || Number(chosen[2]) >= Browser.index.length ? -1 : Number(chosen[2]);
    Browser.chosen = Number(chosen[1]);
    openTab("browser");
    Browser.choose(Browser.chosen, beside);
  } else if (TABS.includes(location.hash.slice(1))) openTab(location.hash.slice(1));
}

(async () => {
  const [runs, index] = await Promise.all([readBlock("runs"), readBlock("index")]);
  for (const tab of TABS) $(`tab-${tab}`).addEventListener("click", () => openTab(tab));
  $("theme").addEventListener("click", KEYS.t);
  $("keys").addEventListener("click", KEYS["?"]);
  document.addEventListener("keydown", onKey);
  addEventListener("hashchange", fromHash);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => Curves.draw());
  Curves.start(runs);
  Settings.start(runs);
  Browser.start(runs, index);
  fromHash();
  document.body.dataset.ready = "true";
})();
