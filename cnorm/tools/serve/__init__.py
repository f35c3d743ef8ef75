"""`cnorm serve`: sessions of a model over WebSockets. docs/serving.md documents the protocol byte for byte.

`supervisor` starts the worker processes behind one port and restarts those that are lost; each runs a `worker.Worker`,
which holds the sessions and steps those that are ready together; a `connection.Connection` has the messages of one
client; `pages` answers plain HTTP requests; `metrics` counts for /metrics; a `listener.Listener` bounds connections
without a session; `logs` formats the log.

A change of the protocol touches `connection` (messages read), `worker` (welcome, reset, checkpoint), its other end in
`cnorm.conversation`, which has its version and the struct of frame numbers, `cnorm.client` (a method of both sessions),
`examples/serve/page/page.js`, and `cnorm_bench.load`.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path

from cnorm.text import quoted

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
    reuse_port : bool
        Whether another server may have the port; connections are then spread over both.
    demo : bool
        Whether a client may end the worker that it is connected to.
    page : str
        Folder of a web page: index.html at /, its other .html, .js and .json files beside it; empty for none.
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
    reuse_port: bool = False
    demo: bool = False
    page: str = ""

    def __post_init__(self) -> None:
        for name in ("workers", "limit", "credit", "turn_sessions", "checkpoint_frames"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("idle", "rate", "lag"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if bool(self.certificate) != bool(self.private_key):
            raise ValueError("TLS needs a certificate and its private key: give both")


def key_of(store: str | Path | None) -> str:
    """The secret that seals checkpoints, in hexadecimal: that of the folder `store`, else a new one.

    With a store, checkpoints are still accepted after a restart, and by other hosts that share the folder.

    Raises
    ------
    ValueError
        If `store` is no folder, if others than owner and group may read the file, others than the owner change it or
        write to the folder, or it does not hold a secret.
    """
    if store is None:
        return secrets.token_hex(32)
    path = Path(store) / "key"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"the store must be a folder, got {quoted(os.fspath(store))}") from None
    if path.parent.stat().st_mode & 0o022:
        raise ValueError(f"others may write to {path.parent}, and so replace the secret: chmod go-w {path.parent}")
    if not os.path.lexists(path):
        write_key(path)
    # without waiting, should it be a pipe
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(f"{path} must be a regular file")
        if status.st_mode & 0o027:
            raise ValueError(f"others may read or change {path}, the secret that seals checkpoints: chmod 600 {path}")
        key = file.read(4096)
    try:
        given = bytes.fromhex(key.decode("ascii").strip())
    except ValueError:
        given = b""
    if len(given) < 16 or len(set(given)) < 8:  # 16 random bytes have fewer than 8 values once in 10^9
        raise ValueError(f"{path} must hold at least 16 random bytes in hexadecimal; cnorm makes it if it is missing")
    return given.hex()


def write_key(path: Path) -> None:
    """Make the file whole or not at all; if another server makes it at the same time, its secret is kept."""
    new = path.with_name(f"key.{secrets.token_hex(8)}")
    try:
        with os.fdopen(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(new, path)
    finally:
        new.unlink(missing_ok=True)
