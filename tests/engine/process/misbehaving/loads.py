"""Those that do not load: refuse, break, die, or never come to an end."""

import os
import signal
from typing import NoReturn

import msgspec

from engine.errors import LoadError
from engine.process.protocol import Outlet
from engine.types import Report


def refuse(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    raise LoadError(f"There is no pipeline in {msgspec.msgpack.decode(options).decode()}.")


def raise_something(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    raise ValueError("the shapes do not fit")


def be_killed(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def exit_quietly(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    raise SystemExit(5)


def never_end(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    report(f"{os.getpid()}", 0.5)
    while True:
        signal.pause()


def go_on_reporting(options: msgspec.Raw, outlet: Outlet, report: Report) -> NoReturn:
    while True:
        report(f"{os.getpid()}", 0.5)
