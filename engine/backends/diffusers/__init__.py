"""Images by diffusers: model.py is the server's half, service.py what the worker process opens."""
