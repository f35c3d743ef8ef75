"""`cnorm serve`: sessions of a model over WebSockets. docs/serving.md documents the protocol byte for byte.

`supervisor` starts the worker processes behind one port and restarts those that are lost; each runs a `worker.Worker`,
which holds the sessions and steps those that are ready together; a `connection.Connection` parses the messages of one
client; `pages` answers plain HTTP requests.

A change of the protocol touches `connection` (messages read), `worker` (welcome, reset, checkpoint), its other end in
`cnorm.client`, which has its version and the struct of frame numbers, `page.js`, and `cnorm.tools.bench.load`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Options", "key_of"]


@dataclass(frozen=True)
class Options:
    """The options of `cnorm serve`.

    Attributes
    ----------
    model : str
        Path of the model; empty for the packaged demo.
    host, port
        Address; port 0 lets the system choose.
    workers : int
        Processes behind the port.
    limit : int
        Sessions of one worker.
    idle : float
        Seconds without a frame after which a session is closed with its checkpoint.
    credit : int
        Frames of one session that may be without output at a time, and the most frames of a message.
    rate : float
        Frames per second that are read of one session in the long run.
    lag : float
        Seconds from reading a frame to its answer beyond which a worker is overloaded: it refuses new sessions, and
        closes the newest ones with their checkpoint if that does not help.
    turn_sessions : int
        Sessions that are stepped together at most. More share one reading of the weights, but their inputs and outputs
        have to stay in the second-level cache.
    checkpoint_frames : int
        A session is sent a checkpoint each time it has processed so many frames.
    origins : list of str
        Origins of web pages that may connect, beside the server's own.
    token : str
        The secret that clients must present; empty for none.
    certificate, private_key : str
        PEM files; TLS is used if they are given.
    key : str
        The secret that seals checkpoints, in hexadecimal.
    metrics_port : int
        Worker i also listens to this port + i, for its own /metrics; 0 for none.
    demo : bool
        Whether a client may end the worker that it is connected to.
    """

    model: str = ""
    host: str = "127.0.0.1"
    port: int = 8765
    workers: int = 1
    limit: int = 1024
    idle: float = 300.0
    credit: int = 256
    rate: float = 5000.0
    lag: float = 2.0
    turn_sessions: int = 64
    checkpoint_frames: int = 256
    origins: list[str] = field(default_factory=list)
    token: str = ""
    certificate: str = ""
    private_key: str = ""
    key: str = ""
    metrics_port: int = 0
    demo: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "limit", "credit", "turn_sessions", "checkpoint_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("idle", "rate", "lag"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("TLS needs a certificate and its private key: give both")


def key_of(store: str | Path | None) -> str:
    """The secret that seals checkpoints, in hexadecimal: that of the folder `store`, else a new one.

    With a store, checkpoints are still accepted after a restart, and by other hosts that share the folder.
    """
    if store is None:
        return secrets.token_hex(32)
    path = Path(store) / "key"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with (
        contextlib.suppress(FileExistsError),
        os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file,
    ):
        file.write(secrets.token_hex(32))
    key = path.read_text().strip()
    try:
        long_enough = len(bytes.fromhex(key)) >= 16
    except ValueError:
        long_enough = False
    if not long_enough:
        raise ValueError(f"{path} must hold at least 16 bytes in hexadecimal")
    return key
