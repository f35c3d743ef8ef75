"""The gallery: specimen models of everything the validator must find, distinguish or ignore, by section."""

from gallery.arithmetic import *  # noqa: F403
from gallery.context import *  # noqa: F403
from gallery.lints import *  # noqa: F403
from gallery.miscomputed import *  # noqa: F403
from gallery.near_misses import *  # noqa: F403
from gallery.operators import *  # noqa: F403
from gallery.specimen import *  # noqa: F403
from gallery.unrunnable import *  # noqa: F403
from gallery.wrong import *  # noqa: F403
