"use strict";
// One ECG, the reader's marks, and what the program knows. The server keeps everything; this page may be closed at any time.

const at = (id) => document.getElementById(id);
let state = null;      // of /api/state
let asked = null;      // of /api/question
let marks = {};        // short name -> "yes" or "unsure"
let back = 0;          // how many answers the reader has gone back
let busy = false;
let timer = { since: 0, before: 0 };   // the time that the ECG was visible

async function call(path, send) {
  const options = send === undefined ? {} : { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(send) };
  let answer;
  try {
    answer = await fetch(path, { ...options, headers: { accept: "application/json", ...options.headers } });
  } catch {
    throw new Error("The program does not answer: it was stopped. Give the same command again, then press the key again; all earlier answers are saved.");
  }
  const value = await answer.json();
  if (!answer.ok) throw new Error(value.error || answer.statusText);
  return value;
}

function trouble(text) {
  at("trouble").hidden = !text;
  at("trouble").textContent = text;
}

async function guarded(work) {
  if (busy) return;
  busy = true;
  try {
    await work();
    trouble(state && state.warning);
  } catch (error) {
    trouble(error.message);
  } finally {
    busy = false;
    document.body.dataset.ready = String(Number(document.body.dataset.ready || 0) + 1);
  }
}

function element(name, text, properties) {
  return Object.assign(document.createElement(name), { textContent: text ?? "" }, properties);
}

function seconds() {
  return (timer.before + (timer.since ? performance.now() - timer.since : 0)) / 1000;
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) timer = { since: 0, before: seconds() * 1000 };
  else timer.since = performance.now();
});

async function ask() {
  take(await call(`/api/question?back=${back}`));
}

function take(found) {
  asked = found;
  back = asked.back;
  marks = {};
  if (asked.answer) {
    for (const name of asked.answer.classes) marks[name] = "yes";
    for (const name of asked.answer.unsure) marks[name] = "unsure";
  }
  timer = { since: document.hidden ? 0 : performance.now(), before: 0 };
  at("similar").hidden = true;
  at("show").setAttribute("aria-expanded", "false");
  draw();
}

const REASONS = {
  random: "chosen at random", spread: "unlike those before", uncertain: "the model is unsure", "second reader": "another reader has answered it",
  check: "the model doubts your label", again: "answered before",
};

function draw() {
  const over = !asked.recording;
  at("recording").textContent = over ? "Every recording is answered." : asked.recording;
  at("about").textContent = over ? "" : asked.about;
  at("why").textContent = over ? "" : REASONS[asked.why] || asked.why;
  at("flags").replaceChildren(...(asked.flags || []).map((text) => element("li", text)));
  at("paper").innerHTML = over ? "" : asked.svg;   // made by the server, names in it are escaped
  at("scale").textContent = over ? "" : asked.limbs
    ? "Limb leads in their true proportions to each other; the proportions of V1 to V6 and millivolts are not known."
    : "Every lead is scaled to the same size: heights do not compare between leads.";
  for (const id of ["save", "none", "unsure", "show"]) at(id).disabled = over;
  at("back").disabled = back >= asked.history;
  at("forward").disabled = back === 0;
  at("undo").disabled = asked.history === 0;
  drawMarks();
}

function drawMarks() {
  at("classes").replaceChildren(...state.classes.map((one, i) => {
    const button = element("button", "", { title: one.short });
    if (i < 9) button.append(element("kbd", String(i + 1)), " ");
    button.append(one.name + (marks[one.short] === "unsure" ? " ?" : ""));
    button.setAttribute("aria-pressed", { yes: "true", unsure: "mixed" }[marks[one.short]] || "false");
    button.disabled = !asked.recording;
    let held = 0;
    button.addEventListener("pointerdown", () => { held = Date.now(); });
    button.addEventListener("click", (event) => {
      toggle(i, event.shiftKey || (held && Date.now() - held > 500) ? "unsure" : "yes");
      button.blur();
    });
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    return button;
  }));
}

function toggle(i, mark) {
  if (!asked || !asked.recording || i >= state.classes.length) return;
  const name = state.classes[i].short;
  if (marks[name] === mark) delete marks[name];
  else {
    marks[name] = mark;
    // A class that excludes the others, as Normal does, takes their place and gives way to them.
    if (state.normal !== null && mark === "yes") {
      for (const [c, one] of state.classes.entries()) {
        if (c !== i && (c === state.normal || i === state.normal) && marks[one.short] === "yes") delete marks[one.short];
      }
    }
  }
  drawMarks();
}

async function save(kind) {
  if (!asked || !asked.recording) return;
  const every = state.classes.map((one) => one.short);
  const having = (mark) => every.filter((name) => marks[name] === mark);
  if (kind === "marks" && !Object.keys(marks).length) {
    throw new Error("No class is on. Press 0 if there is none of them, or u if you are not sure.");
  }
  const saved = await call("/api/answer", {
    recording: asked.recording, why: asked.why, seconds: seconds(),
    classes: kind === "marks" ? having("yes") : [],
    unsure: kind === "marks" ? having("unsure") : kind === "unsure" ? every : [],
  });
  if (back) {
    back -= 1;
    await ask();
  } else take(saved.next);
  await refresh();   // after the picture: the reader waits for that alone
}

async function undo() {
  await call("/api/undo", {});
  back = 0;
  await ask();
  await refresh();
}

async function go(steps) {
  back = Math.max(0, Math.min(back + steps, asked.history));
  await ask();
}

async function similar() {
  if (!at("similar").hidden) { at("similar").hidden = true; return; }
  const found = await call(`/api/alike?recording=${encodeURIComponent(asked.recording)}`);
  at("cases").replaceChildren(...found.map((one) => {
    const figure = element("figure"), scroll = element("div", "", { className: "scroll" });
    scroll.innerHTML = one.svg;
    figure.append(scroll, element("figcaption", `${one.recording}: ${one.codes} (distance ${one.distance.toFixed(1)}; 1 is usual)`));
    return figure;
  }));
  if (!found.length) at("cases").textContent = "None yet.";
  at("similar").hidden = false;
  at("show").setAttribute("aria-expanded", "true");
}

async function check() {
  await call("/api/check", {});
  back = 0;
  await ask();
  await refresh();
}

async function train() {
  await call("/api/train", { stop: state.training.running });
  await refresh();
}

function drawTraining() {
  const now = state.training;
  for (const id of ["train", "training", "chain"]) at(id).hidden = !now;
  at("reached").hidden = !now || !now.reached.length;
  if (!now) return;
  at("train").replaceChildren(element("kbd", "t"), now.running ? " Stop training" : " Train now");
  at("train").disabled = !now.running && state.answered < now.least;
  at("training").textContent = now.running ? `${now.step}. ${now.line || "Starting."}` : now.error ||
    (state.answered < now.least ? `After ${now.least - state.answered} more answers.` : "");
  rows("reached", ["answers", "MAP, cross-validated", "90 %", "model to use"], now.reached.map((one) => [[
    one.answers, one.map ? one.map[0].toFixed(2) : "not yet", one.map ? `${one.map[1].toFixed(2)} to ${one.map[2].toFixed(2)}` : "", one.run]]));
}

async function refresh() {
  state = await call("/api/state");
  const left = state.recordings - state.answered;
  at("progress").textContent = `${state.mine} answered by you` + (state.answered > state.mine ? `, ${state.answered} in all` : "") +
    ` of ${state.recordings.toLocaleString("en")}`;
  at("speed").textContent = state.seconds ? `${state.seconds.toFixed(1)} s per ECG (median), ${left.toLocaleString("en")} left` : "";
  const named = state.reader === "reader" ? "" : `reader: ${state.reader}`;   // the default name says nothing
  at("who").textContent = [named, state.random ? "random order" : ""].filter(Boolean).join(" · ");
  const model = state.model;
  at("words").textContent = state.measured < state.recordings
    ? `Measuring the recordings: ${state.measured.toLocaleString("en")} of ${state.recordings.toLocaleString("en")}. Until then questions are random.`
    : model.words || `The first model comes after ${model.left} more answers.`;
  Object.assign(at("measured"), { max: state.recordings, value: state.measured, hidden: state.measured >= state.recordings });
  at("curve").innerHTML = curve(model);
  at("honest").hidden = !model.curve.length;
  at("kind").textContent = model.kind || "";
  drawTraining();
  at("check").hidden = !state.doubts || state.answered < 50;
  at("check").textContent = `Check ${state.doubts} label${state.doubts > 1 ? "s" : ""} that the model doubts`;
  rows("counts", ["class", "yes", "unknown"], state.classes.map((one) => [[one.name, one.yes, one.unknown]]));
  at("table").replaceChildren("The table for training: ", element("a", state.table, { href: "/labels.csv", download: state.table }));
  at("readers").hidden = !state.agreement.length;
  rows("kappa", ["readers", "class", "kappa", "both said", "one said", "of"], state.agreement.map((one) => [[
    one.readers.join(" and "), one.name, one.kappa === null ? "–" : one.kappa.toFixed(2), one.both, one.one, one.recordings], one.few]));
  at("commands").textContent = state.commands.join("\n");
}

function rows(id, names, lines) {
  const head = element("tr");
  head.append(...names.map((name, i) => element("th", name, { className: i ? "number" : "" })));
  at(id).replaceChildren(head, ...lines.map(([cells, few]) => {
    const row = element("tr", "", { className: few ? "few" : "" });
    row.append(...cells.map((cell, i) => element("td", cell, { className: i ? "number" : "" })));
    return row;
  }));
}

function curve(model) {
  if (!model.curve.length) return "";
  const ahead = model.ahead || [], all = [...model.curve, ...ahead];
  const most = Math.max(...all.map((p) => p[0])), low = Math.max(0, Math.min(...all.map((p) => p[2])) - 0.05), high = Math.min(1, Math.max(...all.map((p) => p[3])) + 0.05);
  const x = (n) => 40 + (n / most) * 385, y = (v) => 200 - ((v - low) / (high - low)) * 180;
  const line = (points, k) => points.map((p) => `${x(p[0]).toFixed(1)},${y(p[k]).toFixed(1)}`);
  const band = (points) => `<polygon points="${[...line(points, 3), ...line(points, 2).reverse()].join(" ")}" fill="currentColor" opacity=".12"/>`;
  let svg = `<svg viewBox="0 0 440 235" role="img" aria-label="MAP against labels">${band(model.curve)}`;
  svg += `<polyline points="${line(model.curve, 1).join(" ")}" fill="none" stroke="var(--accent)" stroke-width="2"/>`;
  if (ahead.length) svg += `${band(ahead)}<polyline points="${line(ahead, 1).join(" ")}" fill="none" stroke="var(--accent)" stroke-width="2" stroke-dasharray="5 4"/>`;
  for (const p of model.curve) svg += `<circle cx="${x(p[0]).toFixed(1)}" cy="${y(p[1]).toFixed(1)}" r="3" fill="var(--accent)"/>`;
  for (const v of [low, (low + high) / 2, high]) svg += `<text x="34" y="${y(v) + 4}" text-anchor="end">${v.toFixed(2)}</text>`;
  for (const n of [0, most / 2, most]) svg += `<text x="${x(n)}" y="218" text-anchor="middle">${Math.round(n)}</text>`;
  return `${svg}<path d="M40 15V203H430" fill="none" stroke="var(--soft)"/><text x="235" y="232" text-anchor="middle">labels learnt from</text></svg>`;
}

const actions = {
  save: () => save("marks"), none: () => save("none"), unsure: () => save("unsure"), undo, show: similar, check, train,
  back: () => go(1), forward: () => go(-1),
};
for (const [id, work] of Object.entries(actions)) {
  at(id).addEventListener("click", () => { at(id).blur(); guarded(work); });
}

const KEYS = { Enter: "save", 0: "none", u: "unsure", ArrowLeft: "back", ArrowRight: "forward", z: "undo", Backspace: "undo", n: "show", t: "train" };
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !state || !asked) return;
  const digit = /^Digit([1-9])$/.exec(event.code) || /^Numpad([1-9])$/.exec(event.code);
  if (digit) {
    toggle(Number(digit[1]) - 1, event.shiftKey ? "unsure" : "yes");
  } else if (KEYS[event.key] && !event.repeat) {
    const button = at(KEYS[event.key]);
    if (!button.disabled && !button.hidden) guarded(actions[KEYS[event.key]]);
  } else return;
  event.preventDefault();
});

setInterval(() => { if (!busy && !document.hidden && state) refresh().catch((error) => trouble(error.message)); }, 4000);
guarded(async () => { await refresh(); await ask(); });
