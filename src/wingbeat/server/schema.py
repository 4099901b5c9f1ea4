"""Bodies of the API, checked on arrival. pydantic lives here only; inside, requests are wingbeat.types records."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

TokenIds = list[Annotated[int, Field(ge=0)]]
NonNegative = Annotated[int, Field(ge=0)]


class Part(BaseModel):
    """A nested object: extra fields are harmless, wrong types are not."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Part):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchema(Part):
    name: str = "answer"
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Function(Part):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function


class FunctionName(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: FunctionName


class Body(BaseModel):
    """What completions and chat completions share. Unknown fields are kept aside for intake.check_extras."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: dict[str, float] | None = None
    max_draft_depth: int | None = None
    """Cap on speculation for this request; 0 switches it off."""
    response_format: ResponseFormat | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    """Prefix reuse only among requests with the same salt, as in vLLM."""
    return_token_ids: bool = False
    return_speculation: bool = False
    """Adds usage.speculation: what drafting did for this request."""


class CompletionBody(Body):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: int | None = None
    add_special_tokens: bool = True


class ChatBody(Body):
    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None


class PolicyBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    policy: Annotated[str, Field(max_length=1000)]
