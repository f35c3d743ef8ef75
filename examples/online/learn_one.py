"""A classifier with the methods `learn_one` and `predict_one` of online-learning libraries such as River."""

from collections.abc import Mapping

import numpy as np

import cnorm


class OnlineClassifier:
    """A recurrent classifier over `cnorm.Learner`, for a stream of dicts of features.

    Parameters
    ----------
    learner : cnorm.Learner
        The outputs of its model are the scores of the classes.
    features : sequence of str
        Names of the features in the order of the model's inputs.
    classes : sequence
    every : int
        Number of labels to collect before each call of `learn`; it is limited to the learner's `truncate`.
    """

    def __init__(self, learner: cnorm.Learner, features, classes, every: int = 16) -> None:
        self.learner, self.features, self.classes = learner, list(features), list(classes)
        self.every, self._pending, self._scores = min(every, learner.truncate), [], None

    def predict_proba_one(self, x: Mapping) -> dict:
        """Make one step and return the probability of each class."""
        frame = np.array([x[name] for name in self.features], np.float32)
        self._scores = np.float64(self.learner.step(frame))
        share = np.exp(self._scores - self._scores.max())
        return dict(zip(self.classes, share / share.sum(), strict=True))

    def predict_one(self, x: Mapping):
        """Make one step and return the most probable class."""
        probabilities = self.predict_proba_one(x)
        return max(probabilities, key=probabilities.get)

    def learn_one(self, x: Mapping, y) -> None:
        """Take the label of the step that `predict_one` has just made; without one, make a step with x first."""
        if y not in self.classes:
            raise ValueError(f"y must be one of {self.classes}, got {y!r}")
        if self._scores is None:
            self.predict_proba_one(x)
        self._scores = None
        self._pending.append(self.classes.index(y))
        if len(self._pending) == self.every:
            self.learner.learn(loss="cross_entropy", target=self._pending)
            self._pending = []
