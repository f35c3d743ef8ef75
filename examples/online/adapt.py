"""Online adaptation: a speaker recogniser adapts to a new channel while it streams.

The demo's network recognises the speaker of a vowel pair frame by frame. Here its input frames are changed as by
another microphone: each cepstral coefficient has another gain and an offset. The label of an utterance arrives at its
end, and then `cnorm.Learner` updates all weights, at batch size 1.

    python examples/online/adapt.py [PICTURE.png]
"""

import sys
import time
from pathlib import Path

import numpy as np

import cnorm

RECORDINGS = Path(__file__).parents[1] / "japanese_vowels" / "japanese_vowels_test.npz"
PASSES, RATE = 3, 1e-3


def recordings():
    """A list with (frames [T, 12], speaker) for each of the 370 utterances."""
    with np.load(RECORDINGS) as data:
        return list(zip(np.split(data["frames"], np.cumsum(data["lengths"])[:-1]), data["labels"], strict=True))


def channel(rng):
    gain, offset = rng.uniform(0.6, 1.6, 12), rng.normal(0, 0.25, 12)
    return lambda frames: (frames * gain + offset).astype(np.float32)


def accuracy(model, sequences):
    named = [int(np.argmax(model.stream().process(frames)[-1])) == label for frames, label in sequences]
    return 100 * float(np.mean(named))


def adapt(learner, sequences):
    """Stream and learn; returns whether each utterance was named rightly, judged before its label is learned, and
    microseconds a step.
    """
    right, steps, start = [], 0, time.perf_counter()
    for frames, label in sequences:
        learner.reset()
        for frame in frames:
            scores = learner.step(frame)
        right.append(int(np.argmax(scores)) == label)
        learner.learn(loss="cross_entropy", target=int(label))
        steps += len(frames)
    return right, (time.perf_counter() - start) / steps * 1e6


def draw(right, unseen, clean, path):
    """Picture of the accuracy on arrival, of the last 50 utterances, and of the unseen half after each pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    sums, passed = np.cumsum([0, *right]), len(right) // PASSES
    ends = np.arange(1, len(right) + 1)
    begins = np.maximum(0, ends - 50)
    axes.plot(ends, 100 * (sums[ends] - sums[begins]) / (ends - begins), color="#0b6e99", lw=1.5,
              label="as they arrive, the last 50")  # fmt: skip
    axes.plot(passed * np.arange(PASSES + 1), unseen, "o", color="#c2571a", label="utterances that are not learned")
    axes.axhline(clean, color="grey", lw=1, ls=":", label="on the channel it was trained for")
    axes.set(xlabel="utterances heard on the new channel", ylabel="named correctly (%)", ylim=(0, 100))
    axes.set_title("A recogniser adapts while it streams, batch size 1", fontsize=11)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main(picture=None):
    rng = np.random.default_rng(7)
    clean, heard = recordings(), channel(rng)
    changed = [(heard(frames), label) for frames, label in clean]
    order = rng.permutation(len(changed))
    arriving, unseen = ([changed[i] for i in part] for part in (order[: len(order) // 2], order[len(order) // 2 :]))
    model = cnorm.demo_model()
    found = {"clean": accuracy(model, clean), "changed": accuracy(model, unseen)}
    print(f"as trained, its own channel          {found['clean']:5.1f} %")
    print(f"the new channel, not adapted         {found['changed']:5.1f} %")
    learner = cnorm.Learner(model, cnorm.Adam(RATE, clip=1.0), truncate=32)
    right, after = [], [found["changed"]]
    for number in range(PASSES):
        named, micros = adapt(learner, arriving)
        found["adapted"] = accuracy(learner.model(), unseen)
        right += named
        after.append(found["adapted"])
        print(
            f"pass {number + 1}: named on arrival {100 * np.mean(named):5.1f} %, unseen {found['adapted']:5.1f} %, "
            f"{micros:.1f} us a step, learning included"
        )
    start, stream = time.perf_counter(), model.stream()
    for frames, _ in arriving:
        for frame in frames:
            stream.step(frame)
    steps = sum(len(frames) for frames, _ in arriving)
    print(f"a step without learning              {(time.perf_counter() - start) / steps * 1e6:5.1f} us")
    if picture:
        draw(right, after, found["clean"], picture)
    return found


if __name__ == "__main__":
    main(*sys.argv[1:2])
