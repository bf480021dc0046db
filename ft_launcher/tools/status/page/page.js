// The page of a running job: follows /events and shows what they say. It asks only the launcher that it comes from.
//
// What ranks and users have written is put in by `textContent` alone, never as HTML. In order: how the status comes,
// how texts are shown, then one part for each section of the page.
"use strict";

const POLL_MS = 2000;     // without a stream of events, and before the next try
const SILENT_MS = 5000;   // events come every second: after so long the launcher stands still, or a proxy keeps them
const MAX_TEXT = 2000;   // characters of one text
const LATE = 2;           // steps behind the foremost rank; one is usual while the ranks are asked one after the other

const byId = (id) => document.getElementById(id);
const sleep = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));

let status = null;        // the last that came
let token = "";           // kept by this page alone, until it is closed

// How the status comes.

/** Requests a path. Throws where the launcher cannot be reached or refuses; asks for the token where one is needed.
 * `limit` gives the signal that ends one try. */
async function ask(path, limit = () => AbortSignal.timeout(SILENT_MS)) {
  for (;;) {
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { headers, signal: limit(), cache: "no-store" });
    if (response.status === 401) {
      await askForToken();
    } else if (!response.ok) {
      throw new Error(await response.text());
    } else {
      return response;
    }
  }
}

let asked = null;

/** Shows the form and waits until somebody has filled it in. */
function askForToken() {
  asked ??= new Promise((done) => {
    const form = byId("ask");
    say("", token ? "That is not the token." : "A token is needed.");
    put(byId("sentence"), "ft_launcher");
    form.hidden = false;
    byId("token").focus();
    form.onsubmit = (event) => {
      event.preventDefault();
      token = byId("token").value.trim();
      byId("token").value = "";
      form.hidden = true;
      asked = null;
      done();
    };
  });
  return asked;
}

/** Shows events until the stream ends, fails or is silent for too long. Returns how many came and whether the launcher
 * has said that it ends. */
async function follow() {
  let ending;
  let alarm = 0;
  let came = 0;
  let ended = false;
  const wait = () => {
    clearTimeout(alarm);
    alarm = setTimeout(() => ending.abort(), SILENT_MS);
  };
  const begin = () => {
    ending = new AbortController();
    wait();
    return ending.signal;
  };
  try {
    const response = await ask("events", begin);
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let pieces = [];
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      wait();
      pieces.push(value);
      if (!value.endsWith("\n\n")) continue;  // an event of 1,024 ranks comes in several pieces
      const events = pieces.join("").split("\n\n").slice(0, -1);
      pieces = [];
      const last = events[events.length - 1];  // a slow reader gets several at once, and needs only the last
      ended = last.startsWith("event: end\n");
      came += events.length;
      show(last.slice(last.indexOf("data: ") + 6));
      say(ended ? "ended" : "", ended ? endText() : "live");
    }
  } catch (error) {
    if (status === null) say("lost", `The launcher does not answer: ${error.message || error}`);
  }
  clearTimeout(alarm);
  return { came, ended };
}

/** Follows the launcher for as long as the page is open. */
async function run() {
  let streams = true;  // whether events arrive one by one: some proxies keep them
  for (;;) {
    let came = 0;
    if (streams) {
      let ended;
      ({ came, ended } = await follow());
      if (ended) return;
      if (came) lost();
    }
    await sleep(POLL_MS);
    try {
      const response = await ask("status.json");
      show(await response.text());
      say("", `live, asked every ${POLL_MS / 1000} s`);
      streams = came > 0;
    } catch {
      lost();
      streams = true;
    }
  }
}

let lostAt = null;

/** Says that nothing comes any more. */
function lost() {
  if (status === null) return;
  lostAt ??= new Date();
  const since = lostAt.toLocaleTimeString();
  say("lost", `No answer since ${since}: the launcher has ended, stands still or cannot be reached. ` +
    "Below is what was known then; the page tries again.");
}

function endText() {
  return `The launcher ended at ${new Date(status.t * 1000).toLocaleTimeString()}. Below is its last state.`;
}

/** Says how the page is connected: "", "lost" or "ended". */
function say(kind, text) {
  if (kind === "") lostAt = null;
  const line = byId("connection");
  if (line.className !== kind) line.className = kind;
  document.body.classList.toggle("stale", kind === "lost");
  put(line, text);
}

/** Shows a status, JSON as text. */
function show(text) {
  const began = performance.now();
  const found = JSON.parse(text);
  const isAnother = status !== null && (status.run_id !== found.run_id || status.started !== found.started);
  status = found;
  if (isAnother) forget();
  byId("all").hidden = false;
  showHead();
  showRanks();
  showFaults();
  showTime();
  showCycles();
  showNode();
  performance.clearMeasures("update");
  performance.measure("update", { start: began, end: performance.now() });  // scripts/bench reads it
}

/** Removes what belongs to a job that another has followed at this port. */
function forget() {
  faults.clear();
  byId("faults").replaceChildren();
  byId("values").replaceChildren();
  byId("settings").open = byId("collectives").open = false;
  byId("groups").replaceChildren();
  selected = -1;
}

// Texts.

// What would be invisible, or would turn the direction of a line around.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

/** Returns a text of somebody else's as it is shown: of bounded length, with nothing in it that is invisible. */
function shown(value, most = MAX_TEXT) {
  const whole = String(value);
  const text = whole.slice(0, most).replace(HIDDEN, (sign) => `\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`);
  return whole.length > most ? `${text} … (${count(whole.length - most, "more character")})` : text;
}

/** Sets the text of a node, if it is another. */
function put(node, value, most) {
  const text = shown(value, most);
  if (node.textContent !== text) node.textContent = text;
}

/** Makes an element with a text in it. */
function element(tag, text = "", className = "") {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = shown(text);
  if (className) made.className = className;
  return made;
}

/** Makes an element with other nodes in it. */
function around(tag, ...children) {
  const made = document.createElement(tag);
  made.append(...children);
  return made;
}

const number = (value) => value.toLocaleString("en");
const count = (value, noun) => `${number(value)} ${noun}${value === 1 ? "" : "s"}`;
const percent = (share) => `${(share * 100).toFixed(1)} %`;

/** A number of bytes in words, as the launcher writes it. */
function size(bytes) {
  for (const [unit, name] of [[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) {
    if (bytes >= unit) return `${(bytes / unit).toFixed(1)} ${name}`;
  }
  return `${number(bytes)} bytes`;
}

/** A length of time in words. */
function span(seconds) {
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  const whole = Math.round(seconds);
  if (whole < 90) return `${whole} s`;
  if (whole < 5400) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

const moment = (seconds) => new Date(seconds * 1000).toLocaleString();

/** Ranks in few words: "rank 3", "ranks 0-6, 9". */
function named(ranks) {
  const parts = [];
  const sorted = [...ranks].sort((one, other) => one - other);
  for (let index = 0; index < sorted.length; index++) {
    const first = sorted[index];
    while (sorted[index + 1] === sorted[index] + 1) index++;
    parts.push(first === sorted[index] ? `${first}` : `${first}-${sorted[index]}`);
  }
  return `rank${ranks.length === 1 ? "" : "s"} ${parts.slice(0, 40).join(", ")}${parts.length > 40 ? ", …" : ""}`;
}

/** Fills a table. A cell is a text or a node; columns in `numbers` are aligned as numbers are. */
function fill(table, heads, rows, numbers = []) {
  const cell = (tag, content, column) => {
    const made = content instanceof Node ? around(tag, content) : element(tag, content);
    if (numbers.includes(column)) made.className = "number";
    return made;
  };
  const head = around("thead", around("tr", ...heads.map((name, column) => cell("th", name, column))));
  const body = around("tbody", ...rows.map((row) => around("tr", ...row.map((content, at) => cell("td", content, at)))));
  table.replaceChildren(head, body);
}

// The sentence.

function nodeText() {
  const place = status.nodes > 1 ? `, node ${status.node_rank} of ${status.nodes}` : "";
  return `${shown(status.node, 200)}${place}`;
}

function showHead() {
  put(byId("job"), `${shown(status.job_name, 200)} on ${nodeText()}`, 1000);
  put(byId("sentence"), status.sentence, 600);
  byId("sentence").className = status.state;
  document.title = `${status.state}: ${shown(status.job_name, 60)}`;
}

// Ranks: one canvas, a mark for each. Colour and shape say the same.

const SIZES = [44, 36, 28, 22, 18, 14, 11];  // of a mark and the room around it: the largest with which all fit
const MAX_HEIGHT = 420;
const STATES = ["training", "late", "stalled", "hung", "starting", "unwatched", "exited"];
const MEANING = {
  training: "training", late: `training, ${LATE} or more steps behind`, stalled: "stalled: no steps", hung: "hung", starting: "starting",
  unwatched: "runs, asked for no watch", exited: "exited",
};
const PEN = { training: "--good", late: "--late", stalled: "--late", hung: "--bad", starting: "--start", unwatched: "--idle", exited: "--idle" };

const FADED = 0.4;        // opacity of the ranks of a node that has said nothing for longer than it should

let nodes = [];           // by node rank: where the launcher is the coordinator all of the cycle, else its own alone
let ranks = [];           // of these nodes, in their order
let places = [];          // left and top of the mark of each rank
let selected = -1;        // index in ranks
let hovered = -1;
let cell = SIZES[0];

// Steps are compared within a node: what other nodes have said was true at other moments.
const lag = (rank) => (rank.iteration === null ? 0 : rank.on.foremost - rank.iteration);
const look = (rank) => (rank.state === "training" && lag(rank) >= LATE ? "late" : rank.state);
const isWell = (rank) => rank.state !== "hung" && rank.state !== "stalled" && look(rank) !== "late" && !rank.exit_code;

/** Takes nodes and ranks from the status; the one that is selected stays so. */
function takeRanks() {
  const chosen = ranks[selected]?.rank;
  const own = { node: status.node, node_rank: status.node_rank, age_s: 0, is_old: false, ranks: status.ranks };
  nodes = [own, ...(status.other_nodes ?? [])].sort((one, other) => one.node_rank - other.node_rank);
  for (const node of nodes) {
    node.foremost = node.ranks.reduce((most, rank) => Math.max(most, rank.iteration ?? 0), 0);
    for (const rank of node.ranks) rank.on = node;
  }
  ranks = nodes.flatMap((node) => node.ranks);
  selected = ranks.findIndex((rank) => rank.rank === chosen);
  if (hovered >= ranks.length) hovered = -1;
}

function showRanks() {
  takeRanks();
  const counts = new Map();
  for (const rank of ranks) counts.set(rank.state, (counts.get(rank.state) ?? 0) + 1);
  const parts = [...counts].map(([state, many]) => `${number(many)} ${state}`);
  const late = ranks.filter((rank) => look(rank) === "late").length;
  if (late) parts.push(`${number(late)} behind`);
  const where = nodes.length > 1 ? `${number(nodes.length)} nodes` : "this node";
  const text = ranks.length ? `${count(ranks.length, "rank")} on ${where}: ${parts.join(", ")}` : "No rank has run yet.";
  put(byId("states"), [text, ...silentNodes()].join("; "));
  draw();
  showRank();
}

/** Which nodes say nothing, and which wait for a place, in parts of a sentence. */
function silentNodes() {
  const some = (found) => `${found.slice(0, 8).map((name) => shown(name, 100)).join(", ")}${found.length > 8 ? ", …" : ""}`;
  const parts = [];
  const unreported = nodes.filter((node) => node.age_s === null).map((node) => node.node);
  const old = nodes.filter((node) => node.is_old).map((node) => `${shown(node.node, 100)} (${span(node.age_s)})`);
  const waiting = status.waiting_nodes ?? [];
  if (unreported.length) parts.push(`no report yet: ${some(unreported)}`);
  if (old.length) parts.push(`no report any more: ${some(old)}`);
  if (waiting.length) parts.push(`${count(waiting.length, "node")} waiting for a place: ${some(waiting)}`);
  return parts;
}

/** Returns the places of all marks of a size, and the height of all. The marks of a node are together; between two
 * nodes is room, and one that does not fit into a line begins the next. */
function layOut(size, width) {
  const room = nodes.length > 1 ? size / 2 : 0;
  const found = [];
  let left = 0;
  let top = 0;
  const nextLine = () => {
    left = 0;
    top += size + room / 2;
  };
  for (const node of nodes) {
    if (left > 0 && left + node.ranks.length * size > width) nextLine();
    for (let index = 0; index < node.ranks.length; index++) {
      if (left + size > width) nextLine();
      found.push([left, top]);
      left += size;
    }
    if (node.ranks.length) left += room;
  }
  return { found, height: top + size };
}

/** Draws all marks. */
function draw() {
  const canvas = byId("grid");
  const width = canvas.clientWidth;
  canvas.hidden = byId("legend").hidden = !ranks.length;
  if (!ranks.length || !width) return;
  cell = SIZES.find((size) => layOut(size, width).height <= MAX_HEIGHT) ?? SIZES.at(-1);
  const { found, height } = layOut(cell, width);
  places = found;
  const scale = window.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const brush = canvas.getContext("2d");
  brush.scale(scale, scale);
  const colours = readColours();
  for (let index = 0; index < ranks.length; index++) {
    const [left, top] = places[index];
    if (nodes.length > 1) {
      brush.fillStyle = colours["--line"];
      brush.fillRect(left, top, cell, cell);
    }
    brush.globalAlpha = ranks[index].on.is_old ? FADED : 1;
    mark(brush, colours, look(ranks[index]), left, top, cell, ranks[index]);
    brush.globalAlpha = 1;
    if (index === selected || index === hovered) {
      brush.strokeStyle = colours["--focus"];
      brush.lineWidth = 2;
      brush.strokeRect(left + 1, top + 1, cell - 2, cell - 2);
    }
  }
}

/** The colours of the present theme, by their names in the style sheet. */
function readColours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries([...Object.values(PEN), "--focus", "--on", "--bad", "--line"].map((name) => [name, style.getPropertyValue(name)]));
}

/** Draws the mark of one state into a square. */
function mark(brush, colours, state, left, top, size, rank = null) {
  const gap = size > 16 ? 3 : 1.5;
  const side = size - 2 * gap;
  const middle = [left + size / 2, top + size / 2];
  const colour = state === "exited" && rank?.exit_code ? colours["--bad"] : colours[PEN[state]];
  brush.fillStyle = brush.strokeStyle = colour;
  brush.lineWidth = Math.max(1.5, side / 9);
  const inset = brush.lineWidth / 2 + 1;
  brush.beginPath();
  if (state === "training") {
    brush.roundRect(left + gap, top + gap, side, side, side / 6);
    brush.fill();
  } else if (state === "late") {
    brush.roundRect(left + gap, top + gap + side / 2, side, side / 2, side / 8);
    brush.fill();
    brush.strokeRect(left + gap + inset / 2, top + gap + inset / 2, side - inset, side - inset);
  } else if (state === "stalled") {
    brush.moveTo(middle[0], top + gap / 2);
    brush.lineTo(left + size - gap / 2, middle[1]);
    brush.lineTo(middle[0], top + size - gap / 2);
    brush.lineTo(left + gap / 2, middle[1]);
    brush.fill();
  } else if (state === "hung") {
    brush.moveTo(middle[0], top + gap / 2);
    brush.lineTo(left + size - gap / 2, top + size - gap);
    brush.lineTo(left + gap / 2, top + size - gap);
    brush.fill();
  } else if (state === "exited") {
    const edge = gap + side / 6;
    brush.moveTo(left + edge, top + edge);
    brush.lineTo(left + size - edge, top + size - edge);
    brush.moveTo(left + size - edge, top + edge);
    brush.lineTo(left + edge, top + size - edge);
    brush.stroke();
  } else {
    const radius = state === "starting" ? side / 2 - inset : side / 4;
    brush.arc(...middle, radius, 0, 2 * Math.PI);
    state === "starting" ? brush.stroke() : brush.fill();
  }
  if (rank !== null && size >= 22 && (state === "training" || state === "stalled" || state === "hung")) {
    brush.fillStyle = colours["--on"];
    brush.font = `${Math.round(size / 3)}px system-ui, sans-serif`;
    brush.textAlign = "center";
    brush.textBaseline = "middle";
    brush.fillText(String(rank.rank), middle[0], middle[1] + (state === "hung" ? size / 7 : 0));
  }
}

function drawLegend() {
  byId("legend").replaceChildren(...STATES.map((state) => {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = 28;
    const brush = canvas.getContext("2d");
    brush.scale(2, 2);
    mark(brush, readColours(), state, 0, 0, 14);
    return around("li", canvas, MEANING[state]);
  }));
}

/** Says what is known of the rank that the pointer or the keyboard is at. */
function showRank() {
  const rank = ranks[hovered >= 0 ? hovered : selected];
  const panel = byId("rank");
  if (rank === undefined) {
    const text = ranks.length ? "Point at a rank, or use the arrow keys; N goes to the next one that is not well." : "";
    panel.replaceChildren(element("p", text, "dim"));
    return;
  }
  const state = element("strong", `rank ${rank.rank}: ${rank.state}`, rank.state);
  const facts = [];
  if (rank.exit_code !== null) facts.push(`exit code ${rank.exit_code}`);
  if (rank.iteration !== null) {
    const behind = lag(rank);
    facts.push(`step ${number(rank.iteration)}${behind ? `, ${number(behind)} behind` : ""}`);
  }
  const sections = Object.entries(rank.sections).map(([name, age]) => `${name} for ${span(age)}`);
  if (sections.length) facts.push(`in ${sections.join(", ")}`);
  if (rank.sign_age_s !== null) facts.push(`last sign of life ${span(rank.sign_age_s)} ago`);
  facts.push(`pid ${rank.pid}`);
  if (nodes.length > 1) {
    const old = rank.on.age_s ? `, as of ${span(rank.on.age_s)} ago` : "";
    facts.push(`on ${shown(rank.on.node, 100)} (node ${rank.on.node_rank}${old})`);
  }
  const line = around("p", state, " ", element("span", facts.join("; ")));
  const frames = rank.frames.length ? [element("pre", rank.frames.join("\n"))] : [];
  panel.replaceChildren(line, ...frames);
}

function select(index) {
  selected = Math.min(Math.max(index, 0), ranks.length - 1);
  draw();
  showRank();
}

/** The index of the rank below that at an index, or above it: the nearest one of the next line; without one the last,
 * or the first. */
function inNextLine(at, isBelow) {
  const [left, top] = places[at];
  const beyond = places.filter((place) => (isBelow ? place[1] > top : place[1] < top)).map((place) => place[1]);
  if (!beyond.length) return isBelow ? ranks.length - 1 : 0;
  const line = isBelow ? Math.min(...beyond) : Math.max(...beyond);
  let nearest = -1;
  places.forEach((place, index) => {
    const isNearer = nearest < 0 || Math.abs(place[0] - left) < Math.abs(places[nearest][0] - left);
    if (place[1] === line && isNearer) nearest = index;
  });
  return nearest;
}

function onKey(event) {
  if (status === null || !ranks.length) return;
  const last = ranks.length - 1;
  const at = Math.max(selected, 0);
  const moves = {
    ArrowRight: () => at + 1, ArrowLeft: () => at - 1, ArrowDown: () => inNextLine(at, true), ArrowUp: () => inNextLine(at, false),
    Home: () => 0, End: () => last,
  };
  if (event.key in moves) {
    select(selected < 0 ? 0 : moves[event.key]());
  } else if (event.key === "n" || event.key === "N") {
    const order = ranks.map((_, step) => (selected + 1 + step) % (last + 1));
    const next = order.find((index) => !isWell(ranks[index]));
    if (next !== undefined) select(next);
  } else if (event.key === "Escape") {
    selected = -1;
    draw();
    showRank();
  } else {
    return;
  }
  event.preventDefault();
}

/** The index of the rank under the pointer; -1: there is none. */
function under(event) {
  const { offsetX: x, offsetY: y } = event;
  return places.findIndex(([left, top]) => x >= left && x < left + cell && y >= top && y < top + cell);
}

function hover(index) {
  if (index === hovered || status === null) return;
  hovered = index;
  draw();
  showRank();
}

// Collectives: asked for when somebody wants to know, since each rank has to answer.

/** Fills a table with how far ranks are in their process groups. Those that others wait for, and those that said nothing,
 * stand out. */
function fillCollectives(table, rows, silent) {
  const most = new Map();
  for (const row of rows) most.set(row.group, Math.max(most.get(row.group) ?? 0, row.entered));
  const answered = rows.map((row) => [
    row.group, named(row.ranks), number(row.entered), number(row.finished), `${row.operation} ${row.shape}`,
  ]);
  const missing = silent.map((row) => ["", named(row.ranks), "", "", row.why]);
  fill(table, ["process group", "ranks", "entered", "finished", "collective"], [...answered, ...missing], [2, 3]);
  const lines = table.tBodies[0].rows;
  rows.forEach((row, index) => lines[index].classList.toggle("behind", row.entered < most.get(row.group)));
  silent.forEach((row, index) => lines[rows.length + index].classList.add("behind"));
}

async function askForCollectives() {
  if (!byId("collectives").open) return;
  put(byId("collected"), "Asks the ranks.");
  try {
    const found = (await (await ask("status.json?collectives=1")).json()).collectives;
    fillCollectives(byId("groups"), found?.rows ?? [], found?.silent ?? []);
    byId("groups").hidden = found === null;
    put(byId("collected"), found === null ? "No rank has said anything of its collectives." : `As of ${new Date().toLocaleTimeString()}, in cycle ${status.cycle}.`);
  } catch (error) {
    put(byId("collected"), `No answer: ${error.message || error}`);
  }
}

// Faults: each stays as it is while its reader has it open.

const faults = new Map();  // number -> its element

function showFaults() {
  byId("no_faults").hidden = status.faults.length > 0;
  const more = status.fault_count - status.faults.length;
  put(byId("of_faults"), status.fault_count ? `Faults (${number(status.fault_count)}${more > 0 ? `, the last ${status.faults.length} here` : ""})` : "Faults");
  const known = new Set(status.faults.map((fault) => fault.number));
  for (const [old, made] of faults) {
    if (!known.has(old)) {
      made.remove();
      faults.delete(old);
    }
  }
  for (const fault of status.faults) {
    if (!faults.has(fault.number)) {
      faults.set(fault.number, makeFault(fault));
      byId("faults").prepend(faults.get(fault.number));
    }
    const lost = fault.steps_lost === null ? "" : `; ${count(fault.steps_lost, "step")} lost`;
    put(faults.get(fault.number).querySelector(".next"), fault.next ? `next: ${fault.next}${lost}` : "");
  }
}

function makeFault(fault) {
  const made = element("details");
  const headline = element("span", `rank ${fault.rank} ${fault.what}`, "what");
  made.append(around("summary", element("span", moment(fault.t), "when"), headline));
  const place = fault.where ? `, ${fault.where}` : "";
  const facts = element("div", "", "facts");
  const kind = fault.kind === fault.fault_class ? "" : ` (${fault.kind})`;
  facts.append(element("p", `cycle ${fault.cycle}${place}; class: ${fault.fault_class}${kind}`));
  if (fault.hint) facts.append(element("p", `likely: ${fault.hint}`));
  facts.append(element("p", "", "next"));
  if (fault.detail.length) facts.append(element("pre", fault.detail.join("\n")));
  for (const other of fault.others) facts.append(element("p", `also: ${other}`));
  const scene = element("div", "", "scene");
  facts.append(scene);
  made.append(facts);
  if (fault.has_stacks) {
    made.addEventListener("toggle", () => {
      if (made.open && !scene.hasChildNodes()) showScene(scene, fault.number);
    });
  }
  return made;
}

const PLACES = {
  stopped: "stopped, by SIGSTOP or a debugger", in_kernel: "in the kernel: storage, GPU or NIC",
  collective: "in a collective", outside: "in no call of torch.distributed",
  blocked: "in C code, waits for another thread", unknown: "unknown",
  locked: "waits for a lock of its own program", wrapper: "in the in-process wrapper, waits for the other ranks",
};

/** Shows where the ranks were at a fault: how far in their collectives, then their stacks. */
async function showScene(scene, faultNumber) {
  let found;
  try {
    found = await (await ask(`fault.json?number=${faultNumber}`)).json();
  } catch (error) {
    scene.replaceChildren(element("p", `Its stacks cannot be had any more: ${error.message || error}`, "dim"));
    return;
  }
  const parts = [];
  if (found.collectives.length) {
    const table = element("table");
    fillCollectives(table, found.collectives, found.silent);
    parts.push(element("h3", "Collectives"), around("div", table));
    parts.at(-1).className = "wide";
  }
  for (const stack of found.stacks) {
    parts.push(element("h3", `${named(stack.ranks)}: ${PLACES[stack.place] ?? stack.place}`));
    parts.push(element("pre", stack.frames.join("\n") || `no stacks: ${(stack.process.stacks || "it did not answer").replace(/^none: /, "")}`));
  }
  scene.replaceChildren(...parts);
}

// Time.

// As `record/ledger/palette.py` has them, in the order in which a cycle comes to them.
const KINDS = {
  reschedule: "late slanted", backoff: "late slanted", health: "late weak", rendezvous: "start", membership: "late weak",
  launch: "start", setup: "start", checkpoint_load: "save weak", warmup: "start", data: "start weak", step: "good",
  evaluation: "start slanted", "custom:": "start slanted", checkpoint_save: "save", lost_progress: "bad slanted",
  excluded: "idle weak", unknown: "idle", detection: "late", stop: "late weak",
};
const ORDER = Object.keys(KINDS);
const kindOf = (category) => KINDS[category] ?? KINDS["custom:"];
const turnOf = (category) => ORDER.indexOf(category in KINDS ? category : "custom:");

/** Fills a bar with one piece for each category, as long as its time. */
function fillBar(bar, seconds) {
  bar.replaceChildren(...seconds.map(([category, spent]) => {
    const piece = element("span", "", kindOf(category));
    piece.style.flexGrow = spent;
    piece.title = `${shown(category, 200)}: ${span(spent)}`;
    return piece;
  }));
}

function showTime() {
  const times = status.times;
  if (times === null) return;
  const saved = times.goodput_saved === times.goodput ? "" : `, ${percent(times.goodput_saved)} until the last checkpoint`;
  put(byId("goodput"), `${span(times.wall_s)} so far; ${percent(times.goodput)} of it were steps that count${saved}.`);
  const seconds = Object.entries(times.seconds).sort((one, other) => other[1] - one[1]);
  fillBar(byId("time"), seconds);
  fill(byId("categories"), ["category", "time", "share"], seconds.map(([category, spent]) => [
    around("span", element("span", "", `key ${kindOf(category)}`), shown(category, 200)), span(spent), percent(spent / times.wall_s || 0),
  ]), [1, 2]);
}

// Cycles, and the pieces of each, in the order of time.

function showCycles() {
  const cycles = status.cycles;
  const longest = Math.max(...cycles.map((cycle) => cycle.until - cycle.since), 1e-9);
  byId("cycles").replaceChildren(...cycles.map((cycle) => {
    const facts = [`cycle ${cycle.cycle}`, span(cycle.until - cycle.since), cycle.how || "runs"];
    if (cycle.steps) facts.push(count(cycle.steps, "step"));
    const phases = Object.entries(cycle.recovery);
    if (phases.length) {
      const whole = phases.reduce((sum, [, spent]) => sum + spent, 0);
      facts.push(`after a recovery of ${span(whole)} (${phases.map(([phase, spent]) => `${phase} ${span(spent)}`).join(", ")})`);
    }
    const bar = element("div", "", "bar");
    fillBar(bar, Object.entries(cycle.seconds).sort(([one], [other]) => turnOf(one) - turnOf(other)));
    bar.style.width = `${Math.max(2, (100 * (cycle.until - cycle.since)) / longest)}%`;
    return around("li", element("span", facts.join(", ")), bar);
  }));
}

// Node and settings.

/** What is known of the training's state in memory: the newest step, what the ranks went on from, what saves cost. */
function memoryText(memory) {
  const parts = [memory.newest === null ? "no step yet" : `step ${number(memory.newest)}`];
  if (memory.behind) parts[0] += ` (${number(memory.behind)} behind)`;
  if (memory.copied !== null) parts.push(`step ${number(memory.copied)} on other nodes, too`);
  const lost = memory.steps_lost === null ? "" : `, ${count(memory.steps_lost, "step")} lost`;
  if (memory.step) parts.push(`went on from step ${number(memory.step)}${lost}`);
  else if (memory.steps_lost) parts.push(`no state was used, ${count(memory.steps_lost, "step")} lost`);
  const share = memory.share === null ? "" : ` took ${percent(memory.share)} of the time`;
  parts.push(`${count(memory.saves, "save")}${share}${memory.failed ? `, ${number(memory.failed)} failed` : ""}`);
  if (memory.in_use !== null) parts.push(`${size(memory.in_use)} of ${size(memory.limit)}`);
  return parts.join("; ");
}

function showNode() {
  const facts = {
    "began": moment(status.started),
    "run id": shown(status.run_id, 200),
    "node": nodeText(),
    "restarts": `${number(status.restarts)} so far, ${status.restarts_left ?? "?"} of ${status.max_restarts} left`,
    "steps lost": number(status.steps_lost),
    "health": Object.entries(status.health).map(([check, state]) => `${check}: ${state}`).join(", ") || "nothing to report",
    "launcher": status.launcher,
  };
  if (status.memory !== null) facts["in memory"] = memoryText(status.memory);
  const list = byId("node");
  if (list.children.length !== 2 * Object.keys(facts).length) {
    list.replaceChildren(...Object.keys(facts).flatMap((name) => [element("dt", name), element("dd")]));
  }
  Object.values(facts).forEach((text, index) => put(list.children[2 * index + 1], text));
}

let settings = [];

async function loadSettings() {
  if (!byId("settings").open) return;
  try {
    settings = (await (await ask("settings.json")).json()).settings;
  } catch {
    settings = [];
  }
  showSettings();
}

function showSettings() {
  const wanted = settings.filter((one) => byId("all_settings").checked || one.source !== "default");
  const rows = wanted.map((one) => [one.key, one.value === null ? "none" : typeof one.value === "string" ? one.value : JSON.stringify(one.value), one.source]);
  fill(byId("values"), ["setting", "value", "from"], rows.length ? rows : [["all have their defaults", "", ""]]);
}

// What the reader does.

const grid = byId("grid");
grid.addEventListener("keydown", onKey);
grid.addEventListener("pointermove", (event) => hover(under(event)));
grid.addEventListener("pointerleave", () => hover(-1));
grid.addEventListener("click", (event) => under(event) >= 0 && select(under(event)));
grid.addEventListener("focus", () => status !== null && ranks.length && selected < 0 && select(0));
byId("collectives").addEventListener("toggle", askForCollectives);
byId("collect").addEventListener("click", askForCollectives);
byId("settings").addEventListener("toggle", loadSettings);
byId("all_settings").addEventListener("change", showSettings);
new ResizeObserver(() => status !== null && draw()).observe(document.body);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  drawLegend();
  if (status !== null) draw();
});
drawLegend();
run();
