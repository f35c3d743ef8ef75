// The page of `cnorm serve --demo --page examples/serve/page`: plays frames through a session that survives the loss of its worker.
"use strict";

const $ = (id) => document.getElementById(id);
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

// A session that reconnects: it keeps the last checkpoint and the frames since, as cnorm.client does.
class Session {
  constructor(url, log) {
    Object.assign(this, { url, log, checkpoint: null, kept: 0, tail: [], delivered: 0, attempts: 0, closed: false });
  }

  connect() {
    return new Promise((resolve) => {
      this.welcomed = resolve;
      this.open();
    });
  }

  open() {
    const socket = (this.socket = new WebSocket(this.url));
    socket.binaryType = "arraybuffer";
    const hello = { type: "hello", protocol: 1 };
    if (this.checkpoint) hello.checkpoint = this.checkpoint;
    socket.onopen = () => socket.send(JSON.stringify(hello));
    socket.onmessage = (event) => (typeof event.data === "string" ? this.text(JSON.parse(event.data)) : this.outputs(event.data));
    socket.onclose = async (event) => {
      if (this.closed) return;
      const delay = Math.min(50 * 2 ** this.attempts++, 2000);
      this.log(`connection lost (code ${event.code}) at frame ${this.delivered}; again in ${delay} ms`);
      if (this.attempts === 3) this.log(await cause());
      await wait(delay);
      this.open();
    };
  }

  text(message) {
    if (message.type === "welcome") {
      Object.assign(this, { inputs: message.input_size, width: message.output_size, credit: message.credit });
      if (this.attempts) this.log(`continued at frame ${message.frames}, ${this.kept + this.tail.length - message.frames} frames again`);
      this.keep(message);
      this.sent = message.frames;
      this.attempts = 0;
      this.pump();
      if (this.reset_done) this.socket.send('{"type": "reset"}'); // the one before was lost
      this.welcomed();
    } else if (message.type === "checkpoint") {
      this.keep(message);
    } else if (message.type === "reset") {
      Object.assign(this, { checkpoint: message.checkpoint, kept: 0, tail: [], delivered: 0, sent: 0 });
      this.reset_done?.();
      this.reset_done = null;
    } else if (message.type === "error") {
      this.log(`error ${message.code}: ${message.message}`);
      this.closed = ["message", "frames", "misplaced", "checkpoint"].includes(message.code);
    }
  }

  keep(message) {
    if (message.frames > this.delivered) return;
    this.checkpoint = message.checkpoint;
    this.tail.splice(0, message.frames - this.kept);
    this.kept = message.frames;
  }

  outputs(buffer) {
    const first = Number(new DataView(buffer).getBigUint64(0, true));
    const y = new Float32Array(buffer, 8);
    for (let k = 0; k < y.length / this.width; k++) {
      if (first + k < this.delivered) continue;
      this.delivered = first + k + 1;
      this.arrived(first + k, y.slice(k * this.width, (k + 1) * this.width));
    }
    this.pump();
  }

  send(frame) {
    this.tail.push(frame);
    this.pump();
  }

  // Send frames that were not sent on this connection, as far as the credit goes; frames may be lost and sent again.
  pump() {
    while (this.socket.readyState === WebSocket.OPEN && this.credit && this.sent < this.kept + this.tail.length
           && this.sent - this.delivered < this.credit) {
      const message = new Uint8Array(8 + 4 * this.inputs);
      new DataView(message.buffer).setBigUint64(0, BigInt(this.sent), true);
      message.set(new Uint8Array(this.tail[this.sent - this.kept].buffer), 8);
      this.socket.send(message);
      this.sent++;
    }
  }

  reset() {
    return new Promise((resolve) => {
      this.reset_done = resolve;
      if (this.socket.readyState === WebSocket.OPEN) this.socket.send('{"type": "reset"}');
    });
  }

  kill() {
    this.socket.send('{"type": "kill"}');
  }

  close() {
    this.closed = true;
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send('{"type": "end"}');
    else this.socket.close();
  }
}

// Why no connection succeeds: a browser does not tell the script with what status the server has refused it.
async function cause() {
  try {
    const answer = await fetch("readyz");
    if (!answer.ok) return `the server accepts no session: ${(await answer.text()).trim()}`;
    return `the server is there but may refuse this page: start it with --origin ${location.origin}; `
      + "if it has a token, add ?token=... to this page's address; its log says which; "
      + "a reverse proxy must pass the headers Upgrade and Connection";
  } catch (error) {
    return `the server cannot be reached: ${error.message}`;
  }
}

function probabilities(y) {
  const top = Math.max(...y);
  const e = Array.from(y, (v) => Math.exp(v - top));
  const sum = e.reduce((a, b) => a + b, 0);
  return e.map((v) => v / sum);
}

// Draw lines of one array of numbers each, from `bottom` to `top`; `bold` is the one drawn last and thick.
function draw(canvas, lines, length, bottom, top, bold) {
  const c = canvas.getContext("2d"), w = canvas.width, h = canvas.height, left = 46;
  c.clearRect(0, 0, w, h);
  c.font = "14px system-ui, sans-serif";
  c.fillStyle = "#333";
  for (const part of [0, 0.5, 1]) {
    const y = h - 14 - part * (h - 28);
    c.fillText(String(+(bottom + part * (top - bottom)).toPrecision(2)), 4, y + 5);
    c.fillRect(left, y, w - left, 0.5);
  }
  lines.map((line, k) => [line, k]).sort((a, b) => (a[1] === bold) - (b[1] === bold)).forEach(([line, k]) => {
    c.strokeStyle = k === bold ? "#0a58ca" : "#767676";
    c.lineWidth = k === bold ? 3 : 1;
    c.beginPath();
    line.forEach((v, i) => c.lineTo(left + (i / Math.max(length - 1, 1)) * (w - left - 4), h - 14 - ((v - bottom) / (top - bottom)) * (h - 28)));
    c.stroke();
  });
}

// The SHA-256 of outputs, or, where the browser has none, their bytes: on a page without TLS that is not on localhost.
async function digestOf(arrays) {
  const bytes = new Uint8Array(await new Blob(arrays).arrayBuffer());
  if (!crypto.subtle) return bytes.join();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (b) => b.toString(16).padStart(2, "0")).join("");
}

// Frames of a file: .npy of float32 [frames, inputs] in C or Fortran order, or numbers separated by commas.
async function framesOf(file) {
  const buffer = await file.arrayBuffer();
  if (!file.name.endsWith(".npy")) {
    const rows = new TextDecoder().decode(buffer).trim().split(/\r?\n/);
    return rows.map((row) => Float32Array.from(row.split(",").map(Number)));
  }
  const view = new DataView(buffer), long = view.getUint8(6) > 1;
  const start = (long ? 12 : 10) + (long ? view.getUint32(8, true) : view.getUint16(8, true));
  const head = new TextDecoder().decode(buffer.slice(10, start));
  const shape = /'shape': \((\d+), (\d+)\)/.exec(head);
  if (!head.includes("'<f4'") || !shape) throw new Error(`not float32 [frames, inputs], but ${head.trim()}`);
  const rows = +shape[1], columns = +shape[2];
  const all = new Float32Array(buffer.slice(start, start + 4 * rows * columns));
  const byColumns = head.includes("'fortran_order': True"); // as of a transposed array
  return Array.from({ length: rows }, (_, k) => (byColumns
    ? Float32Array.from({ length: columns }, (_, i) => all[i * rows + k]) : all.slice(k * columns, (k + 1) * columns)));
}

function checkFrames(frames, inputs) {
  if (!frames.length) throw new Error("there are no frames in it");
  frames.forEach((frame, k) => {
    if (frame.length !== inputs) throw new Error(`a frame must have ${inputs} numbers, got ${frame.length} in frame ${k + 1}`);
    if (!frame.every(Number.isFinite)) throw new Error(`frame ${k + 1} has a value that is not a finite number`);
  });
}

function log(text) {
  $("log").textContent += `${text}\n`;
}

const digests = new Map(); // of the outputs of each recording when it was first played
let recordings = [], session = null;

async function play(name, parts, interval) {
  const url = new URL("stream" + location.search, location.href);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  session = new Session(url, log);
  await session.connect();
  for (const { frames } of parts) checkFrames(frames, session.inputs);
  $("kill").disabled = false;
  const all = [], latencies = [];
  for (const { frames, label } of parts) {
    const lines = Array.from({ length: session.width }, () => []), sentAt = [];
    const classes = label !== undefined; // only recordings with labels are a classifier's
    let bottom = 0, top = 1;
    const finished = new Promise((resolve) => {
      session.arrived = (k, y) => {
        all.push(y);
        latencies.push(performance.now() - sentAt[k]);
        const shown = classes ? probabilities(y) : Array.from(y);
        shown.forEach((v, i) => lines[i].push(v));
        const best = shown.indexOf(Math.max(...shown));
        bottom = Math.min(bottom, ...shown);
        top = Math.max(top, ...shown);
        draw($("outputs"), lines, frames.length, bottom, top, label ?? best);
        draw($("latency"), [latencies], latencies.length, 0, Math.max(...latencies, 1), 0);
        const found = classes ? `${(100 * shown[best]).toFixed(0)} %; the speaker is ${label + 1}` : shown[best].toPrecision(4);
        $("summary").textContent = `Frame ${k + 1} of ${frames.length}: output ${best + 1} with ${found}.`;
        if (k + 1 === frames.length) resolve();
      };
    });
    const start = performance.now();
    for (let k = 0; k < frames.length; k++) {
      await wait(Math.max(start + k * interval - performance.now(), 0));
      sentAt.push(performance.now());
      session.send(frames[k]);
    }
    await finished;
    if (parts.length > 1) await session.reset();
  }
  session.close();
  $("kill").disabled = true;
  latencies.sort((a, b) => a - b);
  const at = (q) => latencies[Math.floor(q * (latencies.length - 1))].toFixed(1);
  $("latency-summary").textContent = `${latencies.length} frames: median ${at(0.5)} ms, longest ${at(1)} ms.`;
  const digest = await digestOf(all);
  const before = digests.get(name);
  digests.set(name, before ?? digest);
  const what = crypto.subtle ? `outputs have SHA-256 ${digest}` : `${all.length} outputs (SHA-256 needs TLS)`;
  log(`${name}: ${what}${before === undefined ? "" : before === digest ? ", the same bits as before" : ", OTHER BITS"}`);
}

async function start(name, parts) {
  $("play").disabled = true;
  try {
    await play(name, parts, Number($("interval").value));
  } catch (error) {
    session?.close();
    log(`${name}: ${error.message}`);
  }
  $("play").disabled = !recordings.length;
}

async function main() {
  const answer = await fetch("recordings.json");
  const about = answer.ok ? await answer.json() : { demo: false, recordings: [] };
  $("kill").hidden = !about.demo;
  recordings = about.recordings.map((one) => ({ label: one.label, frames: one.frames.map((row) => Float32Array.from(row)) }));
  $("recording").add(recordings.length ? new Option("all, one after another", "all") : new Option("none: choose a file", ""));
  recordings.forEach((one, k) => $("recording").add(new Option(`${k + 1}: speaker ${one.label + 1}`, k)));
  $("controls").querySelectorAll("#recording, #play").forEach((e) => (e.disabled = !recordings.length));
  $("controls").onsubmit = (event) => {
    event.preventDefault();
    if (!recordings.length) return;
    const chosen = $("recording").value;
    start(`recording ${chosen}`, chosen === "all" ? recordings : [recordings[chosen]]);
  };
  $("kill").onclick = () => session.kill();
  const take = async (file) => {
    try {
      await start(file.name, [{ frames: await framesOf(file) }]);
    } catch (error) {
      log(`${file.name}: ${error.message}`);
    }
  };
  $("file").onchange = () => take($("file").files[0]);
  $("drop").ondragover = (event) => { event.preventDefault(); $("drop").classList.add("over"); };
  $("drop").ondragleave = () => $("drop").classList.remove("over");
  $("drop").ondrop = (event) => { event.preventDefault(); $("drop").classList.remove("over"); take(event.dataTransfer.files[0]); };
}

main();
