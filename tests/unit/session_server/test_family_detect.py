"""Family ``auto``: the model directory's own template decides, and doubt is a refusal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import vocabularies
from tokenizers import Tokenizer

from tollway.errors import ConfigError
from tollway.session_server.families.detect import detect_family
from tollway.session_server.families.registry import load_family
from tollway.session_server.families.vocabularies import CONTROL_STRINGS, with_control_strings

LLAMA = """\
{{- bos_token }}{%- set date = '26 Jul 2024' %}
{%- if messages[0].role == 'system' %}{% set system = messages[0].content | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{ 'Environment: ipython\\n' }}{% endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + date + '\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, please respond with a JSON for a '
        'function call with its proper arguments that best answers the given prompt.\\n\\nRespond in the format '
        '{"name": function name, "parameters": dictionary of argument name and its value}.'
        'Do not use variables.\\n\\n' }}
    {%- for tool in tools %}{{ tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {{- messages[0].content | trim + '<|eot_id|>' }}{% set messages = messages[1:] %}
{%- endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- set f = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + f.name + '", "parameters": ' + f.arguments | tojson + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""Written for this test after the layout of Llama 3.2."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory whose vocabulary fits every family."""
    backend = Tokenizer.from_str(vocabularies.small().to_str())
    for name in CONTROL_STRINGS:
        with_control_strings(backend, name)
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "anything"}))
    return tmp_path


def settings(model: Path, **values: object) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(values))


def test_the_family_that_renders_as_the_template_does_is_taken(model: Path) -> None:
    settings(model, chat_template=LLAMA, bos_token="<|begin_of_text|>")
    assert detect_family(model) == "llama-3"
    assert load_family("auto", tokenizer=model).name == "llama-3"


def test_a_template_of_no_known_family_is_refused(model: Path) -> None:
    """One word more is another model."""
    settings(model, chat_template=LLAMA.replace("'ipython", "'tool"), bos_token="<|begin_of_text|>")
    assert detect_family(model) == "llama-3"  # nothing but the word in quotes has changed
    settings(model, chat_template=LLAMA.replace("|>ipython<|", "|>tool<|"), bos_token="<|begin_of_text|>")
    with pytest.raises(ConfigError, match=r"model_type 'anything'\): no family renders like its template; .* jinja"):
        detect_family(model)


def test_two_families_that_agree_are_a_refusal(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tollway.session_server.families import detect

    settings(model, chat_template=LLAMA, bos_token="<|begin_of_text|>")
    monkeypatch.setattr(detect, "_renders_alike", lambda name, control, template: name in ("qwen3.5", "qwen3.6"))
    with pytest.raises(ConfigError, match=r"several families render like it: qwen3\.5, qwen3\.6; name one"):
        detect_family(model)


def test_a_model_type_decides_only_where_models_have_no_template(model: Path) -> None:
    settings(model)
    with pytest.raises(ConfigError, match=r"model_type 'anything' alone decides nothing"):
        detect_family(model)
    (model / "config.json").write_text(json.dumps({"model_type": "deepseek_v4"}))
    assert detect_family(model) == "deepseek-v4"


def test_there_must_be_a_model_directory(model: Path) -> None:
    for path in (None, model / "tokenizer.json"):
        with pytest.raises(ConfigError, match="to be a model directory; name the family"):
            load_family("auto", tokenizer=path)


@pytest.mark.all
@pytest.mark.slow(300)
def test_the_templates_of_real_models_are_told_apart(model: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(tmp_path), "trl==1.16.0"], check=True
    )
    (wheel,) = tmp_path.glob("trl-*.whl")
    expected = {
        "qwen3": "qwen3",
        "qwen3_5_think": "qwen3.5",
        "qwen3_6": "qwen3.6",
        "qwen3_8": "qwen3.8",
        "glm4moe": "glm-4.5",
        "nemotron_3_nano": "nemotron-3",
        "nemotron_3_ultra": None,
        "qwen2_5": None,
        "gemma3": None,
    }
    with zipfile.ZipFile(wheel) as archive:
        for name, family in expected.items():
            settings(model, chat_template=archive.read(f"trl/chat_templates/{name}.jinja").decode())
            if family is not None:
                assert detect_family(model) == family
                continue
            with pytest.raises(ConfigError) as caught:
                detect_family(model)
            assert re.search("no family renders|several families", str(caught.value))
