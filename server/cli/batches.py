"""`hearth batches`: file batches of a key, over HTTP like any other client; `run` sends one and fetches its answers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn

import httpx2
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from server.cli.options import AsJson, Commands, DataDir, refuse, tell
from server.http.tls import trusting
from server.observability.status import ask
from server.settings import load_settings
from server.terminal import HEARTH, table

app = typer.Typer(cls=Commands, no_args_is_help=True)
_COLUMNS = ("id", "status", "done", "errors", "lines", "endpoint", "model", "made (UTC)", "ends by (UTC)")
_ENDED = {"completed", "failed", "expired", "cancelled"}
_POLL_SECONDS = 1.0
_ANSWER_SECONDS = 60.0
_AGAIN_SECONDS = 300.0  # a server that is being restarted is asked again for so long
_SAVED_AT_A_TIME = 2**20
Url = Annotated[str | None, typer.Option(help="Address of the server, with /v1 [HEARTH_URL, the one running here].")]
BatchId = Annotated[str, typer.Argument(help="Its id, from `hearth batches list`.")]


@app.callback()
def batches() -> None:
    """Run files of requests, and show or cancel those that run. The key is taken from HEARTH_KEY."""


@app.command(name="list")
def list_batches(
    *,
    limit: Annotated[int, typer.Option(min=1, max=100, help="Maximum number, newest first.")] = 20,
    url: Url = None,
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """List the batches of the key."""
    with _Server.open(url, data_dir) as server:
        found = server.get("/batches", limit=limit)["data"]
    shown = table(_COLUMNS, map(_row, found)) if found else "This key has no batches."
    tell({"data": found}, shown, as_json=as_json)


@app.command()
def show(batch: BatchId, *, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Show one batch, and what is wrong with its file."""
    with _Server.open(url, data_dir) as server:
        found = server.get(f"/batches/{batch}")
    tell(found, table(_COLUMNS, [_row(found)]), *_errors(found), as_json=as_json)


@app.command()
def cancel(batch: BatchId, *, url: Url = None, data_dir: DataDir = None, as_json: AsJson = False) -> None:
    """Cancel a batch. The answers that it has by then are kept."""
    with _Server.open(url, data_dir) as server:
        found = server.send("POST", f"/batches/{batch}/cancel")
    tell(found, f"{found['id']} is {found['status']}.", as_json=as_json)


@app.command()
def run(  # noqa: PLR0913  # one argument per option
    file: Annotated[Path, typer.Argument(help="JSON Lines, one request per line.", exists=True, dir_okay=False)],
    *,
    output: Annotated[Path | None, typer.Option(help="Where answers go [FILE.output.jsonl].")] = None,
    errors: Annotated[Path | None, typer.Option(help="Where errors go [FILE.errors.jsonl].")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Endpoint of all lines; default: the first line's.")] = None,
    window: Annotated[str, typer.Option(help="How long it may take: 1h to 7d.")] = "24h",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the files on the server.")] = False,
    url: Url = None,
    data_dir: DataDir = None,
) -> None:
    """Send a file, wait for its batch, and fetch its answers and errors. Ctrl-C leaves it running.

    Exit code 0: every line has an answer. 1: some, or all, have an error.
    """
    asked = endpoint or _endpoint_of(file)
    answers_to = _writable(output or file.with_name(f"{file.name}.output.jsonl"))
    errors_to = _writable(errors or file.with_name(f"{file.name}.errors.jsonl"))
    with _Server.open(url, data_dir) as server:
        sent, batch = server.start(file, asked, window, keep=keep)
        typer.echo(f"{batch['id']}: {file.name}, {sent['bytes']} bytes")
        try:
            batch, seconds = _followed(server, batch)
        except KeyboardInterrupt:
            refuse(f"It continues. To show it: {HEARTH} batches show {batch['id']}; to end it: ... cancel ...", code=1)
        for line in _errors(batch):
            typer.echo(line, err=True)
        for what, id_, target in (
            ("Answers", batch["output_file_id"], answers_to),
            ("Errors", batch["error_file_id"], errors_to),
        ):
            if id_ is not None:
                server.save(id_, target)
                typer.echo(f"{what}: {target}")
            elif target.exists():
                typer.echo(f"From an earlier run: {target}")
        if not keep:
            for id_ in filter(None, (sent["id"], batch["output_file_id"], batch["error_file_id"])):
                server.send("DELETE", f"/files/{id_}")
    counts = batch["request_counts"]
    done = counts["completed"] + counts["failed"]
    rate = f"{done / seconds:.1f} lines a second" if seconds else ""
    said = f"{counts['completed']} answered, {counts['failed']} with an error, {seconds:.1f} s, {rate}"
    typer.echo(f"{batch['status']}: {said if counts['total'] else 'the file was refused, and no line was answered'}")
    if counts["completed"] != counts["total"] or batch["status"] != "completed":
        raise typer.Exit(1)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:.1f} lines/s")


def _followed(server: _Server, batch: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Show the progress until the batch has ended; return the batch, and how many seconds that took."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(bar_width=32), MofNCompleteColumn())
    began = time.monotonic()
    with Progress(*columns, _Rate(), TimeRemainingColumn()) as progress:
        task = progress.add_task(batch["status"], total=None)
        while batch["status"] not in _ENDED:
            time.sleep(_POLL_SECONDS)
            batch = server.get(f"/batches/{batch['id']}")
            counts = batch["request_counts"]
            done = counts["completed"] + counts["failed"]
            progress.update(task, description=batch["status"], completed=done, total=counts["total"] or None)
    return batch, time.monotonic() - began


def _writable(target: Path) -> Path:
    if not os.access(target.parent, os.W_OK):
        refuse(f"{target} cannot be written: check that its folder is there, and that you may write to it.")
    return target


def _endpoint_of(file: Path) -> str:
    with file.open("rb") as opened:
        first = next(filter(bytes.strip, opened), b"")
    try:
        return str(json.loads(first)["url"])
    except (ValueError, TypeError, KeyError):
        return refuse(f"The first line of {file} has no `url`. docs/batches.md shows what a line looks like.")


def _row(batch: dict[str, Any]) -> tuple[str, ...]:
    counts = batch["request_counts"]
    moments = (f"{datetime.fromtimestamp(batch[name], UTC):%Y-%m-%d %H:%M}" for name in ("created_at", "expires_at"))
    numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
    return (batch["id"], batch["status"], *numbers, batch["endpoint"], batch["model"] or "-", *moments)


def _errors(batch: dict[str, Any]) -> list[str]:
    found = (batch["errors"] or {"data": []})["data"]
    return [one["message"] if one["line"] is None else f"line {one['line']}: {one['message']}" for one in found]


class _Server:
    """A server and a key. A refusal is printed on stderr and ends the command."""

    def __init__(self, client: httpx2.Client) -> None:
        self._client = client
        self._answered = False

    @classmethod
    @contextmanager
    def open(cls, url: str | None, data_dir: Path | None) -> Iterator[_Server]:
        key = os.environ.get("HEARTH_KEY") or refuse("Set HEARTH_KEY to a key with the scope `batch`.")
        base_url, certificate = url or os.environ.get("HEARTH_URL"), None
        if not base_url and (running := ask(load_settings(data_dir=data_dir).data_dir, _ANSWER_SECONDS)) is not None:
            base_url, certificate = running.base_url, running.paths.tls_cert
        if not base_url:
            refuse("No server runs here. Name one with --url http://HOST:8000/v1, or HEARTH_URL.")
        base_url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1"
        headers = {"Authorization": f"Bearer {key}"}
        try:
            verify = trusting(Path(certificate)) if certificate else True
            client = httpx2.Client(base_url=base_url, headers=headers, timeout=_ANSWER_SECONDS, verify=verify)
        except UnicodeEncodeError:
            refuse("HEARTH_KEY has a character that no key has. Copy it again.")
        except httpx2.InvalidURL as error:
            refuse(f"{base_url} is not an address: {error}")
        with client:
            yield cls(client)

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        return self._answer(self._patiently(lambda: self._request("GET", path, params=query)))

    def _patiently(self, ask: Callable[[], httpx2.Response]) -> httpx2.Response:
        """Ask, and for some minutes ask again where the server restarts or answers 429 or 503."""
        deadline = time.monotonic() + _AGAIN_SECONDS
        while True:
            try:
                response = ask()
            except httpx2.TransportError as error:
                if not self._answered or time.monotonic() > deadline:
                    self._give_up(error)
            else:
                if response.status_code not in {429, 503} or time.monotonic() > deadline:
                    return response
            time.sleep(_POLL_SECONDS)

    def send(self, method: str, path: str, **body: Any) -> dict[str, Any]:
        try:
            return self._answer(self._request(method, path, **body))
        except httpx2.TransportError as error:
            self._give_up(error)

    def start(self, file: Path, endpoint: str, window: str, *, keep: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Send a file and have its batch made; return both. A batch that is refused leaves no file, unless `keep`."""
        with file.open("rb") as opened:
            sent = self.send("POST", "/files", files={"file": (file.name, opened)}, data={"purpose": "batch"})
        body = {"input_file_id": sent["id"], "endpoint": endpoint, "completion_window": window}
        try:
            return sent, self.send("POST", "/batches", json=body)
        except typer.Exit:
            with suppress(httpx2.TransportError):  # the reason was printed
                if not keep:
                    self._request("DELETE", f"/files/{sent['id']}")
            raise

    def save(self, file: str, target: Path) -> None:
        """Write a file of the server here, whole or not at all."""
        part = target.with_name(f"{target.name}.part")

        def fetch() -> httpx2.Response:
            with self._client.stream("GET", f"/files/{file}/content") as response:
                if response.status_code != 200:
                    response.read()
                    return response
                with part.open("wb") as opened:
                    for piece in response.iter_bytes(_SAVED_AT_A_TIME):
                        opened.write(piece)
                part.replace(target)
                return response

        try:
            response = self._patiently(fetch)
        except OSError as error:
            part.unlink(missing_ok=True)
            again = f"GET {self._client.base_url}files/{file}/content has it."
            refuse(f"{target} cannot be written: {error.strerror}. The server keeps it: {again}", code=1)
        if response.status_code != 200:
            self._answer(response)

    def _request(self, method: str, path: str, **body: Any) -> httpx2.Response:
        response = self._client.request(method, path, **body)
        self._answered = True
        return response

    def _give_up(self, error: httpx2.TransportError) -> NoReturn:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            advice = "Name its file (SSL_CERT_FILE=hearth.pem), and use an address that it is for."
            refuse(f"The certificate of {self._client.base_url} is not trusted. {advice}", code=1)
        refuse(f"{self._client.base_url} does not answer. Is this the server's address?", code=1)

    def _answer(self, response: httpx2.Response) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = response.json()
            if response.is_success:
                return answer
            refuse(str(answer["error"]["message"]), code=1)
        except (ValueError, KeyError, TypeError):
            refuse(f"{self._client.base_url} answers {response.status_code}, but not as Hearth does.", code=1)
