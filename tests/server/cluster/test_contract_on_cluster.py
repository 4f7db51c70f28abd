"""What one server promises to clients, asked of a cluster: its tests, unchanged, and with OpenAI's package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_parts import IMAGES, SPEECH, RayCluster, missing_reason, models_yaml
from postgres_parts import Postgres
from serving import ROOT

from server.store.keys import SCOPES

pytestmark = [pytest.mark.engine, pytest.mark.rounds, pytest.mark.timeout(3600)]
FIRST = ["service-plus", "service-pro", "service-embedding", "service-rerank", "service-transcription"]
ROLES = {"first": {"models": FIRST, "replicas": 2}, "media": {"models": [IMAGES, SPEECH]}}


def test_the_contract_holds_on_a_cluster(tmp_path: Path, postgres: Postgres):
    reason = missing_reason()
    if reason is not None:
        pytest.skip(reason)
    with RayCluster(tmp_path, postgres.new_schema()) as cluster:
        cluster.deploy(models_yaml(tmp_path / "models.yaml", ROLES))
        cluster.wait_until_ready("a")
        key = cluster.make_key("admin", *(part for scope in SCOPES for part in ("--scope", scope)))
        log = tmp_path / "contract.log"
        with log.open("w") as out:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", "-q", "-rs", "tests/server/api", "tests/contract/test_openapi.py"],
                cwd=ROOT,
                env=os.environ | {"HEARTH_TEST_URL": cluster.root_url("a"), "HEARTH_TEST_KEY": key.text},
                stdout=out,
                stderr=subprocess.STDOUT,
                check=False,
            )
        assert done.returncode == 0, log.read_text()[-20_000:]
