"""The inbox for what engine processes send, on real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
import zmq.asyncio

from engine.backends.vllm_inbox import receive_eagerly

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Any, zmq.Socket[bytes]]]:
    """The receiving end, taken over, and the sending end."""
    with zmq.asyncio.Context() as context, zmq.Context() as other:
        address = f"ipc://{tmp_path}/steps"
        receiver = context.socket(zmq.PULL)
        receiver.bind(address)
        receive_eagerly(SimpleNamespace(engine_core=SimpleNamespace(resources=SimpleNamespace(output_socket=receiver))))
        sender = other.socket(zmq.PUSH)
        sender.connect(address)
        yield receiver, sender
        sender.close(linger=0)
        receiver.close(linger=0)


async def received(receiver: Any) -> list[bytes]:
    return [frame.bytes for frame in await asyncio.wait_for(receiver.recv_multipart(copy=False), 10)]


async def test_every_message_arrives_once_and_in_order_however_they_come(ends: tuple[Any, Any]):
    receiver, sender = ends
    sender.send_multipart([b"before", b"anybody asked"])
    assert await received(receiver) == [b"before", b"anybody asked"]
    for burst in (1, 500, 2, 0, 1, 900):
        waiting = asyncio.ensure_future(received(receiver)) if burst else None
        await asyncio.sleep(0)
        sent = [[b"%d" % number, b"x" * number] for number in range(burst)]
        for message in sent:
            sender.send_multipart(message)
        first = [await waiting] if waiting is not None else []
        assert first + [await received(receiver) for _ in sent[1:]] == sent


async def test_closing_ends_the_wait_and_lets_go_of_the_event_loop(ends: tuple[Any, Any]):
    receiver, _ = ends
    waiting = asyncio.ensure_future(receiver.recv_multipart(copy=False))
    await asyncio.sleep(0)
    descriptor = receiver.FD
    receiver.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert receiver.closed
    assert not asyncio.get_running_loop().remove_reader(descriptor)
