"""What the fake `mlc_llm` takes for a request: the form that FastAPI checks, and MLC's rules."""

from __future__ import annotations

from typing import Any

_ROLES = ("system", "user", "assistant", "tool")


class Bad(Exception):
    """A request that MLC itself refuses, with 400."""


class Invalid(Exception):
    """A request whose form FastAPI refuses, with 422: `errors` as pydantic tells them."""

    def __init__(self, kind: str, where: list[Any], message: str) -> None:
        super().__init__(message)
        self.errors = [{"type": kind, "loc": ["body", *where], "msg": message}]


_TYPES: dict[str, tuple[type, ...]] = {
    "model": (str,),
    "user": (str,),
    "max_tokens": (int,),
    "n": (int,),
    "best_of": (int,),
    "stream": (bool,),
    "temperature": (int, float),
    "top_p": (int, float),
    "stream_options": (dict,),
}


def check(body: Any, chat: bool) -> dict[str, Any]:
    """Return the body. Raises Invalid. Fields that MLC does not know are ignored."""
    if not isinstance(body, dict):
        raise Invalid("model_attributes_type", [], "Input should be a valid dictionary")
    wanted = "messages" if chat else "prompt"
    if wanted not in body:
        raise Invalid("missing", [wanted], "Field required")
    for name, types in _TYPES.items():
        value = body.get(name)
        if value is not None and (
            not isinstance(value, types) or (isinstance(value, bool) and bool not in types)
        ):
            raise Invalid("type", [name], f"Input should be a valid {types[0].__name__}")
    options = body.get("stream_options")
    if options is not None:
        if "include_usage" not in options:
            raise Invalid("missing", ["stream_options", "include_usage"], "Field required")
        if chat and not body.get("stream"):
            said = "Value error, stream must be set to True when stream_options is present"
            raise Invalid("value_error", [], said)
    if chat:
        messages = body["messages"]
        if not isinstance(messages, list):
            raise Invalid("list_type", ["messages"], "Input should be a valid list")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                allowed = "Input should be 'system', 'user', 'assistant' or 'tool'"
                raise Invalid("literal_error", ["messages", index, "role"], allowed)
    elif not isinstance(body["prompt"], (str, list)):
        raise Invalid("string_type", ["prompt", "str"], "Input should be a valid string")
    return body


def prompt_tokens(body: dict[str, Any], chat: bool, limit: int) -> int:
    """How long the prompt is. Raises Bad for what MLC refuses."""
    if body.get("best_of") not in (None, 1):
        raise Bad('Request fields "best_of" are not supported right now.')
    count = 0
    for index, message in enumerate(body["messages"] if chat else []):
        if message["role"] == "system" and index != 0:
            raise Bad(f"System prompt at position {index} in the message list is invalid.")
        if isinstance(message.get("content"), list) and message["role"] != "user":
            raise Bad("Non-user message having a list of content is invalid.")
        if message.get("tool_calls") is not None:
            if message["role"] != "assistant":
                raise Bad("Non-assistant message having `tool_calls` is invalid.")
            raise Bad("Assistant message having `tool_calls` is not supported yet.")
        count += len(str(message.get("content") or "").split())
    if not chat:
        prompt = body["prompt"]
        count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    if count > limit:
        raise Bad(
            f"Request prompt has {count} tokens in total, larger than the model input length limit "
            f"{limit}."
        )
    return count
