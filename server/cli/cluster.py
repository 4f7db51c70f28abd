"""`hearth cluster`: Hearth on several machines, by Ray's own commands and Ray Serve (docs/cluster.md)."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from server.cli.options import AsJson, Commands, Models, refuse, tell
from server.terminal import HEARTH, table

if TYPE_CHECKING:
    from engine.config import Config

app = typer.Typer(cls=Commands, no_args_is_help=True)

# The ports that a firewall has to let through: Ray would pick these at random.
_START = (
    "--node-manager-port=6380",
    "--object-manager-port=6381",
    "--runtime-env-agent-port=6382",
    "--dashboard-agent-grpc-port=6383",
    "--dashboard-agent-listen-port=6384",
    "--metrics-export-port=6385",
    "--min-worker-port=6400",
    "--max-worker-port=6699",
    "--disable-usage-stats",
    f"--object-store-memory={256 * 2**20}",
)
_REACH_SECONDS, _PROGRESS_SECONDS = 5.0, 5.0
_HEAD = ("--port=6379", "--ray-client-server-port=10001")
_QUIET = ("--log-style=pretty", "--log-color=false")  # in a pipe or a log too; else with each process' command
_Address = Annotated[str, typer.Option(metavar="HOST:PORT", help="The head of the cluster.")]


@app.callback()
def cluster() -> None:
    """Run Hearth on several machines, with Ray Serve."""


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def up(context: typer.Context) -> None:
    """Make this machine a part of the cluster: `--head` on one, `--address=HOST:6379` of that one on all others.

    All flags are those of `ray start`, like --node-ip-address, --num-gpus, --resources and --block.
    """
    import tempfile

    from server.cluster import BALANCE, PORTS, environment
    from server.settings import check_for_cluster, load_settings

    ray, flags, settings = _ray(), context.args, load_settings()
    check_for_cluster(settings)
    named = dict(flag.split("=", 1) for flag in (*_START, *(_HEAD if "--head" in flags else ()), *flags) if "=" in flag)
    numbers = [number for flag, number in named.items() if flag.endswith("-port")]
    numbers += [os.environ.get(name, str(number)) for name, number in PORTS.items()]
    _look_at_ports([*numbers, str(settings.port)])
    if "--address" in named:
        _reach(named["--address"])
    try:
        given = environment(Path(tempfile.gettempdir()) / f"hearth-haproxy-{os.getuid()}")
        os.environ.update(given | os.environ | {BALANCE: given[BALANCE]})
    except OSError as error:
        refuse(f"The files of HAProxy cannot be made: {error}", code=1)
    if "--head" in flags:
        flags = [*_HEAD, "--include-dashboard=false", *flags]
        subprocess.run([ray, "get-auth-token", "--generate"], check=False, stdout=subprocess.DEVNULL)
        typer.echo(f"The cluster's token: {os.environ.get('RAY_AUTH_TOKEN_PATH', '~/.ray/auth_token')}")
    typer.echo(f"Where Ray says `ray start` or `ray stop`, use `{HEARTH} cluster up` or `{HEARTH} cluster down`.")
    sys.stdout.flush()
    os.execv(ray, [ray, "start", *_QUIET, *_START, *flags])  # noqa: S606


@app.command()
def deploy(
    *,
    models: Models = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Replace all replicas: after new settings, weights or voices.")
    ] = False,
    address: _Address = "auto",
) -> None:
    """Serve the models of models.yaml. If the cluster already serves, replace only roles whose models have changed.

    Replaces one replica at a time, and waits until all are healthy.

    Exit code 1: the new replicas did not become healthy. In a role with several, the old ones go on serving.
    """
    from engine.config import load_config
    from server.settings import load_settings

    settings = load_settings(models=models)
    config = load_config(settings.models)
    _ray()
    from server.cluster.replica import APPLICATION, application

    made = application(config, settings, restart=restart)
    with _connected(address):
        from ray import serve

        http = {"host": settings.host, "port": settings.port, "keep_alive_timeout_s": 75}
        _check_room(config)
        with suppress(TimeoutError):  # proxies that take longer than a minute come up beside the replicas
            serve.start(proxy_location="EveryNode", http_options=http)
        try:
            with _progress(APPLICATION):
                serve.run(made, name=APPLICATION, route_prefix="/")
        except RuntimeError:
            roles = _roles(APPLICATION)
            failed = [f"  {name}: {_last_line(role.message)}" for name, role in roles.items() if role.message]
            down = [name for name, role in roles.items() if not role.replica_states.get("RUNNING")]
            after = (
                f"{', '.join(down)} is not served: deploy the old file." if down else "The old replicas go on serving."
            )
            refuse("\n".join((f"The cluster does not serve {settings.models}:", *failed, after)), code=1)
    typer.echo(f"Served on every machine with a replica, port {settings.port}: {', '.join(config.models)}.")


@app.command()
def status(*, address: _Address = "auto", as_json: AsJson = False) -> None:
    """Show machines, replicas, models, GPUs and queues. Exit code 2: something is missing or does not answer."""
    with _connected(address):
        import asyncio

        from ray import serve

        from server.cluster.replica import APPLICATION, Peers, machines

        nodes, application = machines(), serve.status().applications.get(APPLICATION)
        roles = {} if application is None else application.deployments
        handles = [serve.get_deployment_handle(name, APPLICATION) for name in roles]
        found = sorted(asyncio.run(Peers(handles).statuses()), key=lambda one: (one.role, one.node))
    data = {
        "object": "cluster",
        "status": "nothing is deployed" if application is None else application.status.value.lower(),
        "machines": [one.model_dump(mode="json") for one in nodes],
        "roles": {
            name: {"status": role.status.value.lower(), "message": role.message, "replicas": role.replica_states}
            for name, role in roles.items()
        },
        "replicas": [one.model_dump(mode="json") for one in found],
    }
    machine_rows = (
        (one.address, ("head, " if one.head else "") + ("up" if one.alive else "gone"), str(one.gpus), str(one.cpus))
        for one in nodes
    )
    role_rows = (
        (name, role.status.value.lower(), _counts(role), _last_line(role.message)) for name, role in roles.items()
    )
    model_rows = (
        (f"{one.role} {one.replica}", one.node, model.id, model.status, str(model.running), str(model.waiting))
        for one in found
        for model in one.status.models
    )
    tell(
        data,
        f"Application: {data['status']}",
        table(("machine", "state", "GPUs", "CPUs"), machine_rows),
        table(("role", "state", "replicas", ""), role_rows),
        table(("replica", "machine", "model", "state", "running", "waiting"), model_rows),
        as_json=as_json,
    )
    if data["status"] != "running":
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
        others = any(node["Alive"] and node["NodeManagerAddress"] != machine for node in ray.nodes())
    if nodes and not others:
        refuse(f"No other machine could take its replicas. `{HEARTH} cluster down` ends it.", code=1)
    if not nodes:
        refuse(f"No machine of the cluster has the address {machine}: `{HEARTH} cluster status` lists them.")
    why = ("--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=hearth cluster drain")
    for node in nodes:
        subprocess.run([_ray(), "drain-node", f"--address={head}", f"--node-id={node}", *why], check=True)
    typer.echo(
        f"{machine} gets no new replicas, and its own finish. When `{HEARTH} cluster status` shows none there, run\n"
        f"on that machine: {HEARTH} cluster down"
    )


@app.command()
def down(
    *,
    application: Annotated[bool, typer.Option("--application", help="End what is served, on all machines.")] = False,
    address: _Address = "auto",
) -> None:
    """Take this machine out of the cluster, ending what runs on it. On the head this ends the cluster."""
    if application:
        with _connected(address):
            from ray import serve

            serve.shutdown()
            if serve.status().applications:
                refuse(f"It has not ended yet, after 30 seconds: `{HEARTH} cluster status` shows when it has.", code=1)
        typer.echo("Nothing is served now. The machines are still a cluster.")
        return
    os.execv(ray := _ray(), [ray, "stop", "--grace-period=30", *_QUIET])  # noqa: S606


def _look_at_ports(numbers: Iterable[str]) -> None:
    """Refuse to start if one is taken: Ray would say so in a log, after half a minute, and leave processes."""
    for number in numbers:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", int(number)))
            except OSError as error:
                refuse(
                    f"Port {number} cannot be used: {error.strerror}. `ss -ltnp sport = :{number}` shows what listens "
                    f"on it; `{HEARTH} cluster down` ends Ray.",
                    code=1,
                )


def _reach(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_SECONDS).close()
    except (OSError, ValueError):
        refuse(f"Nothing answers at {address}. It is the head's address and port, like 10.0.0.1:6379.", code=1)


def _check_room(config: Config) -> None:
    """Refuse a role that no machine can run: Serve would end the old replicas, then wait forever."""
    import ray

    from server.cluster.replica import CPUS, OF_RESOURCE

    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for role in config.roles.values():
        needs = {"CPU": CPUS, "GPU": role.gpus, **({role.resource: OF_RESOURCE} if role.resource else {})}
        if not any(all(there.get(name, 0) >= number for name, number in needs.items()) for there in machines):
            what = ", ".join(f"{name} {number:g}" for name, number in needs.items() if number)
            refuse(
                f"No machine can run a replica of {role.id}, which needs {what}. `{HEARTH} cluster up` has the flags "
                "--num-cpus, --num-gpus and --resources.",
                code=1,
            )


@contextmanager
def _progress(application: str) -> Iterator[None]:
    """Print what Serve waits for, whenever that changes."""
    ended = threading.Event()

    def watch() -> None:
        before = ""
        while not ended.wait(_PROGRESS_SECONDS):
            with suppress(Exception):  # Serve's controller may not answer for a moment
                roles = {name: role for name, role in _roles(application).items() if role.status.value != "HEALTHY"}
                said = "\n".join(f"{name}: {_counts(role)} {_last_line(role.message)}" for name, role in roles.items())
                if said != before:
                    typer.echo(said, err=True)
                before = said

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _roles(application: str) -> dict[str, Any]:
    """Return the states of Serve's deployments, by role."""
    from ray import serve

    found = serve.status().applications.get(application)
    return {} if found is None else found.deployments


def _counts(role: Any) -> str:
    return ", ".join(f"{number} {state.lower()}" for state, number in role.replica_states.items())


def _last_line(message: str) -> str:
    """Return the last line: a message of Serve's may be a traceback."""
    return message.strip().rpartition("\n")[2]


def _ray() -> str:
    """Return the path of Ray's command, and set the cluster's environment variables for this process."""
    from server.cluster import BARE

    ray = Path(sys.executable).with_name("ray")
    if not ray.exists():
        refuse("Ray is not installed. ./scripts/setup --ray does it, on every machine.", code=1)
    os.environ.update({"RAY_AUTH_MODE": "token", **BARE} | os.environ)
    return str(ray)


@contextmanager
def _connected(address: str) -> Iterator[None]:
    """Connect to the cluster for the length of the block. Ends the command if there is none."""
    _ray()
    if address != "auto":
        _reach(address)
    warnings.simplefilter("ignore")
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    import ray
    from ray.exceptions import AuthenticationError

    with redirect_stdout(sys.stderr):  # Ray prints events, like a machine that died, in between
        try:
            ray.init(address=address, namespace="hearth", log_to_driver=False, logging_level=logging.ERROR)
        except AuthenticationError:
            refuse(
                "The cluster's token is missing or wrong: RAY_AUTH_TOKEN_PATH names its file (docs/cluster.md).",
                code=1,
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            place = "on this machine" if address == "auto" else f"at {address}"
            refuse(
                f"No cluster answers {place}: {str(error).rstrip('.')}. `{HEARTH} cluster up` starts one. If it runs, "
                "RAY_AUTH_TOKEN_PATH names another token than the cluster's (docs/cluster.md).",
                code=1,
            )
        try:
            yield
        finally:
            ray.shutdown()
