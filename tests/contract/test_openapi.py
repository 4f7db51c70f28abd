"""The published description of the API against the real server: random requests made from it, and what answers may be."""

import importlib.metadata
import warnings
from typing import Any

import httpx2
import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from serving import Key, Server

with warnings.catch_warnings():  # what its own dependencies say while they are imported
    warnings.simplefilter("ignore")
    import schemathesis
    from schemathesis.generation import GenerationMode

pytestmark = pytest.mark.engine

MODEL = "service-plus"
SHORT = {"max_tokens": 1, "max_completion_tokens": 1, "max_output_tokens": 16, "n": 1, "ignore_eos": False}
FORMS = {"/v1/files", "/v1/images/edits", "/v1/images/variations"}
FORMS |= {"/v1/audio/transcriptions", "/v1/audio/translations"}
WITHOUT_BODY = {"/v1/admin/keys/{public_id}/revoke", "/v1/admin/reload", "/v1/batches/{batch_id}/cancel"}
# A request to each endpoint that is answered, and whose other fields may be anything.
HELLO = [{"role": "user", "content": "Hello!"}]
PLAIN: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": HELLO, "max_tokens": 1},
    "/v1/chat/completions/batch": {"requests": [{"model": MODEL, "messages": HELLO, "max_tokens": 1}, {}]},
    "/v1/completions": {"model": MODEL, "prompt": "Hello", "max_tokens": 1},
    "/v1/messages": {"model": MODEL, "messages": HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": HELLO},
    "/v1/responses": {"model": MODEL, "input": "Hello", "max_output_tokens": 16},
    "/v1/tokenize": {"model": MODEL, "prompt": "Hello"},
    "/v1/detokenize": {"model": MODEL, "tokens": [5]},
    "/v1/embeddings": {"model": "service-embedding", "input": ["Hello", "there"]},
    "/v1/rerank": {"model": "service-rerank", "query": "Hello", "documents": ["Hello", "there"]},
    "/v1/audio/speech": {"model": "service-voice", "voice": "emma", "input": "Hello."},
    "/v1/images/generations": {"model": "service-image", "prompt": "a red circle", "size": "256x256"},
    "/v1/admin/keys": {"name": "described", "tier": "standard"},
}
ALLOWED = {
    "DELETE": {200, 400, 404, 409},
    "GET": {200, 400, 404},
    "PATCH": {200, 400, 404, 413, 415},
    "POST": {200, 400, 404, 413, 415},
}


@pytest.fixture(scope="module")
def document(server: Server) -> dict[str, Any]:
    response = httpx2.get(f"{server.root_url}/openapi.json", timeout=60)
    assert response.status_code == 200
    return response.json()


def test_the_description_names_the_key_the_bodies_and_one_shape_of_errors(document: dict[str, Any]) -> None:
    assert document["info"]["version"] == importlib.metadata.version("hearth-inference")
    assert set(document["components"]["securitySchemes"]) == {"bearer", "x-api-key"}
    assert "422" not in str(document["paths"])
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["description"]
            if path.startswith("/v1/"):
                of_keys = set() if operation.get("security") == [] else {"401", "403", "429"}
                assert {"200", "400", "500", "503"} | of_keys <= set(operation["responses"])
                errors = [answer for status, answer in operation["responses"].items() if int(status) >= 400]
                shapes = {answer["content"]["application/json"]["schema"]["$ref"] for answer in errors}
                assert shapes == {"#/components/schemas/Error"}
            if method == "post" and path not in WITHOUT_BODY:
                form = "multipart/form-data" if path in FORMS else "application/json"
                assert operation["requestBody"]["content"][form]["schema"]


def operations(document: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(document)
    return [found.ok() for found in schema.get_all_operations()]


def made_answerable(case: Any) -> None:
    """Name a model that is there, and ask for little: else every request would end as 404, or take its time."""
    bodies = case.body.get("requests", [case.body]) if isinstance(case.body, dict) else []
    for body in bodies if isinstance(bodies, list) else []:
        if isinstance(body, dict):
            body.update({name: value for name, value in SHORT.items() if name in body or name.startswith("max_tok")})
            if isinstance(body.get("model"), str):
                body["model"] = PLAIN.get(case.operation.path, {}).get("model", MODEL)


def check_answer(document: dict[str, Any], path: str, method: str, response: httpx2.Response) -> None:
    answers = document["paths"][path][method.lower()]["responses"]
    status = response.status_code
    assert status in ALLOWED[method.upper()], (status, response.text)
    assert str(status) in answers, f"{status} of {path} is not documented"
    assert response.headers["x-request-id"]
    content_type = response.headers["content-type"].partition(";")[0]
    described = answers[str(status)]["content"]
    assert content_type in described, content_type
    if content_type == "application/json":
        whole = {**described[content_type]["schema"], "components": document["components"]}
        jsonschema.validate(response.json(), whole, cls=jsonschema.Draft202012Validator)


@pytest.mark.parametrize("path", PLAIN)
def test_a_plain_request_gets_the_answer_that_is_described(
    server: Server, admin_key: Key, document: dict[str, Any], path: str
) -> None:
    headers = {"Authorization": f"Bearer {admin_key.text}"}
    response = httpx2.post(f"{server.root_url}{path}", json=PLAIN[path], headers=headers, timeout=240)
    assert response.status_code == 200, response.text
    check_answer(document, path, "POST", response)
    if path == "/v1/admin/keys":
        server.made_keys.append(Key(response.json()["key"]))


@pytest.mark.parametrize("examples", [6, pytest.param(100, marks=[pytest.mark.rounds, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_whatever_is_sent_the_answer_is_one_that_is_described(
    server: Server, admin_key: Key, document: dict[str, Any], mode: GenerationMode, examples: int
) -> None:
    headers = {"Authorization": f"Bearer {admin_key.text}"}
    for operation in operations(document):
        if operation.path in FORMS and operation.method == "post":
            continue  # a form, which it makes for another client: those have tests of their own
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing in it can be wrong
        strategy = operation.as_strategy(generation_mode=mode)

        @settings(
            max_examples=examples,
            derandomize=True,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=strategy)
        def check(case: Any) -> None:
            made_answerable(case)
            sent = case.as_transport_kwargs(base_url=server.root_url, headers=headers)
            sent.pop("cookies", None)
            body = {"content": sent.pop("data")} if isinstance(sent.get("data"), bytes | str) else {}
            response = client.request(**sent, **body)
            check_answer(document, case.operation.path, case.operation.method, response)

        with httpx2.Client(timeout=240) as client:
            check()
