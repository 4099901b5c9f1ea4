"""Chat templates: what they see, what they may not do, and the errors that name a message's field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from wingbeat.errors import CheckpointError, RequestError
from wingbeat.text.template import ChatTemplate, read_template

PLAIN = """{% for message in messages %}
{{ '<' + message.role + '>' + message.content + eos_token }}
{% endfor %}
{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}
"""
USER = {"role": "user", "content": "Hi"}
Message = dict[str, object]


def render(source: str, messages: list[Message] | None = None, **names: object) -> str:
    return ChatTemplate(source, {"eos_token": "</s>"}).render(messages or [dict(USER)], variables=names)


def test_messages_and_special_tokens_with_transformers_whitespace() -> None:
    messages: list[Message] = [{"role": "system", "content": "Be brief."}, dict(USER)]
    assert render(PLAIN, messages) == "<system>Be brief.</s>\n<user>Hi</s>\n<assistant>"
    assert ChatTemplate(PLAIN, {"eos_token": ""}).render(messages, add_generation_prompt=False).endswith("Hi\n")


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert "<user>a\nb</s>" in render(PLAIN, [{"role": "user", "content": parts}])


def test_tools_reach_the_template_unescaped() -> None:
    source = "{{ tools | tojson if tools else 'none' }}"
    template = ChatTemplate(source, {})
    tools = [{"type": "function", "function": {"name": "f", "description": "<a & \u00e9>"}}]
    assert json.loads(template.render([USER], tools=tools)) == tools
    assert "<a & \u00e9>" in template.render([USER], tools=tools)
    assert template.render([USER]) == "none"
    assert template.reads_tools
    assert not ChatTemplate(PLAIN, {}).reads_tools


def test_tool_calls_arrive_parsed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages: list[Message] = [
        dict(USER),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "ok", "tool_call_id": "1"},
    ]
    source = "{{ messages[1].tool_calls[0].function.arguments.x[0] }}{{ messages[1].content }}{{ messages[2].content }}"
    assert render(source, messages) == "1ok"
    function = call["function"]
    assert isinstance(function, dict)
    assert function["arguments"] == '{"x": [1]}'  # the request itself is left alone


def test_a_second_template_for_tools() -> None:
    template = ChatTemplate("plain", {}, tool_source="{{ tools[0].name }}")
    assert template.render([USER]) == "plain"
    assert template.render([USER], tools=[{"name": "f"}]) == "f"


def test_extra_variables_cannot_replace_the_messages() -> None:
    assert render("{{ enable_thinking }}", None, enable_thinking=False) == "False"
    assert ChatTemplate("{{ messages | length }}", {}).render([USER], variables={"messages": []}) == "1"


def test_names_templates_rely_on() -> None:
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(loop) == "01"
    assert render("{% generation %}{{ 1 + 1 }}{% endgeneration %}") == "2"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ {'b': 1, 'a': 2} | tojson(indent=1) }}") == '{\n "b": 1,\n "a": 2\n}'


def test_refusals_by_the_template_are_request_errors() -> None:
    with pytest.raises(RequestError, match="alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.field == "messages"
    with pytest.raises(RequestError, match="cannot render"):
        render("{{ messages[0].content + 1 }}")
    with pytest.raises(RequestError, match="cannot render"):
        render("{{ undefined_function() }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ range(10 ** 9) | list | length }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(RequestError):
        ChatTemplate(source, {}).render([USER])


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": "wizard", "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "tool_calls": "f"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_wrong_messages_name_the_field(messages: list[Message], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(PLAIN, {"eos_token": ""}).render(messages)
    assert caught.value.field == field


def test_continuing_the_final_message() -> None:
    template = ChatTemplate(PLAIN, {"eos_token": "</s>"})
    messages = [USER, {"role": "assistant", "content": "Hello, "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi</s>\n<assistant>Hello, "
    stripping = ChatTemplate(PLAIN.replace("message.content", "message.content | trim"), {"eos_token": "</s>"})
    assert stripping.render(messages, add_generation_prompt=False, continue_final_message=True).endswith("Hello,")
    with pytest.raises(RequestError, match="add_generation_prompt=false"):
        template.render(messages, continue_final_message=True)
    with pytest.raises(RequestError, match="assistant"):
        template.render([USER], add_generation_prompt=False, continue_final_message=True)


def test_where_templates_are_found(tmp_path: Path) -> None:
    assert read_template(tmp_path, {}, {}) is None
    listed = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "{{ tools[0] }}"}]
    for config, expected in (({"chat_template": "c"}, "c"), ({"chat_template": listed}, "d")):
        found = read_template(tmp_path, config, {})
        assert found is not None
        assert found.render([USER]) == expected
    (tmp_path / "chat_template.jinja").write_text("file")
    found = read_template(tmp_path, {"chat_template": "c"}, {})
    assert found is not None
    assert found.render([USER]) == "file"


def test_broken_templates_are_checkpoint_errors() -> None:
    with pytest.raises(CheckpointError, match="chat_template: line 2"):
        ChatTemplate("x\n{% if %}", {})
