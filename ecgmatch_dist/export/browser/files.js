// Files -> recordings {name, leads, rate, flags}. WFDB of formats 16 and 212, and CSV; other formats need `ecgmatch serve`.

async function readRecording(files, said) {
  const header = files.find(file => file.name.toLowerCase().endsWith(".hea"));
  if (header) return readWfdb(header, files);
  const [file] = files;
  if (/\.(csv|tsv|txt)$/i.test(file.name)) return readCsv(file, said);
  if (/\.(dat|mat)$/i.test(file.name)) throw new Refusal("signals need their WFDB header (.hea): choose both together");
  throw new Refusal("this page reads WFDB (.hea with .dat or .mat) and CSV; `ecgmatch serve` and `ecgmatch predict` read more formats");
}

async function readWfdb(header, files) {
  const lines = (await header.text()).split(/\r?\n/).map(line => line.trim()).filter(line => line && !line.startsWith("#"));
  const [, count, rateText, samplesText] = (lines[0] ?? "").split(/\s+/);
  const rate = parseFloat(rateText ?? "250"), rows = lines.slice(1, 1 + Number(count));
  if (!(Number(count) >= 1) || rows.length !== Number(count)) throw new Refusal("not a WFDB header with one line per lead");
  if (!(rate >= 1 && rate <= 50000)) throw new Refusal(`sampling rate ${rateText}; 1 to 50,000 Hz are read`);
  const fields = rows.map(signalFields);
  const signals = [];
  for (const name of new Set(fields.map(field => field.file))) {
    const file = files.find(one => one.name === name);
    if (!file) throw new Refusal(`${name} is missing: choose the header and its signal files together`);
    const own = fields.filter(field => field.file === name);
    const digital = decode(await file.arrayBuffer(), own, Number(samplesText) || 0, name);
    own.forEach((field, s) => {
      const values = digital[s].map(value => (value - field.baseline) / field.gain);
      signals.push({ name: field.lead, unit: field.unit, values });
    });
  }
  return { name: header.name.replace(/\.hea$/i, ""), rate, ...arrange(signals) };
}

function signalFields(line) {
  const words = line.split(/\s+/);
  const form = /^(\d+)(?:x(\d+))?(?::(\d+))?(?:\+(\d+))?$/.exec(words[1] ?? "");
  const scale = /^([-+\d.eE]+)?(?:\((-?\d+)\))?(?:\/(\S+))?$/.exec(words[2] ?? "");
  if (!form || !scale || Number(form[2] ?? 1) !== 1 || Number(form[3] ?? 0) !== 0) throw new Refusal(`this line of the header is not understood: ${line}`);
  if (!["16", "212"].includes(form[1])) throw new Refusal(`signals of format ${form[1]}; this page reads 16 and 212, \`ecgmatch serve\` reads all`);
  return {
    file: words[0], format: form[1], offset: Number(form[4] ?? 0), gain: parseFloat(scale[1] ?? "0") || 200, unit: scale[3] ?? "mV",
    baseline: Number(scale[2] ?? words[4] ?? 0), lead: words.slice(8).join(" "),
  };
}

// -> one Float64Array per signal; NaN where there is no value.
function decode(buffer, fields, samples, name) {
  const { format, offset } = fields[0], signals = fields.length, bytes = new DataView(buffer);
  const room = Math.max(buffer.byteLength - offset, 0);
  const held = Math.floor((format === "16" ? Math.floor(room / 2) : Math.floor(room / 3) * 2 + (room % 3 === 2 ? 1 : 0)) / signals);
  if (held < Math.max(samples, 1)) throw new Refusal(`cut short: ${name} holds ${held} of ${samples} samples`);
  const n = samples || held;
  const out = fields.map(() => new Float64Array(n));
  for (let i = 0; i < n * signals; i++) {
    let value;
    if (format === "16") {
      value = bytes.getInt16(offset + 2 * i, true);
      if (value === -32768) value = NaN;
    } else {
      const at = offset + 3 * (i >> 1);
      value = i % 2 ? bytes.getUint8(at + 2) | (bytes.getUint8(at + 1) & 0xf0) << 4 : bytes.getUint8(at) | (bytes.getUint8(at + 1) & 0x0f) << 8;
      if (value > 2047) value -= 4096;
      if (value === -2048) value = NaN;
    }
    out[i % signals][Math.floor(i / signals)] = value;
  }
  return out;
}

async function readCsv(file, said) {
  const lines = (await file.text()).replace(/^\ufeff/, "").split(/\r?\n/).filter(line => line.trim() && !line.startsWith("#"));
  if (lines.length < 3) throw new Refusal(`${lines.length} lines: one line per sample is needed`);
  const separator = [";", "\t", "|", ","].find(mark => lines.slice(1, 20).every(line => line.includes(mark)));
  const cells = line => (separator ? line.split(separator) : line.trim().split(/\s+/)).map(cell => cell.trim().replace(/^["']|["']$/g, ""));
  const number = cell => (cell === "" || cell === "-" ? NaN : Number(separator && separator !== "," ? cell.replace(",", ".") : cell));
  const head = cells(lines[0]), named = head.some(cell => !/^nan$/i.test(cell) && Number.isNaN(number(cell)));
  const rows = lines.slice(named ? 1 : 0).map(line => cells(line).map(number));
  if (rows.some(row => row.length !== head.length)) throw new Refusal("not a table: lines of different lengths");
  const column = place => Float64Array.from(rows, row => row[place]);
  const signals = [];
  let rate = said.rate;
  head.forEach((cell, place) => {
    const match = /^(.*?)\s*(?:[([]\s*([nuµμm]?V|m?s(?:ec)?)\s*[)\]])?$/i.exec(named ? cell : said.leads[place] ?? "");
    const name = match[1];
    if (/^(time|t|seconds|sec|s|zeit|ms|milliseconds)$/i.test(name)) {
      const time = column(place), scale = /^m/i.test(match[2] ?? name) ? 1e-3 : 1;
      rate = (time.length - 1) / ((time[time.length - 1] - time[0]) * scale);
      if (Math.abs(rate - Math.round(rate)) < 0.001 * rate) rate = Math.round(rate);
    } else if (leadOf(name)) signals.push({ name, unit: match[2] ?? said.unit, values: column(place) });
  });
  if (signals.length < 2) throw new Refusal(`the file does not name its ${head.length} leads; name them in their order`);
  if (!(rate >= 1 && rate <= 50000)) throw new Refusal("the file does not say its sampling rate; name it");
  if (signals.some(signal => !signal.unit)) throw new Refusal("the file does not say its unit; name it");
  return { name: file.name.replace(/\.\w+$/, ""), rate, ...arrange(signals) };
}
