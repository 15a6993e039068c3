// From a recording to the graph's input. The same computation as data/preprocess.py and predict/prepare.py; a test compares them.

const LEADS = ["I", "II", "III", "aVR", "aVL", "aVF", "V1", "V2", "V3", "V4", "V5", "V6"];
const DERIVED = { III: [-1, 1], aVR: [-0.5, -0.5], aVL: [1, -0.5], aVF: [-0.5, 1] };
const ALIAS = /^(?:mdc_ecg_)?(?:(?:ecg|ekg|lead|ableitung|derivation)(?:[ _:.]*|-))*(?:d?(i{1,3})|(av[rlf])|[vc]([1-6]))(?:\s*[([].*[)\]])?$/;

class Refusal extends Error {}

function leadOf(name) {
  const match = ALIAS.exec(name.trim().toLowerCase());
  if (!match) return null;
  if (match[1]) return match[1].toUpperCase();
  return match[2] ? `aV${match[2][2].toUpperCase()}` : `V${match[3]}`;
}

function millivolts(unit) {
  const word = unit.trim().toLowerCase().replace(/[µμ]/g, "u");
  const factor = { nv: 1e-6, uv: 1e-3, mv: 1, v: 1e3 }[word];
  if (factor === undefined) throw new Refusal(`${unit || "no unit"}: not a voltage; uV, mV or V is needed`);
  return factor;
}

// signals: [{name, unit, values}] -> twelve leads in mV, and flags.
function arrange(signals) {
  const place = new Map();
  for (const signal of signals) {
    const lead = leadOf(signal.name);
    if (lead === null) continue;
    if (place.has(lead)) throw new Refusal(`${lead} is there more than once`);
    place.set(lead, signal);
  }
  const derivable = place.has("I") && place.has("II");
  if (place.size < 2) throw new Refusal(`fewer than two leads; there are ${signals.map(signal => signal.name).join(", ") || "none"}`);
  const length = Math.max(...[...place.values()].map(signal => signal.values.length));
  const out = new Map();
  const flags = [];
  for (const [lead, { values, unit }] of place) {
    const factor = millivolts(unit);
    out.set(lead, Float64Array.from(values, value => value * factor));
  }
  for (const lead of LEADS.filter(name => !place.has(name))) {
    const made = new Float64Array(length);
    if (derivable && DERIVED[lead]) {
      const [one, two] = [out.get("I"), out.get("II")];
      for (let i = 0; i < length; i++) made[i] = DERIVED[lead][0] * one[i] + DERIVED[lead][1] * two[i];
      flags.push(`derived:${lead}`);
    } else flags.push(`missing:${lead}`);
    out.set(lead, made);
  }
  const leads = LEADS.map(lead => out.get(lead));
  const moving = leads.filter(moves);
  if (moving.length < 2) throw new Refusal(`${moving.length} of 12 leads move; two are needed`);
  const spans = moving.map(lead => { const s = lead.filter(Number.isFinite).sort(); return quantile(s, 0.99) - quantile(s, 0.01); });
  const middle = quantile(Float64Array.from(spans).sort(), 0.5);
  if (!(middle >= 0.02 && middle <= 30)) flags.push("unit?");
  return { leads, flags };
}

function quantile(sorted, share) {
  const place = share * (sorted.length - 1), low = Math.floor(place), high = Math.ceil(place);
  return sorted[low] + (sorted[high] - sorted[low]) * (place - low);
}

function moves(lead) {
  let low = Infinity, high = -Infinity;
  for (const value of lead) if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
  return low < high;
}

// Missing values become straight lines; 0 where there is no value at all.
function fillMissing(lead) {
  const known = [];
  lead.forEach((value, i) => { if (Number.isFinite(value)) known.push(i); });
  if (known.length === lead.length) return lead;
  const out = new Float64Array(lead.length);
  if (!known.length) return out;
  let next = 0;
  for (let i = 0; i < lead.length; i++) {
    while (next < known.length - 1 && known[next] < i) next++;
    const right = known[next], left = right > i ? known[Math.max(next - 1, 0)] : right;
    out[i] = left === right || right < i ? lead[right] : lead[left] + (lead[right] - lead[left]) * Math.max(i - left, 0) / (right - left);
  }
  return out;
}

// The nearest fraction whose denominator is at most `most`, as Python's Fraction.limit_denominator finds it.
function nearestFraction(value, most) {
  let [p0, q0, p1, q1, rest] = [0, 1, 1, 0, value];
  for (;;) {
    const whole = Math.floor(rest);
    if (q0 + whole * q1 > most) break;
    [p0, q0, p1, q1] = [p1, q1, p0 + whole * p1, q0 + whole * q1];
    if (Math.abs(rest - whole) < 1e-12) return [p1, q1];
    rest = 1 / (rest - whole);
  }
  const k = Math.floor((most - q0) / q1), other = [p0 + k * p1, q0 + k * q1];
  return Math.abs(p1 / q1 - value) <= Math.abs(other[0] / other[1] - value) ? [p1, q1] : other;
}

function bessel(x) {  // modified, of order 0
  let sum = 1, term = 1;
  for (let k = 1; k < 60; k++) { term *= (x / (2 * k)) ** 2; sum += term; }
  return sum;
}

const filters = new Map();
function taps(up, down) {
  const widest = Math.max(up, down), side = 10 * widest, key = `${up}/${down}`;
  if (!filters.has(key)) {
    const h = new Float64Array(2 * side + 1);
    let sum = 0;
    for (let i = 0; i < h.length; i++) {
      const t = (i - side) / widest;
      h[i] = (t === 0 ? 1 : Math.sin(Math.PI * t) / (Math.PI * t)) * bessel(5 * Math.sqrt(1 - ((i - side) / side) ** 2));
      sum += h[i];
    }
    filters.set(key, h.map(value => value / sum * up));
  }
  return filters.get(key);
}

// scipy's resample_poly with padtype="line".
function resample(x, rate, target) {
  const [up, down] = nearestFraction(target / rate, Math.round(1000 * Math.max(1, rate / target)));
  if (up === down) return x;
  const n = x.length, out = Math.ceil(n * up / down), h = taps(up, down), side = (h.length - 1) / 2;
  const first = x[0], slope = n > 1 ? (x[n - 1] - first) * n / (n - 1) : 0;
  const flat = x.map((value, i) => value - first - slope * i / n);
  const y = new Float64Array(out);
  for (let m = 0; m < out; m++) {
    const centre = m * down + side;
    let sum = 0;
    for (let j = Math.max(0, Math.ceil((centre - 2 * side) / up)); j <= Math.min(n - 1, Math.floor(centre / up)); j++) sum += flat[j] * h[centre - j * up];
    y[m] = sum + first + slope * m / out;
  }
  return y;
}

// A recording {leads, rate} -> windows for the graph, Float32Array [windows, 12, length], and flags.
function prepare(recording, model) {
  const { leads, rate } = recording, n = leads[0].length;
  if (n / rate > model.longest) throw new Refusal(`${(n / rate / 60).toFixed(0)} minutes; cut it into pieces of at most ${model.longest / 60}`);
  const window = Math.ceil(model.length * rate / model.rate), whole = n <= 1.05 * window;
  const shorter = Math.ceil(n * model.rate / rate) < model.length;
  if (shorter && !model.padFirst) throw new Refusal(`shorter than ${(model.length / model.rate).toFixed(1)} s; this page cannot take it, ecgmatch predict can`);
  const gaps = whole ? 0 : Math.ceil(2 * (n - window) / window);
  const starts = whole ? [0] : Array.from({ length: gaps + 1 }, (_, i) => halfEven(i * (n - window) / gaps));
  const x = new Float32Array(starts.length * 12 * model.length);
  const flags = [];
  starts.forEach((start, w) => leads.forEach((lead, v) => {
    const raw = lead.subarray(start, whole ? n : start + window);
    const piece = fillMissing(raw);
    if (piece !== raw) flags.push("nan");
    if (!moves(piece.subarray(0, window))) return void flags.push(`flat:${LEADS[v]}`);
    const y = resample(piece, rate, model.rate).subarray(0, model.length);
    x.set(y, (w * 12 + v) * model.length);
  }));
  if (Math.ceil(n * model.rate / rate) < model.length / 2) flags.push("short");
  if (starts.length > 1) flags.push(`windows:${starts.length}`);
  else if (Math.ceil(n * model.rate / rate) > model.length) flags.push("cropped");
  return { x, windows: starts.length, flags: [...new Set(flags)] };
}

function halfEven(value) {  // as Python rounds
  const low = Math.floor(value);
  return value - low === 0.5 ? low + (low % 2) : Math.round(value);
}
