"""The engines of the server in `cnorm bench --serve`: cnorm, onnxruntime, or none, which measures transport alone.

Run as ``python -m cnorm_bench.serving_engines ENGINE PORT [MODEL]`` it is that server, one worker of `cnorm
serve`.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

import cnorm
from cnorm.serving import Sessions

__all__ = ["ENGINES", "loaded"]


class Nothing(Sessions):
    """Answers zeros without a step, so that only transport is measured."""

    def process_many(self, requests):
        zeros = (
            np.zeros((max(len(x) for _, _, x in requests), self.model.output_size), np.float32) if requests else None
        )
        return [zeros[: len(x)] for _, _, x in requests]


class Onnxruntime(Sessions):
    """Steps the exported model in onnxruntime, all sessions with the same number of frames in one batch.

    A session's state is a row of arrays that all sessions share, so that gathering and storing a batch is one
    operation. Checkpoints are not made.
    """

    def __init__(self, model, limit, idle):
        import onnxruntime

        import onnx_export

        super().__init__(model, limit=limit, idle=idle)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._runs = {}
        with tempfile.TemporaryDirectory() as folder:
            for form in ("step", "sequence"):
                path = str(Path(folder, f"{form}.onnx"))
                onnx_export.export(model, path, form=form, batch="n")
                self._runs[form] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        states = self._runs["step"].get_inputs()[1:]
        self._names = [one.name for one in states]
        self._states = [np.zeros((limit, one.shape[1]), np.float32) for one in states]
        self._rows, self._free = {}, list(range(limit))

    def open(self, session):
        super().open(session)
        self._rows[session] = row = self._free.pop()
        for state in self._states:
            state[row] = 0

    def process_many(self, requests):
        results = [None] * len(requests)
        together = {}
        for i, (_, _, x) in enumerate(requests):
            together.setdefault(len(x), []).append(i)
        for steps, indices in together.items():
            rows = [self._rows[requests[i][0]] for i in indices]
            x = np.stack([requests[i][2] for i in indices], axis=1)  # [steps, sessions, input_size]
            inputs = {name: state[rows] for name, state in zip(self._names, self._states, strict=True)}
            run = self._runs["step" if steps == 1 else "sequence"]
            y, *new = run.run(None, inputs | {"x": x[0] if steps == 1 else x})
            for state, rows_of_state in zip(self._states, new, strict=True):
                state[rows] = rows_of_state
            y = np.ascontiguousarray(y[:, None] if steps == 1 else y.swapaxes(0, 1))
            for i, outputs in zip(indices, y, strict=True):
                results[i] = outputs
        return results


def loaded(path):
    """The model of a file, or the packaged one."""
    return cnorm.load(path) if path else cnorm.demo_model()


ENGINES = {"cnorm": Sessions, "onnxruntime": Onnxruntime, "transport alone": Nothing}
TURN_SESSIONS = {"onnxruntime": 256}  # its own best of 64, 128 and 256; the server's default is that of cnorm


def main(engine, port, path=""):
    from cnorm.tools.serve import Options, key_of, worker

    never = 1 << 62  # the others make no checkpoints
    frames = Options.checkpoint_frames if engine == "cnorm" else never
    turn = TURN_SESSIONS.get(engine, Options.turn_sessions)
    options = Options(port=int(port), key=key_of(None), limit=8_000, checkpoint_frames=frames, turn_sessions=turn)
    worker.run_worker(loaded(path), options, 0, ENGINES[engine])


if __name__ == "__main__":
    main(*sys.argv[1:])
