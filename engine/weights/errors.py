"""What stops a download, a check or a copy of weights, and what to do about it. Read by the operator: names files."""

import errno
from collections.abc import Mapping
from pathlib import Path

from engine.errors import EngineError

_RESUMES = "What was fetched so far is kept: run the same command again to continue."

_GATED = """\
{address} is gated: its owner gives it to people who have accepted the conditions. Do this once:
  1. Open {address} in a browser, sign in and accept the conditions (some owners take days to answer).
  2. Make a token that may read gated repositories (Settings, Access Tokens), and set HF_TOKEN=hf_... for
     this command, or run `.venv/bin/hf auth login`.
  3. Run the same command again. Or take a model without a gate, or carry the folder from a machine that has
     it: `hearth weights export` and `import`."""
_REFUSED_LOGIN = (
    "{address}: the hub does not know the token. Pick one: 1. set HF_TOKEN to a valid one; 2. unset it and run "
    "`.venv/bin/hf auth logout`, for models that need none."
)
_UNKNOWN = (
    "There is no {address}, or this machine may not see it. Pick one: 1. correct the name (owner/name); 2. if it is "
    "private, set HF_TOKEN to a token that may read it."
)
_BY_CODE = {
    "GatedRepo": _GATED,
    "RevisionNotFound": "{address} has no such revision. Give --revision a commit, branch or tag that its page shows, "
    "or leave it out for the newest.",
    "EntryNotFound": "{address} lists a file that it does not have. Try another --revision.",
}
_BY_STATUS = {
    401: _UNKNOWN,
    404: _UNKNOWN,
    403: "{address}: access is refused. Give HF_TOKEN a token with the right to read this repository; if a proxy "
    "refuses, have it let the hub and its storage through.",
    429: "{address}: the hub has had too many requests from here and asks to come back {when}. {resumes}",
}
_OTHER = "{address}: the hub answered with status {status}, which Hearth cannot use. {resumes}"


class WeightsError(EngineError):
    """Weights cannot be fetched, verified, copied or removed; the message says why and what to do."""


class UnreachableError(WeightsError):
    """The hub cannot be reached, so nothing else can be had from it either."""


class StoppedError(WeightsError):
    """The operator asked for an end. What was fetched so far is kept."""


def disk_error(error: OSError, place: Path) -> WeightsError:
    """Say what the operating system has against reading or writing below `place`."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return WeightsError(
            f"The disk of {place} is full. What was fetched so far is kept: free some space (`hearth weights list` "
            "shows what lies there), then run the same command again."
        )
    if error.errno in {errno.EACCES, errno.EPERM, errno.EROFS}:
        return WeightsError(
            f"{error.filename or place} cannot be written or read by this user. Run the command as the owner of "
            f"{place}, or change the owner."
        )
    if error.errno == errno.EXDEV:
        return WeightsError(
            f"{place} is spread over two file systems, so a finished folder cannot appear in it at once. Have the "
            "whole weights directory on one file system."
        )
    where = f" ({error.filename})" if error.filename else ""
    return WeightsError(f"{place} cannot be used: {error.strerror or 'input/output error'}{where}.")


def refused(address: str, status: int, headers: Mapping[str, str]) -> WeightsError:
    """Say why `address`, a repository's page, was answered with this status."""
    meaning = _BY_CODE.get(headers.get("x-error-code", "")) or _BY_STATUS.get(status, _OTHER)
    if status == 401 and headers.get("x-error-message", "").startswith("Invalid credentials"):
        meaning = _REFUSED_LOGIN
    asked = headers.get("retry-after", "")
    when = f"in {asked} seconds" if asked.isdecimal() else "later"
    return WeightsError(meaning.format(address=address, status=status, when=when, resumes=_RESUMES))


def unreachable(endpoint: str, error: Exception) -> UnreachableError:
    """Say what can be done when there was no answer, or none to the end."""
    if isinstance(error, ConnectionError):  # huggingface_hub's own: HF_HUB_OFFLINE
        return UnreachableError("HF_HUB_OFFLINE is set, so nothing is fetched. Unset it for this command.")
    untrusted = "CERTIFICATE_VERIFY" in str(error)
    why = "the server's certificate is not trusted" if untrusted else type(error).__name__
    return UnreachableError(
        f"{endpoint} cannot be reached, or the connection breaks again and again ({why}). {_RESUMES} If it stays so, "
        "pick one: 1. HTTPS_PROXY names your proxy, SSL_CERT_FILE its certificate; 2. HF_ENDPOINT names a mirror; "
        "3. pull on a machine that reaches it and carry the folder here: `hearth weights export` and `import`."
    )
