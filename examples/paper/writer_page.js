// The page of writer_page.py: sends a line of text, draws the pen points as they arrive.
"use strict";

const $ = (id) => document.getElementById(id);
const UNITS = 4.4; // of the network, usual width of a letter
const MARGIN = 1.5; // units around the line
const ABOVE = -6, BELOW = 7; // usual extent of a line in y, which points downwards

let socket = null, strokes = [], pen = { x: 0, y: 0 }, box = null, drawing = false;

function begin(text) {
  strokes = [[]];
  pen = { x: 0, y: 0 };
  box = { left: 0, right: UNITS * text.length, top: ABOVE, bottom: BELOW };
  paint();
}

function take([dx, dy, end]) {
  pen = { x: pen.x + dx, y: pen.y + dy };
  box = {
    left: Math.min(box.left, pen.x), right: Math.max(box.right, pen.x),
    top: Math.min(box.top, pen.y), bottom: Math.max(box.bottom, pen.y),
  };
  strokes[strokes.length - 1].push(pen);
  if (end) strokes.push([]);
  if (drawing) return; // points that arrive together are drawn together
  drawing = true;
  requestAnimationFrame(paint);
}

// Draw the whole line, scaled so that it fits: at most some hundred points.
function paint() {
  drawing = false;
  const canvas = $("paper"), c = canvas.getContext("2d");
  const width = box.right - box.left + 2 * MARGIN, height = box.bottom - box.top + 2 * MARGIN;
  const scale = Math.min(canvas.width / width, canvas.height / height);
  c.setTransform(1, 0, 0, 1, 0, 0);
  c.clearRect(0, 0, canvas.width, canvas.height);
  c.setTransform(scale, 0, 0, scale, (MARGIN - box.left) * scale, (canvas.height - (box.top + box.bottom) * scale) / 2);
  Object.assign(c, { lineWidth: 0.4, lineCap: "round", lineJoin: "round", strokeStyle: "#0b4f8a", fillStyle: "#c2185b" });
  for (const stroke of strokes) {
    c.beginPath();
    for (const { x, y } of stroke) c.lineTo(x, y);
    if (stroke.length === 1) c.lineTo(stroke[0].x, stroke[0].y); // a dot
    c.stroke();
  }
  if (!socket) return;
  c.beginPath();
  c.arc(pen.x, pen.y, 0.45, 0, 2 * Math.PI); // the pen
  c.fill();
}

function say(text) {
  $("status").textContent = text;
}

function finish(text) {
  socket?.close();
  socket = null;
  $("write").disabled = false;
  $("stop").disabled = true;
  say(text);
  if (box) paint();
}

function write(wish) {
  begin(wish.text);
  $("write").disabled = true;
  $("stop").disabled = false;
  say(`Writing “${wish.text}”.`);
  const mine = (socket = new WebSocket(new URL("/write", location.href.replace(/^http/, "ws"))));
  mine.onopen = () => mine.send(JSON.stringify(wish));
  mine.onmessage = (event) => {
    const message = JSON.parse(event.data);
    if (mine !== socket) return; // stopped
    if (Array.isArray(message)) take(message);
    else if (message.error) finish(`Not written: ${message.error}.`);
    else finish(`“${wish.text}” written: ${message.done} pen points, each computed in ${message.microseconds} µs (median).`);
  };
  mine.onclose = () => {
    if (mine === socket) finish("Not finished: the server closed the connection, or all its pens are writing.");
  };
}

$("controls").onsubmit = (event) => {
  event.preventDefault();
  $("text").value = $("text").value.toLowerCase();
  write({ text: $("text").value, ...Object.fromEntries(["seed", "caution", "speed"].map((name) => [name, Number($(name).value)])) });
};
$("stop").onclick = () => finish("Stopped.");
