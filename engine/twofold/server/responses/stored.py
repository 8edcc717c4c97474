"""Stored responses: the routes that read and delete them, and requests that continue them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import ValidationError
from starlette.responses import JSONResponse, Response

from twofold.server.http import errors as api_errors
from twofold.server.http.errors import ApiError
from twofold.server.http.openapi import answers
from twofold.server.responses.answer_schemas import ResponseAnswer, ResponseDeleted, ResponseItems
from twofold.server.responses.schemas import InputItem, ResponsesRequest
from twofold.server.responses.store import ResponseStore, StoredResponse

R = TypeVar("R", bound=ResponsesRequest)


def with_stored_items(body: R, store: ResponseStore) -> R:
    """The request with its whole conversation: what it continues, and the items that it refers to.

    ApiError 404 for a response or an item that is not kept.
    """
    items = list(body.items)
    previous = body.previous_response_id
    if previous is None and all(item.kind != "item_reference" for item in items):
        return body
    before = [] if previous is None else store.conversation(previous)
    if before is None:
        raise _missing(
            f"the response {previous!r:.200}", "previous_response_id", "previous_response_not_found"
        )
    whole = [*map(_input_item, before), *items]
    return body.model_copy(update={"input": list(_resolved(whole, store)), "previous_response_id": previous})


def _resolved(items: list[InputItem], store: ResponseStore) -> Iterator[InputItem]:
    for item in items:
        if item.kind != "item_reference":
            yield item
            continue
        found = store.item(item.id or "")
        if found is None:
            raise _missing(f"the item {item.id!r:.200}", "input", "item_not_found")
        yield _input_item(found)


def _input_item(stored: dict[str, Any]) -> InputItem:
    """A stored item as input. ApiError 400 for one that cannot be continued, such as a call that was cut off."""
    try:
        return InputItem.model_validate(stored)
    except ValidationError as error:
        raise api_errors.from_validation(error) from None


def add_stored_routes(routes: APIRouter, store: ResponseStore) -> None:
    """GET and DELETE of a response, its input, and its cancellation."""

    def found(response_id: str) -> StoredResponse:
        stored = store.get(response_id)
        if stored is None:
            raise _missing(f"the response {response_id!r:.200}", "response_id", "response_not_found")
        return stored

    @routes.get("/{response_id}", responses=answers(ResponseAnswer))
    async def stored(response_id: str) -> Response:
        return JSONResponse(found(response_id).body)

    @routes.delete("/{response_id}", responses=answers(ResponseDeleted))
    async def delete(response_id: str) -> Response:
        found(response_id)
        store.remove(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @routes.get("/{response_id}/input_items", responses=answers(ResponseItems))
    async def input_items(response_id: str, request: Request) -> Response:
        items = list(found(response_id).input_items)
        ids = [item.get("id") for item in items]
        first, last = (ids[0], ids[-1]) if ids else (None, None)
        body: dict[str, Any] = {"object": "list", "data": items, "first_id": first, "last_id": last}
        return JSONResponse(body | {"has_more": False})

    @routes.post("/{response_id}/cancel")
    async def cancel(response_id: str) -> Response:
        found(response_id)
        raise ApiError(
            400,
            "only responses in the background can be cancelled, and none run there; close the connection instead",
            param="response_id",
        )


def _missing(what: str, param: str, code: str) -> ApiError:
    return ApiError(
        404,
        f"{what} is not kept here: the server keeps recent responses in memory, unless store is false "
        "(--max-stored-responses); send the conversation in input",
        param=param,
        code=code,
    )
