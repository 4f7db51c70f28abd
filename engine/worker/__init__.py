"""A model in a child process: `WorkerProcess` is the parent's half, service.py says what a model must be."""

from engine.worker.process import WorkerDiedError, WorkerProcess

__all__ = ["WorkerDiedError", "WorkerProcess"]
