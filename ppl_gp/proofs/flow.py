"""The smallest cut of a graph of arrays, by maximal flow."""

from collections import deque
from typing import Any

UNBOUNDED = float("inf")


class Flow:
    """Maximal flow through arrays, each of which lets as much through as it has room (Edmonds &
    Karp 1972); an array is an entry and an exit.
    """

    def __init__(self, order, room):
        self.order, self.left = order, {}
        for v in order:
            self._edge((v, 0), (v, 1), room[v])

    def _edge(self, a, b, capacity):
        self.left.setdefault(a, {})[b] = capacity
        self.left.setdefault(b, {}).setdefault(a, 0)

    def join(self, v, w):
        """w is computed from v."""
        self._edge((v, 1), (w, 0), UNBOUNDED)

    def cut(self, sources, sinks) -> list | None:
        """The arrays of the smallest cut nearest to the sinks."""
        for v in sources:
            self._edge("z", (v, 0), UNBOUNDED)
        for v in sinks:
            self._edge((v, 1), "out", UNBOUNDED)
        if "z" not in self.left or "out" not in self.left:
            return []
        while "out" in (before := self._reached()):
            if not self._push(before):
                return None
        behind = self._reaching()
        return [v for v in self.order if (v, 0) not in behind and (v, 1) in behind]

    def _reached(self) -> dict:
        """{node: the node before it} of what has room left from z."""
        before: dict[Any, Any] = {"z": None}
        front: deque[Any] = deque(["z"])
        while front:
            node = front.popleft()
            for other, room in self.left[node].items():
                if room > 0 and other not in before:
                    before[other] = node
                    front.append(other)
        return before

    def _reaching(self) -> set:
        """The nodes from which there is room left to the sinks."""
        found, front = {"out"}, deque(["out"])
        while front:
            node = front.popleft()
            for other in self.left[node]:  # every edge has its reverse
                if other not in found and self.left[other][node] > 0:
                    found.add(other)
                    front.append(other)
        return found

    def _push(self, before) -> bool:
        path, node = [], "out"
        while before[node] is not None:
            path.append((before[node], node))
            node = before[node]
        amount = min(self.left[a][b] for a, b in path)
        if amount == UNBOUNDED:
            return False
        for a, b in path:
            self.left[a][b] -= amount
            self.left[b][a] += amount
        return True
