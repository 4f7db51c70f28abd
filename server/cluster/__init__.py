"""Hearth on several machines: roles of models.yaml as deployments of Ray Serve. Nothing else imports this folder."""
