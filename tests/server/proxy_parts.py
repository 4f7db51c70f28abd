"""Real reverse proxies from Debian's packages, with the configuration of docker/ and a certificate of the tests' own."""

import shutil
import socket
import subprocess
from pathlib import Path
from typing import Self

from serving import ROOT, free_port, poll_until
from tls_pair import Pair

PROXIES = {"nginx": "nginx-light", "haproxy": "haproxy", "caddy": "caddy"}


def missing_reason(proxy: str) -> str | None:
    """Why this proxy cannot be run here, or None."""
    if shutil.which(proxy, path="/usr/sbin:/usr/bin:/usr/local/bin") is None:
        return f"{proxy} is not installed (apt-get install {PROXIES[proxy]})"
    return None


class Proxy:
    """One proxy in front of a server. Use as `with`; it speaks HTTPS at `url`."""

    def __init__(self, kind: str, folder: Path, upstream: str, pair: Pair) -> None:
        self.kind = kind
        self._folder = folder
        self._port = free_port()
        self._upstream = upstream
        self._pair = pair
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"https://127.0.0.1:{self._port}"

    def __enter__(self) -> Self:
        program = shutil.which(self.kind, path="/usr/sbin:/usr/bin:/usr/local/bin")
        assert program is not None
        with (self._folder / "output").open("wb") as output:
            command = [program, *getattr(self, f"_{self.kind}")()]
            environment = {"HOME": str(self._folder), "XDG_DATA_HOME": str(self._folder)}
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=self._folder)
        poll_until(self._listens, 60, describe=self.log)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)

    def log(self) -> str:
        return (self._folder / "output").read_text(errors="replace")

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self._port)) == 0

    def _nginx(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "nginx.conf").read_text(),
            {
                "listen 443 ssl": f"listen 127.0.0.1:{self._port} ssl",
                "/etc/ssl/hearth/fullchain.pem": str(self._pair.cert),
                "/etc/ssl/hearth/privkey.pem": str(self._pair.key),
                "127.0.0.1:8000;": f"{self._upstream};",
            },
        )
        folders = "".join(
            f"{kind}_temp_path {self._folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        file = self._folder / "nginx.conf"
        around = f"daemon off; master_process off; pid {self._folder}/pid;\nevents {{}}\nhttp {{\naccess_log off;\n"
        file.write_text(f"{around}{folders}{site}\n}}\n")
        return ["-e", "stderr", "-c", str(file)]

    def _haproxy(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "haproxy.cfg").read_text(),
            {
                "bind :443": f"bind 127.0.0.1:{self._port}",
                "/etc/ssl/hearth/hearth.pem alpn": f"{self._pair.both} alpn",
                "one 127.0.0.1:8000": f"one {self._upstream}",
            },
        )
        file = self._folder / "haproxy.cfg"
        file.write_text(site)
        return ["-db", "-f", str(file)]

    def _caddy(self) -> list[str]:
        site = _changed(
            (ROOT / "docker" / "Caddyfile").read_text(),
            {
                "https://hearth.example.org {": f"https://127.0.0.1:{self._port} {{",
                "/etc/ssl/hearth/fullchain.pem": str(self._pair.cert),
                "/etc/ssl/hearth/privkey.pem": str(self._pair.key),
                "reverse_proxy 127.0.0.1:8000": f"reverse_proxy {self._upstream}",
            },
        )
        file = self._folder / "Caddyfile"
        # It would also take port 80, for redirects, and one for its own administration.
        file.write_text(f"{{\n\tadmin off\n\tauto_https disable_redirects\n\tskip_install_trust\n}}\n{site}")
        return ["run", "--config", str(file), "--adapter", "caddyfile"]


def _changed(text: str, changes: dict[str, str]) -> str:
    """The shipped file with this test's places. Each stands in it once, so that nothing is tested but what is shipped."""
    for old, new in changes.items():
        assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in the file"
        text = text.replace(old, new)
    return text
