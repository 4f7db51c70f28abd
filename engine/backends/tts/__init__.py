"""Voices that speak in a worker process: `model` is the server's side of it, `service` the worker's."""
