"""The inbox for what engine processes send, and the outbox to them, on real ZeroMQ sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import zmq
import zmq.asyncio

from engine.backends.vllm_sockets import receive_eagerly, send_at_once

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


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[tuple[Any, zmq.Socket[bytes]]]:
    """The sending end, taken over, with room for few messages, and the receiving end, which knows itself as `me`."""
    with zmq.asyncio.Context() as context, zmq.Context() as other:
        address = f"ipc://{tmp_path}/requests"
        sender, receiver = context.socket(zmq.ROUTER), other.socket(zmq.DEALER)
        sender.setsockopt(zmq.ROUTER_MANDATORY, 1)
        sender.setsockopt(zmq.SNDHWM, 5)
        receiver.setsockopt(zmq.RCVHWM, 5)
        receiver.setsockopt(zmq.IDENTITY, b"me")
        sender.bind(address)
        receiver.connect(address)
        receiver.send(b"here")
        sender._shadow_sock.recv_multipart()
        send_at_once(SimpleNamespace(engine_core=SimpleNamespace(input_socket=sender)))
        yield sender, receiver
        receiver.close(linger=0)
        sender.close(linger=0)


async def test_what_has_room_is_sent_at_once_whatever_its_parts_are(outbox: tuple[Any, Any]):
    sender, receiver = outbox
    large = b"x" * 200_000
    sent = sender.send_multipart((b"me", b"one", memoryview(large), b""), copy=False)
    assert sent.done()
    await sent
    assert receiver.recv_multipart() == [b"one", large, b""]


async def test_what_has_no_room_waits_its_turn_and_nothing_is_lost_or_overtaken(outbox: tuple[Any, Any]):
    sender, receiver = outbox
    sent = [sender.send_multipart((b"me", b"%d" % number, b"x" * 300_000), copy=False) for number in range(60)]
    waiting = sum(not one.done() for one in sent)
    assert waiting
    got = []
    while len(got) < len(sent):
        got.append((await asyncio.to_thread(receiver.recv_multipart))[0])
    await asyncio.wait_for(asyncio.gather(*sent), 10)
    assert got == [b"%d" % number for number in range(60)]


async def test_who_is_gone_is_told_of_at_once(outbox: tuple[Any, Any]):
    sender, _ = outbox
    with pytest.raises(zmq.ZMQError):
        await sender.send_multipart((b"nobody", b"one"))


async def test_what_cannot_be_sent_does_not_spoil_what_comes_after_it(outbox: tuple[Any, Any]):
    sender, receiver = outbox
    with pytest.raises(TypeError):
        await sender.send_multipart((b"me", b"one", "text"))
    await sender.send_multipart((b"me", bytearray(b"two"), b"good"))
    assert receiver.recv_multipart() == [b"two", b"good"]
