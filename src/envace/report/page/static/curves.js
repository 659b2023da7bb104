"use strict";
// Curves over steps, several runs in each. A run has a colour and a dash, so it can be told without colour.

const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [14, 4], [4, 4]];
const MAIN_METRICS = [
  ["reward/mean", "mean reward"],
  ["reward/success", "success in rehearsal"],
  ["eval/real_success", "real success, held out"],
  ["eval/rehearsed_success", "rehearsed success, held out"],
  ["eval/imagination_gap", "imagination gap"],
  ["loss/kl", "KL to the reference"],
  ["loss/entropy", "entropy"],
  ["rollout/act_tokens", "tokens of an ACT output"],
  ["rollout/rehearse_tokens", "tokens of a REHEARSE output"],
  ["rollout/sequence_length", "sequence length"],
  ["throughput/sampled_tokens_per_second", "sampled tokens per second"],
  ["throughput/trained_tokens_per_second", "trained tokens per second"],
  ["status/parse_error", "share of parse errors"],
  ["loss/sft", "SFT loss"],
];

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const Curves = {
  plots: [],

  start(runs) {
    this.runs = runs;
    const events = runs.flatMap((run) => run.events.map((event) => el("li", {}, el("b", {}, plain(run.name)), " ", plain(event))));
    document.getElementById("events").replaceChildren(...events);
    const all = document.getElementById("all-metrics");
    const filter = document.getElementById("metric-filter");
    all.addEventListener("change", () => this.draw());
    filter.addEventListener("input", () => this.draw());
    new ResizeObserver(() => this.resize()).observe(document.getElementById("charts"));
    this.draw();
  },

  /** {stage: {metric: [{run, xs, ys}]}} in order of first appearance. */
  series() {
    const stages = new Map();
    this.runs.forEach((run, number) => {
      for (const record of run.metrics) {
        if (!stages.has(record.stage)) stages.set(record.stage, new Map());
        const metrics = stages.get(record.stage);
        for (const [key, value] of Object.entries(record)) {
          if (key === "stage" || key === "step" || key === "time") continue;
          if (!metrics.has(key)) metrics.set(key, new Map());
          if (!metrics.get(key).has(number)) metrics.get(key).set(number, new Map());
          metrics.get(key).get(number).set(record.step, Number(value));
        }
      }
    });
    return stages;
  },

  draw() {
    const everything = document.getElementById("all-metrics").checked;
    const wanted = document.getElementById("metric-filter").value.trim();
    const titles = new Map(MAIN_METRICS);
    this.plots.forEach((plot) => plot.destroy());
    this.plots = [];
    const legend = this.runs.map((run, i) => {
      const line = el("i", { class: `swatch run${i % 6}` });
      return el("span", { class: "run" }, line, plain(run.name));
    });
    document.getElementById("legend").replaceChildren(...legend);
    const charts = document.getElementById("charts");
    const single = document.getElementById("single");
    charts.replaceChildren();
    single.replaceChildren();
    for (const [stage, metrics] of this.series()) {
      const names = [...metrics.keys()].filter((n) => (wanted ? n.includes(wanted) : everything || titles.has(n)));
      const order = MAIN_METRICS.map(([name]) => name);
      if (!everything && !wanted) names.sort((a, b) => order.indexOf(a) - order.indexOf(b));
      const isCurve = (name) => [...metrics.get(name).values()].some((points) => points.size > 1);
      for (const name of names.filter(isCurve)) charts.append(this.card(stage, name, titles.get(name), metrics.get(name)));
      const rest = [...metrics.keys()].filter((n) => !isCurve(n) && (!wanted || n.includes(wanted)));
      if (rest.length) single.append(this.table(stage, rest, metrics));
    }
    if (!charts.childElementCount && !single.childElementCount)
      charts.append(el("p", { class: "empty" }, wanted ? "No metric has this in its name." : "No metrics were recorded."));
    this.lazily();
  },

  card(stage, name, title, byRun) {
    const card = el("figure", { class: "card" }, el("figcaption", {}, el("b", {}, title ?? plain(name)), el("small", {}, `${plain(stage)} · ${plain(name)}`)));
    const last = el("div", { class: "last" });
    for (const [run, points] of byRun) {
      const value = [...points.values()].at(-1);
      last.append(el("span", { class: `value run-text${run % 6}`, title: plain(this.runs[run].name) }, show(value)));
    }
    card.append(last);
    const host = el("div", { class: "plot" });
    card.append(host);
    card.plot = () => this.plot(host, byRun);
    return card;
  },

  /** A chart is drawn when it comes into view. */
  lazily() {
    this.watch?.disconnect();
    this.watch = new IntersectionObserver((entries) => {
      for (const entry of entries.filter((e) => e.isIntersecting)) {
        this.watch.unobserve(entry.target);
        entry.target.plot();
      }
    }, { rootMargin: "200px" });
    document.querySelectorAll("#charts .card").forEach((card) => this.watch.observe(card));
  },

  plot(host, byRun) {
    const steps = [...new Set([...byRun.values()].flatMap((points) => [...points.keys()]))].sort((a, b) => a - b);
    const rows = [...byRun].map(([, points]) => steps.map((s) => (Number.isFinite(points.get(s)) ? points.get(s) : null)));
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 }, font: "11px system-ui" };
    const series = [...byRun].map(([run]) => ({
      label: plain(this.runs[run].name),
      stroke: colour(`--run${run % 6}`),
      dash: DASHES[run % 6],
      width: 2,
      spanGaps: true,
      points: { show: steps.length < 40, size: 5 },
      value: (u, v) => (v === null ? "–" : show(v)),
    }));
    const options = {
      width: host.clientWidth, height: 190, legend: { show: true, live: true }, cursor: { y: false, sync: { key: "steps" } },
      scales: { x: { time: false } }, axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 5000] }, { ...axis, size: 56, values: (u, ticks) => ticks.map((v) => show(v, 3)) }],
      series: [{ label: "step" }, ...series],
    };
    this.plots.push(new uPlot(options, [steps, ...rows], host));
  },

  resize() {
    for (const plot of this.plots) {
      const width = plot.root.parentElement.clientWidth;
      if (width) plot.setSize({ width, height: 190 });
    }
  },

  table(stage, names, metrics) {
    const table = el("table", {}, el("caption", {}, `${plain(stage)}: recorded once`));
    table.append(el("tr", {}, el("th", {}, "metric"), ...this.runs.map((run) => el("th", { scope: "col" }, plain(run.name)))));
    for (const name of names) {
      const cell = (_, i) => el("td", {}, metrics.get(name).has(i) ? show([...metrics.get(name).get(i).values()].at(-1)) : "–");
      table.append(el("tr", {}, el("th", { scope: "row" }, plain(name)), ...this.runs.map(cell)));
    }
    return el("div", { class: "scroll" }, table);
  },
};
