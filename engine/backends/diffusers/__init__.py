"""Images by diffusers: model.py is the server's half, service.py the worker's."""
