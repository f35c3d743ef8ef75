"""The meaning of each code that an output prints, and its remedy: the text of `cnorm explain CODE`.

The codes are those of findings, of verdicts other than "ok", and of files that were not validated (`formats`).
"""

from __future__ import annotations

CODES = {
    "alone": "The model does not run, so each norm was cut out and judged as a model of its own, on generated rows. "
    "Norms that need other values than rows, scale and bias were not.",
    "axis": "The axis is out of range for the norm's input. Correct the attribute in the model that was exported.",
    "bias-nan": "The bias holds NaN or Inf. Look at the training run or the conversion of the weights.",
    "bias-shape": "The bias does not broadcast to the input of the norm.",
    "cannot-validate": "The file could not be validated, wholly or in part: it could not be read or run, a limit was "
    "reached, or no norm was exercised. Nothing is proved about the norms that have no other verdict.",
    "converted": "The model was converted to another opset (--opset) before it was examined.",
    "data-file": "Tensors were read from the data file of the model's name beside it.",
    "eps-input": "eps is an input of the model: the norm was judged with the value that --input gives, else 1e-5. "
    "Operators and fused kernels store eps; export it as a constant.",
    "eps-large": "eps is 0.01 or more: rows whose standard deviation is below 0.1 shrink. Some models use "
    "such an eps on purpose.",
    "eps-nan": "eps is NaN, so every result is NaN.",
    "eps-negative": "eps is negative: rows of small variance give NaN.",
    "eps-subnormal": "eps is below 1.2e-38, a subnormal number of float32: devices that take these for 0 "
    "give NaN for constant rows. Use a larger one.",
    "eps-zero": "eps is 0, absent, or 0 in the type it is used in (1e-8 in float16): constant rows give NaN. PyTorch's "
    "current exporter drops an eps of 1e-8 or less: use a larger one, or its older exporter.",
    "float16-overflow": "Squares of the values seen overflow float16. onnxruntime's CPU computes in float32 and hides "
    "it; other devices do not.",
    "frozen-length": "The number of steps of the example that was exported is stored in the file: sequence_lens is a "
    "constant, or x is reversed by constant indices. Longer and shorter inputs are computed wrongly. Export with "
    "dynamic axes, and pass the lengths as an input.",
    "gru-reset": "A GRU with linear_before_reset = 0 and a recurrent bias, from a framework whose GRU applies the "
    "reset gate after the product (PyTorch, Keras, Paddle): the exporter forgot the attribute. An error where "
    "--outputs proves it; --fix then sets the attribute. A warning is not proved: give --input and --outputs.",
    "inaccurate": "The result is off float64 by more than the bound, up to 100 times. To blame is the file if its "
    "formula is not accurate enough in its own precision on any runtime, else onnxruntime's kernel.",
    "like-count": "The reference (--like) has another number of norms.",
    "like-differs": "A norm differs from that of the reference (--like) in the fields named.",
    "miscomputed": "A graph shape that the installed onnxruntime computes wrongly, measured on a small model.",
    "model-drift": "How far the outputs of the optimised model are from those of the unoptimised one.",
    "nan": "Finite rows came out of the norm as NaN or Inf.",
    "narrow-statistics": "Mean and variance are computed in a narrower type than the input has.",
    "near-miss": "The nodes resemble a norm but do not compute one; the message says why. An error for forms that "
    "nobody intends: mean and variance over different axes, no root, an exponent that is no even integer, a count "
    "other than n and n - 1, a product with the deviation instead of a quotient, an average of other elements than the "
    "row's subtracted from x, a division by the deviation of another row. Use the framework's own operator "
    "(nn.LayerNorm, keras.layers.LayerNormalization), or the biased variance (var(unbiased=False)) with eps added to "
    "it before the root.",
    "non-finite": "Rows with NaN or Inf reached the norm and were not judged. An error where all inputs were given and "
    "are finite.",
    "no-result": "The operator's first output has no name; it is not optional, and onnxruntime refuses the file.",
    "not-judged": "A recurrent operator of another domain than ONNX's own (DynamicQuantizeLSTM), or a recurrence that "
    "no operator names: a Loop, steps written out, or one step in elementary operators. What it computes is not known "
    "to be right. Prove the results of the model (--input and --outputs), or export the operator LSTM, GRU or RNN.",
    "not-exercised": "The run gave no row of this norm to judge: a branch not taken, a loop not entered, no rows, or "
    "NaN in all of them. Give inputs that reach it (--input).",
    "notes": "Notes, which say nothing against the file, are counted here; --notes shows them.",
    "omitted-bias": "The last input of a LayerNormalization has the empty name. That means no bias, and is allowed, "
    "but onnxruntime 1.32 does not survive optimising every such model. Remove the input from the node.",
    "operator-opset": "The operator came with a newer opset than the file has: onnxruntime runs it, onnx's checker and "
    "other runtimes refuse it. Convert the file (--fix with --opset), or export it again.",
    "opset": "The opset is newer than the installed onnxruntime takes.",
    "ir": "The IR version is one that the installed onnxruntime does not take.",
    "optimiser-precision": "The operator that the optimiser makes adds the elements of a row one after another, and "
    "its error is that of such a sum. The file is sound; the message names the optimiser to disable.",
    "order": "Nodes come before those whose results they use. The standard forbids it, onnxruntime sorts the main "
    "graph only.",
    "outputs-agree": "The outputs are those of the file given with --outputs, up to rounding.",
    "outputs-differ": "The outputs are not those of the file given with --outputs.",
    "recurrence": "A recurrence that no operator names, with norms or recurrent nodes in its step. These are judged; "
    "the products and gates of the step are not. --input and --outputs prove the results of the model.",
    "refused": "The file was refused for safety: it is too large or too deep, or its tensors lie in files that may not "
    "be read. --external-data and --data-root allow files that you trust.",
    "risky": "All rows of the run are within the bound, but not all stress rows: large means, huge or tiny values, "
    "rows that hardly vary. It is sound for data like those of the run; give real inputs (--input) to be sure.",
    "runtime-limit": "On these rows onnxruntime's own operator fails as well, or adds the elements of a row one after "
    "another: no file is to blame.",
    "runtime-data": "A runtime named with --runtime was seen to compute this operator otherwise for data of this "
    "magnitude. An error where rows of the run are such; else give real inputs (--input) to know.",
    "runtime-differs": "A runtime named with --runtime was seen to compute another function for this node, without a "
    "word. Write the node in another form, or use another runtime; docs/runtimes.md has the table, `make runtimes` "
    "measures it again. A warning where the version is another one than was seen.",
    "runtime-refuses": "A runtime named with --runtime was seen to refuse this node.",
    "runtime-untried": "No file with this combination of attributes, inputs and types was tried in the runtime named "
    "with --runtime.",
    "runtimes": "Runtimes that were seen to compute a node of the file otherwise than the standard says; name one with "
    "--runtime to see which and how. docs/runtimes.md has the table.",
    "scale-axis": "The result of the norm is multiplied by a constant that varies along other axes than the normalised "
    "ones. Gains for each channel or head do so, along axes before the normalised ones: a note. A norm over the wrong "
    "axis does, too: a warning where the scale varies along a later axis.",
    "scale-nan": "The scale holds NaN or Inf. Look at the training run or the conversion of the weights.",
    "scale-shape": "The scale does not broadcast to the input of the norm. paddle2onnx 2.1 writes such norms over two "
    "axes: reshape the scale to the normalised axes.",
    "shapes": "Shape inference failed; less can be said of axes and counts.",
    "sizes": "The model does not run with the default sizes of free dimensions and was run with others, or is so large "
    "that not all rows were judged or stressed. Give real inputs (--input), or sizes (--batch, --dim, --size).",
    "shared-state": "Two initial states are one value: h and c of an LSTM, or those of two nodes. torch.onnx.export("
    "dynamo=True) merges inputs whose examples are one tensor: give each state an example of its own.",
    "stash-type": "The statistics are kept in another type than float32, which runtimes do not support.",
    "stateless-step": "A graph of one step whose recurrent node begins with a stored state, and whose last state is no "
    "output: called once for each frame, it forgets. Make the states inputs and outputs.",
    "unclaimed": "Square roots and means that belong to no norm which was recognised: if a norm is missing from the "
    "report, look for it among these.",
    "unused-input": "No node reads this input of the model: what a caller gives changes nothing. Where it is a state, "
    "the exporter may have taken another one in its place.",
    "unlike-others": "At least three norms of the file agree on something in which this one differs, or this one "
    "shares its scale with another where the rest have scales of their own.",
    "unproved-claim": "A local function named LayerNorm holds nothing that was recognised as one, or an operator "
    "that calls itself a norm is not known.",
    "unread": "The validator failed on this node and looked at the rest. Please report it.",
    "weights-nan": "A weight, bias or stored state of the recurrent node holds NaN or Inf, which spread. "
    "Look at the training run or the conversion of the weights.",
    "wrong": "The norm does not compute what it claims. To blame is the file if its nodes compute another function or "
    "their formula loses all accuracy; the kernel if onnxruntime is off by more than 100 times the bound or gives NaN "
    "for finite input; the optimiser if the norm is right without optimisation.",
}
