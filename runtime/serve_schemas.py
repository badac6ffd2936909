"""What requests and answers of ``tfx serve`` hold, and what is said of a request that is not so. Needs pydantic."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

__all__ = [
    "EmbedRequest",
    "EmbedResponse",
    "ErrorResponse",
    "OpenAIRequest",
    "OpenAIResponse",
    "problem",
    "state_limits",
]


def _whole(value: Any) -> Any:
    """Return 3 for 3.0, which is the same number in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _wholes(value: Any) -> Any:
    """Do the same for the items of a list, which holds millions when somebody means harm."""
    if isinstance(value, list) and float in set(map(type, value)):
        return [_whole(item) for item in value]
    return value


def _kind_of_input(value: Any) -> str:
    """Return the tag of the one type that a value of ``input`` is checked as: its first item tells which."""
    if not isinstance(value, list):
        return "text"
    first = value[0] if value else None
    if isinstance(first, list):
        return "rows"
    return "ids" if isinstance(first, int | float) and not isinstance(first, bool) else "texts"


# A list is checked up to its first wrong item: a report of each of a million takes minutes and gigabytes.
_Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
_Id = Annotated[int, Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], Field(min_length=1, fail_fast=True), BeforeValidator(_wholes)]
_Rows = Annotated[list[_Ids], Field(min_length=1, fail_fast=True)]
_Whole = Annotated[int, Field(ge=1, lt=1 << 31), BeforeValidator(_whole)]


class _Request(BaseModel):
    """A body whose first unknown key is reported, and no other."""

    @model_validator(mode="before")
    @classmethod
    def _one_unknown_key(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        unknown = next((key for key in data if key not in cls.model_fields), None)
        return {key: data[key] for key in (*cls.model_fields, unknown) if key in data}


class EmbedRequest(_Request):
    """Texts to vectors: ``texts``, or one ``text``."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "oneOf": [{"required": ["texts"]}, {"required": ["text"]}],
            "example": {"texts": ["The cat sat.", "A dog ran."]},
        },
    )

    texts: _Texts = []
    text: str = ""

    @model_validator(mode="after")
    def _one_of_both(self) -> EmbedRequest:
        if len(self.model_fields_set) != 1:
            raise ValueError('wanted either "texts" or "text"')
        return self


class EmbedResponse(BaseModel):
    """A vector per text, in order."""

    vectors: list[list[float]]
    tokens: list[int] = Field(description="Tokens of each text, special ones counted.")
    cut: list[bool] = Field(description="Whether a text was longer than the model takes, and was cut.")
    model: str


class OpenAIRequest(_Request):
    """What OpenAI's clients send to ``/v1/embeddings``."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"example": {"input": "The cat sat.", "model": "my-model"}}
    )

    input: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[_Texts, Tag("texts")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[_Rows, Tag("rows")],
        Discriminator(_kind_of_input),
    ] = Field(description="A text, texts, token ids with special tokens in them, or a list of such.")
    model: str = Field(description="The name that GET /v1/models says.")
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: _Whole | None = Field(None, description="The model's own dimension; no other can be had.")
    user: str | None = Field(None, description="Not used.")

    def rows(self) -> tuple[list[str], list[list[int]]]:
        """Return the texts or the rows of token ids that ``input`` means; one of both is empty."""
        value: Any = self.input
        if isinstance(value, str):
            return [value], []
        if isinstance(value[0], str):
            return value, []
        return [], value if isinstance(value[0], list) else [value]


class OpenAIEmbedding(BaseModel):
    """One vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class Usage(BaseModel):
    """Tokens of a request, special ones counted."""

    prompt_tokens: int
    total_tokens: int


class OpenAIResponse(BaseModel):
    """What OpenAI's clients read."""

    object: Literal["list"]
    data: list[OpenAIEmbedding]
    model: str
    usage: Usage


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """Every answer that is no success."""

    error: ErrorDetail


def state_limits(
    schema: dict[str, Any], *, name: str, dimension: int, max_texts: int, max_length: int | None, limit: int | None
) -> None:
    """Write into an OpenAPI schema what only a running server knows.

    Args:
        schema: changed in place.
        name: of the model.
        dimension: of a vector.
        max_texts: texts in one request.
        max_length: longest sequence of token ids, None when there is no limit.
        limit: token ids are below it, None when there is none.
    """
    models = schema["components"]["schemas"]
    models["EmbedRequest"]["properties"]["texts"]["maxItems"] = max_texts
    wanted = models["OpenAIRequest"]["properties"]
    wanted["model"]["const"] = name
    wanted["dimensions"]["anyOf"][0]["const"] = dimension
    _, texts, ids, rows = wanted["input"]["oneOf"]
    texts["maxItems"] = rows["maxItems"] = max_texts
    for row in (ids, rows["items"]):
        row |= {} if max_length is None else {"maxItems": max_length}
        row["items"] |= {} if limit is None else {"exclusiveMaximum": limit}


def problem(error: Any) -> tuple[str, str | None]:
    """Return one line about a body that is not as the schema wants it, and the key that is wrong."""
    place = [part for part in error["loc"] if part != "body"]
    if error["type"] == "json_invalid":
        return f"body: not JSON: {error['ctx']['error']} at character {place[0]}", None
    if error["type"] == "value_error":
        return f"body: {error['ctx']['error']}", None
    if not place:
        if isinstance(error["input"], bytes):
            return "body: found another content type, wanted application/json", None
        if error["type"] == "string_unicode":
            return "body: a key is no valid Unicode (a lone surrogate)", None
        return f"body: found {_kind(error['input'])}, wanted a JSON object", None
    key = str(place[0])
    where = key + "".join(f"[{part}]" for part in place[1:] if isinstance(part, int))
    if error["type"] == "missing":
        return f"{where}: missing", key
    if error["type"] == "extra_forbidden":
        return f"{where}: not known here", key
    if key == "input":
        return "input: wanted a text, a list of texts, token ids or a list of lists of them, none empty", key
    if error["type"] == "too_short":
        return f"{where}: found an empty array, wanted at least one text", key
    if error["type"] == "string_unicode":
        return f"{where}: no valid Unicode (a lone surrogate)", key
    return f"{where}: found {_kind(error['input'])}; {error['msg'].replace('Input should be', 'wanted')}", key


def _kind(value: object) -> str:
    """Return what JSON calls a value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    names = {str: "a string", int: "a number", float: "a number", list: "an array", dict: "an object"}
    return names.get(type(value), "nothing")
