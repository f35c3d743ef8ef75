#!/usr/bin/env bash
# TensorFlow.js and Keras 3 name LSTM, GRU and hard_sigmoid alike and compute them otherwise: TensorFlow.js gates with
# hardSigmoid unless told, Keras with sigmoid; hardSigmoid is min(max(0.2 x + 0.5, 0), 1) there, relu6(x + 3) / 6 in Keras 3.
# Expected: layers.lstm({units}) with the weights of keras.layers.LSTM(units) gives the same outputs, at the latest
# when recurrent_activation="hard_sigmoid" is given to both.
# Output seen on 28 November 2026 with tfjs 4.22.0, keras 3.15.1 on torch 2.13.0:
#   defaults: off by 0.1 of outputs up to 0.9
#   sigmoid given: off by 9e-8
#   hard_sigmoid given to both: off by 0.1
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6 keras==3.15.1
cat > "$d/k.py" <<'PY'
import json
import os
os.environ["KERAS_BACKEND"] = "torch"
import keras
import numpy as np

r = np.random.default_rng(0)
x = r.normal(size=(1, 20, 4)).astype("f4")
weights = [r.normal(size=s).astype("f4") for s in ((4, 20), (5, 20), (20,))]
out = {"x": x.tolist(), "weights": [w.tolist() for w in weights]}
for gate in ("sigmoid", "hard_sigmoid"):
    layer = keras.layers.LSTM(5, return_sequences=True, recurrent_activation=gate)
    layer.build(x.shape)
    layer.set_weights(weights)
    out[gate] = np.asarray(keras.ops.convert_to_numpy(layer(x))).tolist()
json.dump(out, open("k.json", "w"))
PY
cat > "$d/t.js" <<'JS'
const tf = require("@tensorflow/tfjs");
const k = JSON.parse(require("fs").readFileSync("k.json"));
function off(options, wanted) {
  const layer = tf.layers.lstm({units: 5, returnSequences: true, ...options});
  const x = tf.tensor3d(k.x);
  layer.apply(x);  // makes the weights
  layer.setWeights(k.weights.map((w) => tf.tensor(w)));
  return layer.apply(x).sub(tf.tensor3d(wanted)).abs().max().dataSync()[0];
}
tf.setBackend("cpu");
const plain = off({}, k.sigmoid);
const sigmoid = off({recurrentActivation: "sigmoid"}, k.sigmoid);
const hard = off({recurrentActivation: "hardSigmoid"}, k.hard_sigmoid);
const most = Math.max(...k.sigmoid.flat(2).map(Math.abs));
console.log(`defaults: off by ${plain.toPrecision(1)} of outputs up to ${most.toPrecision(1)}`);
console.log(`sigmoid given: off by ${sigmoid.toPrecision(1)}`);
console.log(`hard_sigmoid given to both: off by ${hard.toPrecision(1)}`);
process.exit(plain > 0.02 && sigmoid < 1e-5 && hard > 0.02 ? 0 : 1);
JS
cd "$d"
npm install --silent --no-fund --no-audit @tensorflow/tfjs@4.22.0 >/dev/null
"$d/v/bin/python" -P k.py
node t.js | grep -v -e '^$' -e '==' -e 'Hi, looks like' -e 'node backend'
exit "${PIPESTATUS[0]}"
