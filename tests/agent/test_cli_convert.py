# SPDX-License-Identifier: Apache-2.0
"""`convert`: a model converted on the command line is the model."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from freetoken_agent import LocalModel, Store
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.cli.convert import folder_files
from freetoken_agent.cli.main import app
from freetoken_agent.tokenizers.gguf_tokenizer import from_metadata, read_metadata
from freetoken_agent.tokenizers.hf_tokenizer import HFTokenizer

TEXTS = ["Hello, world!", "def f(x):\n    return x ** 2", "naïve 漢字 🙂 12345", "<|im_end|> plain"]


def run(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["convert", *arguments, "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout if code == 0 else result.stderr)


@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_a_converted_model_answers_as_its_source(
    quant: str, tiny_folder: Path, tmp_path: Path
) -> None:
    """A session with each. Oracle: the source with the same quantisation."""
    from freetoken_runtime import EngineConfig

    report = run(str(tiny_folder), str(tmp_path / "tiny.ftw"), "--quant", quant)
    assert report["quant"] == quant and report["folder"] == str(tmp_path / "tiny.ftw")
    assert report["records"] > 20 and report["resumed_records"] == 0
    answers = []
    for path, asked in ((tiny_folder, quant), (tmp_path / "tiny.ftw", "none")):
        config = EngineConfig(threads=1, quant=None if asked == "none" else asked)  # type: ignore[arg-type]
        with LocalModel.load(path, config=config) as model, Store(":memory:") as store:
            session = store.create("s", model, system="Be brief.")
            session.append("user", "Hello?")
            reply = session.generate_sync(max_tokens=8, temperature=0.0)
            answers.append((reply.text, reply.usage.input_tokens, model.tokenizer.digest))
    assert answers[0] == answers[1]


def test_the_folder_is_named_by_its_header(tiny_folder: Path, tmp_path: Path) -> None:
    """The report's digest is the engine's fingerprint of the weights."""
    report = run(str(tiny_folder), str(tmp_path / "a"))
    stored = (tmp_path / "a" / "model.ftw").read_bytes()
    assert report["digest"] == stored[24:56].hex()
    with LocalModel.load(tmp_path / "a") as model:
        assert model.fingerprint.parts["weights"] == report["digest"]


def test_refusals_are_errors(tiny_folder: Path, tmp_path: Path) -> None:
    """By code, with exit status 1."""
    target = str(tmp_path / "a")
    run(str(tiny_folder), target)
    assert run(str(tiny_folder), target, code=1)["error"]["code"] == "ftw_error"
    assert run("no-such-model", target, code=1)["error"]["code"] == "model_not_found"
    run(target, str(tmp_path / "b"), "--quant", "int8")
    error = run(str(tmp_path / "b"), str(tmp_path / "c"), "--quant", "int4", code=1)["error"]
    assert error["code"] == "unsupported_quantization"
    assert not (tmp_path / "c").exists()


@pytest.mark.smollm2
def test_a_gguf_tokenizer_becomes_a_folders(tmp_path: Path) -> None:
    """Oracle: the tokenizer of the .gguf itself: ids, stops, special tokens, template."""
    try:
        path = resolve("smollm2")
    except ModelNotFound:
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    files = from_metadata(read_metadata(path))
    for name, content in folder_files(files).items():
        (tmp_path / name).write_bytes(content)
    ours, theirs = HFTokenizer.load(tmp_path), HFTokenizer(files)
    for text in TEXTS:
        assert ours.encode_content(text) == theirs.encode_content(text)
        assert ours.encode_frame(text) == theirs.encode_frame(text)
    assert ours.stop_ids == theirs.stop_ids
    assert ours.special_tokens == theirs.special_tokens
    assert ours.chat_template == theirs.chat_template
