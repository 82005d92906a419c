# SPDX-License-Identifier: Apache-2.0
"""Who goes into the next pass. Oracle: the rules of the module, checked over many passes."""

from hypothesis import given
from hypothesis import strategies as st

from freetoken_runtime.scheduler import Candidate, Scheduler

candidates = st.lists(st.builds(Candidate, st.integers(0, 500), st.booleans()), max_size=20)


@given(candidates, st.integers(1, 300), st.integers(1, 9))
def test_a_pass_keeps_the_rules(found: list[Candidate], chunk: int, batch: int) -> None:
    """One row for each ready decoder up to the batch, one chunk of one prompt, nobody else."""
    rows = Scheduler(chunk, batch).next_rows(found)
    decoding = [i for i, c in enumerate(found) if not c.missing and c.ready]
    prompts = [i for i, c in enumerate(found) if c.missing]
    chosen_prompts = [i for i in rows if i in prompts]
    chosen_decoders = [i for i in rows if i in decoding]
    assert len(chosen_prompts) + len(chosen_decoders) == len(rows)
    assert len(chosen_decoders) == min(len(decoding), batch)
    assert len(chosen_prompts) == min(len(prompts), 1)
    assert all(rows[i] == 1 for i in chosen_decoders)
    assert all(rows[i] == min(chunk, found[i].missing) for i in chosen_prompts)


def test_everybody_gets_a_turn() -> None:
    """Ten decoders and three prompts in a batch of four: nobody waits for more than three."""
    scheduler = Scheduler(16, 4)
    found = [Candidate(0, True)] * 10 + [Candidate(1000, True)] * 3
    served = [0] * 13
    for _ in range(30):
        for index in scheduler.next_rows(found):
            served[index] += 1
    assert min(served[:10]) >= 10 and max(served[:10]) <= 14
    assert served[10:] == [10, 10, 10]


def test_a_consumer_that_does_not_read_is_left_out() -> None:
    """Neither its row nor an empty pass."""
    scheduler = Scheduler(16, 4)
    assert scheduler.next_rows([Candidate(0, False)]) == {}
    assert scheduler.next_rows([Candidate(0, False), Candidate(0, True)]) == {1: 1}


@given(st.integers(1, 100), st.integers(1, 1000))
def test_chunks_depend_on_the_prompt_alone(chunk: int, length: int) -> None:
    """However many neighbours decode, a prompt is cut at the same places."""

    def cuts(neighbours: int) -> list[int]:
        scheduler, missing, found = Scheduler(chunk, 8), length, []
        while missing:
            rows = scheduler.next_rows(
                [Candidate(missing, True)] + [Candidate(0, True)] * neighbours
            )
            found.append(rows[0])
            missing -= rows[0]
        return found

    assert cuts(0) == cuts(7)
