// What pages with files to choose share: the drop zone, and which files belong together.

const by = id => document.getElementById(id);

function say(parent, tag, text, kind = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = kind;
  parent.append(element);
  return element;
}

// One list of files per recording: a WFDB header with the signal files that it names, any other file alone.
async function group(files) {
  const byName = new Map(files.map(file => [file.name, file]));
  const taken = new Set();
  const groups = [];
  for (const header of files.filter(file => file.name.toLowerCase().endsWith(".hea"))) {
    const lines = (await header.text()).split(/\r?\n/).filter(line => line.trim() && !line.startsWith("#")).slice(1);
    const names = new Set(lines.map(line => line.trim().split(/\s+/)[0]));
    const own = [header, ...[...names].filter(name => byName.has(name)).map(name => byName.get(name))];
    own.forEach(file => taken.add(file));
    groups.push(own);
  }
  return [...groups, ...files.filter(file => !taken.has(file)).map(file => [file])];
}

// `use` gets the groups, one batch after the other.
function takeFiles(use) {
  let before = Promise.resolve();
  const take = async list => {
    const files = [...list];
    by("files").value = "";  // so that the same file can be chosen again
    if (!files.length) return;
    const groups = await group(files);
    before = before.then(() => use(groups));
  };
  by("files").addEventListener("change", () => take(by("files").files));
  by("form").addEventListener("submit", event => event.preventDefault());
  for (const kind of ["dragover", "drop"]) document.addEventListener(kind, event => event.preventDefault());
  document.addEventListener("dragover", () => by("zone").classList.add("over"));
  document.addEventListener("dragleave", () => by("zone").classList.remove("over"));
  document.addEventListener("drop", event => {
    by("zone").classList.remove("over");
    take(event.dataTransfer.files);
  });
}
