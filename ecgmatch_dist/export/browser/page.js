// The page: files are chosen or dropped, the graph answers, nothing leaves this machine.

const model = JSON.parse(by("model").textContent);
let waiting = start();

async function unpack(id) {
  const binary = atob(by(id).textContent.trim()), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function start() {
  try {
    ort.env.wasm.numThreads = 1;
    ort.env.wasm.wasmBinary = await unpack("wasm");
    const session = await ort.InferenceSession.create(await unpack("graph"), { executionProviders: ["wasm"], logSeverityLevel: 3 });
    by("state").textContent = "";
    return session;
  } catch (error) {
    by("state").textContent = `The model cannot run in this browser: ${error.message}`;
    by("state").className = "error";
    throw error;
  }
}

const sigmoid = x => 1 / (1 + Math.exp(-x));

async function answer(session, recording) {
  const { x, windows, flags } = prepare(recording, model);
  const found = await session.run({ signal: new ort.Tensor("float32", x, [windows, 12, model.length]) });
  const classes = model.classes.length;
  const rows = model.classes.map((row, c) => {
    const each = Array.from({ length: windows }, (_, w) => found.probability.data[w * classes + c]);
    if (windows === 1) return { ...row, probability: each[0], calibrated: found.calibrated.data[c] };
    const logit = each.reduce((sum, p) => sum + Math.log(p / (1 - p)), 0) / windows;  // as `predict`: the mean of the logits
    return { ...row, probability: sigmoid(logit), calibrated: sigmoid(row.slope * logit + row.shift) };
  });
  const decide = reached => { const names = rows.filter(reached); return names.length > 1 ? names.filter(row => !row.alone) : names; };
  const predicted = decide(row => row.probability >= row.threshold), likely = decide(row => row.calibrated >= 0.5);
  return { rows: rows.map(row => ({ ...row, predicted: predicted.includes(row), likely: likely.includes(row) })), flags: [...new Set([...recording.flags, ...flags])] };
}

function sentences(flags) {
  const kinds = new Map();
  for (const flag of flags) {
    const [kind, of = ""] = flag.split(":");
    if (kind !== "flat" || !flags.includes(`missing:${of}`)) kinds.set(kind, [...(kinds.get(kind) ?? []), of]);
  }
  return [...kinds].map(([kind, of]) => [(model.words[kind] ?? kind).replace("{}", of.join(", ")), !model.notes.includes(kind)]).filter(([text]) => text);
}

function show(button, recording, { rows, flags }) {
  for (const other of by("results").querySelectorAll("button[aria-pressed]")) other.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  const page = by("page");
  page.replaceChildren();
  page.hidden = false;
  say(page, "h2", recording.name);
  const seconds = recording.leads[0].length / recording.rate;
  say(page, "p", `${seconds.toFixed(1)} s at ${recording.rate} Hz`, "soft");
  const names = list => list.map(row => row.name).join(", ");
  const likely = rows.filter(row => row.likely), possible = rows.filter(row => row.predicted && !row.likely);
  say(page, "p", `${likely.length ? `Likely: ${names(likely)}.` : "No class is likely."}${possible.length ? ` Possible: ${names(possible)}.` : ""}`, "answer");
  const list = say(page, "ul", "", "flags");
  for (const [text, warning] of sentences(flags)) say(list, "li", text, warning ? "warning" : "");
  const table = say(page, "table", "");
  const head = say(table, "tr", "");
  for (const text of ["class", "probability", "", "answer"]) say(head, "th", text);
  for (const row of rows) {
    const line = say(table, "tr", "", row.likely ? "likely" : row.predicted ? "possible" : "");
    Object.assign(line.dataset, { class: row.short, probability: row.probability, calibrated: row.calibrated });
    say(line, "td", row.name);
    const bar = say(say(line, "td", ""), "div", "", "bar");
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", `${(100 * row.calibrated).toFixed(0)} per cent, threshold ${(100 * row.mark).toFixed(0)}`);
    say(bar, "i", "").style.width = `${100 * row.calibrated}%`;
    say(bar, "b", "").style.left = `${100 * row.mark}%`;
    say(bar, "b", "", "half").style.left = "50%";
    say(line, "td", `${(100 * row.calibrated).toFixed(0)} %`, "number");
    say(line, "td", row.likely ? "likely" : row.predicted ? "possible" : "no", "verdict");
  }
  const back = rows.find(row => row.probability >= row.threshold && !row.predicted && !row.likely);
  const why = back ? ` ${model.alone.replace("{}", back.name)}` : "";
  say(page, "p", `Solid mark: the alarm threshold, set low so that few cases are missed (possible). Dashed mark: 50 % (likely).${why}`, "soft");
  say(page, "div", "", "scroll").innerHTML = drawPaper(recording);  // numbers alone: no text of a file is in it
  say(page, "p", `Offsets of the baseline were removed.${seconds > 10.5 ? ` The first ten seconds are shown; the answer uses all ${seconds.toFixed(0)}.` : ""}`, "soft");
}

async function addRow(files) {
  const item = say(by("results"), "li", "");
  const name = files.map(file => file.name).join(", ");
  try {
    const said = { rate: parseFloat(by("rate").value), unit: by("unit").value, leads: by("leads").value.split(/[\s,]+/).filter(Boolean) };
    const session = await waiting, recording = await readRecording(files, said);
    const found = await answer(session, recording);
    const button = say(item, "button", recording.name);
    button.type = "button";
    button.onclick = () => show(button, recording, found);
    const likely = found.rows.filter(row => row.likely).map(row => row.name);
    say(item, "strong", likely.length ? `likely: ${likely.join(", ")}` : "no class is likely");
    if (by("results").querySelector("button[aria-pressed=true]") === null) show(button, recording, found);
  } catch (error) {
    say(item, "span", name);
    say(item, "span", error instanceof Refusal ? error.message : `unreadable: ${error.message}`, "error");
    if (error instanceof Refusal && error.message.includes("does not")) {
      by("said").open = true;
      const again = say(item, "button", "fill in above what is missing, then try again");
      again.type = "button";
      again.onclick = () => { item.remove(); addRow(files); };
    }
  }
}

takeFiles(async groups => { for (const files of groups) await addRow(files); });
