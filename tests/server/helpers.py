"""Reading what came back."""

import json
from typing import Any

import httpx


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(text: str = "hi", **fields: Any) -> dict[str, Any]:
    """A greedy chat request."""
    return {"model": "fake/model", "messages": [user(text)], "temperature": 0} | fields


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a finished stream, which must end as streams do."""
    assert response.headers["content-type"].startswith("text/event-stream")
    *datas, end = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert end == "data: [DONE]"
    return [json.loads(data.removeprefix("data: ")) for data in datas]


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error in an envelope, which must be whole."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return body["error"]
