#!/usr/bin/env bash
# A Keras 2 LSTM that is not stateful, converted to TensorFlow Lite, starts each call from the state that the call before left: the
# converter fuses it into one operator whose h and c are variables of the interpreter, so that the same input gives another output
# the second time, and an earlier input shows in a later answer. GRU and SimpleRNN of the same model, and the LSTM of Keras 3,
# become loops that start from zeros each time; nothing in the file's inputs or outputs tells the two kinds apart.
# Expected: a layer with stateful=False answers the same to the same input, as it does before it is converted.
# Output seen on 30 November 2026 with tensorflow-cpu 2.21.0, tf_keras 2.21.0, keras 3.15.1, the largest difference from Keras:
#   tf_keras LSTM, UNIDIRECTIONAL_SEQUENCE_LSTM: the first call 0.000, the second 0.095, after another input 0.118, after reset_all_variables() 0.000
#   tf_keras GRU, WHILE: the first call 0.000, the second 0.000, after another input 0.000, after reset_all_variables() 0.000
#   tf_keras SimpleRNN, WHILE: the first call 0.000, the second 0.000, after another input 0.000, after reset_all_variables() 0.000
#   keras LSTM, WHILE: the first call 0.000, the second 0.000, after another input 0.000, after reset_all_variables() 0.000
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check tensorflow-cpu==2.21.0 tf_keras==2.21.0 keras==3.15.1 numpy==2.4.6
cat > "$d/t.py" <<'PY'
import importlib
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import numpy as np
import tensorflow as tf

package, kind = sys.argv[1:]
keras = importlib.import_module(package)
keras.utils.set_random_seed(1)
x, other = np.random.default_rng(0).standard_normal((2, 1, 5, 4)).astype("f4")
layer = getattr(keras.layers, kind)(6, return_sequences=True)
assert not layer.stateful
model = keras.Sequential([keras.layers.InputLayer(batch_shape=(1, 5, 4)) if package == "keras" else
                          keras.layers.InputLayer(input_shape=(5, 4), batch_size=1), layer])
expected = model(x).numpy()
interpreter = tf.lite.Interpreter(model_content=tf.lite.TFLiteConverter.from_keras_model(model).convert())
interpreter.allocate_tensors()
source, result = interpreter.get_input_details()[0]["index"], interpreter.get_output_details()[0]["index"]
operator = {one["op_name"] for one in interpreter._get_ops_details()} & {"UNIDIRECTIONAL_SEQUENCE_LSTM", "WHILE"}


def off(given):
    interpreter.set_tensor(source, given)
    interpreter.invoke()
    return float(np.abs(interpreter.get_tensor(result) - expected).max())


first, second, _, after = off(x), off(x), off(other), off(x)
interpreter.reset_all_variables()
again = off(x)
print(f"{package} {kind}, {operator.pop()}: the first call {first:.3f}, the second {second:.3f}, after another input {after:.3f}, "
      f"after reset_all_variables() {again:.3f}", file=open("seen", "a"))
remembers = package == "tf_keras" and kind == "LSTM"
right = max(first, again) < 1e-5 and (min(second, after) > 1e-2 if remembers else max(second, after) < 1e-5)
sys.exit(not right)
PY
cd "$d"
for layer in tf_keras.LSTM tf_keras.GRU tf_keras.SimpleRNN keras.LSTM; do
    "$d/v/bin/python" t.py "${layer%.*}" "${layer#*.}" > log 2>&1 || { tail log; cat seen; exit 1; }
done
cat seen
