// Standard ECG paper as SVG, as predict/paper.py draws it: 25 mm/s, 10 mm/mV, 3 x 4 leads of 2.5 s, a strip of lead II.

const SPEED = 25, ROW = 30, LEFT = 12, TOP = 6, WIDTH = LEFT + 10 * SPEED + 3, HEIGHT = TOP + 4 * ROW + 8;
const STRIPS = [...LEADS.map((_, v) => ({ v, from: 2.5 * Math.floor(v / 3), to: 2.5 * Math.floor(v / 3) + 2.5, row: v % 3 })), { v: 1, from: 0, to: 10, row: 3 }];

function gridLines(step, colour, width) {
  let d = "";
  for (let x = LEFT % step; x <= WIDTH; x += step) d += `M${x} 0V${HEIGHT}`;
  for (let y = TOP % step; y <= HEIGHT; y += step) d += `M0 ${y}H${WIDTH}`;
  return `<path d="${d}" stroke="${colour}" stroke-width="${width}"/>`;
}

function drawPaper({ leads, rate }) {
  const shown = leads.map(lead => {
    const part = lead.subarray(0, Math.round(10 * rate)), sorted = part.filter(Number.isFinite).sort();
    const level = sorted.length ? quantile(sorted, 0.5) : 0;  // machines remove an offset, too
    return part.map(value => value - level);
  });
  const sizes = Float64Array.from(shown.flatMap(lead => [...lead].filter(Number.isFinite).map(Math.abs))).sort();
  const gain = sizes.length && quantile(sizes, 0.999) > 2.2 ? 5 : 10;
  const baseline = row => TOP + ROW * (row + 0.5);
  let traces = "", words = "";
  for (const { v, from, to, row } of STRIPS) {
    let d = "", pen = false;
    for (let i = Math.round(from * rate); i <= Math.min(Math.round(to * rate), shown[v].length - 1); i++) {
      const y = shown[v][i];
      if (!Number.isFinite(y)) { pen = false; continue; }
      const height = Math.max(-1.6 * ROW, Math.min(1.6 * ROW, y * gain));
      d += `${pen ? "L" : "M"}${(LEFT + i / rate * SPEED).toFixed(2)} ${(baseline(row) - height).toFixed(2)}`;
      pen = true;
    }
    traces += `<path d="${d}"/>`;
    if (from > 0) traces += `<path d="M${LEFT + from * SPEED} ${baseline(row) - 3}v6"/>`;
    words += `<text x="${LEFT + from * SPEED + 1}" y="${baseline(row) - 11}" class="lead">${LEADS[v]}</text>`;
  }
  for (let row = 0; row < 4; row++) traces += `<path d="M2 ${baseline(row)}h2v${-gain}h${0.2 * SPEED}v${gain}h2"/>`;
  return `<svg class="ecg" viewBox="0 0 ${WIDTH} ${HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg"><title>The twelve leads</title>`
    + `<rect width="${WIDTH}" height="${HEIGHT}" fill="#fffafa"/>${gridLines(1, "#f6dcdc", 0.1)}${gridLines(5, "#e8a9a9", 0.18)}`
    + `<g fill="none" stroke="#111" stroke-width=".28" stroke-linejoin="round">${traces}</g>${words}`
    + `<text x="${LEFT}" y="${HEIGHT - 2.5}" class="foot">${SPEED} mm/s · ${gain} mm/mV</text></svg>`;
}
