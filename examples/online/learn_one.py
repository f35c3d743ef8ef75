"""`learn_one` and `predict_one` over `cnorm.Learner`, as libraries for online learning such as River call them."""

from collections.abc import Mapping

import numpy as np

import cnorm


class OnlineClassifier:
    """A recurrent classifier of a stream of feature dicts.

    Parameters
    ----------
    learner : cnorm.Learner
        Its model's outputs are the scores of the classes.
    features : sequence of str
        Names in the order of the model's inputs.
    classes : sequence
    every : int
        Labels that are collected before a call of `learn`, at most the learner's `truncate`.
    """

    def __init__(self, learner: cnorm.Learner, features, classes, every: int = 16) -> None:
        self.learner, self.features, self.classes = learner, list(features), list(classes)
        self.every, self._pending, self._scores = min(every, learner.truncate), [], None

    def predict_proba_one(self, x: Mapping) -> dict:
        """One step of the stream: the probability of each class."""
        frame = np.array([x[name] for name in self.features], np.float32)
        self._scores = np.float64(self.learner.step(frame))
        share = np.exp(self._scores - self._scores.max())
        return dict(zip(self.classes, share / share.sum(), strict=True))

    def predict_one(self, x: Mapping):
        """One step of the stream: the likeliest class."""
        probabilities = self.predict_proba_one(x)
        return max(probabilities, key=probabilities.get)

    def learn_one(self, x: Mapping, y) -> None:
        """The label of a step: of the one that `predict_one` has just made, else of a new one."""
        if y not in self.classes:
            raise ValueError(f"y must be one of {self.classes}, got {y!r}")
        if self._scores is None:
            self.predict_proba_one(x)
        self._scores = None
        self._pending.append(self.classes.index(y))
        if len(self._pending) == self.every:
            self.learner.learn(loss="cross_entropy", target=self._pending)
            self._pending = []
