"""The listening socket of a worker: who may bind the port, and how many connections without a session it holds."""

from __future__ import annotations

import contextlib
import socket
import ssl

__all__ = ["BACKLOG", "STRANGERS", "Listener", "need_descriptors", "reserved", "tls"]

# connections without a session at a time, at least: handshakes, HTTP requests, sessions that are being closed
STRANGERS = 64
BACKLOG = 128  # connections that the kernel completes before they are accepted
ACCEPTS = 4  # in one turn of the event loop: a connection takes 0.2 to 0.5 ms, in which nobody else is served
OTHER_DESCRIPTORS = 64  # of a worker, beside its connections: standard streams, the model, libraries


class Listener(socket.socket):
    """A bound socket that closes its oldest connection without a session when there are too many of them.

    So clients that say nothing, before or after the TLS handshake, can't keep others out: those need a place for
    milliseconds only. There are as many places as sessions, because all clients may come at once after a restart.
    """

    def __init__(self, host: str, port: int, shared: bool = True, places: int = STRANGERS) -> None:
        # with the protocol asyncio sets TCP_NODELAY; else a checkpoint would wait 40 ms for an acknowledgement
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        super().__init__(family, kind, protocol)
        self.places = max(places, STRANGERS)
        self.accepted = 0  # connections since the start
        self._strangers: dict[int, socket.socket] = {}  # by descriptor, in order of arrival
        try:
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            self.bind(address)
        except OSError:
            self.close()
            raise

    def listen(self, backlog: int = BACKLOG) -> None:
        super().listen(BACKLOG)  # asyncio is given ACCEPTS, which it would pass on

    def accept(self) -> tuple[socket.socket, object]:
        sock, address = super().accept()
        self.accepted += 1
        self.estrange(sock)
        return sock, address

    def estrange(self, sock) -> None:
        """Count a connection among those without a session."""
        descriptor = sock.fileno()
        if descriptor < 0:
            return
        self._strangers.pop(descriptor, None)  # of a socket that is closed
        self._strangers[descriptor] = sock
        if len(self._strangers) <= self.places:
            return
        self._strangers = {fd: one for fd, one in self._strangers.items() if one.fileno() == fd}
        while len(self._strangers) > self.places:
            oldest = self._strangers.pop(next(iter(self._strangers)))
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def admit(self, sock) -> None:
        """Count a connection among the sessions, which have a limit of their own."""
        self._strangers.pop(sock.fileno(), None)


def reserved(host: str, port: int, shared: bool) -> Listener:
    """A socket that holds the port for the workers, which bind it too; it never listens.

    Raises
    ------
    OSError
        If a server has the port, unless it may be `shared`.
    """
    try:
        sock = Listener(host, port, shared)
    except OSError as error:
        raise OSError(error.errno, f"{host}, port {port}: {error.strerror}") from None
    # from now on only sockets with SO_REUSEPORT may bind it, which strangers' servers have not
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    return sock


def need_descriptors(limit: int) -> None:
    """Raise the soft limit of descriptors so that `limit` sessions fit it.

    Raises
    ------
    ValueError
        If they do not fit the hard limit.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limit + max(limit, STRANGERS) + STRANGERS + BACKLOG + OTHER_DESCRIPTORS
    if soft >= needed or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ValueError(f"--limit {limit} needs {needed} descriptors, the hard limit of this process is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def tls(certificate: str, private_key: str) -> ssl.SSLContext | None:
    """The context of a server with a certificate; None without one."""
    if not certificate:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, private_key)
    return context
