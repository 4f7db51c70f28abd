"""A replica of a role as Ray Serve runs it: the app of one server with the role's engine. The first role speaks HTTP.

It does so itself, behind the HAProxy that Ray runs on every machine: Serve's own proxy is a Python process that each
piece of an answer would have to pass. HAProxy sends requests to the replicas' own ports. Serve would listen there with
plain uvicorn: `speak` has it use our protocol, so that limits, errors and writes are those of one server.

`application` makes what Serve runs of a models.yaml. All of Ray Serve is here, and in the command `hearth cluster`.
"""

import asyncio
import hashlib
import importlib.metadata
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import ray
import uvicorn
from prometheus_client.metrics_core import Metric
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.experimental.consistent_hash_router import ConsistentHashRouter
from ray.serve.handle import DeploymentHandle
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from engine import Config, EngineError, ModelSpec, load_config
from engine.config import RoleSpec
from engine.config.models import ChatModelSpec
from engine.errors import StartError as ModelError
from engine.stream import Stream
from engine.types import SETTLED
from server.app import HearthApp, Place, create_app
from server.cluster import DEREGISTER_SECONDS
from server.cluster.compat import HAS_HAPROXY, HAS_TWO_LOOPS, TIMEOUT, UNWATCHED, listen_by, set_version
from server.cluster.engine import ClusterEngine, Message, Remote, RoleState, answer, ask_all
from server.http.protocol import Connection, http_config
from server.instance import InstanceError, only_one
from server.observability.metrics import read_families
from server.observability.status import MachineState, ReplicaStatus
from server.observability.status_server import answers, read_status, status_socket
from server.serve import StartError, listen, prepare_process
from server.settings import Settings, SettingsError, check_for_cluster, load_settings
from server.terminal import set_up_log

_T = TypeVar("_T")
APPLICATION = "hearth"
_MOST_ON_A_NODE = 64
_DRAIN_MARGIN_SECONDS = 10.0  # to end engines, once requests have ended
_OTHER_REQUESTS = 64  # of one replica: lists, status, files, beside what its models run and queue
_UNLIMITED = 1_000_000
OF_RESOURCE = 0.001
CPUS = 0.1  # of Ray's count: a replica needs memory and GPUs, but Ray runs none on a machine without a CPU
_AT_ONCE = {"tier", "owned_by", "aliases", "description"}  # of a model, taken over without a new engine
_MOST_OF_AVERAGE = 1.25  # as HAProxy's hash-balance-factor is set
_OF_MODELS = {"hearth_model_state", "hearth_model_engines", "hearth_model_restarts"}
_FOR_SERVE = {TIMEOUT.encode(), UNWATCHED.encode()}
_HEALTH = "/-/healthz"  # what HAProxy asks
# Serve reads the bodies of clients that it watches for a disconnect, of any size, before we check the key.
_UNWATCHED = (UNWATCHED.encode(), b"?1")
_log = logging.getLogger("hearth.cluster")


class Replica:
    """One process. It takes requests once its models are ready; one that cannot load them never does."""

    async def __init__(self, models: str, role: str, **others: DeploymentHandle) -> None:  # type: ignore[misc]  # Serve awaits it
        settings = load_settings()
        check_for_cluster(settings)
        check_environment()
        set_up_log(settings.log_level)
        prepare_process()
        self._parts = ExitStack()
        folder = _own_folder(self._parts, settings.data_dir / "cluster", role)
        (folder / "models.yaml").write_text(models, "utf-8")
        settings = settings.model_copy(update={"data_dir": folder, "models": folder / "models.yaml"})
        self._models, config = models, load_config(settings.models)
        self._labels = {
            "node": ray.util.get_node_ip_address(),
            "role": role,
            "replica": serve.get_replica_context().replica_tag,
        }
        remotes = [Remote(name, handle) for name, handle in others.items()]
        speaks_http = isinstance(self, Ingress)
        own = serve.get_deployment_handle(role, APPLICATION) if speaks_http else None
        place = Place(
            engine=partial(ClusterEngine, role=role, remotes=remotes),
            name="-".join((self._labels["node"], role, self._labels["replica"])),
            speaks_http=speaks_http,
            peers=None if own is None else Peers([own, *others.values()]),
        )
        self._app = create_app(settings, config, place)
        if speaks_http:
            speak(self._app, self._labels["node"])
        self._ending = asyncio.Event()
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._life = asyncio.create_task(self._live())
        await self._ready

    async def _live(self) -> None:
        """Run the app from its start to its end, in one task. `_ready` gets an error that keeps it from serving."""
        try:
            async with self._app.router.lifespan_context(self._app):
                engine: ClusterEngine = self._app.state.engine
                while not all(health.status in SETTLED for health in engine.own_health()):
                    await engine.wait_for_change()
                engine.check()
                async with status_socket(self._app.state.settings.data_dir, answers(self._app)):
                    self._ready.set_result(None)
                    await self._ending.wait()
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)
        finally:
            self._parts.close()

    async def __del__(self) -> None:
        """End the models, once Serve has waited for the requests."""
        if hasattr(self, "_life"):
            self._ending.set()
            await asyncio.wait((self._life,))

    async def check_health(self) -> None:
        """Raise where a model of this replica does not answer; after three times Serve replaces the replica."""
        if self._life.done():
            raise RuntimeError("The app of this replica has ended.")
        self._app.state.engine.check()

    async def answer(  # the arguments come from `Remote`
        self,
        method: str,
        request: Any,
        stream: type[Stream[Any]],
        takes_turn: bool,  # noqa: FBT001
    ) -> AsyncGenerator[Message, None]:
        async for message in answer(self._app.state.engine, method, request, stream(), takes_turn=takes_turn):
            yield message

    async def call(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a method of the engine. An error of ours is returned: raised, it would come with Ray's around it."""
        try:
            return await getattr(self._app.state.engine, method)(*arguments, **named)
        except EngineError as error:
            return error

    async def state(self) -> RoleState:
        engine: ClusterEngine = self._app.state.engine
        return RoleState(engine.models(), engine.health(), {name: engine.voices(name) for name in engine.config.models})

    async def status(self) -> ReplicaStatus:
        found, own = await read_status(self._app), {health.id for health in self._app.state.engine.own_health()}
        found = found.model_copy(update={"models": [model for model in found.models if model.id in own]})
        return ReplicaStatus(**self._labels, status=found)

    async def metrics(self) -> list[Metric]:
        """Return the metrics of this process, each sample with the labels of this replica."""
        families = await read_families(self._app)
        elsewhere = self._app.state.engine.elsewhere
        for family in families:
            if family.name in _OF_MODELS:  # their own replicas report them
                family.samples = [one for one in family.samples if one.labels["model"] not in elsewhere]
            family.samples = [one._replace(labels={**one.labels, **self._labels}) for one in family.samples]
        return families


class Ingress(Replica):
    """A replica of the first role, to which HAProxy sends the requests of clients."""

    async def reconfigure(self, given: Mapping[str, str]) -> None:
        """Take over what a deploy has changed in models.yaml, other than the models of this role."""
        if given["models"] == self._models:
            return
        self._models, path = given["models"], self._app.state.settings.models
        await asyncio.to_thread(path.write_text, self._models, "utf-8")
        config = await asyncio.to_thread(load_config, path)
        await self._app.state.engine.take_over(config)
        self._app.state.metrics.models = config.entries
        _log.info("models.yaml was taken over as it was deployed.")

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return OwnHttp(self._app)


def check_environment() -> None:
    """Refuse to run if Serve's Python proxy would pass requests on. Raises `SettingsError`."""
    if not HAS_HAPROXY or HAS_TWO_LOOPS:
        raise SettingsError(
            "Ray was started without variables that Hearth needs (RAY_SERVE_ENABLE_HA_PROXY=1 and others). Start every "
            "machine with `hearth cluster up`; on Kubernetes set the variables of docker/kuberay.yaml."
        )


def speak(app: HearthApp, address: str) -> None:
    """Have the replica of this process listen with our protocol, once it is ready, at the port that Serve chooses."""

    async def start(
        serve: ASGIApp, options: Any, *, event_loop: asyncio.AbstractEventLoop, **_: Any
    ) -> tuple[asyncio.Task[None], uvicorn.Server]:
        every = "::" if ":" in address else "0.0.0.0"  # noqa: S104  # HAProxy comes from other machines, too
        try:
            listener = listen(app.state.settings.model_copy(update={"host": every, "port": options.port}))
        except StartError as error:
            raise RuntimeError(str(error)) from error.__cause__  # Serve takes another port then
        app.state.base_url = f"http://{address}:{options.port}/v1"
        server = _Server(app, serve)
        return event_loop.create_task(server.serve(sockets=[listener])), server

    listen_by(start)


class _Server(uvicorn.Server):
    def __init__(self, app: HearthApp, serve: ASGIApp) -> None:
        self._app = app
        config = http_config(_Entrance(app, serve), app.state.settings, None)
        config.lifespan = "off"
        config.timeout_graceful_shutdown = None
        super().__init__(config)

    async def shutdown(self, sockets: Any = None) -> None:
        """Let running requests finish; after the time for that, end the rest with an error event."""
        state = self._app.state
        draining = asyncio.create_task(state.drain.drain(state.settings.drain_seconds))
        await super().shutdown(sockets)
        await draining


class _Entrance:
    """Serve's entrance, where requests are counted for autoscaling and the drain. It ends in `OwnHttp`."""

    def __init__(self, app: HearthApp, serve: ASGIApp) -> None:
        self.state = app.state
        self._serve = serve

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == _HEALTH:
            # Serve says no as soon as this replica is to end, so HAProxy left it before it knew the next one. Instead
            # answer as long as it listens: HAProxy does not try one twice that no longer listens.
            with suppress(ModelError):
                self.state.engine.check()
                await Response()(scope, receive, send)
                return
        headers = [header for header in scope["headers"] if header[0] not in _FOR_SERVE]
        await self._serve({**scope, "headers": [*headers, _UNWATCHED]}, receive, send)


class OwnHttp:
    """The app, for Serve: also for what HAProxy sends through Serve's Python proxy while it knows of no replica."""

    def __init__(self, app: HearthApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":  # the lifespan is the replica's
            scope.setdefault("hearth.connection", _Proxied())
            await self._app(scope, receive, send)


class _Proxied(Connection):
    """The connection of a request that Serve's proxy passes on: it cancels when the client leaves."""

    def __init__(self) -> None: ...

    def can_write(self) -> bool:
        return False

    def end_with_connection(self) -> None: ...

    def last_comes(self, size: int) -> None: ...

    def watch(self, on_disconnect: Callable[[], None] | None) -> None: ...


class Peers:
    """All replicas of the application, for views of the cluster. One that does not answer is left out."""

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._handles = handles

    async def statuses(self) -> list[ReplicaStatus]:
        return await self._all("status", ReplicaStatus)

    async def machines(self) -> list[MachineState]:
        return await asyncio.to_thread(machines)

    async def metrics(self) -> list[Metric]:
        return list(chain.from_iterable(await self._all("metrics", list)))

    async def _all(self, method: str, kind: type[_T]) -> list[_T]:
        return list(chain.from_iterable(await asyncio.gather(*(ask_all(one, method, kind) for one in self._handles))))


def machines() -> list[MachineState]:
    """Return the machines of the cluster that this process belongs to. Blocks."""
    return [
        MachineState(
            address=node["NodeManagerAddress"],
            node_id=node["NodeID"],
            alive=node["Alive"],
            head="node:__internal_head__" in node["Resources"],
            gpus=int(node["Resources"].get("GPU", 0)),
            cpus=int(node["Resources"].get("CPU", 0)),
            memory_bytes=int(node["Resources"].get("memory", 0)),
        )
        for node in ray.nodes()
    ]


def _own_folder(stack: ExitStack, parent: Path, role: str) -> Path:
    """Lock the first data directory that no other replica of this role has on this machine, and return it."""
    for number in range(_MOST_ON_A_NODE):
        folder = parent / f"{role}-{number}"
        with suppress(InstanceError):
            stack.enter_context(only_one(folder))
            return folder
    raise InstanceError(f"No data directory for {role} can be used below {parent}: check who may write there.")


class StickyRouter(ConsistentHashRouter):  # type: ignore[misc]  # of Ray, which has no types
    """Serve's consistent hashing by session, with bounded loads: replicas over the bound are tried last.

    It keeps a conversation with the replica that has cached its beginning, unless that is much busier than others.
    """

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        found = await super().choose_replicas(candidate_replicas, pending_request)
        busy = {one.replica_id: self.replica_queue_len_cache.get(one.replica_id) or 0 for one in candidate_replicas}
        most = max(1.0, _MOST_OF_AVERAGE * (sum(busy.values()) + 1) / max(len(busy), 1))
        return sorted(found, key=lambda rank: busy.get(rank[0].replica_id, 0) >= most)


def application(config: Config, settings: Settings, *, restart: bool = False) -> serve.Application:
    """Make what Serve runs; with `restart` no old replica goes on. Raises `SettingsError`."""
    check_for_cluster(settings)
    if not config.roles:
        raise SettingsError(
            f"{config.path} has no section `cluster`, which says what replicas there are (docs/cluster.md)."
        )
    text = config.path.read_text("utf-8")
    first, *others = config.roles.values()

    def make(kind: type[Any], role: RoleSpec, **more: Any) -> serve.Deployment:
        made = _deployment(kind, role, config, settings.drain_seconds, **more)
        set_version(made, secrets.token_hex() if restart else _version(config, role))
        return made

    bound = {role.id: make(Replica, role).bind(text, role.id) for role in others}
    ingress = make(serve.ingress()(Ingress), first, user_config={"models": text})
    return ingress.bind(text, first.id, **bound)


def build(arguments: Mapping[str, str]) -> serve.Application:
    """Make it for a Serve config file, as KubeRay has one; `models` is the path of models.yaml on the head."""
    settings = load_settings()
    return application(load_config(Path(arguments.get("models", settings.models))), settings)


def _deployment(kind: type[Any], role: RoleSpec, config: Config, drain_seconds: float, **more: Any) -> serve.Deployment:
    models = config.of_role(role.id).models.values()
    runs, queues = (sum(one) for one in zip((0, 0), *map(_places, models), strict=True))
    options: dict[str, Any] = {
        "num_replicas": role.replicas.min,
        "max_replicas_per_node": role.most_per_node,
        "max_surge_percent": 100 if role.surge else 0,
        "ray_actor_options": {"num_cpus": CPUS, "num_gpus": role.gpus},
        **more,
    }
    if role.replicas.most > role.replicas.min:
        del options["num_replicas"]
        options["autoscaling_config"] = {
            "min_replicas": role.replicas.min,
            "max_replicas": role.replicas.most,
            "target_ongoing_requests": role.replicas.requests or max(runs, 1),
        }
    if role.resource is not None:
        options["ray_actor_options"]["resources"] = {role.resource: OF_RESOURCE}
    # The first role refuses requests itself, with our errors; Serve's have another shape.
    most = runs + queues + _OTHER_REQUESTS if kind is Replica else _UNLIMITED
    if kind is Replica and any(isinstance(model, ChatModelSpec) for model in models):
        options["request_router_config"] = RequestRouterConfig(request_router_class=StickyRouter)
    made = serve.deployment(
        kind,
        name=role.id,
        max_ongoing_requests=most,
        max_queued_requests=most,
        logging_config={"enable_access_log": False},  # we have our own
        health_check_period_s=5,
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=DEREGISTER_SECONDS + drain_seconds + _DRAIN_MARGIN_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        **options,
    )
    assert isinstance(made, serve.Deployment)  # noqa: S101
    return made


def _version(config: Config, role: RoleSpec) -> str:
    """Return a version that differs if a deploy has to replace the replicas of this role."""
    own = [entry.model_dump_json(exclude=_AT_ONCE) for entry in config.of_role(role.id).entries.values()]
    said = [importlib.metadata.version("hearth-inference"), *config.roles, *own]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()


def _places(model: ModelSpec) -> tuple[int, int]:
    """How many requests it runs and how many it queues, as models.yaml says."""
    said = dict(model.engine)
    runs = said.get("max_num_seqs") or said.get("max_parallel_requests") or 1
    return runs, said.get("max_queued_requests") or said.get("max_queued_images") or 0
