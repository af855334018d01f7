from __future__ import annotations

import json
import subprocess
import sys
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
    assert sorted(TEMPLATES) == ["bounded", "chatml", "gemma", "language", "llama3", "mistral", "qwen2.5", "qwen3"]


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
    for source in ("{{ '<{0.__class__.__init__}>'.format(messages) }}", "{{ '{a[b].c}'.format(a=messages) }}"):
        with pytest.raises(PromptError, match="formats a part of a value"):
            render(source)
    assert render("{{ '<{0}>'.format(joiner.__init__) }}") == "<>"


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


def grown(step: str) -> str:
    """A template whose value `ns.x` grows by `step` sixty times, to 2 ** 60 where that doubles it."""
    return f"{{% set ns = namespace(x='ab') %}}{{% for i in range(60) %}}{step}{{% endfor %}}"


TEXT = "{% set s = 'a' * 9000000 %}"
LARGE, WIDTH, OTHER = "a value of more than", "a width that is too large", "which templates cannot here"
MADE, SPLIT = "characters on its way", "splits a text of more than"

# Each would take gigabytes, or hours, in one step or in few.
BOMBS = [
    (grown("{% set ns.x = ns.x ~ ns.x %}"), LARGE),
    (grown("{% set ns.x = ns.x + ns.x %}"), LARGE),
    (grown("{% set ns.x = [ns.x, ns.x] %}"), LARGE),
    (grown("{% set ns.x = (ns.x, ns.x) %}"), LARGE),
    (grown("{% set ns.x = {1: ns.x, 2: ns.x} %}"), LARGE),
    (grown("{% set ns.x = dict(a=ns.x, b=ns.x) %}"), LARGE),
    (grown("{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"), LARGE),
    ("{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}" + grown("{% set ns.x = f(ns.x) %}"), LARGE),
    ("{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}", LARGE),
    ("{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}", "nests values"),
    ("{{ 'a'|center(10**9) }}", LARGE),
    ("{{ 'a'.center(10**9) }}", LARGE),
    ("{{ 'a'.ljust(10**9) }}", LARGE),
    ("{{ 'a'.rjust(10**9) }}", LARGE),
    ("{{ 'a'.zfill(10**9) }}", LARGE),
    ("{{ ('\\t' * 99999).expandtabs(99999) }}", LARGE),
    ("{{ ('a\\n' * 99999)|indent(99999) }}", LARGE),
    ("{{ ('a\\n' * 99999)|indent('a' * 99999) }}", LARGE),
    ("{{ ['a']|map('center', 10**9)|list }}", LARGE),
    ("{% filter center(10**9) %}a{% endfilter %}", LARGE),
    ("{{ '%9999999999d' % 1 }}", WIDTH),
    ("{{ '%999999999d' % 1 }}", LARGE),
    ("{{ '%*d' % (10**9, 1) }}", WIDTH),
    ("{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}", LARGE),
    ("{{ '%999999999d'|format(1) }}", LARGE),
    ("{{ '{:999999999}'.format(1) }}", LARGE),
    ("{{ '{:{}}'.format(1, 10**9) }}", WIDTH),
    ("{{ ('{0}' * 99999).format('x' * 99999) }}", LARGE),
    ("{{ '{a:999999999}'.format_map({'a': 1}) }}", LARGE),
    ("{{ ('a' * 99999)|replace('a', 'b' * 99999) }}", LARGE),
    ("{{ ('a' * 99999).replace('a', 'b' * 99999) }}", LARGE),
    ("{{ ('a' * 99999).replace('', 'b' * 99999) }}", LARGE),
    ("{{ ('a' * 99999)|replace(new='b' * 99999, old='a') }}", LARGE),
    ("{{ range(99999)|join('a' * 99999) }}", LARGE),
    ("{{ ('a' * 99999).join(['x'] * 99999) }}", LARGE),
    ("{{ [1]|batch(10**9, 'x')|list }}", LARGE),
    ("{{ [1]|slice(10**9)|list }}", LARGE),
    ("{{ ([1] * 99999)|tojson(indent=99999) }}", LARGE),
    ("{{ ([1] * 99999)|tojson(separators=('a' * 99999, 'b')) }}", LARGE),
    ("{{ ([[1] * 100] * 1000)|sum(start=[]) }}", "adds up lists"),
    ("{{ 1.5|round(10**9, 'ceil') }}", "rounds to more than"),
    ("{{ strftime_now('%Y' * 99999) }}", "a pattern of more than"),
    ("{{ (1).to_bytes(10**9, 'big') }}", OTHER),
    ("{{ ('a' * 99999)|wordwrap(1, wrapstring='b' * 99999) }}", OTHER),
    (TEXT + "{{ ([namespace(x=s)] * 9999)|join('', attribute='x') }}", LARGE),
    (TEXT + "{{ ('{0.x}' * 9999).format(namespace(x=s)) }}", "a part of a value"),
    (TEXT + "{{ s|list|length }}", SPLIT),
    (TEXT + "{{ s.split('a')|length }}", SPLIT),
    (TEXT + "{{ (" + "~".join(["s"] * 2000) + ")|length }}", MADE),
    (TEXT + "{% for i in range(9999) %}{% if 'b' in s %}{% endif %}{% endfor %}", MADE),
    (TEXT + "{% for i in range(9999) %}{% if s.find('b') %}{% endif %}{% endfor %}", MADE),
    (TEXT + "{{ range(9999)|map('string')|select('in', s)|list }}", MADE),
    (TEXT + "{% for i in range(9999) %}{% set x = s[1:] %}{% endfor %}", MADE),
    (TEXT + "{% for i in range(9999) %}{% set x = s|upper %}{% endfor %}", MADE),
    ("{% set x %}{% for i in range(99999) %}" + "y" * 9999 + "{% endfor %}{% endset %}", MADE),
    ("{% set x %}{% for i in range(99999) %}{{ '" + "y" * 9999 + "' }}{% endfor %}{% endset %}", MADE),
]

# Renders each template in a process that may not grow, and says how each is refused.
RENDERER = """
import json, resource, sys
from kvist.errors import PromptError
from kvist.loading.chat_template import ChatTemplate
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (512 << 20),) * 2)
for source in json.load(sys.stdin):
    try:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
        print("rendered")
    except PromptError as error:
        print(error)
"""


def test_a_template_that_would_fill_the_memory_is_refused_before_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RENDERER], input=json.dumps([source for source, _ in BOMBS]),
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert len(lines) == len(BOMBS)
    wrong = [(source[:80], line) for (source, reason), line in zip(BOMBS, lines, strict=True) if reason not in line]
    assert not wrong


def test_a_long_conversation_is_far_from_the_bounds() -> None:
    """Half a million characters in 400 messages, through what templates do: loops that append, strip, split, test."""
    messages: list[Message] = [{"role": "user", "content": f"<think>{'hm ' * 400}</think> {i} "} for i in range(400)]
    source = (
        "{% set ns = namespace(text='', kept=[]) %}{% for m in messages %}{% set c = m.content.split('</think>')[-1] %}"
        "{% if '<think>' in m.content %}{% set ns.text = ns.text ~ c.strip() + ' ' %}{% endif %}"
        "{% set ns.kept = ns.kept + [m] %}{{ m.content|trim|replace('hm', 'h') }}{% endfor %}"
        "{{ ns.kept|tojson(indent=4) }}{{ ns.text }}"
    )
    assert len(render(source, list(messages))) > 500_000


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


def test_values_of_the_template_and_of_messages_are_shown_short() -> None:
    for source in ("{% set ns = namespace(**{'_' ~ 'x' * 9999: 1}) %}", "{{ raise_exception('x\n' * 9999) }}"):
        with pytest.raises(PromptError) as raised:
            render(source)
        assert len(str(raised.value)) < 500
        assert "\n" not in str(raised.value)
    with pytest.raises(PromptError, match="content of a message must be text") as raised:
        render("x", [{"role": "user\n" * 9999, "content": 3}])
    assert len(str(raised.value)) < 200
    assert "\n" not in str(raised.value)


def test_a_template_renders_the_same_again_after_it_was_stopped() -> None:
    template = ChatTemplate(
        "{% for i in range(messages[0].content|int) %}{% for j in range(9999) %}{% endfor %}{% endfor %}x", {}
    )
    with pytest.raises(PromptError, match="steps"):
        template.render([{"role": "user", "content": "999"}])
    assert template.render([{"role": "user", "content": "9"}]) == "x"
