# SPDX-License-Identifier: Apache-2.0
"""Sessions on models whose experts lie on disk: edits, forks, restarts and kills. The real mixture
is SmolLM2 with its neurons in another order, so that the dense model says what it must answer."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from freetoken_agent import LocalModel, Session, Store
from freetoken_agent.catalog import ModelNotFound, resolve
from freetoken_agent.proving.proofs import Gold
from freetoken_agent.upcycled import build_mixture
from freetoken_runtime import Engine, EngineConfig, SamplingParams
from freetoken_runtime.conversion import convert
from freetoken_runtime.models.registry import read_family
from freetoken_runtime.upcycling import Recipe, mixtral_config
from freetoken_runtime.weights import open_source

LAYERS = 4  # of SmolLM2's 30, by default
RESIDENT = EngineConfig(threads=1, offload="none")
ON_DISK = EngineConfig(threads=1, offload="disk", expert_slots=10)
IN_PAGES = EngineConfig(threads=1, offload="ram")
SETTINGS = {"none": RESIDENT, "disk": ON_DISK, "ram": IN_PAGES}
HYBRIDS = ("qwen3_next", "granitemoehybrid")


class Watched:
    """Replies that cost what was planned: plan = usage = rows that the runner forwarded. `gold`: a
    cold prefill of another engine says what the answers must be. `replies`: all ids sampled."""

    def __init__(self, model: LocalModel, gold: Gold | None = None, num_tokens: int = 4) -> None:
        self.model = model
        self.replies: list[list[int]] = []
        self._gold = gold
        self._num_tokens = num_tokens

    async def reply(self, session: Session, max_tokens: int = 5) -> str:
        """What is reused comes from here: "ram", "disk" or "none"."""
        plan = session.plan()
        before, ids = self.model.stats().forward_rows, session.ids()
        usage = (await session.reply(max_tokens=max_tokens, temperature=0.0)).usage
        rows = self.model.stats().forward_rows - before
        assert (usage.reused_tokens, usage.prefill_tokens) == (
            plan.reused_tokens,
            plan.prefill_tokens,
        )
        assert rows == usage.prefill_tokens + usage.output_tokens - 1
        self.replies.append(session.ids()[len(ids) :])
        if self._gold is not None:
            engine, path = self.model.engine, session.ids()
            self._gold.check(engine, path, num_tokens=self._num_tokens)
        return plan.source

    async def converse(self, store: Store, name: str = "s") -> Session:
        """Turns, a call, an edit in the middle, a fork, a rewind, each answered."""
        session = store.create(name, self.model, system="You are helpful.")
        session.append("user", "List /srv/app, please.")
        call = session.append_call("ls", {"path": "/srv/app"})
        session.append_result(call, "main.py\ntest_main.py\n" * 6)
        assert await self.reply(session) == "none"
        session.append("user", "And which of them are tests?")
        assert await self.reply(session) == "ram"
        session.replace(session.find(kind="tool_result")[0], "README.md\nmain.py")
        assert await self.reply(session) == "ram"
        fork = session.fork(at=session.find(kind="tool_result")[0], name="fork")
        for branch, question in (
            (fork, "What is in main.py?"),
            (session, "Thanks. Anything else?"),
        ):
            branch.append("user", question)
            assert await self.reply(branch) == "ram"
        session.rewind(turns=1)
        session.append("user", "Once more?")
        assert await self.reply(session) == "ram"
        return session


async def go_on(store: Store, watched: Watched, name: str = "s") -> None:
    """What a restart left: both branches go on from the disk, without a row twice."""
    for branch in ("main", "fork"):
        session = store.open(name, watched.model, branch=branch)
        session.append("user", "Go on.")
        assert await watched.reply(session) == "disk"


def dense_of(source: Path, like: Path, folder: Path, layers: int) -> Path:
    """The dense model that a mixture was made of, cut after as many layers, in fp32."""
    opened = open_source(source)
    config = mixtral_config(opened.spec, Recipe(layers=layers)) | {"model_type": "llama"}
    for key in ("architectures", "sliding_window", "num_local_experts", "num_experts_per_tok"):
        del config[key]
    family, spec = read_family(config)
    folder.mkdir()
    names = {name: ways[0][0].tensor for name, ways in family.names(spec).items()}
    tensors = {stored: opened.read(name).float().contiguous() for name, stored in names.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(like / name, folder)
    return folder


@pytest.fixture(scope="module")
def mixture(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layers of the mixture, in fp32."""
    folder = tmp_path_factory.mktemp("mixture") / "smollm2-moe"
    build_mixture(smollm2_path, folder, layers=LAYERS)
    return folder


@pytest.fixture(scope="module")
def dense(smollm2_path: Path, mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_of(smollm2_path, mixture, tmp_path_factory.mktemp("dense") / "cut", LAYERS)


@pytest.fixture(scope="module")
def gold(dense: Path) -> Iterator[Gold]:
    with Engine.load(dense, RESIDENT) as engine:
        yield Gold(engine)


@pytest.mark.smollm2
async def test_the_mixture_on_disk_answers_as_the_dense_model(
    mixture: Path, gold: Gold, tmp_path: Path
) -> None:
    """Through edits, forks and a restart. Oracle: a cold prefill of the dense model, in fp32."""
    with LocalModel.load(mixture, config=ON_DISK) as model, Store(tmp_path) as store:
        await Watched(model, gold).converse(store)
        await store.flush()
        experts = model.stats().experts
        assert experts.slots == 10 and experts.read_bytes > 0 and experts.misses > 0
    with LocalModel.load(mixture, config=ON_DISK) as model, Store(tmp_path) as store:
        await go_on(store, Watched(model, gold))


@pytest.mark.smollm2
async def test_a_killed_process_loses_nothing_that_it_acknowledged(
    mixture: Path, gold: Gold, tmp_path: Path
) -> None:
    """SIGKILL while a reply streams from experts on disk. Oracles: the ids it had told, and a cold
    prefill of the dense model."""
    acknowledged = killed(mixture, tmp_path)
    with LocalModel.load(mixture, config=ON_DISK) as model, Store(tmp_path / "store") as store:
        session, watched = store.open("killed", model), Watched(model, gold)
        ids = session.ids()
        assert ids[: len(acknowledged)] == acknowledged
        assert model.plan(acknowledged).source == "disk"
        session.append("user", "Go on.")
        assert await watched.reply(session) == "disk"
        session.replace(session.find(kind="user")[0], "Other words.")
        await watched.reply(session)


KILLED = """
import sys
from freetoken_agent import LocalModel, Store
from freetoken_runtime import EngineConfig
import asyncio, json

async def main():
    config = EngineConfig(threads=1, offload="disk", expert_slots=10)
    with LocalModel.load(sys.argv[1], config=config) as model, Store(sys.argv[2]) as store:
        session = store.create("killed", model, system="You are helpful.")
        session.append("user", "Count to a thousand.")
        await session.reply(max_tokens=8)
        await store.flush()
        print(json.dumps(session.ids()), flush=True)
        async for event in session.generate(max_tokens=4000):
            print(event.type, flush=True)

asyncio.run(main())
"""


def killed(model: Path, folder: Path) -> list[int]:
    """Kill a process in the middle of its second reply. The ids that it had told before."""
    command = [sys.executable, "-c", KILLED, str(model), str(folder / "store")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        ids: list[int] = json.loads(child.stdout.readline())
        events = [child.stdout.readline().strip() for _ in range(6)]
        os.kill(child.pid, signal.SIGKILL)
    assert child.returncode == -signal.SIGKILL and "text_delta" in events, events
    return ids


@pytest.fixture(scope="module")
def int4(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same converted: a record per expert."""
    return convert(mixture, tmp_path_factory.mktemp("int4") / "ftw", quant="int4").folder


@pytest.mark.smollm2
async def test_int4_records_on_disk_and_in_pages_are_the_engine_in_memory(
    int4: Path, dense: Path, tmp_path: Path
) -> None:
    """Oracles: an engine in memory that has the same conversations, bit for bit, and each goes on
    from what another wrote; for the numbers, the dense model in int4, whose sums differ by the
    rounding of activations."""
    said, last = [], []
    for level, config in SETTINGS.items():
        with LocalModel.load(int4, config=config) as model, Store(tmp_path / level) as store:
            watched = Watched(model)
            session = await watched.converse(store)
            await store.flush()
            said.append(watched.replies)
            last.append(model.engine.logits(session.ids()))
            assert model.stats().experts.level == level
    assert said[0] == said[1] == said[2]
    assert torch.equal(last[0], last[1]) and torch.equal(last[0], last[2])
    again = []
    for level, other in (("none", "disk"), ("disk", "ram"), ("ram", "none")):
        config = SETTINGS[other]
        with LocalModel.load(int4, config=config) as model, Store(tmp_path / level) as store:
            watched = Watched(model)
            await go_on(store, watched)
            again.append(watched.replies)
    assert again[0] == again[1] == again[2]
    ids = session_ids(tmp_path / "disk")
    one = EngineConfig(threads=1, quant="int4")
    with Engine.load(int4, ON_DISK) as ours, Engine.load(dense, one) as theirs:
        differences = []
        for end in range(len(ids) - 24, len(ids)):
            ours.warm(ids[:end]), theirs.warm(ids[:end])
            a, b = ours.logits(ids[:end]), theirs.logits(ids[:end])
            differences.append(float((a - b).abs().max() / (b.max() - b.min())))
    assert max(differences) <= 6e-2 and sum(differences) / 24 <= 1e-2, differences


def session_ids(folder: Path) -> list[int]:
    with Store(folder) as store:
        return store.open("s").ids()


@pytest.mark.smollm2
def test_sessions_of_the_dense_model_open_with_the_mixture(
    smollm2_path: Path, mixture: Path, int4: Path, tmp_path: Path
) -> None:
    """It has the same ids and template, so they can be written; only states are made anew. Oracle:
    the binding."""
    with LocalModel.load(smollm2_path, weights=False) as model, Store(tmp_path) as store:
        store.create("s", model, system="You are helpful.")
    for folder in (mixture, int4):
        with LocalModel.load(folder, weights=False) as model, Store(tmp_path) as store:
            session = store.open("s", model)
            session.append("user", f"Hello, {folder.name}")


@pytest.mark.parametrize("family", HYBRIDS)
async def test_hybrids_with_experts_on_disk(
    family: str, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """Recurrent layers and experts: what one engine wrote, the other goes on from, whichever is in
    memory. Oracles: a cold prefill in memory; the replies of the engine in memory."""
    folder, said = folder_of(family), []
    with Engine.load(folder, RESIDENT) as cold:
        gold = Gold(cold)
        for level, other in (("none", "disk"), ("disk", "none")):
            path = tmp_path / level
            with LocalModel.load(folder, config=SETTINGS[level]) as model, Store(path) as store:
                watched = Watched(model, gold)
                await watched.converse(store)
                await store.flush()
                assert model.stats().experts.level == level
            with LocalModel.load(folder, config=SETTINGS[other]) as model, Store(path) as store:
                again = Watched(model, gold)
                await go_on(store, again)
                said.append(watched.replies + again.replies)
    assert said[0] == said[1]


@pytest.fixture(scope="module")
def whole(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers, 2.9 GB: as pulled, or built here."""
    try:
        return resolve("smollm2-moe")
    except ModelNotFound:
        folder = tmp_path_factory.mktemp("whole") / "smollm2-moe"
        build_mixture(smollm2_path, folder)
        return folder


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
async def test_the_whole_mixture_on_disk_answers_as_smollm2(
    whole: Path, smollm2_gold: Gold, tmp_path: Path
) -> None:
    """Edits, forks, a restart and a kill, a quarter of the experts in slots. Oracle: a cold prefill
    of SmolLM2 itself."""
    config = EngineConfig(threads=1, offload="disk", expert_slots=60)
    with LocalModel.load(whole, config=config) as model, Store(tmp_path) as store:
        await Watched(model, smollm2_gold, 2).converse(store)
        await store.flush()
        assert model.stats().experts.slots == 60
    with LocalModel.load(whole, config=config) as model, Store(tmp_path) as store:
        await go_on(store, Watched(model, smollm2_gold, 2))
    acknowledged = killed(whole, tmp_path)
    with LocalModel.load(whole, config=config) as model, Store(tmp_path / "store") as store:
        session = store.open("killed", model)
        assert session.ids()[: len(acknowledged)] == acknowledged
        session.append("user", "Go on.")
        assert await Watched(model, smollm2_gold, 16).reply(session) == "disk"


@pytest.mark.slow
@pytest.mark.smollm2
@pytest.mark.timeout(1800)
def test_tokens_of_the_whole_mixture(whole: Path, smollm2_gold: Gold) -> None:
    """64 greedy tokens with barely more than k slots. Oracle: SmolLM2, where its lead allows."""
    config = EngineConfig(threads=1, offload="disk", expert_slots=3)
    with LocalModel.load(whole, config=config) as model:
        ids = model.tokenizer.encode_frame("<|im_start|>user\nTell me a story.<|im_end|>\n")
        tokens = model.engine.generate(ids, SamplingParams(max_tokens=64, temperature=0.0))
        smollm2_gold.check_tokens(model.engine, ids, [token.id for token in tokens])
