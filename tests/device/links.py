# SPDX-License-Identifier: Apache-2.0
"""How fast bytes go between host and device, by each way there is."""

import torch

from freetoken_runtime.device.host_records import HostRecords

from .block import Place, Report, Shape, device_experts, host_records


def links(place: Place, report: Report) -> None:
    """Copies of one large piece, and of records by the copy engine and by the kernel. Checked:
    every way brings the same bytes."""
    size = place.size(256 << 20, 1 << 20)
    there = torch.empty(size, dtype=torch.uint8, device=place.accelerator.device)
    locked = place.accelerator.host_memory(size)
    plain = torch.empty(size, dtype=torch.uint8)
    locked.random_(0, 256)
    for name, memory in (("locked", locked), ("pageable", plain)):
        seconds = place.seconds(lambda m=memory: there.copy_(m, non_blocking=True))  # type: ignore[misc]
        report.note(f"host to device, {name}, GB/s", size / seconds / 1e9)
        seconds = place.seconds(lambda m=memory: m.copy_(there, non_blocking=True))  # type: ignore[misc]
        report.note(f"device to host, {name}, GB/s", size / seconds / 1e9)
    shape = Shape(1, place.size(32, 4), 2, place.size(2048, 24), place.size(768, 20))
    for form in ("bfloat16", "int4"):
        records = host_records(place, shape, form)
        for count in (1, place.size(8, 2), shape.experts):
            for gathers in (False, True):
                _fetch(place, report, (form, records, count), gathers=gathers)


def _fetch(
    place: Place, report: Report, what: tuple[str, HostRecords, int], *, gathers: bool
) -> None:
    form, records, count = what
    experts = device_experts(place, records, count, gathers=gathers)

    def fetch() -> None:
        for key in list(experts.slots.keys()):
            slot = experts.slots.find(key)
            assert slot is not None
            experts.slots.drop(slot)
        experts.fetch_all()

    fetch()
    seconds = place.seconds(fetch)
    way = "kernel" if gathers else "copy engine"
    size = experts.records.form.layout.size_bytes
    report.note(f"{count} records of {form} by {way}, GB/s", count * size / seconds / 1e9)
    same = all(
        torch.equal(slot.memory[:size].cpu(), experts.records.bytes_of(*key)[:size])
        for key in experts.slots.keys()
        if (slot := experts.slots.find(key)) is not None
    )
    report.check(f"{count} records of {form} by {way} are whole", same)
