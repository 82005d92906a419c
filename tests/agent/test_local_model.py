# SPDX-License-Identifier: Apache-2.0
"""LocalModel: loading, what is refused and how it is said, and closing."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freetoken_agent import FreetokenError, LocalModel, Store
from freetoken_agent.catalog import ModelNotFound, home, pulled
from freetoken_agent.errors import TemplateUnsupported, TokenizerUnsupported
from freetoken_agent.model import (
    ContextOverflow,
    InvalidSampling,
    Model,
    ModelClosed,
    ModelUnusable,
    SamplingOptions,
)
from freetoken_agent.segments import Part
from freetoken_agent.tokenizers.byte_tokenizer import ByteTokenizer
from freetoken_runtime import EngineConfig
from freetoken_runtime.errors import (
    BudgetTooSmall,
    UnsupportedArchitecture,
    UnsupportedConfig,
    WeightsDamaged,
    WeightsNotFound,
)

ONE_THREAD = EngineConfig(dtype="float32", threads=1)


@pytest.fixture
def model(tiny_folder: Path) -> Iterator[LocalModel]:
    with LocalModel.load(tiny_folder, config=ONE_THREAD) as model:
        yield model


def test_it_is_a_model_wherever_it_is_imported_from(model: LocalModel) -> None:
    """Oracle: the type checker, the protocol's member names, and identity."""
    from freetoken_agent import model as module

    typed: Model = model
    assert all(hasattr(typed, name) for name in vars(Model) if not name.startswith("_"))
    assert module.LocalModel is LocalModel


def test_importing_it_loads_no_torch() -> None:
    """Oracle: the module table of a fresh interpreter."""
    code = (
        "import sys; from freetoken_agent import LocalModel; import freetoken_agent.model;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_tokens_are_counted_without_frames(model: LocalModel) -> None:
    """Oracle: the bytes of the text, which cannot form a control token."""
    assert model.count_tokens("hé<|im_end|>") == len("hé<|im_end|>".encode())
    assert model.count_tokens([Part(text="a"), Part(text="bc")]) == 3


def test_greedy_text_is_the_reference_models(model: LocalModel, tiny_folder: Path) -> None:
    """Oracle: transformers on the same folder, for the ids that a session renders."""
    import torch
    from transformers import AutoModelForCausalLM

    with Store(":memory:") as store:
        session = store.create("s", model)
        session.append("user", "Hi")
        request = session.plan().input_tokens
        written = session.generate_sync(max_tokens=12)
        ids = session.ids()
    reference = AutoModelForCausalLM.from_pretrained(tiny_folder).eval()
    for position in range(request, len(ids)):
        with torch.inference_mode():
            logits = reference(torch.tensor([ids[:position]])).logits[0, -1]
        assert int(logits.argmax()) == ids[position]
    assert written.usage.output_tokens >= len(ids) - request


def test_without_weights_sessions_open_and_nothing_is_forwarded(tiny_folder: Path) -> None:
    """Oracle: the documented error, and a plan that says so."""
    with LocalModel.load(tiny_folder, weights=False) as model, Store(":memory:") as store:
        session = store.create("s", model, system="You are helpful.")
        session.append("user", "Hi")
        assert session.render().startswith("<|im_start|>system\nYou are helpful.")
        plan = session.plan()
        assert plan.miss is not None and plan.miss.cause == "no_weights"
        assert plan.reused_tokens == 0 and plan.prefill_tokens == plan.input_tokens
        for use in (session.generate_sync, model.stats, lambda: model.warm([1])):
            with pytest.raises(ModelUnusable, match="weights=True") as caught:
                use()
            assert caught.value.code == "model_unusable"
        session.append("user", "still here")


def test_a_closed_model_refuses_and_closes_twice(tiny_folder: Path) -> None:
    """Oracle: the documented error; the session itself stays readable."""
    model = LocalModel.load(tiny_folder, config=ONE_THREAD)
    with Store(":memory:") as store:
        session = store.create("s", model)
        session.append("user", "Hi")
        model.close()
        model.close()
        with pytest.raises(ModelClosed):
            session.generate_sync()
        assert session.path()[-1].text == "Hi"


def test_values_only_the_engine_can_judge_are_refused(model: LocalModel) -> None:
    """Oracle: the documented errors; the model goes on."""
    with Store(":memory:") as store:
        session = store.create("s", model)
        session.append("user", "Hi")
        with pytest.raises(InvalidSampling, match="force") as caught:
            session.generate_sync(force=[1 << 20])
        assert caught.value.code == "invalid_sampling"
        with pytest.raises(BudgetTooSmall, match="ram_budget_bytes"):
            model.set_budget(ram_bytes=1)
        session.append("user", "x" * model.context_limit)
        with pytest.raises(ContextOverflow) as overflow:
            session.generate_sync()
        assert overflow.value.code == "context_overflow"
        assert str(model.context_limit) in str(overflow.value)
        session.undo()
        assert session.generate_sync(max_tokens=3).usage.output_tokens <= 3


def _rewrite(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def _template(folder: Path, source: str | None) -> None:
    _rewrite(folder / "tokenizer_config.json", chat_template=source)


BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], type[FreetokenError], str]] = {
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFound, "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), WeightsNotFound, "safetensors"),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""),
        WeightsDamaged,
        "model.safetensors is empty",
    ),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes(
            (f / "model.safetensors").read_bytes()[:-10]
        ),
        WeightsDamaged,
        "model.safetensors",
    ),
    "foreign weights": (
        lambda f: (f / "model.safetensors").write_bytes(b"PK\3\4" * 100),
        WeightsDamaged,
        "model.safetensors",
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), TokenizerUnsupported, "tokenizer"),
    "foreign tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{"),
        TokenizerUnsupported,
        "tokenizer.json",
    ),
    "architecture": (
        lambda f: _rewrite(f / "config.json", model_type="gru", architectures=["Gru"]),
        UnsupportedArchitecture,
        "gru",
    ),
    "config key": (
        lambda f: _rewrite(f / "config.json", logit_bend=2.0),
        UnsupportedConfig,
        "logit_bend",
    ),
    "no template": (lambda f: _template(f, None), ModelUnusable, "chat template"),
    "template that refuses": (
        lambda f: _template(f, "{{ raise_exception('never') }}"),
        TemplateUnsupported,
        "never",
    ),
    "template that is no template": (
        lambda f: _template(f, "{% for"),
        TemplateUnsupported,
        "compile",
    ),
    "template without content": (lambda f: _template(f, "hello"), TemplateUnsupported, "template"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_bad_folder_is_refused_by_name(case: str, tiny_copy: Path, tiny_folder: Path) -> None:
    """Oracle: the error's type and what its message names; the process goes on and loads a good
    folder."""
    spoil, error, named = BAD_FOLDERS[case]
    spoil(tiny_copy)
    with pytest.raises(error, match=named) as caught:
        LocalModel.load(tiny_copy, config=ONE_THREAD)
    assert caught.value.code == error.code
    LocalModel.load(tiny_folder, config=ONE_THREAD).close()


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF" + bytes(100), b"\x93NUMPY" * 50])
def test_a_bad_gguf_is_refused_by_name(content: bytes, tmp_path: Path) -> None:
    """Oracle: the error's type and the file's name in it."""
    (tmp_path / "some.gguf").write_bytes(content)
    with pytest.raises(WeightsDamaged, match=r"some\.gguf") as caught:
        LocalModel.load(tmp_path / "some.gguf")
    assert caught.value.code == "weights_damaged"
    with pytest.raises(TokenizerUnsupported, match=r"some\.gguf"):
        LocalModel.load(tmp_path / "some.gguf", weights=False)


def test_an_unknown_name_lists_what_can_be_pulled() -> None:
    """Oracle: the documented error."""
    with pytest.raises(ModelNotFound, match="freetoken-agent pull smollm2") as caught:
        LocalModel.load("smollm3")
    assert caught.value.code == "model_not_found"


def test_its_name_is_the_pulled_one_or_the_folders(model: LocalModel, tiny_folder: Path) -> None:
    """Oracle: the folder's name."""
    assert model.name == tiny_folder.name


@pytest.mark.smollm2
def test_a_pulled_model_remembers_its_hash() -> None:
    """Oracle: the name that was asked for, and the file of hashes in the user's folder."""
    if not any(model.name == "smollm2" for model in pulled()):
        pytest.skip("SmolLM2 is not pulled: freetoken-agent pull smollm2")
    with LocalModel.load("smollm2", config=ONE_THREAD) as model:
        assert model.name == "smollm2"
        assert (home() / "hashes.json").is_file()


def test_the_byte_tokenizer_of_the_folder_is_the_scripted_one(model: LocalModel) -> None:
    """Oracle: ByteTokenizer, on text with control tokens and broken UTF-8."""
    text, twin = "hé\n\0<|im_start|>user<think>", ByteTokenizer()
    assert model.tokenizer.encode_frame(text) == twin.encode_frame(text)
    ids = [257, 195, 40, 0, 258]
    assert model.tokenizer.decode(ids) == twin.decode(ids)


def test_sampling_options_are_the_engines(model: LocalModel) -> None:
    """Oracle: the defaults of both sides, field by field."""
    from dataclasses import asdict, fields

    from freetoken_runtime import SamplingParams

    engine = SamplingParams(max_tokens=1)
    for name, value in asdict(SamplingOptions(max_tokens=1)).items():
        assert name in {f.name for f in fields(SamplingParams)}
        assert value == (getattr(engine, name) or value)
