# SPDX-License-Identifier: Apache-2.0
"""Where missing experts are computed: the split that measured rates predict, against every split
there is, each of them run."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from statistics import median

from freetoken_runtime.batch import Form
from freetoken_runtime.device.mixture import DeviceExperts
from freetoken_runtime.experts.placement import PlacementPolicy, Split, Way, split
from freetoken_runtime.experts.rates import ExpertRates

from .block import Place, Report, Shape, device_experts, host_records, routes, rows_of, whole

_WITHIN = 1.10  # of the best split's time


class FixedSplit(PlacementPolicy):
    """Fetches the first `fetched` of a layer's missing experts, come what may."""

    def __init__(self, fetched: int) -> None:
        super().__init__(ExpertRates())
        self._count = fetched

    def begin_step(self, rows: int) -> Way:
        return "split"

    def split(self, rows: Sequence[int], size_bytes: int) -> Split:
        every = tuple(range(len(rows)))
        self._beside = self._count < len(rows)
        return Split(every[: self._count], every[self._count :], 0.0, 0.0)

    def end_step(self, seconds: float, pairs: int) -> None:
        """Nothing to decide."""


def placement(place: Place, report: Report) -> None:
    """A layer of which no expert is there, one row. Time of every split; the predicted one is
    within 10 % of the best."""
    shape = Shape(1, place.size(32, 6), place.size(8, 3), place.size(2048, 24), place.size(768, 20))
    for form in ("bfloat16", "int4"):
        records = host_records(place, shape, form)
        experts = device_experts(place, records, shape.experts, streams=False)
        rates, times = ExpertRates(), []
        for fetched in range(shape.top_k + 1):
            policy = FixedSplit(fetched)
            policy.rates = rates
            experts.serving = replace(experts.serving, policy=policy)
            times.append(_time(place, experts, shape))
        ones = [1] * shape.top_k
        costs = rates.beside()
        chosen = split(ones, records.record_bytes, costs, plain=rates.alone())
        count = len(chosen.fetched)
        report.note(f"{form}: seconds by experts fetched", times)
        report.note(f"{form}: predicted", {"fetched": count, "seconds": chosen.predicted_s})
        report.note(f"{form}: rates", asdict(costs))
        ratio = times[count] / min(times)
        report.check(f"{form}: over the best", place.interpreted or ratio <= _WITHIN, ratio)


def _time(place: Place, experts: DeviceExperts, shape: Shape) -> float:
    """Median of a few passes that find nothing there."""
    seconds = []
    for seed in range(place.size(15, 2)):
        for key in list(experts.slots.keys()):
            slot = experts.slots.find(key)
            assert slot is not None
            experts.slots.drop(slot)
        x, routed = rows_of(shape, 1, seed), routes(shape, 1, seed)
        run = lambda: experts.mix(0, x, routed, whole(1, Form.FEW))  # noqa: B023, E731
        seconds.append(place.seconds(run, times=1))
    return median(seconds[len(seconds) // 3 :])  # the first ones compile and warm up
