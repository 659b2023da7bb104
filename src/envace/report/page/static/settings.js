"use strict";
// Saved settings and library versions, run beside run; what differs is marked in words as well.

const Settings = {
  start(runs) {
    this.runs = runs;
    document.getElementById("all-settings").addEventListener("change", () => this.draw());
    this.draw();
  },

  draw() {
    const all = document.getElementById("all-settings").checked;
    const rows = [...this.rows("settings", "setting"), ...this.rows("versions", "version")];
    const shown = rows.filter((row) => all || row.differs).sort((a, b) => a.absent - b.absent);
    const differing = rows.filter((row) => row.differs).length;
    const head = el("tr", {}, ...["stage", "key", ...this.runs.map((run) => plain(run.name)), ""].map((t) => el("th", { scope: "col" }, t)));
    const body = shown.map((row) =>
      el("tr", { class: row.differs ? "differs" : "" }, el("td", {}, plain(row.stage)), el("th", { scope: "row" }, plain(row.key)),
        ...row.values.map((value) => el("td", {}, value === undefined ? "not recorded" : plain(typeof value === "string" ? value || '""' : JSON.stringify(value)))),
        el("td", {}, row.absent ? "only in some" : row.differs ? "differs" : "")));
    document.getElementById("settings-table").replaceChildren(head, ...body);
    const count = document.getElementById("settings-count");
    if (!rows.length) count.textContent = "No settings were recorded.";
    else if (this.runs.length === 1) count.textContent = `One run: nothing to compare; ${rows.length} settings and versions.`;
    else count.textContent = `${differing} of ${rows.length} settings and versions differ, ${rows.filter((row) => row.absent).length} of them because a run has no such entry.`;
  },

  rows(kind, word) {
    const stages = [...new Set(this.runs.flatMap((run) => Object.keys(run[kind])))];
    return stages.flatMap((stage) => {
      const keys = [...new Set(this.runs.flatMap((run) => Object.keys(run[kind][stage] ?? {})))];
      return keys.map((key) => {
        const values = this.runs.map((run) => run[kind][stage]?.[key]);
        const differs = values.some((value) => JSON.stringify(value) !== JSON.stringify(values[0]));
        return { stage: word === "version" ? `${stage}, version` : stage, key, values, differs, absent: values.includes(undefined) };
      });
    });
  },
};
