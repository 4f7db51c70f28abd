"""A line between one client and the server that can fall silent without being closed, as a lost network does."""

import socket
import threading
from contextlib import suppress
from typing import Self

from serving import Server, open_socket

_BUFFER_BYTES = 4096  # so that little of an answer is in the proxy's hands while it is silent


class StallingProxy:
    """Use as `with`. Takes one client at `address`. While it is silent it forwards nothing, not even an end."""

    def __init__(self, server: Server) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._upstream = open_socket(server)
        self._upstream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._upstream.settimeout(None)
        self._downstream: socket.socket | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = False
        self._threads = [threading.Thread(target=self._take)]

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._flowing.set()
        for each in (self._listener, self._upstream, self._downstream):
            if each is not None:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
                each.close()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def fall_silent(self) -> None:
        self._flowing.clear()

    def go_on(self) -> None:
        self._flowing.set()

    def _take(self) -> None:
        with suppress(OSError):  # closed before a client came
            self._downstream, _ = self._listener.accept()
            back = threading.Thread(target=self._forward, args=(self._downstream, self._upstream))
            self._threads.append(back)
            back.start()
            self._forward(self._upstream, self._downstream)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while True:
                self._flowing.wait()
                data = source.recv(_BUFFER_BYTES)
                self._flowing.wait()
                if not data or self._ended:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
