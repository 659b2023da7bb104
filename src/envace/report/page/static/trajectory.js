"use strict";
// One trajectory: how it was judged, then every segment with who wrote it and on what evidence.

const LABELS = {
  "act/claimed": ["ACT", "claimed"],
  "rehearse/rehearsed": ["REHEARSE", "rehearsed"],
  "context/observed": ["OBSERVED", "a real response"],
  "context/recorded": ["RECORDED", "a real response of the reference dialogue"],
  "context/simulated": ["SIMULATED", "another model's or a constant response"],
  "context/rehearsed": ["MEMORY", "rehearsed beforehand"],
  "context/given": ["GIVEN", "prompt and framing"],
  user: ["USER", "given"],
};
const CALLS = /<tool_call>/;

/** [{kind, label, note, text, segment}]; user turns inside of given text are parts of their own. */
function parts(trajectory) {
  const turns = [...(trajectory.user_turns ?? [])];
  const found = [];
  for (const segment of trajectory.segments ?? []) {
    const isRecorded = segment.evidence === "observed" && segment.provenance?.source !== undefined;
    const kind = `${segment.role}/${isRecorded ? "recorded" : segment.evidence}`;
    const [label, note] = LABELS[kind] ?? [segment.role.toUpperCase(), segment.evidence];
    let text = segment.text;
    if (kind === "context/given" && text !== undefined) {
      while (turns.length && turns[0] && text.includes(turns[0])) {
        const at = text.indexOf(turns[0]);
        if (at) found.push({ kind, label, note, text: text.slice(0, at), segment });
        found.push({ kind: "user", label: "USER", note: "given", text: turns[0], segment });
        text = text.slice(at + turns.shift().length);
      }
      if (!text && found.at(-1)?.segment === segment) continue;
    }
    const claims = segment.role === "act" && segment.finish_reason === "stop" && text !== undefined && !CALLS.test(text);
    found.push({ kind: claims ? "claim" : kind, label: claims ? "CLAIMED" : label, note: claims ? "ACT, an answer" : note, text, segment });
  }
  return found;
}

// What a shade tells, and what it is made of.
const SHADES = {
  logprobs: ["Darker is less likely: logprob at sampling.", "logprobs"],
  ratio: ["Solid line: likelier by the update, dotted: less likely; darker is more. Ratio of the probability behind the update to that at sampling.", "updated_logprobs"],
};

/** mode: "" or a key of SHADES. */
function trajectoryView(t, mode) {
  const view = el("div", { class: "trajectory" });
  const status = el("span", { class: `status ${t.status === "finished" ? "good" : "bad"}` }, plain(t.status));
  view.append(el("header", {}, el("h2", {}, plain(t.task)), el("p", {}, `${plain(t.stage)} · step ${plain(t.step)} · ${plain(t.split)}${t.kind ? " · kind " + plain(t.kind) : ""} · group ${plain(t.group_id)}`)));
  const facts = el("dl", {});
  const fact = (name, value) => facts.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  fact("status", status);
  fact("reward", el("b", {}, show(t.reward)));
  for (const [part, value] of Object.entries(t.reward_parts ?? {})) fact(plain(part), show(value));
  for (const role of ["act", "rehearse"]) fact(`advantage ${role.toUpperCase()}`, advantageOf(t, role));
  if (t.reason) fact("reason", plain(t.reason));
  view.append(facts);
  if (mode && !(t.segments ?? []).some((s) => s[SHADES[mode][1]]))
    view.append(el("p", { class: "note" }, `${mode === "ratio" ? "Ratio" : "Logprobs"} of the tokens: not recorded for this trajectory (setting record_tokens).`));
  else if (mode) view.append(el("p", { class: "note" }, `${SHADES[mode][0]} Point at a token for the number.`));
  for (const part of parts(t)) view.append(segmentView(part, mode));
  for (const prediction of t.predictions ?? [])
    view.append(el("section", { class: "segment" }, el("h3", {}, el("span", { class: "pill" }, "PREDICTION"), " dry run of a risky call"), textBlock(JSON.stringify(prediction, null, 1))));
  if ((t.verdicts ?? []).length)
    view.append(el("details", {}, el("summary", {}, "verdicts [turn][variant][step][item]"), textBlock(JSON.stringify(t.verdicts))));
  return view;
}

function advantageOf(t, role) {
  const outputs = (t.segments ?? []).filter((s) => s.role === role);
  if (!outputs.length) return "no output";
  const values = outputs.filter((s) => typeof s.advantage === "number").map((s) => show(s.advantage, 3));
  const distinct = [...new Set(values)];
  return distinct.length ? distinct.join(", ") : "not recorded";
}

function segmentView({ kind, label, note, text, segment }, mode) {
  const name = kind.replace("/", "-");
  const head = el("h3", {}, el("span", { class: "pill" }, label), el("span", {}, plain(note)));
  const facts = [text === segment.text ? `${segment.tokens} tokens` : `in ${segment.tokens} tokens`];
  if (segment.finish_reason && segment.finish_reason !== "stop") facts.push(plain(segment.finish_reason));
  if (segment.sequence) facts.push(`sequence ${segment.sequence}`);
  if (typeof segment.advantage === "number") facts.push(`advantage ${show(segment.advantage, 3)}`);
  for (const [key, value] of Object.entries(segment.provenance ?? {})) facts.push(`${plain(key)} ${plain(value)}`);
  head.append(el("small", {}, facts.join(" · ")));
  const body = text === undefined ? el("p", { class: "note" }, "Text: not recorded.") : mode && segment[SHADES[mode][1]] ? tokensView(segment, mode) : textBlock(text);
  const section = el("section", { class: `segment kind-${name}` }, head);
  if (kind === "context/given" && text !== undefined && text.length > 200) {
    const fold = el("details", {}, el("summary", {}, plain(text.trim().slice(0, 90)) + " …"));
    fold.append(body);
    section.append(fold);
  } else {
    if (kind === "context/given") section.classList.add("framing");
    section.append(body);
  }
  return section;
}

const MOST_TOKENS = 4000; // shaded at once

/** How a token is shaded, and the number behind it: [class, title]. */
function shadeOf(segment, i, mode) {
  const value = Number(segment.logprobs[i]);
  if (mode === "logprobs") return [`level${levelOf(-value * 2)}`, `logprob ${show(value)}, p ${show(Math.exp(value), 3)}`];
  const change = Number(segment.updated_logprobs[i]) - value;
  const level = levelOf(Math.abs(change) * 20); // the darkest from 25 % on
  return [`level${level}${level ? (change > 0 ? " up" : " down") : ""}`, `ratio ${show(Math.exp(change))}, logprob ${show(value)} before`];
}

const levelOf = (amount) => (Number.isFinite(amount) ? Math.min(5, Math.floor(amount)) : 5);

function tokensView(segment, mode) {
  const body = el("pre", { class: "tokens", dir: "ltr" });
  segment.logprobs.slice(0, MOST_TOKENS).forEach((_, i) => {
    const [shade, title] = shadeOf(segment, i, mode);
    const token = el("span", { class: `token ${shade}`, title });
    appendVisible(token, segment.token_texts[i]);
    body.append(token);
  });
  if (segment.logprobs.length <= MOST_TOKENS) return body;
  return el("div", {}, body, el("p", { class: "note" }, `The first ${MOST_TOKENS} of ${segment.logprobs.length} tokens are shaded.`));
}
