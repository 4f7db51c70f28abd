"""`hearth cluster`: Hearth on several machines, by Ray's own commands and Ray Serve (docs/cluster.md)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.options import AsJson, Commands, Models, refuse, tell
from server.terminal import HEARTH, table

if TYPE_CHECKING:
    from server.observability.status import MachineState, ReplicaStatus

app = typer.Typer(cls=Commands, no_args_is_help=True)

HEAD_PORT = 6379
# All that a firewall has to know: what Ray would pick at random has a number here.
_PORTS = {
    "--node-manager-port": 6380,
    "--object-manager-port": 6381,
    "--runtime-env-agent-port": 6382,
    "--dashboard-agent-grpc-port": 6383,
    "--dashboard-agent-listen-port": 6384,
    "--metrics-export-port": 6385,
    "--min-worker-port": 6400,
    "--max-worker-port": 6699,
}
_OBJECT_STORE_BYTES = 256 * 2**20
_STATUS_SECONDS = 10.0
_Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The head of the cluster.")]


@app.callback()
def cluster() -> None:
    """Run Hearth on several machines, with Ray Serve."""


@app.command()
def up(  # noqa: PLR0913  # one argument per flag
    *,
    head: Annotated[
        bool, typer.Option("--head", help="Make this machine the head, which keeps the state of the cluster.")
    ] = False,
    address: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Join the cluster of this head.")] = None,
    node_ip: Annotated[str | None, typer.Option(help="Address of this machine among the others.")] = None,
    replicas: Annotated[bool, typer.Option(help="Allow replicas on this machine.")] = True,
    resource: Annotated[list[str], typer.Option(help="Roles that ask for this `resource` may run here.")] = [],  # noqa: B006
    gpus: Annotated[int | None, typer.Option(help="GPUs that roles may have here; else all.")] = None,
    block: Annotated[bool, typer.Option("--block", help="Stay in the foreground, for systemd.")] = False,
) -> None:
    """Make this machine a part of the cluster. What runs there is `deploy`'s."""
    import json
    import tempfile

    from server.cluster.environment import environment

    if head == (address is not None):
        refuse("Give one: --head on one machine, --address HOST:PORT of that one on all others.")
    flags = ["--head", f"--port={HEAD_PORT}", "--include-dashboard=false"] if head else [f"--address={address}"]
    flags += [f"{flag}={port}" for flag, port in _PORTS.items()]
    flags += ["--disable-usage-stats", f"--object-store-memory={_OBJECT_STORE_BYTES}"]
    flags += [f"--resources={json.dumps(dict.fromkeys(resource, 1000))}"] if resource else []
    flags += [f"--node-ip-address={node_ip}"] if node_ip else []
    flags += ["--num-cpus=0", "--num-gpus=0"] if not replicas else [f"--num-gpus={gpus}"] if gpus is not None else []
    flags += ["--block"] if block else []
    ray = _ray()
    folder = Path(tempfile.gettempdir()) / f"hearth-haproxy-{os.getuid()}"
    try:
        _set(environment(folder))
    except OSError as error:
        refuse(f"HAProxy cannot have its files: {error}", code=1)
    if head:
        subprocess.run([ray, "get-auth-token", "--generate"], check=False, stdout=subprocess.DEVNULL)
    sys.stdout.flush()
    os.execv(ray, [ray, "start", *flags])  # noqa: S606


@app.command()
def deploy(
    *,
    models: Models = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace all replicas: after new settings, weights or voices.")
    ] = False,
    address: _Address = "auto",
) -> None:
    """Serve what models.yaml says. Where something is served already, roles whose models are others are replaced.

    Replica by replica; waits until it is healthy.

    Exit code 1: the new replicas did not become healthy; those of before go on.
    """
    from engine.config import load_config
    from server.cluster.environment import BARE
    from server.settings import load_settings

    settings = load_settings(models=models)
    config = load_config(settings.models)
    _ray()
    _set(BARE)
    from server.cluster.replica import APPLICATION, application

    made = application(config, settings, restart=restart)
    with _connected(address):
        from ray import serve

        http = {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": 75}
        with suppress(TimeoutError):  # proxies that take longer than a minute come up beside the replicas
            serve.start(proxy_location="EveryNode", http_options=http)
        try:
            serve.run(made, name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            refuse(f"The cluster does not serve {settings.models}: {error}", code=1)
    typer.echo(f"Served on every machine with a replica, port {settings.port}: {', '.join(config.models)}.")


@app.command()
def status(*, address: _Address = "auto", as_json: AsJson = False) -> None:
    """Show machines, replicas, models, GPUs and queues. Exit code 2: something is missing or does not answer."""
    with _connected(address):
        import asyncio

        from ray import serve
        from ray.serve.exceptions import RayServeException

        from server.cluster.replica import APPLICATION, Peers, machines

        nodes = machines()
        found: list[ReplicaStatus] = []
        state, roles = "nothing is deployed", {}
        try:
            application = serve.status().applications.get(APPLICATION)
        except RayServeException:
            application = None
        if application is not None:
            state = application.status.value.lower()
            roles = {
                name: {"status": role.status.value.lower(), "message": role.message, "replicas": role.replica_states}
                for name, role in application.deployments.items()
            }
            handles = [serve.get_deployment_handle(name, APPLICATION) for name in roles]
            found = asyncio.run(Peers(handles).statuses())
    data = {
        "object": "cluster",
        "status": state,
        "machines": [one.model_dump(mode="json") for one in nodes],
        "roles": roles,
        "replicas": [one.model_dump(mode="json") for one in found],
    }
    tell(
        data,
        f"Application: {state}",
        _machine_table(nodes),
        _role_table(roles),
        _model_table(found),
        as_json=as_json,
    )
    if state != "running":
        raise typer.Exit(2)


@app.command()
def drain(
    machine: Annotated[str, typer.Argument(help="Address of the machine.")], *, address: _Address = "auto"
) -> None:
    """Have a machine's replicas end and start elsewhere, so that it can be taken away. Running answers are finished."""
    with _connected(address):
        import ray

        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["NodeManagerAddress"] == machine]
        head = ray.get_runtime_context().gcs_address
    if not nodes:
        refuse(f"No machine of the cluster has the address {machine}: `{HEARTH} cluster status` lists them.")
    for node in nodes:
        flags = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=hearth cluster drain"]
        subprocess.run([_ray(), "drain-node", f"--address={head}", f"--node-id={node}", *flags], check=True)
    typer.echo(
        f"{machine} gets no new replicas, and its own finish. When `{HEARTH} cluster status` shows none there, run"
    )
    typer.echo(f"on that machine: {HEARTH} cluster down")


@app.command()
def down(
    *,
    application: Annotated[bool, typer.Option("--application", help="End what is served, on all machines.")] = False,
    address: _Address = "auto",
) -> None:
    """Take this machine out of the cluster, ending what runs on it. On the head, that is the cluster's end."""
    if application:
        with _connected(address):
            from ray import serve

            serve.shutdown()
        typer.echo("Nothing is served now. The machines are still a cluster.")
        return
    os.execv(ray := _ray(), [ray, "stop", "--grace-period=30"])  # noqa: S606


def _set(values: Mapping[str, str]) -> None:
    for name, value in {"RAY_AUTH_MODE": "token", "RAY_SERVE_LOG_TO_STDERR": "0", **values}.items():
        os.environ.setdefault(name, value)


def _ray() -> str:
    """Return Ray's command of our own environment."""
    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        refuse("Ray is not installed. ./scripts/setup --ray does it, on every machine.", code=1)
    return str(ray)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Be a part of the cluster for as long as the block. Ends the command where there is none."""
    from server.cluster.environment import BARE

    _ray()
    _set(BARE)
    warnings.simplefilter("ignore")
    import ray
    from ray.exceptions import AuthenticationError

    try:
        ray.init(address=address, namespace="hearth", log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError:
        refuse(
            "The cluster's token is missing or another: RAY_AUTH_TOKEN_PATH names its file (docs/cluster.md).", code=1
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        refuse(f"No cluster answers at {address}: {error}. `{HEARTH} cluster up` starts one.", code=1)
    try:
        yield
    finally:
        ray.shutdown()


def _machine_table(nodes: list[MachineState]) -> Any:
    states = (("head, " if one.head else "") + ("up" if one.alive else "gone") for one in nodes)
    rows = ((one.address, state, str(one.gpus), str(one.cpus)) for one, state in zip(nodes, states, strict=True))
    return table(("machine", "state", "GPUs", "CPUs"), rows)


def _role_table(roles: dict[str, Any]) -> Any:
    counts = (", ".join(f"{n} {state.lower()}" for state, n in role["replicas"].items()) for role in roles.values())
    rows = (
        (name, role["status"], count, role["message"])
        for (name, role), count in zip(roles.items(), counts, strict=True)
    )
    return table(("role", "state", "replicas", ""), rows)


def _model_table(found: list[ReplicaStatus]) -> Any:
    columns = ("replica", "machine", "model", "state", "running", "waiting")
    rows = (
        (f"{one.role} {one.replica}", one.node, model.id, model.status, *map(str, (model.running, model.waiting)))
        for one in sorted(found, key=lambda one: (one.role, one.node))
        for model in one.status.models
    )
    return table(columns, rows)
