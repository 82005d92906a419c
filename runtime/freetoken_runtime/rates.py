# SPDX-License-Identifier: Apache-2.0
"""How fast this machine has been so far, to say how long a path will take.

A pass over n rows that see c rows on average takes about n (a + b c); a and b are fitted to the
passes seen, older ones counting less. Any thread may ask.
"""

from dataclasses import dataclass

_MEMORY = 0.95  # weight of the past at each new measurement


@dataclass(frozen=True)
class _Sums:
    """Decayed sums of the normal equations, in units of rows and row-contexts."""

    nn: float = 0.0
    nc: float = 0.0
    cc: float = 0.0
    ns: float = 0.0
    cs: float = 0.0

    def add(self, rows: float, contexts: float, seconds: float) -> "_Sums":
        return _Sums(
            _MEMORY * self.nn + rows * rows,
            _MEMORY * self.nc + rows * contexts,
            _MEMORY * self.cc + contexts * contexts,
            _MEMORY * self.ns + rows * seconds,
            _MEMORY * self.cs + contexts * seconds,
        )

    def solve(self) -> tuple[float, float]:
        """(a, b), both at least 0."""
        if not self.nn:
            return 0.0, 0.0
        determinant = self.nn * self.cc - self.nc * self.nc
        if determinant > 1e-6 * self.nn * self.cc:
            a = (self.ns * self.cc - self.cs * self.nc) / determinant
            b = (self.cs * self.nn - self.ns * self.nc) / determinant
            if a > 0 and b > 0:
                return a, b
        return self.ns / self.nn, 0.0


class Rates:
    """Measured speeds. Changed by the owner thread only."""

    def __init__(self) -> None:
        self._restore_s_per_byte = 0.0
        self.clear()

    def clear(self) -> None:
        """Forget the passes."""
        self._many = _Sums()
        self._few = _Sums()

    def passed(self, rows: int, start: int, seconds: float, *, many: bool) -> None:
        """One sequence's pass over rows [start, start + rows) took this long."""
        contexts = rows * (start + rows / 2)
        if many:
            self._many = self._many.add(rows, contexts, seconds)
        else:
            self._few = self._few.add(rows, contexts, seconds)

    def restored(self, size_bytes: int, seconds: float) -> None:
        """So many bytes came back from the store in this time."""
        if size_bytes:
            now = seconds / size_bytes
            past = self._restore_s_per_byte or now
            self._restore_s_per_byte = 0.7 * past + 0.3 * now

    def predict(self, rows: int, start: int, *, many: bool, restored_bytes: int) -> float:
        """Seconds to bring back `restored_bytes` and forward rows [start, start + rows)."""
        a, b = (self._many if many else self._few).solve()
        forward = rows * (a + b * (start + rows / 2))
        return forward + restored_bytes * self._restore_s_per_byte
