from __future__ import annotations

from pathlib import Path
from typing import Any

import jinja2
import pytest

from kvist.errors import PromptError
from kvist.loading.chat_template import ChatTemplate, Message

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

# In the manner of the models they are named after, with what each asks of the template language; `language` has more.
TEMPLATES = {
    path.stem: path.read_text(encoding="utf-8")
    for path in sorted((Path(__file__).parent / "data" / "chat_templates").glob("*.jinja"))
}

CHATS: dict[str, list[Message]] = {
    "one question": [{"role": "user", "content": "Why is the sky blue?"}],
    "with a system message": [
        {"role": "system", "content": " Answer in <b>Swedish</b> & é. "},
        {"role": "user", "content": "Hi\n"},
    ],
    "several turns": [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo "},
        {"role": "user", "content": "3"},
    ],
    "ending with the assistant": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
    "roles that do not alternate": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
}


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_template_renders_as_in_transformers(name: str, chat: str, add_generation_prompt: bool) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    arguments = {"chat_template": TEMPLATES[name], "add_generation_prompt": add_generation_prompt, **SPECIAL}
    if name in ("gemma", "mistral") and chat == "roles that do not alternate":
        with pytest.raises(jinja2.TemplateError, match="must alternate") as theirs:
            render_jinja_template(conversations=[CHATS[chat]], **arguments)
        with pytest.raises(PromptError, match="refuses these messages") as ours:
            template.render(CHATS[chat], add_generation_prompt=add_generation_prompt)
        assert str(theirs.value) in str(ours.value)
    else:
        rendered, _ = render_jinja_template(conversations=[CHATS[chat]], **arguments)
        assert template.render(CHATS[chat], add_generation_prompt=add_generation_prompt) == rendered[0]
        assert rendered[0].strip()


def test_a_template_writes_the_text_that_its_model_was_trained_on() -> None:
    assert ChatTemplate(TEMPLATES["chatml"], SPECIAL).render(CHATS["one question"]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ChatTemplate(TEMPLATES["gemma"], SPECIAL).render(CHATS["ending with the assistant"]) == (
        "<s><start_of_turn>user\na<end_of_turn>\n<start_of_turn>model\nb<end_of_turn>\n<start_of_turn>model\n"
    )


def test_all_templates_are_there() -> None:
    assert sorted(TEMPLATES) == ["chatml", "gemma", "language", "llama3", "mistral", "qwen2.5", "qwen3"]


def render(source: str, messages: list[Any] | None = None) -> str:
    return ChatTemplate(source, SPECIAL).render(messages if messages is not None else CHATS["one question"])


def test_other_keys_of_a_message_reach_the_template_and_none_counts_as_missing() -> None:
    message = {"role": "user", "content": "a", "name": "Ada", "tool_calls": None}
    assert (
        render("{% for m in messages %}{{ m.name }}{{ m.tool_calls is defined }}{% endfor %}", [message]) == "AdaFalse"
    )


def test_a_refusal_of_the_template_is_told_in_one_line() -> None:
    with pytest.raises(PromptError, match="refuses these messages: System role not supported; change them"):
        render("{{ raise_exception('System role\n not supported') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{% set ns = namespace(_a=1) %}",
        "{% set ns = namespace(a=1) %}{% set ns.__class__ = 2 %}",
        "{{ lipsum() }}",
        "{% include 'secret' %}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(PromptError, match="chat template fails"):
        render(source)


def test_formatting_shows_nothing_of_python() -> None:
    assert render("{{ '<{0.__class__.__init__}>'.format(messages) }}") == "<>"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "steps"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}", "steps"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 9 ** 9 ** 9 }}", "too large a '\\*\\*'"),
        ("{{ 'a' * 9999999999 }}", "too large a '\\*'"),
        ("{% set a = 'a' * 99999 %}{% for b in range(99999) %}{{ a }}{% endfor %}", "characters"),
        ("{{ range(10 ** 9) }}", "OverflowError"),
    ],
)
def test_a_template_that_would_not_end_is_stopped(source: str, reason: str) -> None:
    with pytest.raises(PromptError, match=reason):
        render(source)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 1 / 0 }}", "{{ messages[7].content }}", "{{ 1 + '1' }}"])
def test_a_broken_template_is_told_in_one_line(source: str) -> None:
    with pytest.raises(PromptError, match="chat template fails") as raised:
        render(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        {"role": "user", "content": "a"},
        ["a"],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": "user", "content": 3}],
        [{"role": 1, "content": "a"}],
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    with pytest.raises(PromptError, match="message"):
        render("x", messages)


def test_a_template_renders_the_same_again_after_it_was_stopped() -> None:
    template = ChatTemplate(
        "{% for i in range(messages[0].content|int) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x", {}
    )
    with pytest.raises(PromptError, match="steps"):
        template.render([{"role": "user", "content": "999"}])
    assert template.render([{"role": "user", "content": "9"}]) == "x"
