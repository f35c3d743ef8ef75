#!/usr/bin/env bash
# The stack of the last observations at an episode's start: Gymnasium's FrameStackObservation repeats the first observation,
# Stable-Baselines3's VecFrameStack puts zeros before it. A policy trained with one meets, at each start, histories it has never seen
# with the other: for a robot at 2 rad, a jump from 0.
# Expected: the two stacks of one ecosystem fill up alike. (Gymnasium has padding_type="zero"; VecFrameStack has no choice.)
# Output seen on 29 November 2026 with gymnasium 1.4.0, stable-baselines3 2.9.2:
#   FrameStackObservation: 2 2 2; 2 2 2.5; 2 2.5 3
#   VecFrameStack: 0 0 2; 0 2 2.5; 2 2.5 3
set -euo pipefail
d=$(mktemp -d)
trap 'rm -rf "$d"' EXIT
python3 -m venv "$d/v"
"$d/v/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$d/v/bin/pip" install -q --disable-pip-version-check gymnasium==1.4.0 stable-baselines3==2.9.2
cat > "$d/t.py" <<'PY'
import sys
import gymnasium
import numpy as np
from gymnasium.wrappers import FrameStackObservation
from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack


class Joint(gymnasium.Env):
    """A joint that begins at 2 rad and moves by the action."""

    observation_space = gymnasium.spaces.Box(-4, 4, (1,), np.float32)
    action_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.angle = np.full(1, 2, np.float32)
        return self.angle, {}

    def step(self, action):
        self.angle = self.angle + action
        return self.angle, 0.0, False, False, {}


one, many = FrameStackObservation(Joint(), 3), VecFrameStack(DummyVecEnv([Joint]), 3)
action = np.full(1, 0.5, np.float32)
a, b = [one.reset()[0].ravel()], [many.reset().ravel()]
for _ in range(2):
    a.append(one.step(action)[0].ravel())
    b.append(many.step(action[None])[0].ravel())
for name, stacks in (("FrameStackObservation", a), ("VecFrameStack", b)):
    print(f"{name}: {'; '.join(' '.join(f'{v:g}' for v in s) for s in stacks)}")
same = np.array_equal(a, [[2, 2, 2], [2, 2, 2.5], [2, 2.5, 3]]) and np.array_equal(b, [[0, 0, 2], [0, 2, 2.5], [2, 2.5, 3]])
sys.exit(not same)
PY
cd "$d"
"$d/v/bin/python" -P t.py
