"use strict";
// Files are sent one recording after the other; the server answers with its page.

const limit = Number(by("form").dataset.limit);

async function ask(files) {
  const size = files.reduce((sum, file) => sum + file.size, 0);
  if (size > limit) return { error: `more than ${limit / 2 ** 20} MiB, the limit of this server` };
  const form = new FormData();
  for (const name of ["rate", "unit", "leads"]) if (by(name).value.trim()) form.append(name, by(name).value);
  for (const file of files) form.append("file", file, file.name);
  try {
    const answer = await fetch("predict?page=yes", { method: "POST", body: form, headers: { Accept: "application/json" } });
    return await answer.json();
  } catch {
    return { error: "no answer from the server: has it ended?" };
  }
}

function show(button, html) {
  for (const other of by("results").querySelectorAll("button[aria-pressed]")) other.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  const frame = by("page");
  const fit = () => { frame.style.height = `${frame.contentDocument.documentElement.scrollHeight + 16}px`; };
  frame.onload = () => { fit(); new ResizeObserver(fit).observe(frame.contentDocument.body); };
  frame.srcdoc = html;
  frame.hidden = false;
}

function addRow(row, names, files) {
  const item = say(by("results"), "li", "");
  if (row.error) {
    say(item, "span", row.path);
    say(item, "span", row.error, "error");
    if (/does not (say|name)/.test(row.error)) {
      by("said").open = true;
      const again = say(item, "button", "fill in above what is missing, then try again");
      again.type = "button";
      again.onclick = () => { item.remove(); askAll([files]); };
    }
    return;
  }
  const button = say(item, "button", row.record);
  button.type = "button";
  button.setAttribute("aria-pressed", "false");
  button.onclick = () => show(button, row.page);
  const likely = row.likely.map(name => names[name]);
  const possible = row.predicted.filter(name => !row.likely.includes(name)).map(name => names[name]);
  say(item, "strong", likely.length ? `likely: ${likely.join(", ")}` : "no class is likely");
  if (possible.length) say(item, "span", `possible: ${possible.join(", ")}`, "soft");
  if (by("results").querySelector("button[aria-pressed=true]") === null) show(button, row.page);
}

async function askAll(groups) {
  for (const [number, files] of groups.entries()) {
    by("state").textContent = `reading ${files[0].name}, ${number + 1} of ${groups.length} …`;
    const found = await ask(files);
    const rows = found.recordings?.length ? found.recordings : [{ path: files.map(file => file.name).join(", "), error: found.error }];
    for (const row of rows) addRow(row, found.names, files);
  }
  by("state").textContent = "";
}

takeFiles(askAll);
